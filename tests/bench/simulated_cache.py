"""The KV space of a simulated replica: blocks by key, in the way of vLLM's block pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]


class SimulatedCache:
    """`capacity` blocks. Each is blank, private to a job, in use under its key, or unused and kept as cache.

    Unused ones are evicted least recently used first. A key that became resident is told (`changes`) once
    `publish` was called: engines tell at the end of a step what they began to compute with it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blank = capacity
        self._used: dict[int, int] = {}  # key: jobs that use it
        self._unused: OrderedDict[int, None] = OrderedDict()  # key; least recently used first
        self._fresh: set[int] = set()
        self._changes: dict[int, bool] = {}  # key: became resident, or ceased to be

    @property
    def free(self) -> int:
        """Blocks that can be had, by evicting where needed."""
        return self.blank + len(self._unused)

    @property
    def used(self) -> int:
        """Keys in use."""
        return len(self._used)

    def hits(self, keys: Sequence[int], start: int = 0, *, published: bool = False) -> int:
        """Leading keys that are resident, in truth or as told so far; the first `start` are known to be."""
        found = start
        while found < len(keys) and (keys[found] in self._used or keys[found] in self._unused):
            if published and keys[found] in self._fresh:
                break
            found += 1
        return found

    def claim(self, keys: Sequence[int], blocks: int) -> bool:
        """Use these resident keys and take so many private blocks, if all of that can be had."""
        revived = sum(1 for key in keys if key not in self._used)
        if blocks > self.free - revived:
            return False
        for key in keys:
            self._use(key)
        blank = min(blocks, self.blank)
        self.blank -= blank
        for _ in range(blocks - blank):
            key, _ = self._unused.popitem(last=False)
            self._changes[key] = False
        return True

    def name(self, keys: Iterable[int]) -> None:
        """Private blocks become shared ones with these keys; a double is given back."""
        for key in keys:
            if key in self._used or key in self._unused:
                self.blank += 1
            else:
                self._fresh.add(key)
            self._use(key)

    def release(self, keys: Sequence[int], blocks: int) -> None:
        """One user less for each key, the last to be evicted first; private blocks become blank."""
        for key in reversed(keys):
            users = self._used[key] - 1
            if users:
                self._used[key] = users
            else:
                del self._used[key]
                self._unused[key] = None
        self.blank += blocks

    def publish(self) -> None:
        """A step has ended."""
        for key in self._fresh:
            self._changes[key] = True
        self._fresh.clear()

    def changes(self) -> tuple[Keys, Keys]:
        """Keys stored and removed since the last call, on balance."""
        stored = [key for key, is_stored in self._changes.items() if is_stored]
        removed = [key for key, is_stored in self._changes.items() if not is_stored]
        self._changes.clear()
        return np.array(stored, np.uint64), np.array(removed, np.uint64)

    def resident(self) -> set[int]:
        """All keys that can be hit."""
        return self._used.keys() | self._unused.keys()

    def assert_whole(self, private: int) -> None:
        """No block is lost or doubled when jobs hold so many private ones."""
        total = self.blank + len(self._unused) + len(self._used) + private
        assert total == self.capacity, f"{total} blocks of {self.capacity}"
        assert self.blank >= 0

    def _use(self, key: int) -> None:
        users = self._used.get(key, 0)
        if not users:
            self._unused.pop(key, None)
        self._used[key] = users + 1
