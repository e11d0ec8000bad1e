"""May a new block take the place of the one that was used least lately? Two policies. Pure.

`TinyLfu` after Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy" (2017): a
count-min sketch with conservative update, halved now and then, behind a doorkeeper. It lies in the segment,
so every replica on the host counts in the same one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from workers.kvpool.layout import KEY_BYTES, SKETCH_ROWS, U64, Segment, Word

LARGEST_COUNT: Final = 15
"""The range of four bits, kept in a byte: next to blocks of 100 KB and more, a sketch need not be small."""

SAMPLE_PER_SLOT: Final = 10
"""Keys counted, per slot of the arena, before all counters are halved."""

_WORDS = struct.Struct("=4Q")  # a key; it is a digest, so its words are four independent hashes
_HIGH: Final = np.uint64(32)


class Policy(IntEnum):
    """Which admission an arena has; written in its header."""

    LRU = 1
    TINYLFU = 2


class Admission(Protocol):
    """A policy's view of one segment."""

    def asked(self, keys: Sequence[bytes]) -> None:
        """Somebody wanted these blocks, whether they were there or not."""

    def admits(self, newcomer: bytes, victim: bytes) -> bool:
        """Whether `newcomer` may take the place of `victim`, the block used least lately."""


class Lru:
    """Everything new is let in."""

    def asked(self, keys: Sequence[bytes]) -> None:
        pass

    def admits(self, newcomer: bytes, victim: bytes) -> bool:
        return True


class TinyLfu:
    """A newcomer is let in if it was asked for more often lately than the victim.

    Blocks that nobody asked for twice do not flush those that are asked for again and again. Counts are rough
    (they may be too high, and keys of one batch that collide count once) and fade: after `SAMPLE_PER_SLOT` ×
    slots keys they are halved. A torn update spoils a count, nothing else, so no care is taken of one.
    """

    def __init__(self, segment: Segment) -> None:
        self._counters = segment.counters
        self._doorkeeper = segment.doorkeeper
        self._flat = segment.counters.reshape(-1)
        self._counts, self._seen = self._flat.data, segment.doorkeeper.data
        self._width = segment.counters.shape[1]
        self._rows: npt.NDArray[np.uint64] = np.arange(SKETCH_ROWS, dtype=np.uint64) * np.uint64(self._width)
        self._words = segment.words.data
        self._sample = SAMPLE_PER_SLOT * segment.geometry.slots

    def asked(self, keys: Sequence[bytes]) -> None:
        """O(keys), vectorised; and O(slots) once in `SAMPLE_PER_SLOT` × slots keys."""
        words: U64 = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, KEY_BYTES // 8)
        doors = (words[:, :2] >> _HIGH) & np.uint64(len(self._doorkeeper) - 1)
        again = self._doorkeeper[doors].all(axis=1)
        self._doorkeeper[doors] = 1
        cells = (words[again] & np.uint64(self._width - 1)) + self._rows
        counts = self._flat[cells]
        lowest = counts.min(axis=1, keepdims=True, initial=LARGEST_COUNT)
        self._flat[cells] = counts + ((counts == lowest) & (lowest < LARGEST_COUNT))
        self._words[Word.SAMPLES] += len(keys)
        if self._words[Word.SAMPLES] >= self._sample:
            self._fade()

    def admits(self, newcomer: bytes, victim: bytes) -> bool:
        return self.count(newcomer) > self.count(victim)

    def count(self, key: bytes) -> int:
        """How often the key was asked for lately, at least; 0 to `LARGEST_COUNT` + 1. O(1)."""
        a, b, c, d = _WORDS.unpack(key)
        width, counts, seen = self._width, self._counts, self._seen
        cell, door = width - 1, len(seen) - 1
        lowest: int = min(
            counts[a & cell],
            counts[width + (b & cell)],
            counts[2 * width + (c & cell)],
            counts[3 * width + (d & cell)],
        )
        again: int = seen[a >> 32 & door] & seen[b >> 32 & door]
        return lowest + again

    def _fade(self) -> None:
        self._counters >>= 1
        self._doorkeeper[:] = 0
        self._words[Word.SAMPLES] = 0


def admission(segment: Segment) -> Admission:
    """The one that the segment's header names. Raises ValueError when it names none."""
    policy = Policy(int(segment.words[Word.POLICY]))
    return TinyLfu(segment) if policy is Policy.TINYLFU else Lru()
