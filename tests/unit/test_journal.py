"""Watchers hear the net change since their last position, from one shared record."""

from __future__ import annotations

import random

import numpy as np
import pytest

from workers.journal import Journal, Sum, TierChange


def as_sets(change: TierChange) -> tuple[int, bool, set[int], set[int]]:
    return change.tier, change.cleared, set(change.removed.tolist()), set(change.stored.tolist())


def since(journal: Journal, position: int) -> list[tuple[int, bool, set[int], set[int]]]:
    changes = journal.since(position)
    assert changes is not None
    return [as_sets(change) for change in changes]


def test_a_key_that_ends_as_it_began_is_in_no_list() -> None:
    journal = Journal()
    journal.store(0, 1)
    journal.cut()
    journal.store(0, 2)
    journal.remove(0, 2)
    journal.remove(0, 1)
    journal.store(0, 1)
    assert journal.cut() == 1
    assert since(journal, 1) == []


def test_the_net_change_spans_cuts() -> None:
    journal = Journal()
    start = journal.cut()
    for store, remove in ((1, None), (2, 1), (3, 2)):
        journal.store(0, store)
        if remove is not None:
            journal.remove(0, remove)
        journal.cut()
    assert since(journal, start) == [(0, False, set(), {3})]
    assert since(journal, start + 2) == [(0, False, {2}, {3})]


def test_a_clear_swallows_what_came_before_it() -> None:
    journal = Journal()
    for key in (1, 2):
        journal.store(0, key)
    start = journal.cut()
    journal.remove(0, 1)
    journal.clear(0)
    journal.store(0, 2)
    journal.cut()
    assert since(journal, start) == [(0, True, set(), {2})]


def test_tiers_are_reported_apart() -> None:
    journal = Journal()
    journal.store(0, 1)
    journal.store(1, 1)
    journal.cut()
    assert sorted(since(journal, 0)) == [(0, False, set(), {1}), (1, False, set(), {1})]


def test_nothing_changed_makes_no_position() -> None:
    journal = Journal()
    assert journal.cut() == journal.cut() == 0
    assert since(journal, 0) == []


def test_a_watcher_that_lags_beyond_the_bound_is_told_to_start_over() -> None:
    journal = Journal(limit=10)
    for key in range(40):
        journal.store(0, key)
        journal.cut()
    assert journal.since(0) is None
    assert since(journal, 35) == [(0, False, set(), set(range(35, 40)))]


def test_one_change_larger_than_the_bound_still_reaches_who_was_up_to_date() -> None:
    journal = Journal(limit=10)
    journal.store(0, 1_000)
    start = journal.cut()
    for key in range(100):
        journal.store(0, key)
    journal.cut()
    assert since(journal, start) == [(0, False, set(), set(range(100)))]
    assert journal.since(0) is None


def test_watchers_at_one_position_share_one_answer() -> None:
    journal = Journal()
    for key in range(3):
        journal.store(0, key)
        journal.cut()
    assert journal.since(0) is journal.since(0)


def test_the_sum_is_of_the_last_cut_over_all_tiers() -> None:
    journal = Journal()
    top = 2**64 - 1
    journal.store(0, top)
    journal.store(1, 5)
    assert journal.sum == Sum(0, 0)
    journal.cut()
    assert journal.sum == Sum(2, top ^ 5)
    journal.remove(1, 5)
    journal.cut()
    assert journal.sum == Sum(1, top)
    journal.clear(0)
    journal.cut()
    assert journal.sum == Sum(0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_any_watcher_at_any_pace_ends_with_the_same_set(seed: int) -> None:
    rng = random.Random(seed)
    journal = Journal(limit=120)
    truth: set[int] = set()
    mirrors: list[tuple[int, set[int]]] = [(0, set()) for _ in range(4)]
    for step in range(600):
        for _ in range(rng.randrange(6)):
            key = rng.randrange(40)
            if key in truth:
                truth.discard(key)
                journal.remove(0, key)
            else:
                truth.add(key)
                journal.store(0, key)
        if rng.random() < 0.02:
            truth.clear()
            journal.clear(0)
        if rng.random() < 0.5:
            continue
        journal.cut()
        assert journal.sum == Sum(len(truth), int(np.bitwise_xor.reduce([0, *truth])))
        for index, (position, seen) in enumerate(mirrors):
            if step % (index + 1):
                continue
            changes = journal.since(position)
            mirror = set(truth) if changes is None else seen
            for change in changes or ():
                _, cleared, removed, stored = as_sets(change)
                assert not removed & stored
                assert cleared or removed <= mirror
                mirror = (set() if cleared else mirror - removed) | stored
            mirrors[index] = (journal.position, mirror)
            assert mirror == truth
