"""Waiting for a replica, and every way in which a request can end: over real gRPC, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc
import pytest
from fakes_cluster import FakeReplica, Script
from fakes_router import Stack, assert_nothing_leaked, collected, eventually, running_stack
from pydantic import ValidationError

from protos import common_pb2, inference_pb2
from protos.errors import KvorumError
from router.client import KvorumClient
from router.config import RouterConfig

LOST = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the engine died")


async def refused(work: Any) -> KvorumError:
    with pytest.raises(KvorumError) as caught:
        await work
    return caught.value


def started(client: KvorumClient, *args: Any, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(collected(client, *args, **fields))


def small(name: str, sequences: int, script: Script) -> FakeReplica:
    """A replica whose engine batches so many sequences."""
    replica = FakeReplica(name, script=script)
    replica.load.max_sequences = sequences
    return replica


async def all_gone(stack: Stack) -> None:
    for replica in stack.replicas:
        await replica.die()
    await eventually(lambda: not stack.server.members.servable("fake"))


# Every replica gone


async def test_without_any_replica_requests_wait_and_end_before_their_deadline_with_a_time_to_retry() -> None:
    async with running_stack() as stack:
        await all_gone(stack)
        waiting = [started(stack.client, [1], timeout=0.5) for _ in range(3)]
        await eventually(lambda: len(stack.group.turnstile) == 3)
        for task in waiting:
            error = await refused(task)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, common_pb2.NO_REPLICA_READY)
            assert error.retry_after_s
        await assert_nothing_leaked(stack.server)


async def test_full_queue_refuses_at_once_while_every_replica_is_gone() -> None:
    async with running_stack(max_queue=2) as stack:
        await all_gone(stack)
        waiting = [started(stack.client, [1], timeout=20) for _ in range(2)]
        await eventually(lambda: len(stack.group.turnstile) == 2)
        error = await refused(collected(stack.client, [1], timeout=20))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.retry_after_s
        assert stack.server.state().queues[0].length == 2
        for task in waiting:
            task.cancel()
        await assert_nothing_leaked(stack.server)


async def test_replica_that_comes_back_serves_those_that_waited() -> None:
    async with running_stack() as stack:
        await all_gone(stack)
        waiting = [started(stack.client, [1], max_tokens=1, timeout=20) for _ in range(4)]
        await eventually(lambda: len(stack.group.turnstile) == 4)
        await stack.replicas[0].restart()
        for messages in await asyncio.gather(*waiting):
            assert messages[0].served.epoch == stack.replicas[0].epoch
        await assert_nothing_leaked(stack.server)


async def test_replica_that_joins_serves_those_that_waited() -> None:
    async with running_stack() as stack:
        await all_gone(stack)
        waiting = started(stack.client, [1], max_tokens=1, timeout=20)
        await eventually(lambda: len(stack.group.turnstile) == 1)
        fresh = await FakeReplica("fresh").start()
        stack.replicas.append(fresh)
        await stack.controller.announce(fresh.member())
        assert (await waiting)[0].served.replica == "fresh"


async def test_waiter_that_is_cancelled_leaves_nothing_and_reaches_no_replica() -> None:
    async with running_stack() as stack:
        await all_gone(stack)
        waiting = started(stack.client, [1], timeout=20)
        await eventually(lambda: len(stack.group.turnstile) == 1)
        waiting.cancel()
        await assert_nothing_leaked(stack.server)
        assert stack.replicas[0].seen == []


async def test_draining_router_ends_those_that_wait_and_says_why() -> None:
    async with running_stack() as stack:
        await all_gone(stack)
        waiting = [started(stack.client, [1], timeout=20) for _ in range(3)]
        await eventually(lambda: len(stack.group.turnstile) == 3)
        await stack.server.stop(grace_s=0.05)
        for task in waiting:
            assert (await refused(task)).reason == common_pb2.ROUTER_DRAINING
        await assert_nothing_leaked(stack.server)


# Saturated replicas


async def test_requests_beyond_the_batch_wait_and_go_in_turn_as_leases_end() -> None:
    gate = asyncio.Event()
    replica = small("r0", 2, Script(gate=gate))
    async with running_stack(replicas=0, extra=[replica]) as stack:
        running = [started(stack.client, [1], max_tokens=1, request_id=f"q{i}") for i in range(2)]
        await eventually(lambda: len(replica.seen) == 2)
        for i in range(2, 6):
            running.append(started(stack.client, [1], max_tokens=1, request_id=f"q{i}"))
            await eventually(lambda i=i: len(stack.group.turnstile) == i - 1)  # type: ignore[misc]
        assert len(replica.seen) == 2
        gate.set()
        await asyncio.gather(*running)
        order = [seen.request.request_id for seen in replica.seen]
        assert order[2:] == ["q2", "q3", "q4", "q5"]
        await assert_nothing_leaked(stack.server)


async def test_cancelled_request_makes_room_for_one_that_waits() -> None:
    replica = small("r0", 1, Script(hang_after=0))
    async with running_stack(replicas=0, extra=[replica]) as stack:
        first = started(stack.client, [1])
        await eventually(lambda: len(replica.seen) == 1)
        second = started(stack.client, [1])
        await eventually(lambda: len(stack.group.turnstile) == 1)
        first.cancel()
        await eventually(lambda: len(replica.seen) == 2)
        second.cancel()
        await assert_nothing_leaked(stack.server)


async def test_tenants_share_a_saturated_replica_although_one_came_first_with_many() -> None:
    gate = asyncio.Event()
    replica = small("r0", 1, Script(gate=gate))
    async with running_stack(replicas=0, extra=[replica]) as stack:
        running = [started(stack.client, [1], max_tokens=1)]
        await eventually(lambda: len(replica.seen) == 1)
        for i in range(12):
            tenant = "many" if i < 9 else "few"
            name = f"{tenant}{i}"
            running.append(started(stack.client, [1], max_tokens=1, tenant=tenant, request_id=name))
            await eventually(lambda i=i: len(stack.group.turnstile) == i + 1)  # type: ignore[misc]
        gate.set()
        await asyncio.gather(*running)
        order = [seen.request.request_id[:3] for seen in replica.seen[1:]]
        assert order[:6].count("few") == 3


async def test_interactive_requests_go_before_batch_ones_and_lower_priorities_first() -> None:
    gate = asyncio.Event()
    replica = small("r0", 1, Script(gate=gate))
    async with running_stack(replicas=0, extra=[replica]) as stack:
        running = [started(stack.client, [1], max_tokens=1)]
        await eventually(lambda: len(replica.seen) == 1)
        options: list[dict[str, Any]] = [
            {"request_id": "batch", "service_class": inference_pb2.BATCH},
            {"request_id": "late", "priority": 5},
            {"request_id": "soon", "priority": -5},
        ]
        for i, fields in enumerate(options):
            running.append(started(stack.client, [1], max_tokens=1, **fields))
            await eventually(lambda i=i: len(stack.group.turnstile) == i + 1)  # type: ignore[misc]
        gate.set()
        await asyncio.gather(*running)
        assert [seen.request.request_id for seen in replica.seen[1:]] == ["soon", "late", "batch"]


async def test_request_that_finds_no_room_in_time_is_refused_early_with_a_time_to_retry() -> None:
    replica = small("r0", 1, Script(hang_after=0))
    async with running_stack(replicas=0, extra=[replica]) as stack:
        first = started(stack.client, [1])
        await eventually(lambda: len(replica.seen) == 1)
        error = await refused(collected(stack.client, [1], timeout=0.5))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED)
        assert error.retry_after_s
        assert stack.server.state().queues[0].refused == 1
        first.cancel()
        await assert_nothing_leaked(stack.server)


async def test_request_whose_turn_cannot_come_in_time_is_refused_at_the_door() -> None:
    replica = small("r0", 1, Script(hang_after=0))
    replica.load.prefill_ms_per_token = 1000.0
    async with running_stack(replicas=0, extra=[replica], replica_queue_ms=1e9) as stack:
        await eventually(lambda: float(stack.group.fleet.column("a")[0]) == 1000.0)
        running = [started(stack.client, [1] * 100, timeout=300)]
        await eventually(lambda: len(replica.seen) == 1)
        running.append(started(stack.client, [1] * 100, timeout=300))
        await eventually(lambda: len(stack.group.turnstile) == 1)
        error = await refused(collected(stack.client, [1], timeout=30))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED)
        assert error.retry_after_s
        assert error.retry_after_s > 30
        assert "deadline leaves" in error.message
        for task in running:
            task.cancel()
        await assert_nothing_leaked(stack.server)


async def test_prompt_too_long_for_its_deadline_is_refused_at_the_door_where_others_wait() -> None:
    replica = small("r0", 1, Script(hang_after=0))
    replica.load.prefill_ms_per_token = 100.0
    async with running_stack(replicas=0, extra=[replica], replica_queue_ms=1e9) as stack:
        await eventually(lambda: float(stack.group.fleet.column("a")[0]) == 100.0)
        running = [started(stack.client, [1], timeout=300)]
        await eventually(lambda: len(replica.seen) == 1)
        running.append(started(stack.client, [2], timeout=300))
        await eventually(lambda: len(stack.group.turnstile) == 1)
        error = await refused(collected(stack.client, [3] * 400, max_tokens=1, timeout=30))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED)
        assert "s to the first token" in error.message
        for task in running:
            task.cancel()
        await assert_nothing_leaked(stack.server)


async def test_replica_with_a_long_predicted_queue_takes_no_more_and_one_without_does() -> None:
    busy, idle = FakeReplica("busy"), FakeReplica("idle")
    busy.load.prefill_backlog_tokens = 1_000_000
    async with running_stack(replicas=0, extra=[busy, idle], policy="predicted-time") as stack:
        for _ in range(5):
            await collected(stack.client, [1], max_tokens=1)
        assert (len(busy.seen), len(idle.seen)) == (0, 5)


async def test_window_holds_requests_and_releases_them_to_the_replica_together() -> None:
    async with running_stack(max_wait_ms=5000, max_batch_tokens=30) as stack:
        (replica,) = stack.replicas
        running = [started(stack.client, [1] * 10, max_tokens=1) for _ in range(2)]
        await eventually(lambda: len(stack.group.gather) == 2)
        assert replica.seen == []
        assert stack.server.members.leased()[stack.key("r0")].prefill_tokens == 20
        running.append(started(stack.client, [1] * 10, max_tokens=1))  # the tokens are reached
        await asyncio.gather(*running)
        assert len(replica.seen) == 3
        await assert_nothing_leaked(stack.server)


@pytest.mark.parametrize("lookaside", [False, True], ids=["proxied", "lookaside"])
async def test_router_that_stops_does_not_wait_for_the_window(lookaside: bool) -> None:
    async with (
        running_stack(token="t", max_wait_ms=10_000, max_batch_tokens=1000) as stack,
        KvorumClient(stack.address, lookaside=lookaside) as client,
    ):
        running = started(client, [1], max_tokens=1)
        await eventually(lambda: len(stack.group.gather) == 1)
        await asyncio.wait_for(stack.server.stop(0.05), 4)
        await asyncio.wait([running], timeout=5)
        assert running.done()
        await assert_nothing_leaked(stack.server)


async def test_request_cancelled_in_the_window_leaves_nothing() -> None:
    async with running_stack(max_wait_ms=5000) as stack:
        running = started(stack.client, [1], max_tokens=1)
        await eventually(lambda: len(stack.group.gather) == 1)
        running.cancel()
        await assert_nothing_leaked(stack.server)
        assert stack.replicas[0].seen == []


async def test_request_in_the_window_goes_elsewhere_when_its_replica_goes() -> None:
    async with running_stack(max_wait_ms=5000, max_batch_tokens=30) as stack:
        running = started(stack.client, [1] * 10, max_tokens=1, timeout=20)
        await eventually(lambda: len(stack.group.gather) == 1)
        old = stack.replicas[0]
        fresh = await FakeReplica("fresh").start()
        stack.replicas.append(fresh)
        await stack.controller.announce(fresh.member())
        await eventually(lambda: len(stack.group.gather) == 0 or bool(old.seen))
        await running
        await assert_nothing_leaked(stack.server)


# Cancels, and everything that may outlive a request


@pytest.mark.parametrize("lookaside", [False, True], ids=["proxied", "lookaside"])
async def test_cancel_during_a_long_prefill_reaches_the_replica_and_frees_the_load(lookaside: bool) -> None:
    async with (
        running_stack(token="t", script=Script(hang_after=0)) as stack,
        KvorumClient(stack.address, lookaside=lookaside) as client,
    ):
        (replica,) = stack.replicas
        running = started(client, [1] * 100)
        await eventually(lambda: len(replica.seen) == 1)
        running.cancel()
        await eventually(lambda: replica.seen[0].cancelled)
        await assert_nothing_leaked(stack.server)


async def test_request_keeps_its_lease_whatever_it_outlives() -> None:
    gate = asyncio.Event()
    async with running_stack(script=Script(gate=gate)) as stack:
        (replica,) = stack.replicas
        key = stack.key("r0")
        running = started(stack.client, [1, 2, 3], max_tokens=2)
        await eventually(lambda: len(replica.seen) == 1)
        await stack.controller.announce()  # withdrawn ...
        await eventually(lambda: stack.server.state().replicas == [])
        assert stack.server.members.leased()[key].prefill_tokens == 3
        await stack.controller.stop()  # ... and nobody is left to ask
        await eventually(lambda: not stack.server.members.controller_connected)
        assert stack.server.members.leased()[key].requests == 1
        gate.set()
        assert len(await running) == 2
        await assert_nothing_leaked(stack.server)


async def test_lease_outlives_a_silent_replica_and_a_dropped_view() -> None:
    gate = asyncio.Event()
    async with running_stack(script=Script(gate=gate)) as stack:
        (replica,) = stack.replicas
        running = started(stack.client, [1, 2, 3], max_tokens=1)
        await eventually(lambda: len(replica.seen) == 1)
        replica.edit_update = lambda update: setattr(update, "seq", update.seq + 5)
        replica.push()
        await eventually(lambda: stack.view("r0").views_dropped > 0)
        replica.edit_update = lambda update: None
        replica.speaking.clear()
        await eventually(lambda: stack.view("r0").standing == "suspect")
        assert stack.view("r0").leases == 1
        gate.set()
        await running
        await assert_nothing_leaked(stack.server)


async def test_withdrawn_replica_that_never_finishes_ends_as_a_lost_one_not_in_silence() -> None:
    async with running_stack(script=Script(hang_after=1), default_deadline_s=0.3) as stack:
        stream = stack.client.generate([1], max_tokens=5, timeout=30)
        await anext(stream)
        await stack.controller.announce()
        error = await refused(anext(stream))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST)
        await assert_nothing_leaked(stack.server)


async def test_replicas_withdrawn_together_are_watched_no_longer() -> None:
    odd = [FakeReplica(f"odd{i}") for i in range(2)]
    for replica in odd:
        replica.block_size = 32
    gate = asyncio.Event()
    async with running_stack(replicas=3, extra=odd, policy="round-robin", script=Script(gate=gate)) as stack:
        # What runs on them keeps their connections open.
        running = [started(stack.client, [1], max_tokens=1) for _ in range(15)]
        await eventually(lambda: all(len(replica.seen) >= 3 for replica in stack.replicas))
        watches = [stack.server.members._watches[f"r{i}"] for i in range(3)]
        # With the first of the majority goes the block size: the others are told to read their blocks anew.
        await stack.controller.announce(*[replica.member() for replica in odd])
        await eventually(lambda: all(watch.done() for watch in watches))
        await eventually(lambda: all(replica.watchers == 0 for replica in stack.replicas[:3]))
        await eventually(lambda: all(stack.view(replica.name).degraded == "" for replica in odd))
        assert len(stack.group.fleet) == 2
        gate.set()
        await asyncio.gather(*running)
        await assert_nothing_leaked(stack.server)


async def one_of_many(stack: Stack, clients: list[KvorumClient], rng: random.Random, number: int) -> str:
    """One request with a random fate; how it ended."""
    tokens = [rng.randrange(1, 900) for _ in range(rng.choice([1, 20, 200]))]
    stream = rng.choice(clients).generate(
        tokens,
        max_tokens=rng.choice([1, 3, 8]),
        n=rng.choice([1, 1, 2]),
        timeout=rng.choice([0.05, 0.3, 20.0]),
        tenant=rng.choice(["", "a", "b"]),
        session=rng.choice(["", "s1", "s2"]),
        top_p=rng.choice([0.5, 0.5, 0.5, 9.0]),
        request_id=f"q{number}",
    )
    fate = rng.choice(["whole", "whole", "closed", "cancelled", "explained"])
    if fate == "explained":
        await stack.client.explain(tokens)
        return fate
    try:
        if fate == "cancelled":
            async with asyncio.timeout(rng.choice([0.0, 0.01, 0.1])):
                _ = [message async for message in stream]
        else:
            async for _ in stream:
                if fate == "closed":
                    break
    except TimeoutError:
        return fate
    except KvorumError as error:
        return error.code.name
    finally:
        await stream.aclose()
    return fate


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_all_load_is_zero_after_any_mix_of_endings(seed: int) -> None:
    rng = random.Random(seed)
    fates = [
        Script(pace_s=0.002),
        Script(error_at_start=LOST),
        Script(error_after=(2, LOST)),
        Script(crash_after=1),
        Script(end_early_after=1),
        Script(hang_after=1),
        Script(first_token_s=0.05),
    ]
    replicas = [small(f"r{i}", 3, fates[0]) for i in range(3)]
    for replica in replicas:
        replica.token = "t"
    async with (
        running_stack(replicas=0, extra=replicas, token="t", ticket_s=0.5, max_queue=20) as stack,
        KvorumClient(stack.address, lookaside=True) as direct,
    ):
        clients = [stack.client, direct]
        running: list[asyncio.Task[str]] = []
        for number in range(90):
            running.append(asyncio.ensure_future(one_of_many(stack, clients, rng, number)))
            if number % 4 == 0:
                rng.choice(replicas).script = rng.choice(fates)
            if number % 30 == 15:
                await rng.choice(replicas).restart()
            await asyncio.sleep(rng.choice([0, 0, 0.004]))
        for replica in replicas:
            replica.script = fates[0]
        await asyncio.sleep(0.3)
        for task in running[::2]:
            task.cancel()
        await asyncio.sleep(0)
        for task in running[1::2]:
            task.cancel()
        await asyncio.wait(running, timeout=10)
        ended = Counter(task.result() for task in running if task.done() and not task.cancelled())
        assert len(ended) >= 5, ended
        await assert_nothing_leaked(stack.server)
        await eventually(lambda: all(replica.running() == 0 for replica in replicas))
        assert stack.group.fleet._flights == {}
        messages = await collected(stack.client, [1], max_tokens=1, timeout=10)  # and it still serves
        assert messages


async def test_all_load_is_zero_after_a_router_stops_in_the_midst() -> None:
    async with running_stack(replicas=2, script=Script(hang_after=2)) as stack:
        running = [started(stack.client, [1], max_tokens=5) for _ in range(10)]
        await eventually(lambda: sum(len(replica.seen) for replica in stack.replicas) == 10)
        await stack.server.stop(0.05)
        for task in running:
            assert (await refused(task)).code is grpc.StatusCode.UNAVAILABLE
        assert stack.server.members.leased() == {}
        await eventually(lambda: all(replica.running() == 0 for replica in stack.replicas))


# Bad input


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "best"},
        {"max_wait_ms": -1},
        {"max_batch_tokens": 0},
        {"near_tie_ms": -0.1},
        {"harm_weight": -1},
        {"affinity_ms": float("nan")},
        {"affinity_ms": float("inf")},
        {"near_tie_percent": 101},
        {"max_queue": 0},
        {"ticket_s": 0},
        {"weight": 3},
    ],
    ids=str,
)
def test_setting_that_makes_no_sense_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        RouterConfig(**settings)
    assert next(iter(settings)) in str(caught.value)


@pytest.mark.parametrize("field", ["session", "tenant", "cache_salt", "request_id"])
async def test_megabyte_of_a_name_is_refused_and_not_kept(field: str) -> None:
    async with running_stack() as stack:
        error = await refused(collected(stack.client, [1], **{field: "x" * 1_000_000}))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.violations[0].field == f"options.{field}"
        assert len(error.message) < 1000
        with suppress(KvorumError):
            await stack.client.explain([1], **{field: "x" * 1_000_000})
        await assert_nothing_leaked(stack.server)


async def test_unknown_service_class_is_refused_with_those_there_are() -> None:
    async with running_stack() as stack:
        error = await refused(collected(stack.client, [1], service_class=7))
    assert error.violations[0].field == "options.service_class"
    assert "BATCH" in error.message
