"""Finished KV blocks of all replicas on a host, in memory that they share.

    a writer                                        a reader
    slots = arena.allocate(keys, extras)            leases = arena.lease(keys)
    in the process of each rank:                    in the process of each rank:
        arena.write_part(slot, generation, rank)        arena.read_part(slot, generation, rank)
        arena.seal_parts(rank, …checksums…)             arena.verify(slot, generation, rank, checksum)
    arena.commit(slots)                             arena.release(leases)

Whoever dies, at any instruction, costs the others at most what it was writing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from workers.kvpool.changes import Changes, Snapshot, split_keys
from workers.kvpool.errors import ArenaBusy, ArenaClosedError, SlotLostError
from workers.kvpool.file import MUTEX_BYTE, ArenaFile
from workers.kvpool.guard import Guard
from workers.kvpool.header import Header
from workers.kvpool.index import Index, Lease, Seal, Slot
from workers.kvpool.integrity import violations
from workers.kvpool.layout import KEY_BYTES, Segment, State
from workers.kvpool.locks import Mutex
from workers.kvpool.owners import OwnerKind
from workers.kvpool.presence import Presence
from workers.kvpool.usage import Counters, Usage

_LARGEST: Final = (1 << 64) - 1


@dataclass(frozen=True)
class Timing:
    """In seconds."""

    lookup_s: float = 0.02
    """Within which a lookup gets the mutex, or raises ArenaBusy."""
    other_s: float = 0.2
    """The same for everything else."""
    reap_every_s: float = 1.0
    """At most this often a lookup looks for dead owners."""


class Arena:
    """One process's access to an arena; its threads may share it.

    Keys are 32 bytes each. Where keys of one prefix are named together they come in the prefix's order: the
    first is evicted last. Methods that need the mutex raise ArenaBusy when they do not get it in time (see
    `Timing`), having changed nothing. All raise ArenaClosedError after `close`, and in a forked process: it
    must open the arena itself.
    """

    def __init__(self, file: ArenaFile, timing: Timing) -> None:
        """For `create` and `open`."""
        self._file = file
        self._timing = timing
        self._segment = Segment(file.mapping, file.header.geometry)
        self._index = Index(self._segment)
        self._guard = Guard(self._segment, Mutex(file.locks, MUTEX_BYTE, str(file.path)))
        self._presence = Presence(self._segment, self._index, file.locks)
        self._pins: Counter[Lease] = (
            Counter()
        )  # this owner's bit of a slot stays while any of its leases does
        self._reap_at = 0.0

    @classmethod
    def create(cls, path: Path, header: Header, timing: Timing | None = None, wait_s: float = 120.0) -> Self:
        """The arena at `path`, made first if there is none; any number of processes may do so at once.

        All its memory is taken now, at 1 to 3 GB/s. Raises ArenaSpaceError, ArenaAccessError,
        ArenaMismatchError (another arena is there), and ArenaBusy when another process takes longer than
        `wait_s` to make it.
        """
        return cls(ArenaFile.create(path, header, wait_s), timing or Timing())

    @classmethod
    def open(cls, path: Path, wanted: Header | None = None, timing: Timing | None = None) -> Self:
        """The arena at `path`, which must be equal to `wanted`, if given.

        Raises ArenaMissingError, ArenaAccessError, ArenaMismatchError.
        """
        return cls(ArenaFile.open(path, wanted), timing or Timing())

    @property
    def header(self) -> Header:
        return self._file.header

    @property
    def path(self) -> Path:
        return self._file.path

    def attach(self, kind: OwnerKind) -> None:
        """Become an owner: only owners lease and allocate. What they hold is freed when their process ends.

        Raises OwnersFullError, and ValueError when this object is one already.
        """
        if self._presence.attached:
            raise ValueError("this Arena is attached already")
        with self._guard.changing(self._timing.other_s):
            self._presence.reap()
            self._presence.enter(kind)

    def lookup(self, keys: Sequence[bytes], asked: bool = True) -> list[State]:
        """The state of each key; FREE means missing.

        `asked`: False when the same request asks again, which must not count twice as demand.
        """
        _require_keys(keys)
        with self._guard.entered(self._timing.lookup_s):
            now = time.monotonic()
            if now >= self._reap_at or self._guard.owes:
                self._reap_at = now + self._timing.reap_every_s
                with self._guard.mutation():
                    self._presence.reap()
            return self._index.lookup(keys, asked)

    def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        """Keep each ready block until it is released; None for those that are not ready.

        Leases count: a block leased twice is released twice. Raises NotAttachedError.
        """
        _require_keys(keys)
        with self._guard.changing(self._timing.other_s):
            leases = self._index.lease(keys, self._presence.require())
            self._pins.update(lease for lease in leases if lease is not None)
            return leases

    def release(self, leases: Sequence[Lease]) -> None:
        """Give leases back. Never ArenaBusy: what cannot be done now is done when the mutex is next had."""
        self._guard.owe(self._unpin, reversed(leases), self._timing.other_s)

    def read_part(self, slot: int, generation: int, rank: int) -> memoryview:
        """A leased slot's bytes of one rank, read-only and not copied. Needs no mutex.

        What is copied from it is worth nothing until `verify` says so. Raises SlotLostError when the slot
        holds something else by now, ValueError for a slot or rank that the arena does not have.
        """
        part = self._part(slot, rank)
        if not self._index.holds(slot, generation, State.READY):
            raise SlotLostError(f"generation {generation} of slot {slot} is gone: recompute the block")
        return part.toreadonly()

    def verify(self, slot: int, generation: int, rank: int, checksum: int) -> bool:
        """Whether a copy of a part, with this `checksum`, is what was written. Needs no mutex.

        If not: forget the copy, and call `corrupt`.
        """
        self._part(slot, rank)
        return self._index.verified(slot, generation, rank, checksum)

    def corrupt(self, slot: int, generation: int) -> None:
        """A copy failed `verify`: free the slot if it still holds that. Never ArenaBusy, like `release`."""
        self._part(slot, 0)
        self._guard.owe(self._index.corrupt, [(slot, generation)], self._timing.other_s)

    def allocate(
        self, keys: Sequence[bytes], extras: Sequence[int], asked: bool = False
    ) -> list[Slot | None]:
        """A slot to write for each key that is new, evicting others if need be.

        None for a key that is there, that somebody is writing, that the admission policy refuses, or for
        which nothing can be evicted. Keys that are there count as used. `extras`: the router's keys, 64 bits
        each. `asked`: no lookup has counted them as demand yet; this does. Raises NotAttachedError.
        """
        _require_keys(keys)
        if len(extras) != len(keys) or not all(0 <= extra <= _LARGEST for extra in extras):
            raise ValueError(f"{len(keys)} keys need as many extras of 64 bits, not {extras!r}")
        with self._guard.changing(self._timing.other_s):
            owner = self._presence.require()
            if self._index.exhausted:
                self._presence.reap()
            return self._index.allocate(keys, extras, owner, asked)

    def write_part(self, slot: int, generation: int, rank: int) -> memoryview:
        """An allocated slot's bytes of one rank, to be written, then sealed. Needs no mutex and no owner.

        Raises SlotLostError when nobody writes that generation any more: its allocator died or gave up.
        """
        part = self._part(slot, rank)
        if not self._index.holds(slot, generation, State.WRITING):
            raise SlotLostError(
                f"generation {generation} of slot {slot} is not being written: drop the block"
            )
        return part

    def seal_parts(self, rank: int, seals: Sequence[Seal]) -> list[bool]:
        """These parts are written. False for each slot that is not being written any more."""
        for seal in seals:
            self._part(seal.slot, rank)
            if not 0 < seal.checksum <= _LARGEST:
                raise ValueError(f"a checksum is a number of 64 bits and not 0: {seal}")
        with self._guard.changing(self._timing.other_s):
            return [self._index.seal(rank, seal) for seal in seals]

    def commit(self, slots: Sequence[Slot]) -> list[bool]:
        """Make those ready that are this owner's and sealed by every rank; its others are freed: False.

        Raises NotAttachedError. After ArenaBusy, call again or `abandon`.
        """
        with self._guard.changing(self._timing.other_s):
            return self._index.commit(slots, self._presence.require())

    def abandon(self, slots: Sequence[Slot]) -> None:
        """Free slots that this owner allocated and did not commit. Never ArenaBusy, like `release`."""
        self._guard.owe(self._abandon, slots, self._timing.other_s)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The ready ones were used just now."""
        _require_keys(keys)
        with self._guard.changing(self._timing.other_s):
            self._index.touch(keys)

    def reap(self) -> int:
        """Free all that dead owners held; returns how many had died."""
        with self._guard.changing(self._timing.other_s):
            return self._presence.reap()

    def changes(self, since: int) -> Changes | None:
        """What became ready and ceased to be after a position. None: start over from `snapshot`."""
        with self._guard.entered(self._timing.other_s):
            position, records = self._index.changes.position, self._index.changes.after(since)
        return None if records is None else Changes.of(position, records)

    def snapshot(self) -> Snapshot:
        """All that is ready. O(slots)."""
        with self._guard.entered(self._timing.other_s):
            ready, position = self._index.ready(), self._index.changes.position
            keys, extras = self._segment.keys[ready], self._segment.extra[ready]
        return Snapshot(position, split_keys(keys.tobytes()), extras.tolist())

    def counters(self) -> Counters:
        """Needs no mutex."""
        self._require_open()
        return Counters.of(self._segment)

    def usage(self) -> Usage:
        """Needs no mutex. O(slots)."""
        self._require_open()
        return Usage.of(self._segment)

    def check(self) -> list[str]:
        """One sentence for each invariant that does not hold. O(slots), under the mutex."""
        with self._guard.entered(self._timing.other_s):
            return violations(self._segment)

    def close(self) -> None:
        """Free all that this owner holds. Idempotent. The file stays, mapped as long as this object lives."""
        if self._file.locks.closed:
            return
        with suppress(ArenaBusy), self._guard.changing(self._timing.other_s):
            self._presence.leave()  # when busy, the others reap it
        self._file.locks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unpin(self, slot: int, generation: int) -> None:
        lease = Lease(slot, generation)
        count = self._pins.pop(lease, 0)
        if count > 1:
            self._pins[lease] = count - 1
        elif count == 1 and (owner := self._presence.entry) is not None:
            self._index.unpin(slot, generation, owner)

    def _abandon(self, slot: int, generation: int) -> None:
        if (owner := self._presence.entry) is not None:
            self._index.abandon(slot, generation, owner)

    def _part(self, slot: int, rank: int) -> memoryview:
        self._require_open()
        return self._segment.part(slot, rank)

    def _require_open(self) -> None:
        if self._file.locks.closed:
            raise ArenaClosedError(f"{self.path} was closed, or opened by a parent process: open it anew")


def _require_keys(keys: Sequence[bytes]) -> None:
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {sorted({len(key) for key in keys})}")
