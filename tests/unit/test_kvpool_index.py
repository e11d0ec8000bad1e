"""The index against a simple model, and dying at any line of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers_kvpool import FREE, MULTIPLIER, RANKS, READY, WRITING, fresh_segment, key, keys
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kvpool.changes import ChangeKind, Changes
from workers.kvpool.index import Index, Seal, Slot
from workers.kvpool.integrity import violations
from workers.kvpool.layout import KEY_BYTES, Segment, State, Word
from workers.kvpool.lru import LruList
from workers.kvpool.owners import OwnerTable
from workers.kvpool.recovery import recover
from workers.kvpool.table import KeyTable

SLOTS = 5
KEYS = 8


def seal_all(index: Index, slots: list[Slot]) -> None:
    for slot in slots:
        assert all(index.seal(rank, Seal(*slot, 7)) for rank in range(RANKS))


def ready(index: Index, numbers: list[int], owner: int = 0) -> None:
    """Make these blocks ready."""
    slots = [slot for slot in index.allocate(keys(numbers), numbers, owner) if slot is not None]
    assert len(slots) == len(numbers)
    seal_all(index, slots)
    assert all(index.commit(slots, owner))


def states(index: Index, numbers: list[int]) -> list[State]:
    return index.lookup(keys(numbers), asked=False)


def evictable(segment: Segment) -> list[bytes]:
    """Keys, the next victim first."""
    return [segment.key(slot) for slot in LruList(segment)]


@dataclass
class Block:
    slot: Slot
    owner: int
    state: State = WRITING
    sealed: bool = False
    readers: set[int] = field(default_factory=set)


class Model:
    """What an index with the LRU policy does, in a dict and a list."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.order: list[bytes] = []

    def use(self, name: bytes) -> None:
        if name in self.order:
            self.order.remove(name)
        self.order.append(name)

    def touch(self, names: list[bytes]) -> None:
        for name in reversed(names):
            if name in self.order:
                self.use(name)

    def admitted(self, names: list[bytes]) -> list[bytes]:
        """Which of them get a slot; the victims are gone."""
        there = {name for name in names if name in self.blocks}
        self.touch(names)
        admitted: list[bytes] = []
        for name in dict.fromkeys(names):
            if name in there:
                continue
            if len(self.blocks) + len(admitted) == SLOTS:
                if not self.order or self.order[0] in there:
                    continue
                self.drop(self.order[0])
            admitted.append(name)
        return admitted

    def drop(self, name: bytes) -> None:
        del self.blocks[name]
        if name in self.order:
            self.order.remove(name)

    def unpin(self, name: bytes, owner: int) -> None:
        block = self.blocks[name]
        if owner in block.readers:
            block.readers.remove(owner)
            if not block.readers:
                self.use(name)


Numbers = st.lists(st.integers(0, KEYS - 1), max_size=4)
Step = st.one_of(
    st.tuples(st.just("allocate"), Numbers, st.integers(0, 1)),
    st.tuples(st.just("seal"), Numbers, st.just(0)),
    st.tuples(st.just("commit"), Numbers, st.integers(0, 1)),
    st.tuples(st.just("abandon"), Numbers, st.integers(0, 1)),
    st.tuples(st.just("lease"), Numbers, st.integers(0, 1)),
    st.tuples(st.just("unpin"), Numbers, st.integers(0, 1)),
    st.tuples(st.just("touch"), Numbers, st.just(0)),
    st.tuples(st.just("corrupt"), Numbers, st.just(0)),
    st.tuples(st.just("reclaim"), st.just([]), st.integers(0, 1)),
    st.tuples(st.just("recover"), st.just([]), st.just(0)),
)


class Pair:
    """An index and its model, stepped together."""

    def __init__(self) -> None:
        self.segment = fresh_segment(SLOTS)
        self.index = Index(self.segment)
        self.model = Model()

    def slots(self, names: list[bytes]) -> list[Slot]:
        """Those of the keys that have one, and one that never was."""
        return [self.model.blocks[name].slot for name in names if name in self.model.blocks] + [
            Slot(0, 1 << 31)
        ]

    def allocate(self, names: list[bytes], owner: int) -> None:
        admitted = self.model.admitted(names)
        slots = self.index.allocate(names, [3] * len(names), owner)
        got = {name: slot for name, slot in zip(names, slots, strict=True) if slot is not None}
        assert list(got) == admitted
        self.model.blocks.update({name: Block(slot, owner) for name, slot in got.items()})

    def seal(self, names: list[bytes], _: int) -> None:
        for name in names:
            block = self.model.blocks.get(name)
            if block is not None:
                sealed = [self.index.seal(rank, Seal(*block.slot, 9)) for rank in range(RANKS)]
                assert sealed == [block.state == WRITING] * RANKS
                block.sealed |= block.state == WRITING

    def commit(self, names: list[bytes], owner: int) -> None:
        done = self.index.commit(self.slots(names), owner)
        known = [name for name in names if name in self.model.blocks]
        before = dict(self.model.blocks)
        for name in dict.fromkeys(reversed(known)):
            block = before[name]
            if block.state == WRITING and block.owner == owner:
                if block.sealed:
                    block.state = READY
                    self.model.use(name)
                else:
                    self.model.drop(name)
                    block.state = FREE
            else:
                block = before[name] = Block(block.slot, owner, FREE)  # not committed by this call
        assert done == [before[name].state == READY for name in known] + [False]

    def abandon(self, names: list[bytes], owner: int) -> None:
        for slot in self.slots(names):
            self.index.abandon(*slot, owner)
        for name in set(names) & set(self.model.blocks):
            if self.model.blocks[name].state == WRITING and self.model.blocks[name].owner == owner:
                self.model.drop(name)

    def lease(self, names: list[bytes], owner: int) -> None:
        leases = self.index.lease(names, owner)
        for name, lease in zip(names, leases, strict=True):
            block = self.model.blocks.get(name)
            if block is None or block.state != READY:
                assert lease is None
                continue
            assert lease == tuple(block.slot)
            block.readers.add(owner)
            if name in self.model.order:
                self.model.order.remove(name)

    def unpin(self, names: list[bytes], owner: int) -> None:
        for slot in self.slots(names):
            self.index.unpin(*slot, owner)
        for name in names:
            if name in self.model.blocks:
                self.model.unpin(name, owner)

    def touch(self, names: list[bytes], _: int) -> None:
        self.index.touch(names)
        self.model.touch(names)

    def corrupt(self, names: list[bytes], _: int) -> None:
        for slot in self.slots(names):
            self.index.corrupt(*slot)
        for name in set(names) & set(self.model.blocks):
            if self.model.blocks[name].state == READY:
                self.model.drop(name)

    def reclaim(self, _: list[bytes], owner: int) -> None:
        freed = self.index.reclaim(owner)
        written = [n for n, b in self.model.blocks.items() if b.state == WRITING and b.owner == owner]
        assert freed == len(written)
        for name in written:
            self.model.drop(name)
        for name in sorted(self.model.blocks, key=lambda name: self.model.blocks[name].slot.slot):
            self.model.unpin(name, owner)

    def recover(self, _: list[bytes], __: int) -> None:
        recover(self.segment)

    def assert_alike(self) -> None:
        names = keys(range(KEYS))
        blocks = self.model.blocks
        expected = [blocks[name].state if name in blocks else FREE for name in names]
        assert self.index.lookup(names, asked=False) == expected
        assert evictable(self.segment) == self.model.order
        assert violations(self.segment) == []


@given(st.lists(Step, max_size=30))
@settings(max_examples=150)
def test_index_does_what_a_dict_and_a_list_do(steps: list[tuple[str, list[int], int]]) -> None:
    pair = Pair()
    for what, numbers, owner in steps:
        getattr(pair, what)(keys(numbers), owner)
        pair.assert_alike()


@given(st.lists(Step.filter(lambda step: step[0] != "recover"), max_size=25), st.integers(0, 24))
@settings(max_examples=60)
def test_a_follower_of_changes_knows_what_is_ready(
    steps: list[tuple[str, list[int], int]], first: int
) -> None:
    pair = Pair()
    position, known = pair.index.changes.position, set[bytes]()
    for number, (what, numbers, owner) in enumerate(steps):
        getattr(pair, what)(keys(numbers), owner)
        if number < first:
            continue  # several steps at once
        records = pair.index.changes.after(position)
        assert records is not None
        position, items = Changes.of(pair.index.changes.position, records)
        for change in items:
            stored = change.kind == ChangeKind.STORED
            assert (change.key in known) is not stored
            known ^= {change.key}
        assert known == {name for name, block in pair.model.blocks.items() if block.state == READY}


class Killed(BaseException):
    pass


@contextmanager
def killed_at(line: int) -> Iterator[None]:
    """Die at the given line that is run in the package, counted from 0."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if "/kvpool/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            if left == 0:
                raise Killed
            left -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def scene() -> tuple[Segment, Index, list[Slot]]:
    """Five slots: blocks 0 and 1 evictable, 2 leased by owner 1, 3 sealed and 4 unsealed by owner 0."""
    segment = fresh_segment(SLOTS)
    index = Index(segment)
    ready(index, [0, 1, 2])
    index.lease(keys([2]), owner=1)
    slots = [slot for slot in index.allocate(keys([3, 4]), [3, 4], 0) if slot is not None]
    seal_all(index, slots[:1])
    return segment, index, slots


MUTATIONS: dict[str, Callable[[Index, list[Slot]], object]] = {
    "allocate": lambda index, _: index.allocate(keys([1, 5, 6, 7]), [1, 5, 6, 7], 1),
    "commit": lambda index, slots: index.commit(slots, 0),
    "abandon": lambda index, slots: index.abandon(*slots[0], 0),
    "lease": lambda index, _: index.lease(keys([0, 2]), 0),
    "unpin": lambda index, _: index.unpin(*(index.lease(keys([2]), 1)[0] or ()), 1),
    "touch": lambda index, _: index.touch(keys([0, 1, 2, 3])),
    "corrupt": lambda index, _: index.corrupt(*(index.lease(keys([2]), 1)[0] or ())),
    "reclaim": lambda index, _: (index.reclaim(0), index.reclaim(1)),
}


def assert_as_before_or_after(segment: Segment, before: list[State], after: list[State]) -> None:
    assert violations(segment) == []
    index = Index(segment)
    now = states(index, list(range(KEYS)))
    for number, state in enumerate(now):
        assert state in {before[number], after[number]}, number
    for slot in np.flatnonzero(segment.state == READY).tolist():
        assert segment.extra[slot] == next(n for n in range(KEYS) if key(n) == segment.key(slot))
    index.reclaim(0)
    index.reclaim(1)
    ready(index, list(range(10, 10 + SLOTS)))  # no slot is lost
    assert violations(segment) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_whoever_dies_at_any_line_leaves_each_block_as_it_was_or_as_it_was_to_be(name: str) -> None:
    mutate = MUTATIONS[name]
    segment, index, slots = scene()
    before = states(index, list(range(KEYS)))
    mutate(index, slots)
    after = states(index, list(range(KEYS)))
    survived = False
    lines = 0
    while not survived:
        segment, index, slots = scene()
        try:
            with killed_at(lines):
                mutate(index, slots)
            survived = True
        except Killed:
            recover(segment)
            assert_as_before_or_after(segment, before, after)
        lines += 1
    assert lines > 5


def test_recovery_that_is_itself_killed_at_any_line_is_made_up_for_by_the_next() -> None:
    base, _, _ = scene()
    before = states(Index(base), list(range(KEYS)))
    survived = False
    lines = 0
    while not survived:
        segment = Segment(bytearray(base.buffer), base.geometry)
        segment.table[:] = 0xFFFF_FFFF
        segment.next[:] = 0
        try:
            with killed_at(lines):
                recover(segment)
            survived = True
        except Killed:
            recover(segment)
        assert_as_before_or_after(segment, before, before)
        lines += 1
    assert lines > 20


def test_recovery_frees_records_that_are_not_whole_and_keeps_the_others_in_their_order() -> None:
    segment = fresh_segment(8)
    index = Index(segment)
    ready(index, [0, 1, 2, 3, 4])
    index.touch(keys([3]))
    slots = index.allocate(keys([5, 6]), [5, 6], 1)
    where = dict(zip(range(5), KeyTable(segment).find(keys(range(5))), strict=True))
    order = [name for name in evictable(segment) if name in keys([3, 4])]
    segment.checksums[where[0], 1] = 0  # ready without a sealed part
    segment.state[where[1]] = 77
    segment.keys[where[2]] = segment.keys[where[4]]  # two slots with one key
    OwnerTable(segment).vacate(1)
    position = index.changes.position
    recover(segment)
    assert violations(segment) == []
    assert states(index, [0, 1, 2, 3, 4, 5, 6]) == [FREE, FREE, FREE, READY, READY, FREE, FREE]
    assert evictable(segment) == order
    assert index.changes.after(position) is None  # its followers start over
    assert not any(index.holds(*slot, WRITING) for slot in slots if slot is not None)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda s: s.state.__setitem__(0, 9), "no known state"),
        (lambda s: s.checksums.__setitem__((0, 1), 0), "unsealed"),
        (lambda s: s.owner.__setitem__(4, 63), "nobody"),
        (lambda s: s.readers.__setitem__(4, 1), "not ready"),
        (lambda s: s.readers.__setitem__(2, 1 << 40), "do not exist"),
        (lambda s: s.used.__setitem__(0, 1 << 40), "future"),
        (lambda s: s.words.__setitem__(Word.FREE, 2), "free stack"),
        (lambda s: s.table.__setitem__(slice(None), 0), "table"),
        (lambda s: s.keys.__setitem__(0, 1), "not found"),
        (lambda s: s.next.__setitem__(5, 5), "list does not hold"),
        (lambda s: s.prev.__setitem__(5, 5), "backwards"),
        (lambda s: s.used.__setitem__(0, 0), "order of use"),
        (lambda s: s.changes["seq"].__setitem__(2, 40), "gap"),
    ],
)
def test_each_broken_invariant_is_named(damage: Callable[[Segment], object], complaint: str) -> None:
    segment, _, _ = scene()
    assert KeyTable(segment).find(keys(range(5))) == list(range(5))
    assert evictable(segment) == keys([1, 0])
    assert violations(segment) == []
    damage(segment)
    assert complaint in " ".join(violations(segment))


def test_generations_wrap_around() -> None:
    segment = fresh_segment(1)
    index = Index(segment)
    segment.generation[0] = (1 << 32) - 1
    (slot,) = index.allocate(keys([1]), [1], 0)
    assert slot == (0, 0)
    index.abandon(*slot, 0)
    assert index.allocate(keys([1]), [1], 0) == [(0, 1)]
    assert not index.holds(*slot, WRITING)


def test_a_slot_that_moves_on_while_a_copy_is_verified_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = fresh_segment(1)
    index = Index(segment)
    ready(index, [1])
    assert index.verified(0, 1, 0, 7)
    moves_on = iter([True, False])
    monkeypatch.setattr(index, "holds", lambda *_: next(moves_on))
    assert not index.verified(0, 1, 0, 7)


def test_keys_that_all_land_on_one_place_are_found_and_forgotten() -> None:
    segment = fresh_segment(40)
    table = KeyTable(segment)
    # The last two places of the table, and around its end to the first ones.
    alike = (-pow(MULTIPLIER, -1, 1 << 64) % (1 << 64)).to_bytes(8, sys.byteorder)
    names = [alike + bytes([number]) * (KEY_BYTES - 8) for number in range(40)]
    segment.keys[:] = np.frombuffer(b"".join(names), np.uint8).reshape(40, KEY_BYTES)
    for slot in range(40):
        table.insert(slot)
    assert table.find(names) == list(range(40))
    for slot in range(0, 40, 3):
        table.remove(slot)
    left = [slot if slot % 3 else -1 for slot in range(40)]
    assert table.find(names) == left
    table.rebuild(np.array([slot for slot in left if slot >= 0]))
    assert table.find(names) == left
    assert table.find([]) == []


def test_a_batch_does_not_evict_what_it_builds_on() -> None:
    segment = fresh_segment(4)
    index = Index(segment)
    ready(index, [0, 1, 2, 3])
    slots = index.allocate(keys([0, 1, 10, 11, 12]), [0] * 5, 0)
    assert [slot is not None for slot in slots] == [False, False, True, True, False]
    assert states(index, [0, 1, 2, 3]) == [READY, READY, FREE, FREE]


def test_of_one_prefix_the_last_block_is_evicted_first() -> None:
    segment = fresh_segment(4)
    index = Index(segment)
    ready(index, [0, 1, 2, 3])
    assert evictable(segment) == keys([3, 2, 1, 0])
    index.touch(keys([2, 3]))
    assert evictable(segment) == keys([1, 0, 3, 2])
