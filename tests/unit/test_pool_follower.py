"""What a replica publishes of its host's arena is what is ready there, and nothing once that is not known."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers_kvpool import PATIENT, RANKS, another, keys, make, store

from workers.journal import Journal
from workers.kvpool import arena_tail, follower
from workers.kvpool.agent_port import AgentAddress, AgentPort
from workers.kvpool.arena import Arena, Timing
from workers.kvpool.file import MUTEX_BYTE
from workers.kvpool.follower import PoolFollower
from workers.kvpool.locks import ByteLocks
from workers.kvpool.pool_keys import PoolKeys

SELF, TIER = os.getpid(), 1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_tail, "TIMING", PATIENT)
    monkeypatch.setattr(follower, "POLL_S", 0.005)
    monkeypatch.setattr(follower, "SEARCH_S", 0.01)
    monkeypatch.setattr(follower, "AGENT_S", 0.01)


class Replica:
    """A follower, and what its hearers know."""

    def __init__(self, folder: Path, agent: AgentAddress | None = None) -> None:
        self.journal = Journal()
        self.keys = PoolKeys(self.journal, TIER)
        self.changes = 0
        agent = agent or AgentAddress("host:1")
        self.follower = PoolFollower(folder, SELF, agent, self.keys, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def published(self) -> set[int]:
        """As the set says; the journal must agree."""
        found = set(self.keys.keys().tolist())
        self.journal.cut()
        assert self.journal.sum.count == len(found)
        assert self.journal.sum.xor == int(np.bitwise_xor.reduce(np.array([0, *found], np.uint64)))
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"still {self.published()}, {self.follower.pool}")


@asynccontextmanager
async def following(folder: Path, agent: AgentAddress | None = None) -> AsyncIterator[Replica]:
    replica = Replica(folder, agent)
    await replica.follower.find()
    running = asyncio.create_task(replica.follower.run())
    yield replica
    assert not running.done(), running
    running.cancel()
    await asyncio.wait([running], timeout=10)
    assert replica.follower.pool is None


def ready(arena: Arena) -> set[int]:
    return set(arena.snapshot().extras)


async def test_every_replica_of_a_host_publishes_what_its_arena_holds(tmp_path: Path) -> None:
    engine = make(tmp_path / "aa.arena", 5)
    store(engine, keys([1, 2]))
    async with following(tmp_path) as one, following(tmp_path) as two:
        for some in ([3], [4, 5], [6, 7, 8]):  # the last evict the first
            store(another(engine), keys(some))
            await one.until(lambda: one.published() == two.published() == ready(engine))
        assert one.changes
        assert one.follower.pool is not None
        assert one.follower.pool == two.follower.pool
        told = one.follower.pool
        assert (told.namespace, told.agent) == ("aa", "host:1")
        assert told.block_bytes == RANKS * one.follower.part_bytes


async def test_an_engine_without_an_arena_is_known_from_the_start(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    assert not await replica.follower.find()
    assert replica.follower.pool is None


async def test_a_file_that_is_removed_ends_the_tier_and_the_next_one_begins_it(tmp_path: Path) -> None:
    engine = make(tmp_path / "aa.arena", 5)
    store(engine, keys([1, 2]))
    async with following(tmp_path) as replica:
        await replica.until(lambda: replica.published() == ready(engine))
        engine.path.unlink()
        await replica.until(lambda: replica.follower.pool is None)
        assert replica.published() == set()
        successor = make(engine.path, 5)
        store(successor, keys([3]))
        await replica.until(lambda: replica.published() == ready(successor))
        assert replica.follower.pool is not None
        successor.close()


async def test_an_arena_that_does_not_answer_counts_as_empty_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_tail, "TIMING", Timing(0.001, 0.001))
    monkeypatch.setattr(follower, "SILENCE_S", 0.05)
    engine = make(tmp_path / "aa.arena", 5)
    store(engine, keys([1, 2]))
    async with following(tmp_path) as replica:
        await replica.until(lambda: replica.published() == ready(engine))
        stopped = ByteLocks(str(engine.path))  # a process that was stopped while it held the mutex
        while not stopped.take(MUTEX_BYTE):  # noqa: ASYNC110 (a file lock has no event)
            await asyncio.sleep(0)
        await replica.until(lambda: replica.published() == set())
        assert replica.follower.pool is not None
        stopped.close()
        await replica.until(lambda: replica.published() == ready(engine))


async def test_a_busy_arena_at_the_start_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_tail, "TIMING", Timing(0.001, 0.001))
    monkeypatch.setattr(follower, "FIND_S", 0.05)
    engine = make(tmp_path / "aa.arena", 5)
    store(engine, keys([1]))
    stopped = ByteLocks(str(engine.path))
    assert stopped.take(MUTEX_BYTE)
    async with following(tmp_path) as replica:
        assert replica.follower.pool is None
        stopped.close()
        await replica.until(lambda: replica.published() == ready(engine))


async def test_a_large_arena_is_told_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_AT_ONCE", 3)
    engine = make(tmp_path / "aa.arena", 20)
    store(engine, keys(range(20)))
    async with following(tmp_path) as replica:
        before = replica.changes
        await replica.until(lambda: replica.published() == ready(engine))
        assert replica.changes - before >= 7


async def test_a_fault_of_the_follower_itself_leaves_no_block_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tmp_path / "aa.arena", 5)
    store(engine, keys([1]))
    replica = Replica(tmp_path)
    await replica.follower.find()
    running = asyncio.create_task(replica.follower.run())
    await replica.until(lambda: replica.published() == ready(engine))

    def broken(self: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(arena_tail.ArenaTail, "read", broken)
    await asyncio.wait_for(running, 10)
    assert (replica.published(), replica.follower.pool) == (set(), None)


async def test_an_agent_at_another_port_makes_it_another_pool_with_the_same_blocks(tmp_path: Path) -> None:
    engine = make(tmp_path / "aa.arena", 5)
    store(engine, keys([1, 2]))
    file = tmp_path / "agent.port"
    async with following(tmp_path, AgentAddress("host:1", "host", file)) as replica:
        await replica.until(lambda: replica.published() == ready(engine))
        before, changes = replica.follower.pool, replica.changes
        assert before is not None
        AgentPort(file).remember(2)
        await replica.until(lambda: replica.follower.pool is not before)
        now = replica.follower.pool
        assert now is not None
        assert (now.arena, now.namespace, now.block_bytes) == (
            before.arena,
            before.namespace,
            before.block_bytes,
        )
        assert (before.agent, now.agent) == ("host:1", "host:2")  # what watchers were told is left as it was
        assert replica.published() == ready(engine)
        assert replica.changes == changes + 1
        await asyncio.sleep(0.1)
        assert replica.follower.pool is now


async def test_an_agent_that_moved_while_the_arena_was_lost_is_known_when_it_is_back(tmp_path: Path) -> None:
    engine = make(tmp_path / "aa.arena", 5)
    file = tmp_path / "agent.port"
    async with following(tmp_path, AgentAddress("host:1", "host", file)) as replica:
        await replica.until(lambda: replica.follower.pool is not None)
        engine.path.unlink()
        await replica.until(lambda: replica.follower.pool is None)
        AgentPort(file).remember(2)
        successor = make(engine.path, 5)
        await replica.until(lambda: replica.follower.pool is not None)
        assert replica.follower.pool is not None
        assert replica.follower.pool.agent == "host:2"
        successor.close()
