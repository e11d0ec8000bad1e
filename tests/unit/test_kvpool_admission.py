"""Who is let in when the arena is full."""

from __future__ import annotations

import random

import pytest
from helpers_kvpool import READY, fresh_segment, key, keys

from workers.kvpool.admission import LARGEST_COUNT, SAMPLE_PER_SLOT, Policy, TinyLfu
from workers.kvpool.index import Index, Seal
from workers.kvpool.integrity import violations
from workers.kvpool.layout import Word

SLOTS = 64


def hits(policy: Policy, trace: list[list[int]], slots: int = SLOTS) -> list[int]:
    """Which of the keys asked for, in batches, were there; what was not is stored if it is let in."""
    segment = fresh_segment(slots, policy)
    index = Index(segment)
    found: list[int] = []
    for batch in trace:
        states = index.lookup(keys(batch), asked=True)
        found += [number for number, state in zip(batch, states, strict=True) if state == READY]
        for slot in index.allocate(keys(batch), [0] * len(batch), 0):
            if slot is not None:
                assert all(index.seal(rank, Seal(*slot, 1)) for rank in range(2))
                assert index.commit([slot], 0) == [True]
    assert violations(segment) == []
    return found


def scan_with_hot_set(seed: int, hot_start: int = 0, rounds: int = 12) -> list[list[int]]:
    """A hot set of half the slots, each asked for once a round in some order, among twice the slots that are
    asked for once ever."""
    rng = random.Random(seed)
    trace, cold = [], 10_000 * (seed + 1)
    for _ in range(rounds):
        hot = list(range(hot_start, hot_start + SLOTS // 2))
        rng.shuffle(hot)
        for number in hot:
            trace.append([number])
            trace.append(list(range(cold, cold + 4)))
            cold += 4
    return trace


def test_what_is_asked_for_again_survives_a_scan_only_under_tinylfu() -> None:
    trace = scan_with_hot_set(seed=1)
    asked = 12 * SLOTS // 2
    assert len(hits(Policy.LRU, trace)) < 0.1 * asked
    assert len(hits(Policy.TINYLFU, trace)) > 0.8 * asked


def test_a_hot_set_that_has_moved_is_let_in_after_a_while() -> None:
    trace = scan_with_hot_set(seed=1) + scan_with_hot_set(seed=2, hot_start=500)
    three_rounds = len(trace) // 8
    before, all_of_it = (len(hits(Policy.TINYLFU, part)) for part in (trace[:-three_rounds], trace))
    assert all_of_it - before > 0.8 * 3 * SLOTS // 2


def test_while_there_is_room_everything_is_let_in() -> None:
    trace = [[number] for number in range(SLOTS)]
    assert hits(Policy.TINYLFU, trace + trace) == list(range(SLOTS))


def test_refusals_are_counted_and_evict_nothing() -> None:
    segment = fresh_segment(2, Policy.TINYLFU)
    index = Index(segment)
    for slot in index.allocate(keys([0, 1]), [0, 1], 0):
        assert slot is not None
        assert all(index.seal(rank, Seal(*slot, 1)) for rank in range(2))
        index.commit([slot], 0)
    index.lookup(keys([0, 1]), asked=True)
    index.lookup(keys([2]), asked=True)
    assert index.allocate(keys([2]), [2], 0) == [None]
    assert index.lookup(keys([0, 1]), asked=False) == [READY, READY]
    assert (segment.words[Word.REFUSED], segment.words[Word.EVICTED]) == (1, 0)
    index.lookup(keys([2]), asked=False)
    assert index.allocate(keys([2]), [2], 0) == [None]  # looking again was no demand
    index.lookup(keys([2]), asked=True)
    assert index.allocate(keys([2]), [2], 0) != [None]


@pytest.mark.parametrize("times", [0, 1, 2, 7, LARGEST_COUNT, 40])
def test_counts_are_never_too_low_up_to_the_largest(times: int) -> None:
    sketch = TinyLfu(fresh_segment(1000, Policy.TINYLFU))
    for _ in range(times):
        sketch.asked(keys([1, 2]))
    sketch.asked(keys(range(100, 400)))
    assert min(times, LARGEST_COUNT + 1) <= sketch.count(key(1)) <= min(times, LARGEST_COUNT) + 1


def test_counts_are_mostly_right_for_as_many_keys_as_a_sample_holds() -> None:
    sketch = TinyLfu(fresh_segment(500, Policy.TINYLFU))
    for _ in range(4):
        sketch.asked(keys(range(600)))
    sketch.asked(keys(range(1000, 3000)))
    counts = [sketch.count(key(number)) for number in range(600)]
    assert min(counts) >= 4
    assert sum(count > 5 for count in counts) < 30
    assert sum(sketch.count(key(number)) > 1 for number in range(1000, 3000)) < 300


def test_counts_fade_so_that_old_fame_does_not_last() -> None:
    slots = 100
    segment = fresh_segment(slots, Policy.TINYLFU)
    sketch = TinyLfu(segment)
    for _ in range(9):
        sketch.asked(keys([1]))
    assert sketch.count(key(1)) >= 9
    sketch.asked(keys(range(10, 10 + SAMPLE_PER_SLOT * slots)))
    assert sketch.count(key(1)) <= 5
    assert segment.words[Word.SAMPLES] < SAMPLE_PER_SLOT * slots
    assert segment.doorkeeper.max() == 0


def test_the_sketch_is_shared_by_all_who_open_the_segment() -> None:
    segment = fresh_segment(10, Policy.TINYLFU)
    for _ in range(3):
        TinyLfu(segment).asked(keys([1]))
    assert TinyLfu(segment).admits(key(1), key(2))
    assert not TinyLfu(segment).admits(key(2), key(1))
    assert not TinyLfu(segment).admits(key(3), key(2))  # neither was asked for: what is there stays
