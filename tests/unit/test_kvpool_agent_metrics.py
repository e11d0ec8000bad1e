"""What an agent's metrics say is what it did, and what its host's arenas hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes_metrics import FakeCollector
from helpers_kvagent import (
    DIGEST,
    LONG_S,
    TOKEN,
    a_host,
    a_peer,
    arena_in,
    block,
    eventually,
    read,
    spoiled,
    until_ready,
)
from helpers_kvpool import PART, RANKS, key, store

from workers.kvpool.agent import AgentSettings, KvAgent
from workers.kvpool.agent_metrics import AgentMetrics
from workers.kvpool.agent_observer import Pulled
from workers.kvpool.host_arena import HostArena
from workers.kvpool.pull import PullLimits
from workers.kvpool.wire import Block

BLOCK_BYTES = RANKS * PART
SENT, GOT = ({"network__io__direction": direction} for direction in ("transmit", "receive"))


def measured() -> tuple[FakeCollector, AgentMetrics]:
    collector = FakeCollector()
    return collector, AgentMetrics(collector.meters)


def pulls(collector: FakeCollector) -> dict[str, int]:
    return {point.attributes["outcome"]: point.value for point in collector.points("kvorum.kv_agent.pulls")}


async def test_both_ends_count_what_was_exchanged(tmp_path: Path) -> None:
    (far, far_metrics), (near, near_metrics) = measured(), measured()
    async with (
        a_host(tmp_path / "a", blocks=range(12), observer=far_metrics) as a,
        a_host(tmp_path / "b", observer=near_metrics) as b,
    ):
        far_metrics.watch(a.agent)
        near_metrics.watch(b.agent)
        assert (await b.pull(a.address, range(16))).blocks == 12
        for collector, did, did_not in ((far, SENT, GOT), (near, GOT, SENT)):
            for name, amount in (("blocks", 12), ("transferred", 12 * BLOCK_BYTES)):
                assert collector.value(f"kvorum.kv_agent.{name}", **did) == amount
                assert collector.value(f"kvorum.kv_agent.{name}", **did_not) == 0
        assert (pulls(far), pulls(near)) == ({}, {"part": 1})
        assert near.value("kvorum.kv_agent.pull.duration", outcome="part").count == 1


async def test_pulls_are_told_apart_by_what_came(tmp_path: Path) -> None:
    collector, metrics = measured()
    async with a_host(tmp_path / "a", blocks=range(4)) as a, a_host(tmp_path / "b", observer=metrics) as b:
        for numbers in (range(2), range(2), range(8), [9]):  # the second finds all there
            await b.pull(a.address, numbers)
    assert pulls(collector) == {"whole": 2, "part": 1, "none": 1}


async def test_a_pull_too_many_is_refused_and_has_no_duration(tmp_path: Path) -> None:
    collector, metrics = measured()
    async with a_host(tmp_path, limits=PullLimits(pulls=0), observer=metrics) as host:
        assert "busy" in (await host.pull("peer:1", [1])).failed
    assert pulls(collector) == {"refused": 1}
    assert collector.points("kvorum.kv_agent.pull.duration") == []


async def test_a_pull_whose_replica_hangs_up_is_cancelled(tmp_path: Path) -> None:
    async def script(_: Any) -> AsyncIterator[Block]:
        yield block(0, 0)
        await asyncio.Event().wait()

    collector, metrics = measured()
    limits = PullLimits(batch_bytes=1)
    async with (
        a_host(tmp_path, stall_s=LONG_S, limits=limits, observer=metrics) as host,
        a_peer(script) as peer,
    ):
        pull = asyncio.create_task(host.pull(peer, range(4)))
        await until_ready(host.arena, 0)
        pull.cancel()
        await eventually(lambda: pulls(collector) == {"cancelled": 1})


def test_a_pull_that_brought_nothing_is_none_however_it_failed() -> None:
    collector, metrics = measured()
    for came in (Pulled(0, 0, 0.1, ""), Pulled(0, 0, 0.2, "gone"), Pulled(1, 5, 0.3, "late")):
        metrics.pulled(came)
    assert pulls(collector) == {"whole": 1, "none": 1, "part": 1}
    assert collector.value("kvorum.kv_agent.pull.duration", outcome="part").sum == 0.3


async def test_blocks_that_are_false_are_counted_and_their_sender_is_left_alone(tmp_path: Path) -> None:
    async def script(_: Any) -> AsyncIterator[Block]:
        yield spoiled(0, 0)

    collector, metrics = measured()
    async with a_host(tmp_path, observer=metrics) as host, a_peer(script) as peer:
        metrics.watch(host.agent)
        assert collector.value("kvorum.kv_agent.peers.avoided") == 0
        await host.pull(peer, [0])
        assert collector.value("kvorum.kv_agent.blocks.refused") == 1
        assert collector.value("kvorum.kv_agent.peers.avoided") == 1
        assert collector.value("kvorum.kv_agent.blocks", **GOT) == 0


async def test_streams_are_shown_while_they_are_served_and_counted_when_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, plain = threading.Event(), HostArena.read

    def slow(arena: HostArena, keys: Sequence[bytes], first: int) -> list[Block]:
        assert gate.wait(LONG_S)
        return plain(arena, keys, first)

    monkeypatch.setattr(HostArena, "read", slow)
    collector, metrics = measured()
    async with a_host(tmp_path, blocks=range(2), reads=1, observer=metrics) as host:
        metrics.watch(host.agent)
        reading = asyncio.create_task(read(host.address, range(2)))
        await eventually(lambda: collector.value("kvorum.kv_agent.streams") == 1)
        with pytest.raises(grpc.aio.AioRpcError):
            await read(host.address, range(2))
        gate.set()
        assert len(await reading) == 2 * RANKS
        assert collector.value("kvorum.kv_agent.streams") == 0
        assert collector.value("kvorum.kv_agent.streams.refused") == 1


async def test_each_arena_of_the_host_is_shown_by_its_namespace(tmp_path: Path) -> None:
    collector, metrics = measured()
    async with a_host(tmp_path, slots=4, blocks=range(4), observer=metrics) as host:
        other = tmp_path / f"{'0' * 32}.arena"
        other.write_bytes(b"half made")  # left out
        metrics.watch(host.agent)

        def shown(figure: str) -> Any:
            return collector.value(f"kvorum.kv_agent.arena.{figure}", namespace=DIGEST)

        figures = ("slots", "ready", "leased", "evicted", "corrupt", "reclaimed")
        assert [shown(figure) for figure in figures] == [4, 4, 0, 0, 0, 0]
        store(host.arena, [key(number) for number in (10, 11)])
        (lease, damaged) = host.arena.lease([key(10), key(11)])
        assert lease is not None
        assert damaged is not None
        assert [shown(figure) for figure in figures] == [4, 4, 2, 2, 0, 0]
        host.arena.corrupt(*damaged)
        host.arena.release([lease])
        assert [shown(figure) for figure in figures] == [4, 3, 0, 2, 1, 0]
        other.unlink()


async def test_an_agent_that_has_ended_opens_no_arena_again(tmp_path: Path) -> None:
    collector, metrics = measured()
    agent = KvAgent(AgentSettings(tmp_path, "127.0.0.1"), TOKEN)
    with arena_in(tmp_path) as arena:
        await agent.start()
        metrics.watch(agent)
        assert len(collector.points("kvorum.kv_agent.arena.slots")) == 1
        await agent.stop()
        assert collector.points("kvorum.kv_agent.arena.slots") == []
        assert [owner.kind.name for owner in arena.usage().owners] == ["ENGINE"]
        assert collector.value("kvorum.kv_agent.streams") == 0  # what it counted can still be told
