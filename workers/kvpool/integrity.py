"""Does every invariant of a segment hold? Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workers.kvpool.changes import ChangeRing
from workers.kvpool.free import FreeStack
from workers.kvpool.layout import Segment, State, Word
from workers.kvpool.lru import LruList
from workers.kvpool.table import KeyTable


def violations(segment: Segment) -> list[str]:
    """One sentence for each invariant that does not hold. For a segment nobody is changing; O(slots)."""
    return [*_records(segment), *_free(segment), *_table(segment), *_evictable(segment), *_changes(segment)]


def _records(segment: Segment) -> Iterator[str]:
    state, readers = segment.state, segment.readers
    in_use = segment.owners["incarnation"] != 0
    if (state > State.READY).any():
        yield f"slots {_some(state > State.READY)} are in no known state"
    unsealed = (state == State.READY) & ~segment.checksums.all(axis=1)
    if unsealed.any():
        yield f"slots {_some(unsealed)} are ready with an unsealed part"
    orphans = (state == State.WRITING) & ~in_use[segment.owner % len(in_use)]
    if orphans.any():
        yield f"slots {_some(orphans)} are being written by nobody"
    read = (state != State.READY) & (readers != 0)
    if read.any():
        yield f"slots {_some(read)} have readers though they are not ready"
    bits = np.uint64(sum(1 << index for index in np.flatnonzero(in_use).tolist()))
    if (readers & ~bits).any():
        yield f"slots {_some((readers & ~bits) != 0)} have readers that do not exist"
    if segment.used.max() > segment.words[Word.CLOCK]:
        yield "a slot was used in the future"


def _free(segment: Segment) -> Iterator[str]:
    depth = len(FreeStack(segment))
    held = np.sort(segment.free[: min(depth, segment.geometry.slots)])
    if depth != held.size or not np.array_equal(held, np.flatnonzero(segment.state == State.FREE)):
        yield f"the free stack, of {depth}, does not hold exactly the free slots"


def _table(segment: Segment) -> Iterator[str]:
    held = np.sort(segment.table[segment.table != 0].astype(np.int64) - 1)
    taken = np.flatnonzero(segment.state != State.FREE)
    if not np.array_equal(held, taken):
        yield "the table does not hold exactly the slots that are not free"
        return
    keys = [segment.key(slot) for slot in taken.tolist()]
    lost = [
        slot
        for slot, found in zip(taken.tolist(), KeyTable(segment).find(keys), strict=True)
        if slot != found
    ]
    if lost:
        yield f"slots {lost[:8]} are not found by their keys, or share them"


def _evictable(segment: Segment) -> Iterator[str]:
    order = np.fromiter(LruList(segment), np.int64)
    evictable = np.flatnonzero((segment.state == State.READY) & (segment.readers == 0))
    if not np.array_equal(np.sort(order), evictable):
        yield "the list does not hold exactly the slots that are ready and not read"
        return
    ring = np.concatenate((order, [segment.geometry.slots]))
    if not np.array_equal(segment.prev[ring], np.roll(ring, 1)):
        yield "the list is not the same backwards"
    if (np.diff(segment.used[order].astype(np.int64)) <= 0).any():
        yield "the list is not in the order of use"


def _changes(segment: Segment) -> Iterator[str]:
    ring = ChangeRing(segment)
    seqs = np.arange(ring.oldest, ring.position)
    if not np.array_equal(segment.changes["seq"][seqs % segment.geometry.changes], seqs + 1):
        yield "the ring of changes has a gap"


def _some(which: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    """The first few, for people."""
    slots = np.flatnonzero(which).tolist()
    return f"{slots[:8]}{' …' if len(slots) > 8 else ''}"
