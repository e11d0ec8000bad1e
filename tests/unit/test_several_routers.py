"""Several routers over the same replicas: no gossip, no herd, and clients that outlive a router."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
import pytest
from fakes_cluster import FakeReplica, Script, model_info
from fakes_router import Stack, assert_nothing_leaked, collected, eventually, running_stack, warmed

from protos import common_pb2
from protos.errors import KvorumError
from router.client import KvorumClient

HOT = list(range(100, 500))


def replicas(count: int, script: Script, *, heartbeat_s: float = 0.05) -> list[FakeReplica]:
    """Replicas that report what really runs on them."""
    made = [FakeReplica(f"r{i}", script=script, heartbeat_s=heartbeat_s) for i in range(count)]
    for replica in made:
        replica.counts_itself = True
    return made


def seed_choices(stack: Stack, seed: int) -> None:
    """Ties fall the same in every run, differently in each router."""
    for number, server in enumerate(stack.servers):
        for group in server.members.groups():
            group.decider.policy._rng = random.Random(seed + number)  # type: ignore[attr-defined]


def shares(stack: Stack) -> Counter[str]:
    return Counter({replica.name: len(replica.seen) for replica in stack.replicas})


async def burst(stack: Stack, prompts: list[list[int]]) -> None:
    """All at once, each from the next router."""
    clients = [KvorumClient(address) for address in stack.addresses]
    try:
        await asyncio.gather(
            *[
                collected(clients[i % len(clients)], prompt, max_tokens=1, timeout=30)
                for i, prompt in enumerate(prompts)
            ]
        )
    finally:
        for client in clients:
            await client.close()


def different(count: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(1, 900) for _ in range(100)] for _ in range(count)]


async def test_burst_of_different_prompts_from_four_routers_spreads_evenly() -> None:
    gate = asyncio.Event()
    async with running_stack(replicas=0, extra=replicas(8, Script(gate=gate)), routers=4) as stack:
        seed_choices(stack, 1)
        sending = asyncio.ensure_future(burst(stack, different(96)))
        await eventually(lambda: sum(shares(stack).values()) == 96)
        gate.set()
        await sending
        assert max(shares(stack).values()) <= 2 * 96 / 8
        assert min(shares(stack).values()) >= 96 / 8 / 3
        for server in stack.servers:
            await assert_nothing_leaked(server)


async def test_trickle_from_four_routers_does_not_follow_the_one_that_looks_best() -> None:
    """All of them see the same replica as the least loaded, one request each at a time."""
    made = replicas(8, Script(first_token_s=0.2))
    for replica in made[1:]:
        replica.counts_itself = False
        replica.load.sequences = replica.load.running = 3
    async with running_stack(replicas=0, extra=made, routers=4) as stack:
        seed_choices(stack, 1)
        for _ in range(6):
            await burst(stack, different(8))
        assert shares(stack)["r0"] <= 48 / 2
        assert sum(count > 0 for count in shares(stack).values()) >= 4


async def test_burst_of_equal_prompts_from_four_routers_does_not_herd_on_one_replica() -> None:
    gate = asyncio.Event()
    made = replicas(8, Script(gate=gate))
    async with running_stack(replicas=0, extra=made, routers=4) as stack:
        seed_choices(stack, 1)
        sending = asyncio.ensure_future(burst(stack, [HOT] * 160))
        await eventually(lambda: sum(shares(stack).values()) == 160)
        gate.set()
        await sending
        assert max(shares(stack).values()) <= 160 / 2
        assert sum(count > 0 for count in shares(stack).values()) >= 3


async def test_hot_prefix_on_one_replica_does_not_take_the_burst_of_all_routers() -> None:
    gate = asyncio.Event()
    made = replicas(4, Script(gate=gate))
    async with running_stack(replicas=0, extra=made, routers=4) as stack:
        keys = warmed(made[0], HOT)
        await eventually(
            lambda: all(
                next(v for v in server.state().replicas if v.replica == "r0").blocks == len(keys)
                for server in stack.servers
            )
        )
        seed_choices(stack, 1)
        sending = asyncio.ensure_future(burst(stack, [HOT] * 200))
        await eventually(lambda: sum(shares(stack).values()) == 200)
        gate.set()
        await sending
        assert 200 / 4 < max(shares(stack).values()) < 200 * 0.8
        assert shares(stack)["r0"] == max(shares(stack).values())


async def test_each_router_sees_in_the_reports_what_the_others_have_sent() -> None:
    gate = asyncio.Event()
    made = replicas(2, Script(gate=gate), heartbeat_s=0.02)
    async with running_stack(replicas=0, extra=made, routers=2) as stack:
        sending = asyncio.ensure_future(burst(stack, different(8)))
        await eventually(lambda: sum(shares(stack).values()) == 8)
        for server in stack.servers:
            (group,) = server.members.groups()
            assert group.leases.held()
            await eventually(lambda group=group: group.fleet.column("reported_sequences").sum() == 8)  # type: ignore[misc]
            assert group.fleet.routers > 1.5
        gate.set()
        await sending


async def test_ties_are_broken_by_chance_in_every_router() -> None:
    async with running_stack(replicas=4, routers=2) as stack:
        found = set()
        async with KvorumClient(stack.addresses[1]) as second:
            for client in (stack.client, second):
                answers = [(await client.explain([1, 2, 3])).chosen for _ in range(40)]
                assert len(set(answers)) == 4
                found.add(tuple(answers))
        assert len(found) == 2


async def test_sessions_prefer_the_same_replica_through_every_router() -> None:
    async with running_stack(replicas=5, routers=3) as stack:
        clients = [KvorumClient(address) for address in stack.addresses]
        for session in ("a", "b", "c"):
            answers = [(await client.explain([1, 2], session=session)).chosen for client in clients]
            assert len(set(answers)) == 1
        for client in clients:
            await client.close()


async def test_client_of_two_routers_goes_on_when_one_is_killed_in_the_midst() -> None:
    script = Script(pace_s=0.02)
    async with (
        running_stack(replicas=2, script=script, routers=2) as stack,
        KvorumClient(*stack.addresses) as client,
    ):
        ended: list[str] = []

        async def traffic() -> None:
            for _ in range(6):
                try:
                    messages = await collected(client, [1, 2, 3], max_tokens=5, timeout=20)
                    ended.append("whole" if messages[-1].choices[0].finish_reason else "cut")
                except KvorumError as error:
                    ended.append(error.code.name)

        running = [asyncio.ensure_future(traffic()) for _ in range(8)]
        await eventually(lambda: len(ended) >= 8)
        await stack.servers[0].stop(0)
        await asyncio.gather(*running)
        assert len(ended) == 48
        assert set(ended) <= {"whole", "UNAVAILABLE"}  # never cut in silence
        assert ended.count("UNAVAILABLE") <= 8  # the streams it carried, no later one
        assert ended[-8:] == ["whole"] * 8
        for server in stack.servers:
            await assert_nothing_leaked(server)
        await eventually(lambda: all(replica.running() == 0 for replica in stack.replicas))


async def test_router_that_drains_hands_its_waiters_to_the_other_one() -> None:
    replica = FakeReplica("r0", script=Script())
    replica.load.max_sequences = 1
    replica.load.sequences = replica.load.running = 1
    async with (
        running_stack(replicas=0, extra=[replica], routers=2) as stack,
        KvorumClient(*stack.addresses) as client,
    ):
        running = asyncio.ensure_future(collected(client, [1], max_tokens=1, timeout=30))
        await eventually(lambda: len(stack.group.turnstile) == 1)
        await stack.servers[0].stop(0)
        (other,) = stack.servers[1].members.groups()
        await eventually(lambda: len(other.turnstile) == 1)
        replica.load.sequences = replica.load.running = 0
        replica.push()
        assert await running
        await assert_nothing_leaked(stack.servers[1])


async def test_client_whose_routers_are_all_down_is_told_so() -> None:
    async with running_stack(routers=2) as stack, KvorumClient(*stack.addresses) as client:
        for server in stack.servers:
            await server.stop(0)
        with pytest.raises(KvorumError) as caught:
            await collected(client, [1], timeout=5)
        states = await client.router_states()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert all(isinstance(state, KvorumError) for state in states.values())


async def test_router_that_is_stopped_amid_writes_tells_every_client_why_its_stream_ends() -> None:
    fast = FakeReplica("fast", model=model_info(max_model_len=10**7))
    async with running_stack(extra=[fast], replicas=0) as s:
        running = [asyncio.ensure_future(collected(s.client, [1], max_tokens=10**6)) for _ in range(40)]
        await eventually(lambda: len(s.replicas[0].seen) == 40)
        await asyncio.sleep(0.05)
        await s.server.stop(0)
        ends = await asyncio.gather(*running, return_exceptions=True)
        reasons = {end.reason for end in ends if isinstance(end, KvorumError)}
        assert (len(ends), reasons) == (40, {common_pb2.ROUTER_DRAINING})
        await assert_nothing_leaked(s.server)
