"""The free slots: a stack in the segment. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.kvpool.layout import Segment, Word


class FreeStack:
    """Slots to take, the one freed last first: its memory is the likeliest to be in a cache. O(1)."""

    def __init__(self, segment: Segment) -> None:
        self._array = segment.free
        self._slots = segment.free.data
        self._words = segment.words.data

    def __len__(self) -> int:
        return self._words[Word.FREE]

    def push(self, slot: int) -> None:
        depth = self._words[Word.FREE]
        self._slots[depth] = slot
        self._words[Word.FREE] = depth + 1

    def pop(self) -> int:
        """-1 when none is free."""
        depth = self._words[Word.FREE]
        if depth == 0:
            return -1
        self._words[Word.FREE] = depth - 1
        return self._slots[depth - 1]

    def rebuild(self, slots: npt.NDArray[np.intp]) -> None:
        """Hold exactly these slots, the first on top."""
        self._array[: slots.size] = slots[::-1]
        self._words[Word.FREE] = slots.size
