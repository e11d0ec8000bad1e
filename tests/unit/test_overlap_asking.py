"""The controller asks every shard how it overlaps AllReduce, whatever state the shards are in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fakes_shard import FORCED, PLAN, FakeShard, a_report, hanging, raising
from helpers_supervisor import surroundings
from ray.exceptions import RayActorError, RayTaskError

from cluster import supervisor as supervisors
from cluster.admin import AdminServicer, serve_admin
from cluster.adminclient import AdminClient
from cluster.overlap import ask_shards, disagreement, summary, to_message
from cluster.ports import free_port
from cluster.supervisor import ReplicaSupervisor, to_status
from protos import admin_pb2
from protos.errors import KvorumError
from workers.overlap.plan import Plan, PlanRow
from workers.placement import ShardSlot


def a_missing_shard() -> Any:
    raise ValueError("Failed to look up actor with name 'replica-0-e1-shard-0'")


async def silence_of(find: Any) -> str:
    [answer] = (await ask_shards({0: find}, timeout_s=5.0)).values()
    assert isinstance(answer, str)
    return answer


async def test_every_shard_is_asked_and_answers_by_rank() -> None:
    shards = {rank: FakeShard(rank, lambda rank=rank: a_report(rank)) for rank in (0, 1)}
    answers = await ask_shards({rank: lambda shard=shard: shard for rank, shard in shards.items()})
    assert answers == {0: a_report(0), 1: a_report(1)}


async def test_slow_shard_is_shown_as_such_and_the_others_are_not_held_up() -> None:
    slow, quick = FakeShard(0, hanging), FakeShard(1, lambda: a_report(1))
    answers = await ask_shards({0: lambda: slow, 1: lambda: quick}, timeout_s=0.5)
    assert answers == {0: "no answer within 0.5 s", 1: a_report(1)}


async def test_shards_that_cannot_say_tell_why() -> None:
    assert "no such shard" in await silence_of(a_missing_shard)
    assert "died" in await silence_of(lambda: FakeShard(0, raising(RayActorError())))
    assert "still loading" in await silence_of(lambda: FakeShard(0, lambda: None))
    assert "does not report" in await silence_of(object)


async def test_error_inside_a_shard_is_its_last_line_whatever_its_type() -> None:
    # Ray raises a remote ValueError as one that is a RayTaskError too.
    remote = RayTaskError(
        "overlap", "Traceback:\n  frames\nValueError: no engine yet", ValueError("no engine yet")
    )
    answer = await silence_of(lambda: FakeShard(0, raising(remote.as_instanceof_cause())))
    assert answer == "ValueError: no engine yet"


def test_summary_says_from_where_on_steps_are_split() -> None:
    assert summary({0: a_report(), 1: a_report(1)}) == "2 to 4 chunks from 512 tokens (measured)"
    assert summary({0: a_report(plan=FORCED)}) == "4 chunks from 96 tokens (forced)"


def test_summary_of_the_stock_path_says_why() -> None:
    report = a_report(path="stock", plan=Plan(), reason="one host with shared memory")
    assert summary({0: report}) == "stock path: one host with shared memory"


def test_replicas_of_one_mind_say_the_same_however_long_they_measured() -> None:
    def line(reason: str, **changes: Any) -> str:
        return summary({0: a_report(reason=reason, **changes)})

    assert line("measured in 17.7 s; the link has changed") == line("measured in 20.1 s")
    stock: dict[str, Any] = {"path": "stock", "plan": Plan((PlanRow(64, 1),), "measured")}
    assert (
        line("no step gains enough by it, measured in 17.7 s; the link has changed", **stock)
        == line("no step gains enough by it, from the cache, for this model, hardware and link", **stock)
        == "stock path: no step gains enough by it"
    )


def test_a_plan_that_splits_nothing_is_the_stock_path() -> None:
    report = a_report(plan=Plan((PlanRow(128, 1), PlanRow(512, 1)), "measured"), reason="no gain")
    assert summary({0: report}) == "stock path: no gain"


def test_no_summary_before_all_shards_have_said() -> None:
    assert summary({}) == ""
    assert summary({0: a_report(), 1: "no answer within 2 s"}) == ""


def test_ranks_that_would_split_a_step_differently_are_found() -> None:
    answers = {0: a_report(0), 1: a_report(1), 2: a_report(2, path="stock"), 3: "silent"}
    expected = "rank 0, 1: 2 chunks from 512 tokens, 4 chunks from 1024 tokens; rank 2: stock path"
    assert disagreement(answers) == expected
    assert summary({0: a_report(0), 1: a_report(1, FORCED)}).startswith("RANKS DISAGREE: rank 0: ")


def test_ranks_agree_when_every_step_is_split_alike() -> None:
    # The times beside the counts, and rows that repeat a count, change nothing of what a rank does.
    other = Plan((PlanRow(512, 2), PlanRow(768, 2), PlanRow(1024, 4)), "cached")
    assert [PLAN.chunks(n) for n in range(1, 2000)] == [other.chunks(n) for n in range(1, 2000)]
    assert disagreement({0: a_report(0), 1: a_report(1, other)}) == ""
    assert disagreement({0: a_report(0), 1: "silent"}) == ""


def test_message_keeps_every_field_of_a_report() -> None:
    message = to_message("replica-0", "e1", admin_pb2.READY, {1: "dead", 0: a_report()})
    told, silent = message.shards
    assert (told.rank, told.path, told.mode, told.model) == (0, "overlapped", "auto", "LlamaForCausalLM")
    assert (told.reason, told.collective, told.silence) == ("measured at warm-up", "gloo", "")
    assert [(row.tokens, row.chunks) for row in told.plan.rows] == [(128, 1), (512, 2), (1024, 4)]
    last = told.plan.rows[2]
    assert (last.stock_ms, last.overlapped_ms, last.compute_ms, last.all_reduce_ms) == (31.6, 20.7, 12.0, 9.8)
    assert told.plan.origin == "measured"
    assert (told.stock.steps, told.stock.tokens, told.stock.exposed_s) == (40, 90, 0.5)
    assert (told.overlapped.forward_s, told.overlapped.all_reduce_s) == (1.9, 1.2)
    assert (silent.rank, silent.silence, silent.HasField("plan")) == (1, "dead", False)


class FakeCluster:
    """One ready replica of two ranks; `shards` are what Ray finds by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shards = {f"replica-0-e1-shard-{k}": FakeShard(k, lambda k=k: a_report(k)) for k in (0, 1)}
        monkeypatch.setattr(supervisors.ray, "get_actor", self._find)
        around = surroundings({"tensor_parallel_size": 2, "overlap": "4"}, shards=2)
        self.supervisor = ReplicaSupervisor("replica-0", around)
        record = self.record = self.supervisor.record
        record.epoch, record.state = "e1", admin_pb2.READY
        record.slots = tuple(ShardSlot(k, k, f"node-{k}", f"10.0.0.{k}", (0,)) for k in (0, 1))

    def _find(self, name: str, namespace: str) -> FakeShard:
        assert namespace == "ns"
        if name not in self.shards:
            raise ValueError(f"no actor {name}")
        return self.shards[name]

    def asked(self) -> int:
        return sum(shard.overlap.calls for shard in self.shards.values())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(monkeypatch)


async def test_status_line_is_asked_for_once_an_epoch(cluster: FakeCluster) -> None:
    for _ in range(3):
        await cluster.supervisor.refresh_shards()
    assert to_status(cluster.record, None).overlap == "2 to 4 chunks from 512 tokens (measured)"
    assert cluster.asked() == 2
    assert [shard.alive for shard in to_status(cluster.record, None).shards] == [True, True]


async def test_status_line_is_asked_for_again_until_all_shards_have_said(cluster: FakeCluster) -> None:
    silent = cluster.shards["replica-0-e1-shard-1"] = FakeShard(1, lambda: None)
    await cluster.supervisor.refresh_shards()
    assert cluster.record.overlap == ""
    silent.overlap = FakeShard(1, lambda: a_report(1)).overlap
    await cluster.supervisor.refresh_shards()
    assert cluster.record.overlap


async def test_status_line_of_an_epoch_that_ended_meanwhile_is_dropped(cluster: FakeCluster) -> None:
    asked, gate = asyncio.Event(), asyncio.Event()

    async def late() -> Any:
        asked.set()
        await gate.wait()
        return a_report()

    cluster.shards["replica-0-e1-shard-0"] = FakeShard(0, late)
    asking = asyncio.ensure_future(cluster.supervisor.refresh_shards())
    await asyncio.wait_for(asked.wait(), 5.0)
    cluster.record.epoch = "e2"
    gate.set()
    await asking
    assert cluster.record.overlap == ""
    assert cluster.record.shards == ()


async def test_a_shard_is_described_while_it_keeps_silent_about_its_overlap(cluster: FakeCluster) -> None:
    shard = cluster.shards["replica-0-e1-shard-0"] = FakeShard(0, hanging)
    asking = asyncio.ensure_future(cluster.supervisor.refresh_shards())
    async with asyncio.timeout(5.0):
        while not (shard.describe.calls and shard.overlap.calls):
            assert not asking.done()
            await asyncio.sleep(0.01)
    asking.cancel()


async def test_status_says_nothing_of_overlap_while_a_replica_is_not_ready(cluster: FakeCluster) -> None:
    await cluster.supervisor.refresh_shards()
    cluster.record.state = admin_pb2.FAILED
    assert to_status(cluster.record, None).overlap == ""


async def test_report_is_fresh_each_time_and_a_lost_shard_is_named(cluster: FakeCluster) -> None:
    assert [shard.silence for shard in (await cluster.supervisor.overlap()).shards] == ["", ""]
    del cluster.shards["replica-0-e1-shard-1"]
    found = await cluster.supervisor.overlap()
    assert (found.replica, found.epoch, found.state) == ("replica-0", "e1", admin_pb2.READY)
    assert (found.shards[0].path, found.shards[1].path) == ("overlapped", "")
    assert "no such shard" in found.shards[1].silence


async def test_shards_of_a_replica_that_is_not_ready_are_left_alone(cluster: FakeCluster) -> None:
    cluster.record.state = admin_pb2.LOADING
    found = await cluster.supervisor.overlap()
    assert (list(found.shards), found.state, cluster.asked()) == ([], admin_pb2.LOADING, 0)


def test_shards_are_placed_with_the_configured_mode(cluster: FakeCluster) -> None:
    placement = cluster.supervisor._placement("e1", cluster.record.slots)
    assert placement.overlap == "4"


class FakeOwner:
    """What the admin API needs of a controller, for this one call."""

    bundle = admin_pb2.TokenizerBundle()

    def __init__(self, supervisor: ReplicaSupervisor) -> None:
        self._supervisor = supervisor

    async def overlap(self) -> admin_pb2.OverlapStatus:
        return admin_pb2.OverlapStatus(name="kvorum", replicas=[await self._supervisor.overlap()])


@pytest_asyncio.fixture
async def admin(cluster: FakeCluster) -> AsyncIterator[str]:
    port = free_port("127.0.0.1")
    server = await serve_admin(AdminServicer(FakeOwner(cluster.supervisor)), "127.0.0.1", port, "secret")  # type: ignore[arg-type]
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_admin_api_carries_the_reports(admin: str) -> None:
    def ask() -> admin_pb2.OverlapStatus:
        with AdminClient(admin, "secret") as client:
            return client.overlap()

    found = await asyncio.to_thread(ask)
    assert [shard.rank for shard in found.replicas[0].shards] == [0, 1]
    assert found.replicas[0].shards[1].overlapped.tokens == 3072


async def test_reports_need_the_clusters_token(admin: str) -> None:
    def ask() -> None:
        with AdminClient(admin, "wrong") as client:
            client.overlap()

    with pytest.raises(KvorumError) as refused:
        await asyncio.to_thread(ask)
    assert refused.value.code == grpc.StatusCode.UNAUTHENTICATED
