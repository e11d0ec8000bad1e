"""Each watcher of a replica gets one consistent story, however slow it is and whenever it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from fakes_kv import removed, stored

from protos import common_pb2, replica_pb2
from workers import feed as feed_module
from workers.feed import UpdateFeed
from workers.journal import Journal
from workers.kvpool.pool_keys import Transitions
from workers.resident import ResidentBlocks

A, B, C = list(range(4)), list(range(10, 14)), list(range(20, 24))


@dataclass
class Source:
    """What a replica would feed its watchers from."""

    journal: Journal = field(default_factory=Journal)
    encoded: int = 0

    def __post_init__(self) -> None:
        self.resident = ResidentBlocks("revision", self.journal)
        self.load = common_pb2.ReplicaLoad(max_sequences=8)
        snapshot = replica_pb2.ReplicaSnapshot(replica="r0", key_scheme="scheme", heartbeat_s=1)
        self.pool: replica_pb2.KvPool | None = None
        self.feed = UpdateFeed(
            "epoch", snapshot, self.journal, self.resident, self._load, pool=lambda: self.pool
        )

    def _load(self) -> common_pb2.ReplicaLoad:
        self.encoded += 1
        return self.load

    def apply(self, *events: object) -> None:
        self.resident.apply(events)  # type: ignore[arg-type]
        self.feed.touch()

    def fill(self, blocks: int, start: int = 1000) -> None:
        tokens = [start + n // 4 for n in range(4 * blocks)]
        self.apply(stored(tokens))


class Watcher:
    """Rebuilds the set as a router would, and checks each update against its sum."""

    def __init__(self, source: Source) -> None:
        self._updates = source.feed.updates()
        self.keys: dict[int, set[int]] = {}
        self.seen: list[replica_pb2.ReplicaUpdate] = []

    async def next(self) -> replica_pb2.ReplicaUpdate:
        update = await asyncio.wait_for(anext(self._updates), 5)
        assert update.seq == (1 if update.HasField("snapshot") else self.seen[-1].seq + 1)
        if update.seq == 1:
            self.keys = {}
        self.seen.append(update)
        for change in update.blocks:
            keys = self.keys.setdefault(change.tier, set())
            if change.cleared:
                keys.clear()
            keys -= set(np.frombuffer(change.removed, "<u8").tolist())
            keys |= set(np.frombuffer(change.stored, "<u8").tolist())
        assert update.HasField("blocks_count") != update.blocks_more
        if not update.blocks_more:
            every = [key for keys in self.keys.values() for key in keys]
            assert update.blocks_count == len(every)
            assert update.blocks_xor == int(np.bitwise_xor.reduce(np.array([0, *every], np.uint64)))
        return update

    async def until_it_knows(self, source: Source) -> None:
        while self.keys.get(0, set()) != set(source.resident.keys().tolist()):
            await self.next()

    async def close(self) -> None:
        assert isinstance(self._updates, AsyncIterator)
        await self._updates.aclose()  # type: ignore[attr-defined]


@pytest.fixture
def heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "HEARTBEAT_S", 0.05)


async def test_the_snapshot_holds_what_is_resident_in_every_tier() -> None:
    source = Source()
    source.apply(stored(A + B), stored(A, medium="CPU"))
    watcher = Watcher(source)
    first = await watcher.next()
    assert (first.seq, first.epoch, first.snapshot.replica) == (1, "epoch", "r0")
    assert (first.snapshot.resident_blocks, first.block_size, first.load.max_sequences) == (3, 4, 8)
    assert watcher.keys == {
        tier: set(source.resident.keys(tier).tolist()) for tier in (replica_pb2.DEVICE, replica_pb2.HOST)
    }


async def test_changes_follow_as_deltas_with_consecutive_numbers() -> None:
    source = Source()
    watcher = Watcher(source)
    await watcher.next()
    event = stored(A + B)
    source.apply(event)
    await watcher.until_it_knows(source)
    source.apply(removed(event.block_hashes[1]), stored(C))
    await watcher.until_it_knows(source)
    assert [update.seq for update in watcher.seen] == [1, 2, 3]


async def test_a_burst_of_changes_is_one_update() -> None:
    source = Source()
    watcher = Watcher(source)
    await watcher.next()
    for n in range(50):
        source.apply(stored([n] * 4))
    assert (await watcher.next()).blocks_count == 50


@pytest.mark.usefixtures("heartbeat")
async def test_a_silent_replica_sends_heartbeats_without_blocks() -> None:
    source = Source()
    source.apply(stored(A))
    watcher = Watcher(source)
    for _ in range(4):
        last = await watcher.next()
    assert not last.blocks
    assert last.blocks_count == 1


async def test_a_large_set_comes_in_parts_while_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_KEYS", 10)
    source = Source()
    source.fill(35)
    watcher = Watcher(source)
    first = await watcher.next()
    assert (first.blocks_more, first.snapshot.resident_blocks) == (True, 35)
    source.apply(stored(A), removed(stored([1000] * 4).block_hashes[0]))
    await watcher.until_it_knows(source)
    assert [update.blocks_more for update in watcher.seen][:5] == [True, True, True, False, False]


async def test_no_message_is_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_KEYS", 10)
    source = Source()
    source.fill(25)
    watcher = Watcher(source)
    await watcher.until_it_knows(source)
    source.apply(removed(*stored([1000 + n // 4 for n in range(100)]).block_hashes))
    source.fill(25, start=5000)
    await watcher.until_it_knows(source)
    sizes = [sum(len(c.removed) + len(c.stored) for c in update.blocks) // 8 for update in watcher.seen]
    assert max(sizes) == 10
    assert sum(sizes) == 75


async def test_a_watcher_that_is_left_behind_starts_over_with_a_snapshot() -> None:
    source = Source(Journal(limit=20))
    watcher = Watcher(source)
    await watcher.next()
    for n in range(40):
        source.apply(stored([n] * 4))
        source.journal.cut()
    assert (await watcher.next()).seq == 1
    await watcher.until_it_knows(source)


async def test_many_watchers_cost_one_encoding() -> None:
    source = Source()
    watchers = [Watcher(source) for _ in range(8)]
    for watcher in watchers:
        await watcher.next()
    before = source.encoded
    for step in range(3):
        source.fill(5, start=1000 * step + 1000)
        await asyncio.gather(*(watcher.next() for watcher in watchers))
    assert source.encoded - before == 3
    assert len({frozenset(watcher.keys[0]) for watcher in watchers}) == 1


async def test_a_cleared_cache_and_a_degraded_view_are_told() -> None:
    source = Source()
    source.apply(stored(A))
    watcher = Watcher(source)
    await watcher.next()
    source.resident.lost_events("3 batches are lost")
    source.feed.touch()
    while not (update := await watcher.next()).blocks_degraded:
        assert watcher.keys[0]  # the text and the keys change in the same update
    assert update.blocks_degraded == "3 batches are lost"
    assert watcher.keys[0] == set()
    source.resident.reset_done(source.resident.resets)
    source.feed.touch()
    assert (await watcher.next()).blocks_degraded == ""


async def test_blocks_of_the_pool_are_told_like_any_other() -> None:
    source = Source()
    source.pool = replica_pb2.KvPool(arena="a", namespace="n", agent="h:1", block_bytes=4096)
    source.apply(stored(A))
    source.resident.pool.apply(Transitions([5, 2**64 - 1], []))
    watcher = Watcher(source)
    first = await watcher.next()
    assert (first.snapshot.pool, first.snapshot.resident_blocks) == (source.pool, 3)
    assert watcher.keys[replica_pb2.HOST] == {5, 2**64 - 1}
    source.resident.pool.apply(Transitions([7], [5]))
    source.feed.touch()
    while watcher.keys[replica_pb2.HOST] != {7, 2**64 - 1}:
        await watcher.next()
    source.resident.lost_events("the engine's blocks alone")
    source.feed.touch()
    while watcher.keys[replica_pb2.DEVICE]:
        await watcher.next()
    assert watcher.keys[replica_pb2.HOST] == {7, 2**64 - 1}


async def test_a_replica_without_a_pool_says_so() -> None:
    first = await Watcher(Source()).next()
    assert not first.snapshot.HasField("pool")


@pytest.mark.usefixtures("heartbeat")
async def test_another_pool_begins_every_stream_anew() -> None:
    source = Source()
    source.pool = replica_pb2.KvPool(arena="a")
    source.resident.pool.apply(Transitions([5], []))
    watcher = Watcher(source)
    await watcher.next()
    assert not (await watcher.next()).HasField("snapshot")  # the same pool goes on as it was
    source.resident.pool.clear()
    source.pool = None
    source.feed.touch()
    while not (update := await watcher.next()).HasField("snapshot"):
        pass
    assert (update.snapshot.HasField("pool"), update.blocks_count) == (False, 0)
    source.pool = replica_pb2.KvPool(arena="b")
    source.feed.touch()
    while not (update := await watcher.next()).HasField("snapshot"):
        pass
    assert update.snapshot.pool.arena == "b"


async def test_draining_is_told() -> None:
    source = Source()
    watcher = Watcher(source)
    assert not (await watcher.next()).draining
    source.feed.draining = True
    source.feed.touch()
    assert (await watcher.next()).draining


async def test_a_watcher_that_leaves_takes_nothing_with_it() -> None:
    source = Source()
    gone, stays = Watcher(source), Watcher(source)
    await gone.next()
    await stays.next()
    await gone.close()
    source.apply(stored(A))
    await stays.until_it_knows(source)
