"""Every way in which a request can end, over real gRPC: no lease, no prompt in flight, no call is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

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

from protos import common_pb2
from protos.errors import KvorumError
from router.client import KvorumClient

LOST = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the engine died")


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


async def test_of_a_silent_replica_only_requests_without_a_first_token_go_to_another_one() -> None:
    # Its connection stays: nothing but the silence of its updates tells that its host may be gone.
    async with running_stack(replicas=2, policy="round-robin") as stack:
        gone = stack.replicas[0]
        gone.script = Script(hang_after=1)
        stream = stack.client.generate([1], max_tokens=5, timeout=30)
        while (await anext(stream)).served.replica != "r0":
            stream = stack.client.generate([1], max_tokens=5, timeout=30)
        gone.script = Script(hang_after=0)
        before = len(gone.seen)
        waiting = [started(stack.client, [1], max_tokens=2) for _ in range(4)]
        await eventually(lambda: len(gone.seen) == before + 2)
        gone.speaking.clear()
        served = [(await answer)[0].served for answer in waiting]
        assert sorted((s.replica, s.attempt) for s in served) == [("r1", 1), ("r1", 1), ("r1", 2), ("r1", 2)]
        assert [seen.cancelled for seen in gone.seen[before - 1 :]] == [False, True, True]
        await stream.aclose()
        await assert_nothing_leaked(stack.server)


async def test_requests_wait_for_a_silent_replica_while_nothing_else_can_take_them() -> None:
    gate = asyncio.Event()
    async with running_stack(script=Script(gate=gate)) as stack:
        (replica,) = stack.replicas
        running = started(stack.client, [1, 2, 3], max_tokens=1)
        await eventually(lambda: len(replica.seen) == 1)
        replica.speaking.clear()
        await eventually(lambda: stack.view("r0").standing == "out")
        gate.set()
        assert (await running)[0].served.attempt == 1
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
