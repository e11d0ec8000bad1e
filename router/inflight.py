"""Prompts in flight: what each replica is about to have cached.

A prompt's block keys are chained, so two prompts that have the same key at one place are equal up to there,
and the longest common prefix is found by bisection.

Measured on 2 busy cores: a match of 2048 keys with 4 siblings in flight on each of 8 / 64 / 512 rows takes
0.02 / 0.14 / 1.8 ms; an add with its discard 1 µs.
"""

from __future__ import annotations

from itertools import islice

from protos.blockkeys import Keys

_SEEN = 4  # depths tried before bisection


class InflightPrompts:
    """Which prompts are being computed where.

    `match` compares with at most `per_row` prompts of a row, the newest: a burst of siblings is answered by
    any of them, and the work stays bounded under any burst. It is exact while at most `per_row` prompts with
    the same first block are in flight on a row, and never more than the truth.
    """

    def __init__(self, per_row: int = 4) -> None:
        if per_row < 1:
            raise ValueError(f"per_row is {per_row}: must be at least 1")
        self._per_row = per_row
        self._handle = 0
        self._where: dict[int, tuple[int, int]] = {}  # handle: (row, first key); first key 0: no full block
        self._prompts: dict[int, dict[int, dict[int, memoryview]]] = {}  # by first key, row, handle

    def __len__(self) -> int:
        """Prompts in flight, those of less than one block included."""
        return len(self._where)

    def add(self, row: int, keys: Keys) -> int:
        """A prompt with these block keys goes to `row`; the handle ends it. `keys` must not change."""
        self._handle += 1
        first = int(keys[0]) if len(keys) else 0
        self._where[self._handle] = (row, first)
        if first:
            self._prompts.setdefault(first, {}).setdefault(row, {})[self._handle] = _view(keys)
        return self._handle

    def discard(self, handle: int) -> None:
        """The prompt is computed, or will never be. A handle that has ended is ignored."""
        row, first = self._where.pop(handle, (0, 0))
        if not first:
            return
        rows = self._prompts[first]
        del rows[row][handle]
        if not rows[row]:
            del rows[row]
            if not rows:
                del self._prompts[first]

    def match(self, keys: Keys) -> dict[int, int]:
        """Blocks that `keys` shares from its start with a prompt in flight on a row.

        Rows without any are absent.
        """
        rows = self._prompts.get(int(keys[0])) if len(keys) else None
        if not rows:
            return {}
        mine, depths = _view(keys), {}
        seen: list[int] = []  # depths found in this match: prompts in flight tend to be siblings
        for row, prompts in rows.items():
            depth = 0
            for other in islice(reversed(prompts.values()), self._per_row):
                limit = min(len(mine), len(other))
                if depth >= limit or mine[depth] != other[depth]:
                    continue  # not longer than the one before
                for guess in seen:
                    if (
                        depth < guess <= limit
                        and mine[guess - 1] == other[guess - 1]
                        and (guess == limit or mine[guess] != other[guess])
                    ):
                        depth = guess
                        break
                else:
                    depth = _common_blocks(mine, other, depth + 1, limit)
                    seen = [depth, *seen[: _SEEN - 1]]
            depths[row] = depth
        return depths


def _common_blocks(a: memoryview, b: memoryview, low: int, high: int) -> int:
    """Length of the longest common prefix of two chains of keys, known to be from `low` to `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _view(keys: Keys) -> memoryview:
    """Elements as Python's numbers, twice as fast as through NumPy."""
    return memoryview(keys)  # type: ignore[arg-type]
