"""Which slot holds which block, in what state and for whom. Pure: a segment's bytes and plain values.

A slot goes FREE → WRITING → READY → FREE, or back from WRITING. `Arena` calls every method under the mutex
and marks the segment as changing around those that change it. A process may be killed between any two stores,
so the stores to a slot's record are ordered: whatever else a record says is complete before its state says
WRITING or READY, and its state says FREE before the rest is touched. What follows from the records (table,
list, stack) is made anew by `recovery.recover`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.kvpool.admission import admission
from workers.kvpool.changes import ChangeKind, ChangeRing
from workers.kvpool.free import FreeStack
from workers.kvpool.layout import KEY_BYTES, Segment, State, Word
from workers.kvpool.lru import LruList
from workers.kvpool.table import KeyTable

_GENERATIONS = 1 << 32
_STATES = tuple(State)  # by value
_FREE, _WRITING, _READY = map(int, State)  # an enum's members are slow to name


class Lease(NamedTuple):
    """A slot that stays as it is until released."""

    slot: int
    generation: int


class Slot(NamedTuple):
    """A slot to be written: by whom it was allocated, and by nobody else."""

    slot: int
    generation: int


class Seal(NamedTuple):
    """A rank's part of a slot is written."""

    slot: int
    generation: int
    checksum: int
    """Of what was to be written, taken from the source: a stray write to the slot must not be sealed."""


class Index:
    """The state of all slots. Costs are O(1) for each key or slot named, unless said otherwise.

    `owner` is an owner entry's index. Where keys of one prefix are named together, they come in the prefix's
    order: the first is evicted last, since the others are of no use without it.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._words = segment.words.data
        self._state, self._owner = segment.state.data, segment.owner.data
        self._generation, self._readers = segment.generation.data, segment.readers.data
        self._used, self._extra = segment.used.data, segment.extra.data
        self._checksums = segment.checksums
        self._table = KeyTable(segment)
        self._free = FreeStack(segment)
        self._evictable = LruList(segment)  # invariant: the READY slots without readers
        self._admission = admission(segment)
        self.changes = ChangeRing(segment)

    @property
    def exhausted(self) -> bool:
        """No slot is free and none can be evicted."""
        return not self._free and self._evictable.oldest() < 0

    def lookup(self, keys: Sequence[bytes], asked: bool) -> list[State]:
        """FREE for a key that no slot holds. `asked`: it counts as demand."""
        states = [self._key_state(slot) for slot in self._table.find(keys)]
        if asked and keys:
            self._admission.asked(keys)
            hits = states.count(_STATES[_READY])
            self._words[Word.HITS] += hits
            self._words[Word.MISSES] += len(keys) - hits
        return states

    def lease(self, keys: Sequence[bytes], owner: int) -> list[Lease | None]:
        """Keep the READY ones from being evicted; None for the others."""
        return [self._pin(slot, owner) for slot in self._table.find(keys)]

    def unpin(self, slot: int, generation: int, owner: int) -> None:
        """`owner` reads the slot no more. Nothing happens when the slot has moved on."""
        bit = 1 << owner
        if not self.holds(slot, generation, _READY) or not self._readers[slot] & bit:
            return
        self._readers[slot] ^= bit
        if not self._readers[slot]:
            self._append(slot)

    def allocate(
        self, keys: Sequence[bytes], extras: Sequence[int], owner: int, asked: bool = False
    ) -> list[Slot | None]:
        """A WRITING slot for each key that is new; None for one that is there, being written, not admitted,
        or for which there is no room. Those that are there count as used, and are not evicted for the others.
        `asked`: they count as demand.
        """
        found = self._table.find(keys)
        self._touch(found)
        if asked and keys:
            self._admission.asked(keys)
        new = {key: extra for key, extra, slot in zip(keys, extras, found, strict=True) if slot < 0}
        there = set(found)
        # Each once: of a key that is named twice, the second is being written by then.
        return [self._allocate(key, new.pop(key), owner, there) if key in new else None for key in keys]

    def seal(self, rank: int, seal: Seal) -> bool:
        """False when the slot is not being written any more."""
        if not self.holds(seal.slot, seal.generation, _WRITING):
            return False
        self._checksums[seal.slot, rank] = seal.checksum
        return True

    def commit(self, slots: Sequence[Slot], owner: int) -> list[bool]:
        """READY and True for each slot that is still the owner's and has every part sealed. The others of the
        owner's become FREE."""
        rows = np.fromiter((slot.slot for slot in slots), np.intp)
        sealed: list[bool] = np.all(self._checksums[rows], axis=1).tolist()
        ready = {slot for slot in compress(slots, sealed) if self._written_by(slot, owner)}
        for slot in dict.fromkeys(reversed(slots)):
            if slot in ready:
                self._publish(slot.slot)
            else:
                self.abandon(slot.slot, slot.generation, owner)
        return [slot in ready for slot in slots]

    def abandon(self, slot: int, generation: int, owner: int) -> None:
        """Free a slot that the owner was writing. Nothing happens when it is not that any more."""
        if self._written_by(Slot(slot, generation), owner):
            self._discard(slot)
            self._words[Word.ABANDONED] += 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """The READY ones were used just now."""
        self._touch(self._table.find(keys))

    def corrupt(self, slot: int, generation: int) -> None:
        """Free a READY slot whose bytes are not what was written, whoever reads it. Nothing happens when the
        slot has moved on: what was read then is no sign of damage."""
        if self.holds(slot, generation, _READY):
            self._discard(slot)
            self._words[Word.CORRUPT] += 1

    def reclaim(self, owner: int) -> int:
        """Undo all that an owner holds; returns the slots freed. O(slots)."""
        segment = self._segment
        written = np.flatnonzero((segment.state == _WRITING) & (segment.owner == owner))
        for slot in written.tolist():
            self._discard(slot)
        for slot in np.flatnonzero(segment.readers & np.uint64(1 << owner)).tolist():
            self.unpin(slot, self._generation[slot], owner)
        return len(written)

    def holds(self, slot: int, generation: int, state: int) -> bool:
        """Whether the slot is still in this `State` of this generation. May be called without the mutex."""
        return self._state[slot] == state and self._generation[slot] == generation

    def verified(self, slot: int, generation: int, rank: int, checksum: int) -> bool:
        """Whether bytes copied from a part are what was written there for that generation.

        May be called without the mutex: a generation that is the same before and after the checksum is read
        is the one that the checksum belongs to.
        """
        return (
            self.holds(slot, generation, _READY)
            and int(self._checksums[slot, rank]) == checksum
            and self.holds(slot, generation, _READY)
        )

    def ready(self) -> npt.NDArray[np.intp]:
        """Which slots are. O(slots)."""
        return np.flatnonzero(self._segment.state == _READY)

    def _key_state(self, slot: int) -> State:
        return _STATES[_FREE if slot < 0 else self._state[slot]]

    def _written_by(self, slot: Slot, owner: int) -> bool:
        return self.holds(slot.slot, slot.generation, _WRITING) and self._owner[slot.slot] == owner

    def _touch(self, found: list[int]) -> None:
        for slot in reversed(found):
            # One that has readers is not in the list, and will enter it as the youngest.
            if slot >= 0 and self._state[slot] == _READY and not self._readers[slot]:
                self._evictable.remove(slot)
                self._append(slot)

    def _pin(self, slot: int, owner: int) -> Lease | None:
        if slot < 0 or self._state[slot] != _READY:
            return None
        if not self._readers[slot]:
            self._evictable.remove(slot)
        self._readers[slot] |= 1 << owner
        return Lease(slot, self._generation[slot])

    def _allocate(self, key: bytes, extra: int, owner: int, kept: set[int]) -> Slot | None:
        slot = self._free.pop()
        if slot < 0:
            slot = self._evict_for(key, kept)
        if slot < 0:
            return None
        generation = self._generation[slot] = (self._generation[slot] + 1) % _GENERATIONS
        at = self._segment.key_offset + slot * KEY_BYTES
        self._segment.buffer[at : at + KEY_BYTES] = key
        self._extra[slot] = extra
        self._owner[slot] = owner
        self._readers[slot] = 0
        self._checksums[slot] = 0
        self._state[slot] = _WRITING
        self._table.insert(slot)
        return Slot(slot, generation)

    def _evict_for(self, newcomer: bytes, kept: set[int]) -> int:
        victim = self._evictable.oldest()
        if victim < 0 or victim in kept:  # those kept are the youngest: there are no others
            self._words[Word.FULL] += 1
            return -1
        if not self._admission.admits(newcomer, self._segment.key(victim)):
            self._words[Word.REFUSED] += 1
            return -1
        self._discard(victim)
        self._words[Word.EVICTED] += 1
        return self._free.pop()

    def _publish(self, slot: int) -> None:
        self._state[slot] = _READY
        self._append(slot)
        self.changes.append(ChangeKind.STORED, slot)
        self._words[Word.STORED] += 1

    def _append(self, slot: int) -> None:
        """Into the list as the youngest; `used` puts it there again after a recovery."""
        clock = self._words[Word.CLOCK] + 1
        self._words[Word.CLOCK] = self._used[slot] = clock
        self._evictable.append(slot)

    def _discard(self, slot: int) -> None:
        """Whatever state it is in, it becomes FREE."""
        was = self._state[slot]
        self._state[slot] = _FREE
        if was == _READY:
            if not self._readers[slot]:
                self._evictable.remove(slot)
            self.changes.append(ChangeKind.REMOVED, slot)
        self._readers[slot] = 0
        self._table.remove(slot)
        self._free.push(slot)
