"""Agents in processes of their own that are killed or stopped in the middle of a transfer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from helpers_kvagent import (
    LONG_S,
    AgentProcess,
    a_host,
    arena_in,
    pull_from,
    read,
    ready_numbers,
    until_ready,
)
from helpers_kvpool import RANKS, assert_ready_blocks_are_true, key, store
from helpers_kvpool_children import Children

from workers.kvpool.pull import PullLimits

ONE_BY_ONE = PullLimits(batch_bytes=1)


@pytest.fixture
def started() -> Iterator[list[AgentProcess]]:
    agents: list[AgentProcess] = []
    yield agents
    for agent in agents:
        agent.kill()


@pytest.mark.parametrize(
    ("stall_s", "timeout_s", "why"), [(2.0, LONG_S, "nothing came"), (LONG_S, 4.0, "deadline")]
)
async def test_a_peer_that_is_stopped_costs_no_more_than_the_deadline(
    tmp_path: Path, started: list[AgentProcess], stall_s: float, timeout_s: float, why: str
) -> None:
    with arena_in(tmp_path / "peer", blocks=range(8)):
        peer = AgentProcess(tmp_path / "peer", "pause_reading", after=3)
        started.append(peer)
        async with a_host(tmp_path / "here", stall_s=stall_s, limits=ONE_BY_ONE) as host:
            pull = asyncio.create_task(host.pull(peer.address, range(8), timeout_s=timeout_s))
            await until_ready(host.arena, 0, 1, 2)
            peer.signal(signal.SIGSTOP)
            answer = await pull
            assert answer.blocks == 3
            assert why in answer.failed
            assert list(ready_numbers(host.arena, range(8))) == [0, 1, 2]
            assert assert_ready_blocks_are_true(host.arena) == 3
            assert host.arena.usage().writing == 0


async def test_a_peer_that_is_killed_costs_what_it_had_not_sent_and_is_avoided(
    tmp_path: Path, started: list[AgentProcess]
) -> None:
    with arena_in(tmp_path / "peer", blocks=range(8)) as there:
        peer = AgentProcess(tmp_path / "peer", "pause_reading", after=3)
        started.append(peer)
        async with a_host(tmp_path / "here", stall_s=LONG_S, limits=ONE_BY_ONE) as host:
            pull = asyncio.create_task(host.pull(peer.address, range(8)))
            await until_ready(host.arena, 0, 1, 2)
            peer.kill()
            answer = await pull
            assert answer.blocks == 3
            assert answer.failed.startswith(f"{peer.address}: UNAVAILABLE")
            assert "is not asked" in (await host.pull(peer.address, range(8))).failed
        there.reap()
        assert there.usage().leased == 0
        assert there.check() == []


async def test_an_agent_killed_while_it_writes_leaves_nothing_false_and_no_slot_lost(
    tmp_path: Path, started: list[AgentProcess]
) -> None:
    with arena_in(tmp_path / "here", slots=8) as arena:
        agent = AgentProcess(tmp_path / "here", "pause_writing")
        started.append(agent)
        async with a_host(tmp_path / "peer", blocks=range(4)) as peer:
            pull = asyncio.create_task(pull_from(agent.address, peer.address, range(4)))
            assert await asyncio.to_thread(agent.line) == "writing"
            assert arena.usage().writing == 1
            agent.kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await pull
        assert arena.reap() == 1
        assert (arena.usage().writing, arena.counters().reclaimed) == (0, 1)
        assert list(ready_numbers(arena, range(4))) == []
        assert arena.check() == []
        assert len(store(arena, [key(number) for number in range(20, 28)])) == 8


async def test_a_killed_agent_is_replaced_at_its_port_and_serves_what_is_there(
    tmp_path: Path, started: list[AgentProcess]
) -> None:
    with arena_in(tmp_path, blocks=range(4)):
        first = AgentProcess(tmp_path)
        started.append(first)
        assert len(await read(first.address, range(4))) == 4 * RANKS
        first.kill()
        second = AgentProcess(tmp_path)
        started.append(second)
        assert second.address == first.address
        assert len(await read(second.address, range(4))) == 4 * RANKS


async def test_a_stopped_process_in_the_mutex_costs_a_pull_its_blocks_and_no_more(tmp_path: Path) -> None:
    children = Children()
    try:
        async with a_host(tmp_path / "peer", blocks=range(4)) as peer, a_host(tmp_path / "here") as host:
            holder = children.start("hold", host.arena.path)
            answer = await host.pull(peer.address, range(4), timeout_s=10.0)
            assert answer.blocks == 0
            assert "locked by somebody else" in answer.failed
            children.kill(holder)
            assert (await host.pull(peer.address, range(4))).failed == ""
    finally:
        children.close()
