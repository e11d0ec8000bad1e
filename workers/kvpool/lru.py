"""What may be evicted, the oldest first: a circular doubly linked list in two arrays. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from workers.kvpool.layout import U32, Segment


class LruList:
    """Slots in the order of their last use. All but `rebuild` and iteration are O(1).

    The entry after the last slot is both ends of the list, so that no case is special.
    """

    def __init__(self, segment: Segment) -> None:
        self._arrays: tuple[U32, U32] = (segment.next, segment.prev)
        self._next, self._prev = segment.next.data, segment.prev.data
        self._head = segment.geometry.slots

    def oldest(self) -> int:
        """-1 when the list is empty."""
        slot = self._next[self._head]
        return -1 if slot == self._head else slot

    def append(self, slot: int) -> None:
        """Make it the youngest. It must not be in the list."""
        last = self._prev[self._head]
        self._prev[slot] = last
        self._next[slot] = self._head
        self._next[last] = slot
        self._prev[self._head] = slot

    def remove(self, slot: int) -> None:
        """It must be in the list."""
        before, after = self._prev[slot], self._next[slot]
        self._next[before] = after
        self._prev[after] = before

    def rebuild(self, oldest_first: npt.NDArray[np.intp]) -> None:
        """Hold exactly these slots, in this order."""
        following, preceding = self._arrays
        ring = np.concatenate(([self._head], oldest_first, [self._head])).astype(np.uint32)
        following[ring[:-1]] = ring[1:]
        preceding[ring[1:]] = ring[:-1]

    def __iter__(self) -> Iterator[int]:
        """Oldest first. Ends after as many steps as there are slots, even if the list is damaged."""
        slot = self._next[self._head]
        for _ in range(self._head):
            if slot == self._head:
                return
            yield slot
            slot = self._next[slot]
