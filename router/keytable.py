"""A hash table from block keys to small dense numbers, in NumPy arrays.

Cuckoo hashing with two places for each key (Pagh, Rodler: Cuckoo Hashing, 2004): a key is in one of two
slots, so a look-up of a whole batch is two gathers, a removal leaves nothing behind, and the table never
needs to be cleaned. The slots hold numbers; keys are stored by number, so what is kept per key (see
router/index.py) is dense and does not move when slots do. Keys stored together get consecutive numbers while
there is room, which lets a look-up compare a run of keys instead of probing for each.
"""

from __future__ import annotations

import itertools
import secrets
from typing import Final

import numpy as np
import numpy.typing as npt

from protos.blockkeys import Keys

Ids = npt.NDArray[np.intp]

_MASK: Final = (1 << 64) - 1
_SMALLEST: Final = 1024  # numbers, and slots
_FULL: Final = 0.45  # of the slots; two places for each key work up to 0.5
_FEW: Final = 64  # ids; below, a loop in Python beats the fixed costs of NumPy
_STRIDE: Final = 8  # keys
_OFFSETS: Final = np.arange(_STRIDE)
_MOVES: Final = 200  # moves of one key, or rounds of a batch, before new hash functions are drawn


class KeyTable:
    """Numbers (ids) of block keys: 0 … capacity-1, each re-used after its key is dropped.

    `keys[id]` is the key of a live id, and 0 for others. 0 is no key. Hash functions are drawn at random, so
    that nobody can choose keys that collide.
    """

    def __init__(self) -> None:
        self._live = 0
        self._freed = 0  # ids on the stack `_free`
        self._top = 0  # ids from here on were never used
        self._allocate(_SMALLEST)
        self._slots = np.full(_SMALLEST, -1, np.int32)
        self._draw()

    def __len__(self) -> int:
        return self._live

    @property
    def capacity(self) -> int:
        """Ids are smaller than this."""
        return len(self.keys) - 1

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self._slots.nbytes + self._free.nbytes

    def find_one(self, key: int) -> int:
        """The id of a key, or -1."""
        for slot in self._places(key):
            number = self._slot_view[slot]
            if number >= 0 and self._key_view[number] == key:
                return number
        return -1

    def find(self, keys: Keys) -> Ids:
        """The id of each key; -1 for a key that is not here."""
        ids = self._slots.take(self._first(keys)).astype(np.intp)
        # id -1 looks at the last entry of `keys`, which is 0.
        wrong = (self.keys.take(ids, mode="wrap") != keys).nonzero()[0]
        if len(wrong):
            rest = keys.take(wrong)
            other = self._slots.take(self._second(rest)).astype(np.intp)
            other[self.keys.take(other, mode="wrap") != rest] = -1
            ids[wrong] = other
        return ids

    def find_few(self, keys: Keys) -> list[tuple[int, int]]:
        """The id and the slot of each key that is here: `find` for some dozens of keys."""
        slots, known = self._slot_view, self._key_view
        found = []
        one_of, two_of = self._hashed(keys)
        for key, one, two in zip(keys.tolist(), one_of, two_of, strict=True):
            number = slots[one]
            if number >= 0 and known[number] == key:
                found.append((number, one))
            else:
                number = slots[two]
                if number >= 0 and known[number] == key:
                    found.append((number, two))
        return found

    def run(self, start: int, keys: Keys) -> int:
        """How many of `keys` have the consecutive ids from `start`, from the first on."""
        here = self.keys[start : min(start + len(keys), self.capacity)]
        same = here == keys[: len(here)]
        return len(here) if same.all() else int(same.argmin())

    def prefix(self, keys: Keys) -> Ids:
        """The ids of `keys`, none of them 0, up to the first that is not here.

        Every eighth key is looked up; nothing after an absent one counts. The ids between are guessed to go
        on from there, and looked up where the guess proves wrong: that spares most of the cache misses.
        """
        anchors = self.find(keys[::_STRIDE])
        absent = anchors < 0
        if absent.any():
            first = int(absent.argmax())
            anchors, keys = anchors[:first], keys[: first * _STRIDE]
        ids: Ids = (anchors[:, None] + _OFFSETS).reshape(-1)[: len(keys)]
        wrong = (self.keys.take(ids, mode="clip") != keys).nonzero()[0]
        if len(wrong):
            found = self.find(keys.take(wrong))
            ids[wrong] = found
            absent = found < 0
            if absent.any():
                ids = ids[: wrong[absent.argmax()]]
        return ids

    def add(self, keys: Keys) -> Ids:
        """The id of each key; keys that were not here get one. No key may be 0."""
        ids = self.find(keys)
        missing = np.flatnonzero(ids < 0)
        if len(missing):
            fresh = keys.take(missing)
            ordered = np.sort(fresh)
            if (ordered[1:] != ordered[:-1]).all():
                new = self._take(len(fresh))
                ids[missing] = new
            else:
                # Numbers in the order in which the keys came.
                unique, first, back = np.unique(fresh, return_index=True, return_inverse=True)
                order = np.argsort(first)
                rank = np.empty_like(order)
                rank[order] = np.arange(len(order))
                fresh = unique[order]
                new = self._take(len(fresh))
                ids[missing] = new[rank[back]]
            self.keys[new] = fresh
            if not self._place(new):
                self._redraw()
        return ids

    def add_few(self, keys: Keys) -> list[int]:
        """`add`, faster for some dozens of keys; leaves out 0."""
        names = keys.tolist()
        if 0 in names:
            keys = keys[keys != 0]
            names = keys.tolist()
        self._make_room(len(names))
        slots, known, free = self._slot_view, self._key_view, self._free_view
        ids: list[int] = []
        one_of, two_of = self._hashed(keys)
        for key, one, two in zip(names, one_of, two_of, strict=True):
            number = slots[one]
            if number < 0 or known[number] != key:
                number = slots[two]
                if number < 0 or known[number] != key:
                    if self._freed:
                        self._freed -= 1
                        number = free[self._freed]
                    else:
                        number = self._top
                        self._top += 1
                    self._live += 1
                    known[number] = key
                    if slots[one] < 0:
                        slots[one] = number
                    elif slots[two] < 0:
                        slots[two] = number
                    elif not self._push(number, one):
                        ids.append(number)
                        self._redraw()
                        return ids + self.add_few(keys[len(ids) :])
            ids.append(number)
        return ids

    def drop(self, ids: Ids) -> None:
        """These ids, live and each given once, are free again."""
        keys = self.keys.take(ids)
        first = self._first(keys)
        slots = np.where(self._slots.take(first) == ids, first, self._second(keys))
        self._slots[slots] = -1
        self.keys[ids] = 0
        self._free[self._freed : self._freed + len(ids)] = ids
        self._freed += len(ids)
        self._live -= len(ids)

    def drop_few(self, found: list[tuple[int, int]]) -> None:
        """`drop`, faster for some dozens of what `find_few` just found."""
        slots, known, free, freed = self._slot_view, self._key_view, self._free_view, self._freed
        for number, slot in found:
            slots[slot] = -1
            known[number] = 0
            free[freed] = number
            freed += 1
        self._freed = freed
        self._live -= len(found)

    def is_sparse(self) -> bool:
        """Whether `compact` would free at least half of the memory."""
        return self.capacity > _SMALLEST and self._live * 4 < self.capacity

    def compact(self) -> Ids:
        """Shrink to what is live. Every id changes: new id i is what was the returned array's i-th."""
        old = np.flatnonzero(self.keys[:-1])
        keys = self.keys.take(old)
        self._allocate(max(_SMALLEST, len(old) + len(old) // 2))
        self.keys[: len(old)] = keys
        self._top = len(old)
        size = _SMALLEST
        while len(old) > _FULL / 1.5 * size:
            size *= 2
        self._slots = np.empty(size, np.int32)
        self._redraw()
        return old

    def _allocate(self, capacity: int) -> None:
        """Empty arrays by id; nothing freed, nothing used."""
        self.keys = np.zeros(capacity + 1, np.uint64)
        self._free = np.empty(capacity, np.int32)
        self._key_view, self._free_view = _view(self.keys), _view(self._free)
        self._freed = self._top = 0

    def _make_room(self, count: int) -> None:
        """Room for so many new keys in the slots and in the arrays by id."""
        while self._live + count > _FULL * len(self._slots):
            self._double()
        used = self._top - self._freed + count
        if used > self.capacity:
            keys, free, freed, top = self.keys, self._free, self._freed, self._top
            self._allocate(max(used, self.capacity + self.capacity // 2))
            self.keys[: len(keys)] = keys
            self._free[:freed] = free[:freed]
            self._freed, self._top = freed, top

    def _take(self, count: int) -> Ids:
        """So many unused ids."""
        self._make_room(count)
        again = min(count, self._freed)
        new = np.empty(count, np.intp)
        new[:again] = self._free[self._freed - again : self._freed]
        new[again:] = np.arange(self._top, self._top + count - again)
        self._freed -= again
        self._top += count - again
        self._live += count
        return new

    def _draw(self) -> None:
        """New hash functions: multiply, keep the upper bits (Dietzfelbinger and others, 1997)."""
        self._multipliers = (secrets.randbits(64) | 1, secrets.randbits(64) | 1)
        self._both = np.array(self._multipliers, np.uint64).reshape(2, 1)
        self._m1, self._m2 = self._both[:, 0]
        self._measure()

    def _measure(self) -> None:
        self._shift = 65 - len(self._slots).bit_length()
        self._np_shift = np.uint64(self._shift)
        self._slot_view = _view(self._slots)

    def _first(self, keys: Keys) -> Ids:
        product = keys * self._m1
        product >>= self._np_shift
        slots: Ids = product.view(np.intp)
        return slots

    def _second(self, keys: Keys) -> Ids:
        product = keys * self._m2
        product >>= self._np_shift
        slots: Ids = product.view(np.intp)
        return slots

    def _places(self, key: int) -> tuple[int, int]:
        one, two = self._multipliers
        return (key * one & _MASK) >> self._shift, (key * two & _MASK) >> self._shift

    def _hashed(self, keys: Keys) -> tuple[list[int], list[int]]:
        """Both slots of each key."""
        places = keys * self._both
        places >>= self._np_shift
        slots: Ids = places.view(np.intp)
        # Gathered here, the slots are in the processor's cache when the caller's loop comes to them.
        self._slots.take(slots)
        one, two = slots.tolist()
        return one, two

    def _push(self, number: int, slot: int) -> bool:
        """Put an id into one of its slots; who is there moves to its other one, and so on."""
        slots = self._slot_view
        for _ in range(_MOVES):
            slots[slot], number = number, slots[slot]
            if number < 0:
                return True
            one, two = self._places(self._key_view[number])
            slot = two if slot == one else one
        return False

    def _place(self, ids: Ids) -> bool:
        """Put ids into slots: first into free ones, then by moving others, each to its other slot."""
        slots = self._slots
        for hashed in (self._first, self._second):
            wanted = hashed(self.keys.take(ids))
            open_ = (slots.take(wanted) < 0).nonzero()[0]
            slots[wanted[open_]] = ids[open_]
            ids = ids[slots.take(wanted) != ids]
        if len(ids) <= _FEW:
            return all(self._push(number, self._places(self._key_view[number])[0]) for number in ids.tolist())
        return self._push_many(ids)

    def _push_many(self, ids: Ids) -> bool:
        """`_push` for all at once: in each round the losers and the displaced go to their other slot."""
        slots, second = self._slots, np.zeros(len(ids), bool)
        for _ in range(_MOVES):
            keys = self.keys.take(ids)
            wanted = np.where(second, self._second(keys), self._first(keys))
            before = slots.take(wanted)
            slots[wanted] = ids
            lost = slots.take(wanted) != ids
            moved = ~lost & (before >= 0)
            displaced, where = before[moved].astype(np.intp), wanted[moved]
            if not lost.any() and not len(displaced):
                return True
            at_first = self._first(self.keys.take(displaced)) == where
            ids = np.concatenate((ids[lost], displaced))
            second = np.concatenate((~second[lost], at_first))
        return False

    def _redraw(self) -> None:
        """Place every live id anew, with new hash functions; in twice the slots if that keeps failing."""
        ids = np.flatnonzero(self.keys)
        for attempt in itertools.count(1):
            self._slots.fill(-1)
            self._draw()
            if self._place(ids):
                return
            if attempt % 3 == 0:
                self._slots = np.empty(2 * len(self._slots), np.int32)

    def _double(self) -> None:
        """Twice the slots: who was in slot s is now in 2s or 2s+1, so that nobody collides."""
        old = np.flatnonzero(self._slots >= 0)
        ids = self._slots.take(old)
        self._slots = np.full(2 * len(self._slots), -1, np.int32)
        self._measure()
        keys = self.keys.take(ids)
        new = self._first(keys)
        self._slots[np.where(new >> 1 == old, new, self._second(keys))] = ids


def _view(array: npt.NDArray[np.generic]) -> memoryview:
    """Elements as Python's numbers, twice as fast as through NumPy."""
    return memoryview(array)  # type: ignore[arg-type]
