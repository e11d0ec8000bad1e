"""The exact block index: which replica holds which block, and how long a prefix of a prompt it holds. Pure.

Bit masks of rows, by block and tier, in NumPy arrays; blocks are numbered by `router.keytable`. A look-up
finds the numbers of the prompt's blocks up to the first that nobody holds (one comparison when they were
stored in one run, else few gathers) and follows the masks only where they change.

Why this one: 64 rows with staggered depths of a 32k-token prompt (2048 keys, stored by 16, 3 foreign blocks
between) in an index of 500,000 other blocks, on 2 busy cores (`make bench NAME=index_candidates`):

    structure              look-up   half known   store+remove by 16   by 128       MiB per 1M blocks
    NumPy (this)             65 µs        59 µs     0.66M blocks/s    1.3M blocks/s        46
    dict of masks           939 µs       439 µs     1.5M              1.6M                113
    trie of blocks          877 µs       457 µs     0.81M             0.82M               388
    Numba, linear probing    23 µs        12 µs     4.6M             15.6M                 42

Numba is faster, but each start of a router would pay 0.5 s or more of import, 1.5 to 5 s of compiling (a
fresh clone has no cache) and 133 MiB. In one run with Dynamo's RadixTree, look-ups of 2048 keys over 64 rows
take 0.4 of its time, in the aged index above 0.7 to 0.9; over 512 rows 1.2 and 2.1 (`make bench
NAME=router`).

Memory: 41 MiB per 1M distinct blocks at 64 rows and one tier, 111 MiB at 512 (a mask takes 8 bytes for 64
rows, and each tier in use has masks). Arrays grow by half or double, and shrink when three quarters are
unused; the longest such pause on the way to 1M blocks is some 50 to 100 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.blockkeys import Keys
from router.keytable import Ids, KeyTable

_FEW: Final = 48  # keys; below, a loop in Python beats the fixed costs of NumPy


class BlockIndex:
    """Resident blocks by row (a replica) and tier.

    Example: after `store(0, keys)` and `store(1, keys[:10])`, `match(keys)[0]` is `[len(keys), 10]`.
    Exact under any order of stores and removes: a key that a row lacks ends that row's prefix. `keys` are
    uint64 arrays, read-only ones welcome. 0 is no key: it is never stored and ends every prefix.
    """

    def __init__(self, tiers: int = 3) -> None:
        if tiers < 1:
            raise ValueError(f"tiers is {tiers}: must be at least 1")
        self.tiers = tiers
        self.rows = 0  # the highest row ever stored to, plus 1
        self._table = KeyTable()
        self._words = 1
        # By tier: bit masks of rows, [capacity, words], made when the tier is first stored to.
        self._masks: list[npt.NDArray[np.uint64] | None] = [None] * tiers
        self._views: list[memoryview | None] = [None] * tiers
        self._planes = 0  # tiers with masks
        self._blocks = np.zeros((tiers, 64), np.int64)

    def __len__(self) -> int:
        """Distinct keys resident anywhere."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._table.nbytes + self._blocks.nbytes + sum(m.nbytes for m in self._masks if m is not None)

    def blocks(self, row: int, tier: int = 0) -> int:
        """Blocks resident for a row in a tier."""
        self._check(row, tier)
        return int(self._blocks[tier, row]) if row < self.rows else 0

    def store(self, row: int, keys: Keys, tier: int = 0) -> int:
        """These blocks are resident now; how many were not before."""
        self._check(row, tier)
        if row >= self.rows:
            self._cover(row)
        word, bit = row >> 6, 1 << (row & 63)
        if len(keys) <= _FEW:
            few = self._table.add_few(keys)
            view, words, new = self._view(tier), self._words, 0
            for number in few:
                at = number * words + word
                mask = view[at]
                if not mask & bit:
                    view[at] = mask | bit
                    new += 1
        else:
            ids = self._table.add(keys if keys.all() else keys[keys != 0])
            self._view(tier)
            column = self._plane(tier)[:, word]
            masks = column[ids]
            fresh = ids[masks & np.uint64(bit) == 0]
            column[ids] = masks | np.uint64(bit)
            new = len(_distinct(fresh))
        self._blocks[tier, row] += new
        return new

    def remove(self, row: int, keys: Keys, tier: int = 0) -> int:
        """These blocks are gone; how many were resident."""
        self._check(row, tier)
        if row >= self.rows or self._masks[tier] is None:
            return 0
        word, bit = row >> 6, 1 << (row & 63)
        if len(keys) <= _FEW:
            view, words = self._views[tier], self._words
            assert view is not None
            gone, empty = 0, []
            for found in self._table.find_few(keys):
                at = found[0] * words + word
                if view[at] & bit:
                    view[at] ^= bit
                    gone += 1
                    if not view[at]:
                        empty.append(found)
            if words == 1 and self._planes == 1:
                self._table.drop_few(empty)
                self._shrink()
            else:
                self._release(np.array([number for number, _ in empty], np.intp))
        else:
            ids = self._table.find(keys)
            column = self._plane(tier)[:, word]
            ids = _distinct(ids[ids >= 0])
            ids = ids[column[ids] & np.uint64(bit) != 0]
            column[ids] ^= np.uint64(bit)
            gone = len(ids)
            self._release(ids)
        self._blocks[tier, row] -= gone
        return gone

    def clear(self, row: int, tier: int | None = None) -> None:
        """Forget what a row holds in a tier, or in all."""
        self._check(row, tier or 0)
        if row >= self.rows:
            return
        word, bit = row >> 6, np.uint64(1 << (row & 63))
        touched = np.zeros(self._table.capacity, bool)
        for each in range(self.tiers) if tier is None else (tier,):
            if self._blocks[each, row]:
                column = self._plane(each)[:, word]
                held = column & bit != 0
                column[held] ^= bit
                touched[: len(held)] |= held
                self._blocks[each, row] = 0
        self._release(np.flatnonzero(touched))

    def match(self, keys: Keys) -> npt.NDArray[np.int32]:
        """int32 [tiers, rows]: blocks of the longest prefix of `keys` that each row holds.

        Plane t counts a block that is in any tier up to t, so plane 0 is the device's cache alone.
        """
        depths = np.zeros((self.tiers, self.rows), np.int32)
        ids = self._known(keys)
        if ids is None:
            return depths
        masks: npt.NDArray[np.uint64] | None = None
        for tier in range(self.tiers):
            if self._blocks[tier].any():
                plane = self._plane(tier)
                here = plane[ids] if isinstance(ids, slice) else plane.take(ids, axis=0)
                masks = here if masks is None else masks | here
                _depths(masks, depths[tier])
            elif tier:
                depths[tier] = depths[tier - 1]
        return depths

    def match_alone(self, keys: Keys, tiers: Sequence[int]) -> npt.NDArray[np.int32]:
        """int32 [len(tiers), rows]: as `match`, each plane for the blocks that are in that tier itself."""
        depths = np.zeros((len(tiers), self.rows), np.int32)
        ids = self._known(keys)
        if ids is None:
            return depths
        for plane, tier in enumerate(tiers):
            if self._blocks[tier].any():
                masks = self._plane(tier)
                _depths(masks[ids] if isinstance(ids, slice) else masks.take(ids, axis=0), depths[plane])
        return depths

    def _known(self, keys: Keys) -> Ids | slice | None:
        """Ids of the longest prefix of keys that are resident anywhere; None: not even the first."""
        table = self._table
        start = table.find_one(int(keys[0])) if len(keys) else -1
        if start < 0:
            return None
        done = table.run(start, keys)
        if done == len(keys) or table.find_one(int(keys[done])) < 0:
            return slice(start, start + done)
        if not keys.all():
            keys = keys[: keys.argmin()]
        known: Ids = np.concatenate((np.arange(start, start + done), table.prefix(keys[done:])))
        return known

    def _check(self, row: int, tier: int) -> None:
        if row < 0 or not 0 <= tier < self.tiers:
            raise ValueError(f"row {row}, tier {tier}: rows start at 0, tiers are 0 to {self.tiers - 1}")

    def _cover(self, row: int) -> None:
        """Have a bit for a new row."""
        self.rows = row + 1
        words = (row >> 6) + 1
        if words > self._words:
            more = words - self._words
            self._words = words
            self._blocks = np.pad(self._blocks, ((0, 0), (0, more * 64)))
            for tier, masks in enumerate(self._masks):
                if masks is not None:
                    self._keep(tier, np.pad(masks, ((0, 0), (0, more))))

    def _view(self, tier: int) -> memoryview:
        """A tier's masks, flat, with a place for every id."""
        view = self._views[tier]
        if view is None or len(view) < self._table.capacity * self._words:
            self._grow(tier)
            view = self._views[tier]
            assert view is not None
        return view

    def _grow(self, tier: int) -> None:
        """Masks for every id in this tier and in those that have masks."""
        for each, masks in enumerate(self._masks):
            if masks is not None or each == tier:
                grown = np.zeros((self._table.capacity, self._words), np.uint64)
                if masks is None:
                    self._planes += 1
                else:
                    grown[: len(masks)] = masks
                self._keep(each, grown)

    def _plane(self, tier: int) -> npt.NDArray[np.uint64]:
        masks = self._masks[tier]
        assert masks is not None
        return masks

    def _keep(self, tier: int, masks: npt.NDArray[np.uint64]) -> None:
        self._masks[tier] = masks
        self._views[tier] = memoryview(masks.reshape(-1))  # type: ignore[arg-type]

    def _release(self, ids: Ids) -> None:
        """Free those of these ids that no row holds in any tier."""
        if not len(ids):
            return
        held = np.zeros(len(ids), bool)
        for masks in self._masks:
            if masks is not None:
                here = masks[ids]
                held |= here[:, 0] != 0 if self._words == 1 else here.any(axis=1)
        self._table.drop(ids[~held] if held.any() else ids)
        self._shrink()

    def _shrink(self) -> None:
        """Give memory back when most of it is unused."""
        if self._table.is_sparse():
            old = self._table.compact()
            for tier, masks in enumerate(self._masks):
                if masks is not None:
                    packed = np.zeros((self._table.capacity, self._words), np.uint64)
                    packed[: len(old)] = masks[old]
                    self._keep(tier, packed)


def _depths(masks: npt.NDArray[np.uint64], depths: npt.NDArray[np.int32]) -> None:
    """From the masks of consecutive blocks, [blocks, words], to the blocks before each row's first gap."""
    blocks, words = masks.shape
    flat = masks.reshape(-1)
    # Rows can only be lost where the mask is not the one before.
    changes = (flat[words:] != flat[:-words]).nonzero()[0]
    if words > 1:
        changes //= words
        again = changes[1:] == changes[:-1]
        changes = np.delete(changes, again.nonzero()[0]) if again.any() else changes
    count = len(changes)
    ends = np.empty(count + 1, np.intp)
    np.add(changes, 1, out=ends[:count])
    ends[count] = blocks
    alive = np.empty((count + 2, words), np.uint64)
    alive[0] = masks[0]
    masks.take(ends[:count], axis=0, out=alive[1:-1], mode="clip")
    alive[-1] = 0
    np.bitwise_and.accumulate(alive, axis=0, out=alive)
    lost = (alive[:-1] ^ alive[1:]).reshape(-1)
    if words == 1:
        found = _bits(lost)
        depths[found & 63] = ends[found >> 6]
    else:
        where = lost.nonzero()[0]
        found = _bits(lost[where])
        step, word = np.divmod(where[found >> 6], words)
        depths[word * 64 + (found & 63)] = ends[step]


def _bits(words: npt.NDArray[np.uint64]) -> Ids:
    """Positions of the set bits, 64 to a word."""
    octets = words.astype("<u8", copy=False).view(np.uint8)
    positions: Ids = np.unpackbits(octets, bitorder="little").view(np.bool_).nonzero()[0]
    return positions


def _distinct(ids: Ids) -> Ids:
    """Sorted, each once."""
    ids = np.sort(ids)
    first = np.ones(len(ids), bool)
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    unique: Ids = ids[first]
    return unique
