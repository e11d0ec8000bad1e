"""Waiting for a replica, over real gRPC: in turn, within bounds, nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import grpc
import pytest
from fakes_cluster import FakeReplica, Script
from fakes_router import (
    Stack,
    assert_nothing_leaked,
    collected,
    eventually,
    refused,
    running_stack,
    small,
    started,
)

from protos import common_pb2, inference_pb2
from router.client import KvorumClient


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


class OneByOne(asyncio.Event):
    """A gate that lets as many through as it was told to: two that go at once may overtake each other."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = asyncio.Semaphore(0)

    async def wait(self) -> Literal[True]:
        await self._permits.acquire()
        return True

    def let_one_go(self) -> None:
        self._permits.release()


async def test_requests_beyond_the_batch_wait_and_go_in_turn_as_leases_end() -> None:
    gate = OneByOne()
    replica = small("r0", 2, Script(gate=gate))
    async with running_stack(replicas=0, extra=[replica]) as stack:
        running = [started(stack.client, [1], max_tokens=1, request_id=f"q{i}") for i in range(2)]
        await eventually(lambda: len(replica.seen) == 2)
        for i in range(2, 6):
            running.append(started(stack.client, [1], max_tokens=1, request_id=f"q{i}"))
            await eventually(lambda i=i: len(stack.group.turnstile) == i - 1)  # type: ignore[misc]
        assert len(replica.seen) == 2
        for number in range(3, 7):
            gate.let_one_go()
            await eventually(lambda number=number: len(replica.seen) == number)  # type: ignore[misc]
        gate.let_one_go()
        gate.let_one_go()
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
        await stack.announce()
        await eventually(lambda: len(stack.group.fleet.ready()) == 2)
        await old.die()
        await eventually(lambda: len(stack.group.gather) == 1 and stack.view("r0").standing == "out")
        (message,) = await running
        assert (message.served.replica, message.served.attempt) == ("fresh", 2)
        await assert_nothing_leaked(stack.server)
