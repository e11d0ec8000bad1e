"""What the router knows of the cluster, and how it forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fakes_cluster import FakeController, FakeReplica, model_info
from fakes_router import eventually
from fakes_tokenizer import FakeTokenizer

from protos import admin_pb2, common_pb2, replica_pb2
from protos.errors import KvorumError
from router.config import RouterConfig
from router.leases import LeaseTable
from router.membership import Membership
from router.replica_view import DesyncError, ReplicaView


class Cluster:
    def __init__(self, controller: FakeController, members: Membership) -> None:
        self.controller, self.members = controller, members
        self.replicas: list[FakeReplica] = []

    async def add(self, name: str, model: common_pb2.ModelInfo | None = None) -> FakeReplica:
        replica = await FakeReplica(name, model=model, heartbeat_s=0.05).start()
        self.replicas.append(replica)
        await self.announce()
        await eventually(lambda: name in self.pickable(replica.model.name))
        return replica

    async def announce(self) -> None:
        await self.controller.announce(*[replica.member() for replica in self.replicas])

    @property
    def leases(self) -> LeaseTable:
        return self.members.group(model_info()).leases

    def view(self, replica: str) -> admin_pb2.ReplicaView:
        return next(link.state() for link in self.members.all_links() if link.replica == replica)

    def pickable(self, model: str = "fake") -> list[str]:
        return [link.replica for link in self.members.links(model)]


@asynccontextmanager
async def cluster(linger_s: float = 5.0) -> AsyncIterator[Cluster]:
    controller = await FakeController().start()
    config = RouterConfig(heartbeat_s=0.05, default_deadline_s=linger_s)
    members = Membership(controller.address, config, FakeTokenizer)
    await members.start()
    made = Cluster(controller, members)
    try:
        yield made
    finally:
        await members.stop()
        for replica in made.replicas:
            await replica.die()
        await controller.stop()


async def test_announced_replica_becomes_pickable_and_a_withdrawn_one_stops_being_so() -> None:
    async with cluster() as c:
        await c.add("r0")
        await c.add("r1")
        assert c.pickable() == ["r0", "r1"]
        await c.controller.announce(c.replicas[1].member())
        await eventually(lambda: c.pickable() == ["r1"])


@pytest.mark.parametrize("state", [admin_pb2.LOADING, admin_pb2.FAILED, admin_pb2.DRAINING])
async def test_replica_in_another_state_than_ready_is_not_picked(
    state: admin_pb2.ReplicaState.ValueType,
) -> None:
    async with cluster() as c:
        replica = await c.add("r0")
        await c.controller.announce(replica.member(state))
        await eventually(lambda: c.pickable() == [])


async def test_model_whose_replicas_are_all_away_stays_known_with_its_tokenizer() -> None:
    async with cluster() as c:
        info = (await c.add("r0")).model
        await eventually(lambda: c.members.servable(info.name))
        tokenizer = c.members.tokenizer(info)
        away = [admin_pb2.Member(replica=name, state=admin_pb2.FAILED, model=info) for name in ("r0", "r1")]
        await c.controller.announce(*away)
        await eventually(lambda: c.pickable() == [])
        assert c.members.resolve("").name == info.name
        assert c.members.tokenizer(info) is tokenizer
        assert "(0 of 2 ready)" in c.members.no_replica(info.name).message


async def test_members_are_kept_while_the_controller_is_away_and_followed_when_it_is_back() -> None:
    async with cluster() as c:
        await c.add("r0")
        await c.controller.stop()
        await eventually(lambda: not c.members.controller_connected)
        assert c.pickable() == ["r0"]
        await c.controller.start()
        await eventually(lambda: c.members.controller_connected)
        await c.add("r1")
        assert c.pickable() == ["r0", "r1"]


async def test_dead_replica_is_dropped_although_the_controller_still_lists_it() -> None:
    async with cluster() as c:
        replica = await c.add("r0")
        await replica.die()
        await eventually(lambda: c.pickable() == [])


async def test_restarted_replica_is_known_by_its_new_epoch_before_the_controller_knows() -> None:
    async with cluster() as c:
        replica = await c.add("r0")
        old = replica.epoch
        await replica.restart()
        await eventually(lambda: [link.epoch for link in c.members.links("fake")] == [replica.epoch])
        assert old != replica.epoch
        link = c.members.links("fake")[0]
        await c.announce()  # now the controller has the new epoch too
        await asyncio.sleep(0.05)
        assert c.members.links("fake") == [link]


async def test_silent_replica_is_suspect_and_only_picked_when_nothing_else_is() -> None:
    async with cluster() as c:
        quiet, lively = await c.add("r0"), await c.add("r1")
        quiet.speaking.clear()
        await eventually(lambda: c.pickable() == ["r1"])
        lively.draining = True
        lively.push()
        await eventually(lambda: c.pickable() == ["r0"])
        assert c.view("r0").standing == "suspect"
        quiet.speaking.set()
        await eventually(lambda: c.view("r0").standing == "ready")


async def test_replica_silent_for_ten_heartbeats_is_lost_and_found_again() -> None:
    async with cluster() as c:
        quiet = await c.add("r0")
        quiet.speaking.clear()
        await eventually(lambda: c.pickable() == [])
        quiet.speaking.set()
        await eventually(lambda: c.pickable() == ["r0"])


async def test_doubted_replica_is_trusted_again_when_it_speaks() -> None:
    async with cluster() as c:
        replica = await c.add("r0")
        await c.add("r1")
        replica.speaking.clear()
        c.members.links("fake")[0].doubt()
        assert c.pickable() == ["r1"]
        replica.speaking.set()
        await eventually(lambda: c.pickable() == ["r0", "r1"])


async def test_gap_in_the_updates_asks_for_a_fresh_snapshot() -> None:
    async with cluster() as c:
        replica = await c.add("r0")
        streams = 0

        def skip_one(update: replica_pb2.ReplicaUpdate) -> None:
            nonlocal streams
            if update.HasField("snapshot"):
                streams += 1
            elif streams == 0:
                update.seq += 1

        replica.edit_update = skip_one
        await eventually(lambda: streams == 1)
        await eventually(lambda: c.pickable() == ["r0"])


async def test_load_report_reaches_the_fleet_with_our_share_of_it() -> None:
    async with cluster() as c:
        replica = await c.add("r0")
        fleet = c.members.group(model_info()).fleet
        row = fleet.row(c.members.links("fake")[0].key)
        lease = c.leases.take(f"r0@{replica.epoch}", prefill_tokens=1, decode_tokens=1, sequences=2)
        replica.load.running, replica.load.waiting, replica.load.kv_usage = 3, 2, 0.25
        replica.push()
        await eventually(lambda: fleet.column("reported_sequences")[row] == 5)
        lease.release()
        assert fleet.column("leased_sequences")[row] == 0
        assert fleet.column("leased_sequences_at_report")[row] == 2
        assert fleet.column("kv_usage")[row] == 0.25


async def test_withdrawn_replica_finishes_its_requests_before_its_channel_closes() -> None:
    async with cluster() as c:
        replica = await c.add("r0")
        link = c.members.links("fake")[0]
        lease = c.leases.take(link.key, prefill_tokens=1, decode_tokens=1)
        request = replica_pb2.ReplicaGenerateRequest(prompt_token_ids=[1]).SerializeToString()
        await c.controller.announce()
        await eventually(lambda: c.pickable() == [])
        call = link.generate(request, timeout_s=5, metadata=())
        messages = [message async for message in call]
        assert len(messages) == replica.script.tokens
        lease.release()
        await eventually(lambda: replica.watchers == 0)


async def test_tokenizer_is_fetched_once_per_digest_and_forgotten_with_its_last_member() -> None:
    async with cluster() as c:
        await c.add("r0")
        await c.add("r1")
        await eventually(lambda: c.members.servable("fake"))
        assert c.controller.tokenizer_requests == ["tokenizer-1"]
        tokenizer = c.members.tokenizer(model_info())
        assert isinstance(tokenizer, FakeTokenizer)
        await c.controller.announce()
        await eventually(lambda: not c.members.models())
        with pytest.raises(KvorumError):
            c.members.tokenizer(model_info())


async def test_missing_tokenizer_is_asked_for_again_until_it_comes() -> None:
    async with cluster() as c:
        bundle = c.controller.bundles.pop("tokenizer-1")
        await c.add("r0")
        await eventually(lambda: len(c.controller.tokenizer_requests) >= 2)
        with pytest.raises(KvorumError) as caught:
            c.members.tokenizer(model_info())
        assert caught.value.reason == common_pb2.NO_REPLICA_READY
        assert not c.members.servable("fake")
        c.controller.bundles["tokenizer-1"] = bundle
        await eventually(lambda: c.members.servable("fake"))


async def test_replica_with_another_tokenizer_is_not_a_candidate_for_our_tokens() -> None:
    async with cluster() as c:
        c.controller.bundles["tokenizer-2"] = admin_pb2.TokenizerBundle(digest="tokenizer-2")
        await c.add("r0")
        await c.add("r1", model_info(tokenizer_digest="tokenizer-2"))
        assert [link.replica for link in c.members.links("fake", "tokenizer-1")] == ["r0"]
        assert [link.replica for link in c.members.links("fake", "tokenizer-2")] == ["r1"]


async def test_model_is_resolved_by_name_or_because_it_is_the_only_one() -> None:
    async with cluster() as c:
        with pytest.raises(KvorumError) as caught:
            c.members.resolve("fake")
        assert caught.value.reason == common_pb2.NO_REPLICA_READY
        await c.add("r0")
        assert c.members.resolve("").name == "fake"
        with pytest.raises(KvorumError) as caught:
            c.members.resolve("fak")
        assert caught.value.reason == common_pb2.MODEL_NOT_FOUND
        assert "there is: fake" in caught.value.message
        await c.add("r1", model_info("second"))
        with pytest.raises(KvorumError) as caught:
            c.members.resolve("")
        assert caught.value.violations[0].field == "model"
        assert [info.name for info in c.members.models()] == ["fake", "second"]


def update(seq: int, epoch: str = "e1", *, snapshot: bool = False) -> replica_pb2.ReplicaUpdate:
    made = replica_pb2.ReplicaUpdate(epoch=epoch, seq=seq, load=common_pb2.ReplicaLoad(running=seq))
    if snapshot:
        made.snapshot.replica = "r0"
    return made


def test_view_follows_consecutive_updates() -> None:
    view = ReplicaView()
    view.apply(update(1, snapshot=True))
    view.apply(update(2))
    assert (view.synced, view.load.running) == (True, 2)


@pytest.mark.parametrize("bad", [update(3), update(1), update(2, "e2"), update(2, snapshot=True)], ids=str)
def test_view_is_void_after_an_update_that_does_not_follow(bad: replica_pb2.ReplicaUpdate) -> None:
    view = ReplicaView()
    view.apply(update(1, snapshot=True))
    with pytest.raises(DesyncError):
        view.apply(bad)
    assert not view.synced
    with pytest.raises(DesyncError):
        view.apply(update(2))
    view.apply(update(1, "e2", snapshot=True))
    assert (view.synced, view.epoch) == (True, "e2")
