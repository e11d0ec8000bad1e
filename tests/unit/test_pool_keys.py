"""Published keys of the pool: each once, however many slots hold it, told as it comes and goes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workers.journal import Journal, Sum
from workers.kvpool.changes import Change, ChangeKind
from workers.kvpool.pool_keys import Copies, PoolKeys, Transitions
from workers.kvpool.router_keys import UNNAMED

STORED, REMOVED = ChangeKind.STORED, ChangeKind.REMOVED
TIER = 1


def change(kind: ChangeKind, key: int) -> Change:
    return Change(kind, key, bytes(32))


def test_a_key_is_told_with_its_first_copy_and_taken_back_with_its_last() -> None:
    copies = Copies()
    assert copies.take([change(STORED, 7), change(STORED, 7)]) == ([7], [])
    assert copies.take([change(REMOVED, 7)]) == ([], [])
    assert copies.take([change(REMOVED, 7)]) == ([], [7])


def test_what_comes_and_goes_between_two_looks_is_not_told() -> None:
    copies = Copies()
    copies.reset([1])
    there_and_back = [change(STORED, 2), change(REMOVED, 2), change(REMOVED, 1), change(STORED, 1)]
    assert copies.take(there_and_back) == ([], [])


def test_blocks_without_a_key_are_never_told() -> None:
    copies = Copies()
    assert copies.reset([UNNAMED, 5, UNNAMED]) == ([5], [])
    assert copies.take([change(STORED, UNNAMED), change(REMOVED, UNNAMED)]) == ([], [])


def test_a_fresh_snapshot_tells_the_difference_alone() -> None:
    copies = Copies()
    copies.reset([1, 2, 2])
    assert copies.reset([2, 3]) == ([3], [1])
    assert copies.take([change(REMOVED, 2)]) == ([], [2])  # one copy is left of it, not two


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=80), st.integers(1, 9))
def test_following_changes_ends_where_a_snapshot_would(script: list[tuple[bool, int]], pace: int) -> None:
    copies, slots, held = Copies(), Counter[int](), set[int]()
    pending: list[Change] = []
    for number, (stores, key) in enumerate(script):
        if not stores and not slots[key]:
            continue
        slots[key] += 1 if stores else -1
        pending.append(change(STORED if stores else REMOVED, key))
        if number % pace == 0:
            stored, removed = copies.take(pending)
            pending.clear()
            assert not held & set(stored)
            assert held >= set(removed)
            held = (held | set(stored)) - set(removed)
            assert held == {key for key, count in slots.items() if count and key != UNNAMED}


def test_the_journal_hears_every_key_once() -> None:
    journal = Journal()
    keys = PoolKeys(journal, TIER)
    keys.apply(Transitions([5, 9], []))
    keys.apply(Transitions([5], [77]))  # there already; never there
    journal.cut()
    assert journal.sum == Sum(2, 5 ^ 9)
    assert sorted(keys.keys().tolist()) == [5, 9]
    keys.apply(Transitions([], [5]))
    journal.cut()
    assert (journal.sum, len(keys), 5 in keys, 9 in keys) == (Sum(1, 9), 1, False, True)


def test_a_pool_that_is_lost_leaves_nothing_and_can_come_back() -> None:
    journal = Journal()
    keys = PoolKeys(journal, TIER)
    keys.clear()
    assert journal.cut() == 0  # nothing was there to forget
    keys.apply(Transitions([5, 9], []))
    position = journal.cut()
    keys.clear()
    keys.apply(Transitions([9], []))
    journal.cut()
    (told,) = journal.since(position) or ()
    assert (told.tier, told.cleared, told.stored.tolist()) == (TIER, True, [9])
    assert journal.sum == Sum(1, 9)


def test_a_prefix_ends_at_the_first_key_that_is_missing() -> None:
    keys = PoolKeys(Journal(), TIER)
    keys.apply(Transitions([1, 2, 4], []))
    assert keys.prefix([1, 2, 3, 4]) == 2
    assert keys.prefix([8, 9, 4], start=2) == 3
    assert keys.prefix([]) == 0
