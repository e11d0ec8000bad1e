"""Structures that `router.index` could have been: `make bench NAME=index_candidates`.

Each holds exactly what BlockIndex holds for one tier and up to 64 rows, written with the same care:
a dict of masks, a trie of blocks, and an open-addressed table compiled by Numba. The workload is that of
`tests.bench.router`: 64 rows with staggered depths of a 32k-token prompt in an index of 500,000 other blocks,
and batches stored and removed. Times are CPU time of the one thread that works.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import psutil

from router.index import BlockIndex
from tests.bench.report import report

Keys = npt.NDArray[np.uint64]
F = TypeVar("F", bound=Callable[..., Any])
ROWS, BLOCKS, OTHERS, ROUNDS = 64, 2048, 500_000, 5


class Index(Protocol):
    """The part of `BlockIndex` that is compared."""

    def store(self, row: int, keys: Keys) -> int: ...
    def remove(self, row: int, keys: Keys) -> int: ...
    def depths(self, keys: Keys) -> list[int]: ...


class Chosen:
    """`router.index.BlockIndex`."""

    def __init__(self) -> None:
        self._index = BlockIndex()
        self.store, self.remove = self._index.store, self._index.remove

    def depths(self, keys: Keys) -> list[int]:
        found: list[int] = self._index.match(keys)[0].tolist()
        return found


class DictIndex:
    """A dict from key to a mask of rows."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def store(self, row: int, keys: Keys) -> int:
        masks, bit, new = self._masks, 1 << row, 0
        for key in keys.tolist():
            mask = masks.get(key, 0)
            if not mask & bit:
                masks[key] = mask | bit
                new += 1
        return new

    def remove(self, row: int, keys: Keys) -> int:
        masks, bit, gone = self._masks, 1 << row, 0
        for key in keys.tolist():
            mask = masks.get(key, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = mask ^ bit
        return gone

    def depths(self, keys: Keys) -> list[int]:
        depths, alive, count = [0] * ROWS, (1 << ROWS) - 1, 0
        get = self._masks.get
        for key in keys.tolist():
            lost = alive & ~get(key, 0)
            if lost:
                alive ^= lost
                while lost:
                    low = lost & -lost
                    depths[low.bit_length() - 1] = count
                    lost ^= low
                if not alive:
                    return depths
            count += 1
        for row in range(ROWS):
            if alive >> row & 1:
                depths[row] = count
        return depths


class _Node:
    __slots__ = ("children", "key", "mask", "parent")

    def __init__(self, key: int, parent: _Node | None) -> None:
        self.key, self.parent = key, parent
        self.children: dict[int, _Node] | None = None
        self.mask = 0


class TrieIndex:
    """A trie of blocks, a node each, found from anywhere by key; nodes that nobody holds go.

    A batch's first key continues nothing that is known, as in our events: it hangs under the root.
    """

    def __init__(self) -> None:
        self._root = _Node(0, None)
        self._nodes: dict[int, _Node] = {}

    def store(self, row: int, keys: Keys) -> int:
        bit, new, parent = 1 << row, 0, self._root
        for key in keys.tolist():
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node(key, parent)
                if parent.children is None:
                    parent.children = {}
                parent.children[key] = node
            if not node.mask & bit:
                node.mask |= bit
                new += 1
            parent = node
        return new

    def remove(self, row: int, keys: Keys) -> int:
        bit, gone = 1 << row, 0
        for key in keys.tolist():
            node = self._nodes.get(key)
            if node is not None and node.mask & bit:
                gone += 1
                node.mask ^= bit
                if not node.mask:
                    del self._nodes[key]
                    if node.parent is not None and node.parent.children is not None:
                        node.parent.children.pop(key, None)
        return gone

    def depths(self, keys: Keys) -> list[int]:
        depths, alive, count, node = [0] * ROWS, (1 << ROWS) - 1, 0, self._root
        for key in keys.tolist():
            below = node.children.get(key) if node.children else None
            below = below or self._nodes.get(key)
            lost = alive & ~(below.mask if below else 0)
            while lost:
                low = lost & -lost
                depths[low.bit_length() - 1] = count
                lost ^= low
                alive ^= low
            if below is None or not alive:
                return depths
            node = below
            count += 1
        for row in range(ROWS):
            if alive >> row & 1:
                depths[row] = count
        return depths


def numba_index() -> tuple[Callable[[], Index], float, float, float]:
    """A maker of the Numba index; seconds to import and to compile, MiB that both add to the process."""
    before, start = _rss(), time.perf_counter()
    import numba  # type: ignore[import-untyped]

    imported = time.perf_counter() - start
    njit: Callable[[F], F] = numba.njit

    @njit
    def slot_of(table: Keys, key: np.uint64) -> int:
        mask = np.uint64(len(table) - 1)
        at = key & mask
        while table[at] != np.uint64(0) and table[at] != key:
            at = (at + np.uint64(1)) & mask
        return at  # type: ignore[return-value]

    @njit
    def store(table: Keys, masks: Keys, keys: Keys, bit: np.uint64) -> tuple[int, int]:
        new, fresh = 0, 0
        for key in keys:
            at = slot_of(table, key)
            if table[at] != key:
                table[at] = key
                fresh += 1
            if not masks[at] & bit:
                masks[at] |= bit
                new += 1
        return new, fresh

    @njit
    def remove(table: Keys, masks: Keys, keys: Keys, bit: np.uint64) -> tuple[int, int]:
        gone, freed, mask = 0, 0, np.uint64(len(table) - 1)
        for key in keys:
            at = slot_of(table, key)
            if table[at] == key and masks[at] & bit:
                gone += 1
                masks[at] ^= bit
                if not masks[at]:
                    freed += 1
                    # Shift back what the hole would hide: Knuth, The Art of Computer Programming 6.4, R.
                    hole, after = np.uint64(at), np.uint64(at)
                    while True:
                        after = (after + np.uint64(1)) & mask
                        if table[after] == np.uint64(0):
                            break
                        if ((after - (table[after] & mask)) & mask) >= ((after - hole) & mask):
                            table[hole], masks[hole] = table[after], masks[after]
                            hole = after
                    table[hole], masks[hole] = np.uint64(0), np.uint64(0)
        return gone, freed

    @njit
    def depths(table: Keys, masks: Keys, keys: Keys, out: npt.NDArray[np.int32]) -> None:
        alive, count = ~np.uint64(0), 0
        for key in keys:
            at = slot_of(table, key)
            here = masks[at] if table[at] == key else np.uint64(0)
            lost = alive & ~here
            if lost:
                for row in range(64):
                    if lost >> np.uint64(row) & np.uint64(1):
                        out[row] = count
                alive &= here
                if not alive:
                    return
            count += 1
        for row in range(64):
            if alive >> np.uint64(row) & np.uint64(1):
                out[row] = count

    class NumbaIndex:
        """Linear probing, the mask beside the key, removal by shifting back; doubles at half full."""

        def __init__(self) -> None:
            self._live = 0
            self._table, self._masks = np.zeros(1024, np.uint64), np.zeros(1024, np.uint64)

        def store(self, row: int, keys: Keys) -> int:
            while 2 * (self._live + len(keys)) > len(self._table):
                table, masks = self._table, self._masks
                self._table, self._masks = (np.zeros(2 * len(table), np.uint64) for _ in range(2))
                for bit in range(64):
                    held = table[masks >> np.uint64(bit) & np.uint64(1) != 0]
                    store(self._table, self._masks, held, np.uint64(1 << bit))
            new, fresh = store(self._table, self._masks, keys, np.uint64(1 << row))
            self._live += fresh
            return new

        def remove(self, row: int, keys: Keys) -> int:
            gone, freed = remove(self._table, self._masks, keys, np.uint64(1 << row))
            self._live -= freed
            return gone

        def depths(self, keys: Keys) -> list[int]:
            out = np.zeros(64, np.int32)
            depths(self._table, self._masks, keys, out)
            found: list[int] = out.tolist()
            return found

    start = time.perf_counter()
    first, keys = NumbaIndex(), np.arange(1, 9, dtype=np.uint64)
    first.store(0, keys)
    first.depths(keys)
    first.remove(0, keys)
    return NumbaIndex, imported, time.perf_counter() - start, (_rss() - before) / 2**20


def measure(make: Callable[[], Index]) -> list[str]:
    """Look-up of a known and a half known prompt, µs; intake by 16 and by 128, blocks/s; MiB per 1M."""
    rng = np.random.default_rng(1)
    before, index = _rss(), make()
    for start in range(0, OTHERS, 1000):
        index.store(start // 1000 % ROWS, rng.integers(1, 2**64, 1000, np.uint64))
    mib = (_rss() - before) / 2**20 * 1e6 / OTHERS
    keys = rng.integers(1, 2**64, BLOCKS, np.uint64)
    expected = [BLOCKS * (row + 1) // ROWS for row in range(ROWS)]
    for row, depth in enumerate(expected):
        for start in range(0, depth, 16):
            index.store(row, keys[start : min(start + 16, depth)])
            index.store(row, rng.integers(1, 2**64, 3, np.uint64))
    assert index.depths(keys) == expected, "a wrong depth was found"
    half = np.concatenate((keys[: BLOCKS // 2], rng.integers(1, 2**64, BLOCKS // 2, np.uint64)))
    cells = [f"{_p50_us(lambda: index.depths(keys)):.0f}", f"{_p50_us(lambda: index.depths(half)):.0f}"]
    for batch in (16, 128):
        cells.append(f"{statistics.median(_intake(index, batch, rng) for _ in range(ROUNDS)):,.0f}")
    return [*cells, f"{mib:.0f}"]


def _p50_us(call: Callable[[], object]) -> float:
    found = []
    for _ in range(300):
        start = time.process_time()
        call()
        found.append((time.process_time() - start) * 1e6)
    return statistics.median(found)


def _intake(index: Index, batch: int, rng: np.random.Generator) -> float:
    """Block events a second: batches stored on four rows, each removed 64 later."""
    batches = rng.integers(1, 2**64, (200_000 // batch, batch), np.uint64)
    held: deque[tuple[int, Keys]] = deque()
    start = time.process_time()
    for step, keys in enumerate(batches):
        index.store(step % 4, keys)
        held.append((step % 4, keys))
        if len(held) > 256:
            index.remove(*held.popleft())
    while held:
        index.remove(*held.popleft())
    return 2 * batches.size / (time.process_time() - start)


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


def alone(name: str) -> tuple[list[str], dict[str, float]]:
    """One candidate's cells and figures; to be run in a process of its own, for its memory."""
    if name != "Numba":
        return measure(CANDIDATES[name]), {}
    make, imported, compiled, grown = numba_index()
    return measure(make), {"numba_import_s": imported, "numba_compile_s": compiled, "numba_rss_mib": grown}


CANDIDATES: dict[str, Callable[[], Index]] = {"NumPy (chosen)": Chosen, "dict": DictIndex, "trie": TrieIndex}


def main() -> None:
    table, figures = [], {}
    for name in (*CANDIDATES, "Numba"):
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
            cells, more = process.submit(alone, name).result(timeout=600)
        table.append([name, *cells])
        figures.update(more)
    columns = ("structure", "look-up µs", "half known µs", "intake 16/s", "intake 128/s", "MiB per 1M")
    report("index_candidates", "Structures for the block index", columns, table, figures)


if __name__ == "__main__":
    main()
