"""One host's arena, seen and damaged from outside the host, without becoming an owner of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np

from workers.kvpool.arena import Arena
from workers.kvpool.errors import ArenaBusy
from workers.kvpool.layout import Segment, State
from workers.kvpool.usage import Counters, Usage

_BEGINNING: Final = 256
"""Bytes of a slot by which one sees that somebody has begun to write it."""
_RECENT: Final = 24
_BUSY_S: Final = 10.0

_T = TypeVar("_T")


class Held(NamedTuple):
    slot: int
    generation: int


@dataclass(frozen=True)
class Left:
    """What nobody should hold any more."""

    leases: int
    writing: int
    violations: tuple[str, ...]

    @property
    def count(self) -> int:
        return self.leases + self.writing + len(self.violations)


class SeenArena:
    """`path`: by way of /proc/PID/root. What it shows outlives the host."""

    def __init__(self, path: Path) -> None:
        self._arena = Arena.open(path)
        self._segment: Segment = self._arena._segment

    def entry(self, pid: int) -> int | None:
        """Of the owner with this process id, as its host knows it."""
        owners = self._segment.owners
        found = np.flatnonzero((owners["incarnation"] != 0) & (owners["pid"] == pid)).tolist()
        return found[-1] if found else None

    def unsealed(self, owner: int) -> list[Held]:
        """Slots that this owner has allocated, and into which not everything has been written."""
        segment = self._segment
        mine = (segment.state == State.WRITING) & (segment.owner == owner) & ~segment.checksums.all(axis=1)
        return self._held(mine)

    def leased(self, owner: int) -> list[Held]:
        """Ready slots that this owner reads."""
        segment = self._segment
        mine = (segment.state == State.READY) & ((segment.readers >> np.uint64(owner)) & np.uint64(1) != 0)
        return self._held(mine)

    def beginning(self, slot: int) -> bytes:
        return bytes(self._segment.part(slot, 0)[:_BEGINNING])

    def flip(self, dice: random.Random, count: int) -> list[int]:
        """Change a byte in so many ready slots, half of them among those used last; returns the slots."""
        ready = np.flatnonzero(self._segment.state == State.READY)
        by_use = ready[np.argsort(self._segment.used[ready])[::-1]].tolist()
        recent = by_use[:_RECENT]
        chosen = dice.sample(recent, min(count // 2, len(recent)))
        others = [slot for slot in by_use if slot not in chosen]
        chosen += dice.sample(others, min(count - len(chosen), len(others)))
        for slot in chosen:
            part = self._segment.part(slot, 0)
            part[dice.randrange(len(part))] ^= dice.randrange(1, 256)
        return chosen

    def usage(self) -> Usage:
        return self._arena.usage()

    def counters(self) -> Counters:
        return self._arena.counters()

    @property
    def full(self) -> float:
        """Share of the slots that are not free."""
        return float((self._segment.state != State.FREE).mean())

    def left(self, within_s: float) -> Left:
        """What is held by the living, and what is wrong, once the dead have been reaped: of several looks the
        first that finds nothing, or the last."""
        until = time.monotonic() + within_s
        while True:
            _patiently(self._arena.reap)
            # What allocators and readers left, and what no reader's bit is true of.
            readers = self._segment.readers.copy()
            leases = int(np.unpackbits(readers.view(np.uint8)).sum())
            left = Left(leases, self.usage().writing, tuple(_patiently(self._arena.check)))
            if not left.count or time.monotonic() > until:
                return left
            time.sleep(0.5)

    def _held(self, which: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[Held]:
        slots = np.flatnonzero(which).tolist()
        return [Held(slot, int(self._segment.generation[slot])) for slot in slots]


def _patiently(ask: Callable[[], _T]) -> _T:
    """Raises ArenaBusy when nobody was let in for long: somebody dead or stopped holds the mutex."""
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            return ask()
        except ArenaBusy:
            if time.monotonic() > until:
                raise
