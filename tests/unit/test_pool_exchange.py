"""From one host to another: what a replica asks for arrives in its arena, true, and is told to routers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers_kvpool import PATIENT, assert_ready_blocks_are_true, keys, make, store

from protos.channels import bind, create_server
from protos.common_pb2 import KvFetch
from workers.journal import Journal
from workers.kvpool import arena_tail, follower
from workers.kvpool.agent import AgentSettings, KvAgent
from workers.kvpool.agent_port import AgentAddress, port_file
from workers.kvpool.arena import Arena
from workers.kvpool.follower import PoolFollower
from workers.kvpool.prefetch import Prefetcher
from workers.resident import HOST, ResidentBlocks

NAMESPACE, TOKEN, NODE = "ab" * 16, "secret", "node"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_tail, "TIMING", PATIENT)
    monkeypatch.setattr(follower, "POLL_S", 0.01)
    monkeypatch.setattr(follower, "AGENT_S", 0.01)


@dataclass
class Host:
    """An engine's arena, its replica, and the host's agent."""

    engine: Arena
    agent: KvAgent
    prefetcher: Prefetcher
    resident: ResidentBlocks
    follower: PoolFollower

    async def fetch(self, source: str, names: list[bytes]) -> KvFetch:
        """As the replica's servicer does."""
        pool = self.follower.pool
        assert pool is not None
        return await self.prefetcher.fetch(pool.agent, pool.namespace, source, router_keys(names))


def an_agent(folder: Path) -> KvAgent:
    file = port_file(folder, NODE)
    return KvAgent(AgentSettings(folder, "127.0.0.1", follow_s=0.05, port_file=file, port_wait_s=0.1), TOKEN)


@asynccontextmanager
async def host(folder: Path) -> AsyncIterator[Host]:
    engine = make(folder / f"{NAMESPACE}.arena", 8)
    agent = an_agent(folder)
    address = await agent.start()
    resident = ResidentBlocks("revision", Journal())
    known = AgentAddress(address, "127.0.0.1", port_file(folder, NODE))
    followed = PoolFollower(folder, os.getpid(), known, resident.pool, lambda: None)
    assert await followed.find()
    assert followed.pool is not None
    assert (followed.pool.namespace, followed.pool.agent) == (NAMESPACE, address)
    running = asyncio.create_task(followed.run())
    made = Host(engine, agent, Prefetcher(TOKEN, 10.0), resident, followed)
    yield made
    running.cancel()
    await made.prefetcher.close()
    await made.agent.stop()


def router_keys(names: list[bytes]) -> list[int]:
    """Those under which `store` stores them."""
    return [int.from_bytes(name[:8], "little") for name in names]


async def test_a_prompt_of_another_host_is_had_and_told(tmp_path: Path) -> None:
    names = keys([1, 2, 3])
    async with host(tmp_path / "far") as far, host(tmp_path / "near") as near:
        store(far.engine, names)
        told = await near.fetch(far.agent.address, names)
        assert (told.failed, told.blocks) == ("", 3)
        assert told.bytes == 3 * far.engine.header.geometry.slot_bytes
        assert assert_ready_blocks_are_true(near.engine) == 3
        for _ in range(2000):
            if near.resident.local_prefix(router_keys(names)) == 3:
                break
            await asyncio.sleep(0.005)
        assert set(near.resident.keys(HOST).tolist()) == set(router_keys(names))


async def test_a_prompt_that_another_host_has_in_part_comes_as_far_as_it_goes(tmp_path: Path) -> None:
    names = keys([1, 2, 3])
    async with host(tmp_path / "far") as far, host(tmp_path / "near") as near:
        store(far.engine, names[:2])
        told = await near.fetch(far.agent.address, names)
        assert told.blocks == 2
        assert told.failed
        assert assert_ready_blocks_are_true(near.engine) == 2


async def test_a_host_that_is_gone_is_told_and_nothing_else_happens(tmp_path: Path) -> None:
    async with host(tmp_path / "near") as near:
        async with host(tmp_path / "far") as far:
            gone = far.agent.address
        told = await near.fetch(gone, keys([1]))
        assert told.blocks == 0
        assert gone in told.failed


async def test_an_agent_that_comes_back_at_another_port_is_asked_there(tmp_path: Path) -> None:
    names = keys([1, 2, 3])
    async with host(tmp_path / "far") as far, host(tmp_path / "near") as near:
        store(far.engine, names)
        before = near.agent.address
        await near.agent.stop()
        squatter = create_server()
        bind(squatter, "127.0.0.1", int(before.rpartition(":")[2]))
        await squatter.start()
        near.agent = an_agent(tmp_path / "near")
        after = await near.agent.start()
        assert after != before
        for _ in range(2000):
            assert near.follower.pool is not None
            if near.follower.pool.agent == after:
                break
            await asyncio.sleep(0.005)
        told = await near.fetch(far.agent.address, names)
        assert (told.failed, told.blocks) == ("", 3)
        assert assert_ready_blocks_are_true(near.engine) == 3
        await squatter.stop(None)
