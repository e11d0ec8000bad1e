"""What every watcher of this replica is told, encoded once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from protos import common_pb2, replica_pb2
from protos.blockkeys import Keys
from workers.journal import Journal, Sum, TierChange
from workers.resident import ResidentBlocks

HEARTBEAT_S = 1.0

_INTERVAL_S = 0.1
"""Between two updates at least, however much changes."""
_KEYS = 65_536
"""In one message at most, 8 bytes each."""


@dataclass(frozen=True)
class _View:
    """What goes with the keys of one snapshot or delta, as of the cut it ends at."""

    block_size: int
    degraded: str
    sum: Sum


class UpdateFeed:
    """Turns the resident set, its journal and the load into a stream of updates for each watcher.

    A stream is a snapshot, seq 1, then deltas with consecutive seq. It begins again with a snapshot, seq 1,
    for a watcher that was too slow for what the journal keeps, and for all when the pool is another one.
    Nothing is done while nothing changes.

    Args:
        snapshot: what does not change, for the first update.
        pool: what the replica shares blocks in now; None: nothing. The same object as long as it is the same.
    """

    def __init__(
        self,
        epoch: str,
        snapshot: replica_pb2.ReplicaSnapshot,
        journal: Journal,
        resident: ResidentBlocks,
        load: Callable[[], common_pb2.ReplicaLoad],
        *,
        pool: Callable[[], replica_pb2.KvPool | None] = lambda: None,
    ) -> None:
        self._epoch = epoch
        self._snapshot = snapshot
        self._journal = journal
        self._resident = resident
        self._load = load
        self._pool = pool
        self._shared_load = load()
        self._ticks = 0
        self._ticked = asyncio.Event()
        self._scheduled = False
        self._last_tick = 0.0
        self._encoded: dict[tuple[int, int], list[list[replica_pb2.BlockChange]]] = {}
        self.draining = False

    def touch(self) -> None:
        """Something changed: watchers hear of it within 0.1 s. To be called on the event loop."""
        if self._scheduled:
            return
        self._scheduled = True
        loop = asyncio.get_running_loop()
        loop.call_at(max(loop.time(), self._last_tick + _INTERVAL_S), self._tick)

    async def updates(self) -> AsyncIterator[replica_pb2.ReplicaUpdate]:
        """One watcher's stream; never ends by itself."""
        while True:
            async for update in self._until_left_behind():
                yield update

    async def _until_left_behind(self) -> AsyncIterator[replica_pb2.ReplicaUpdate]:
        self._cut()
        seq, ticks, position = 0, self._ticks, self._journal.position
        pool = self._pool()
        view, pieces = self._view, _split(self._resident_changes())
        load = self._load()
        while True:
            for piece in pieces:
                seq += 1
                update = self._update(seq, load, view, piece, more=piece is not pieces[-1])
                if seq == 1:
                    update.snapshot.CopyFrom(self._snapshot)
                    if pool is not None:
                        update.snapshot.pool.CopyFrom(pool)
                    update.snapshot.resident_blocks = view.sum.count
                yield update
            ticked = await self._next_tick(ticks)
            ticks, load = self._ticks, self._shared_load if ticked else self._load()
            changed = self._changes_since(position)
            if changed is None or self._pool() is not pool:
                return
            pieces, view, position = changed, self._view, self._journal.position

    def _cut(self) -> None:
        self._journal.cut()
        self._view = _View(self._resident.block_size, self._resident.degraded, self._journal.sum)

    def _resident_changes(self) -> list[TierChange]:
        nothing = np.empty(0, np.uint64)
        return [
            TierChange(tier, False, nothing, self._resident.keys(tier)) for tier in self._resident.tiers()
        ]

    def _changes_since(self, position: int) -> list[list[replica_pb2.BlockChange]] | None:
        """In messages' worth; at least one, perhaps empty, which then is a heartbeat."""
        span = (position, self._journal.position)
        if span not in self._encoded:
            changes = self._journal.since(position)
            if changes is None:
                return None
            self._encoded = {s: pieces for s, pieces in self._encoded.items() if s[1] == span[1]}
            self._encoded[span] = _split(changes)
        return self._encoded[span]

    async def _next_tick(self, seen: int) -> bool:
        """Wait for a tick after `seen`, at most a heartbeat long; whether there was one."""
        if self._ticks == seen:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._ticked.wait()
            except TimeoutError:
                return False
        return True

    def _tick(self) -> None:
        self._scheduled = False
        self._last_tick = asyncio.get_running_loop().time()
        self._cut()
        self._shared_load = self._load()
        self._ticks += 1
        self._ticked.set()
        self._ticked = asyncio.Event()

    def _update(
        self,
        seq: int,
        load: common_pb2.ReplicaLoad,
        view: _View,
        blocks: list[replica_pb2.BlockChange],
        more: bool,
    ) -> replica_pb2.ReplicaUpdate:
        update = replica_pb2.ReplicaUpdate(
            epoch=self._epoch,
            seq=seq,
            load=load,
            draining=self.draining,
            blocks=blocks,
            block_size=view.block_size,
            blocks_degraded=view.degraded,
            blocks_more=more,
        )
        if not more:
            update.blocks_count, update.blocks_xor = view.sum.count, view.sum.xor
        return update


def _split(changes: tuple[TierChange, ...] | list[TierChange]) -> list[list[replica_pb2.BlockChange]]:
    """As messages of bounded size, which applied one after the other have the same effect."""
    messages: list[list[replica_pb2.BlockChange]] = [[]]
    room = _KEYS
    for change in changes:
        for piece in _pieces(change):
            size = (len(piece.removed) + len(piece.stored)) // 8
            if size > room and messages[-1]:
                messages.append([])
                room = _KEYS
            messages[-1].append(piece)
            room -= size
    return messages


def _pieces(change: TierChange) -> Iterator[replica_pb2.BlockChange]:
    tier = replica_pb2.Tier.ValueType(change.tier)
    if change.cleared:
        yield replica_pb2.BlockChange(tier=tier, cleared=True)
    for start in range(0, len(change.removed), _KEYS):
        yield replica_pb2.BlockChange(tier=tier, removed=_bytes(change.removed[start : start + _KEYS]))
    for start in range(0, len(change.stored), _KEYS):
        yield replica_pb2.BlockChange(tier=tier, stored=_bytes(change.stored[start : start + _KEYS]))


def _bytes(keys: Keys) -> bytes:
    return keys.astype("<u8").tobytes()
