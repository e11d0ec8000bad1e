"""Hash index over the slots' keys: open addressing in the segment. Pure.

Linear probing, at most half full. Removal shifts the cluster back instead of leaving a tombstone, so that the
table never degrades and never needs a pause to be cleaned.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workers.kvpool.layout import KEY_BYTES, Segment, Word

_MASK_64 = (1 << 64) - 1
_EMPTY = 0


class KeyTable:
    """Slots by key. Every operation is O(1) expected; `rebuild` is O(slots).

    A key lands at the top bits of (its first 8 bytes × a secret odd number): keys are digests already, and
    whoever chooses prompts cannot make them collide.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._entries = segment.table.data
        self._array = segment.table
        self._mask = len(segment.table) - 1
        self._shift = 64 - self._mask.bit_length()
        self._multiplier = int(segment.words[Word.MULTIPLIER])

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The slot of each key, -1 where there is none."""
        entries, mask = self._entries, self._mask
        buffer, start = self._segment.buffer, self._segment.key_offset
        first = np.frombuffer(b"".join(keys), np.uint64)[:: KEY_BYTES // 8]
        found = []
        for key, home in zip(keys, self._homes(first).tolist(), strict=True):
            position = home
            while (entry := entries[position]) != _EMPTY:
                at = start + (entry - 1) * KEY_BYTES
                if buffer[at : at + KEY_BYTES] == key:
                    break
                position = (position + 1) & mask
            found.append(entry - 1)
        return found

    def insert(self, slot: int) -> None:
        """Make the slot findable by the key in its record. The key must not be in the table."""
        entries, position = self._entries, self._home(slot)
        while entries[position] != _EMPTY:
            position = (position + 1) & self._mask
        entries[position] = slot + 1

    def remove(self, slot: int) -> None:
        """Forget the slot, which must be in the table under the key in its record."""
        entries, mask = self._entries, self._mask
        hole = self._home(slot)
        while entries[hole] != slot + 1:
            hole = (hole + 1) & mask
        position = hole
        while (entry := entries[position := (position + 1) & mask]) != _EMPTY:
            # It may fill the hole unless its home lies behind it.
            if (position - self._home(entry - 1)) & mask >= (position - hole) & mask:
                entries[hole] = entry
                hole = position
        entries[hole] = _EMPTY

    def rebuild(self, slots: npt.NDArray[np.intp]) -> None:
        """Hold exactly these slots; their keys must differ."""
        table = self._array
        table[:] = _EMPTY
        positions = self._homes(self._segment.keys.view(np.uint64)[slots, 0]).astype(np.intp)
        while slots.size:
            empty = np.flatnonzero(table[positions] == _EMPTY)
            chosen = empty[np.unique(positions[empty], return_index=True)[1]]  # one slot for each position
            table[positions[chosen]] = slots[chosen] + 1
            waiting = np.ones(slots.size, bool)
            waiting[chosen] = False
            slots, positions = slots[waiting], (positions[waiting] + 1) & self._mask

    def _home(self, slot: int) -> int:
        at = self._segment.key_offset + slot * KEY_BYTES
        first = int.from_bytes(self._segment.buffer[at : at + 8], sys.byteorder)
        return (first * self._multiplier & _MASK_64) >> self._shift

    def _homes(self, first: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return (first * np.uint64(self._multiplier)) >> np.uint64(self._shift)
