"""An arena's blocks by the router's keys, as they come and go."""

from __future__ import annotations

import random

from workers.kvpool.block_names import NOWHERE, BlockNames
from workers.kvpool.changes import Change, ChangeKind, Changes, Snapshot
from workers.kvpool.router_keys import UNNAMED

STORED, REMOVED = ChangeKind


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def started(*pairs: tuple[int, int]) -> BlockNames:
    """From (router's key, number of the engine's)."""
    names = BlockNames()
    names.start(Snapshot(7, [key(number) for _, number in pairs], [name for name, _ in pairs]))
    return names


def test_nothing_is_known_before_the_first_snapshot() -> None:
    names = BlockNames()
    assert names.position == NOWHERE
    assert names.prefix([1]) == []
    assert names.missing([1, 2]) == [1, 2]


def test_a_prefix_ends_at_the_first_block_that_is_missing() -> None:
    names = started((1, 10), (2, 20), (4, 40))
    assert names.position == 7
    assert names.prefix([1, 2, 3, 4]) == [key(10), key(20)]
    assert names.missing([1, 2, 3, 4, 5]) == [3, 5]


def test_changes_are_followed() -> None:
    names = started((1, 10))
    names.follow(Changes(9, [Change(STORED, 2, key(20)), Change(REMOVED, 1, key(10))]))
    assert names.position == 9
    assert names.missing([1, 2]) == [1]


def test_blocks_without_a_name_are_left_out() -> None:
    names = started((UNNAMED, 10), (UNNAMED, 20))
    names.follow(Changes(8, [Change(STORED, UNNAMED, key(30))]))
    assert len(names) == 0
    assert names.prefix([UNNAMED]) == []


def test_of_two_blocks_of_one_name_the_other_stays_when_one_goes() -> None:
    names = started((1, 10), (1, 11))
    assert names.prefix([1]) == [key(11)]
    names.follow(Changes(8, [Change(REMOVED, 1, key(11))]))
    assert names.prefix([1]) == [key(10)]
    names.follow(Changes(9, [Change(REMOVED, 1, key(10)), Change(REMOVED, 1, key(10))]))
    assert names.missing([1]) == [1]


def test_a_new_snapshot_forgets_what_was_known() -> None:
    names = started((1, 10))
    names.start(Snapshot(3, [key(20)], [2]))
    assert (names.position, names.missing([1, 2])) == (3, [1])


def test_following_gives_what_starting_anew_would() -> None:
    rng = random.Random(1)
    there: set[tuple[int, int]] = set()
    names = started()
    for position in range(400):
        pair = (rng.randrange(8), rng.randrange(24))
        kind = REMOVED if pair in there else STORED
        (there.discard if pair in there else there.add)(pair)
        names.follow(Changes(position, [Change(kind, pair[0], key(pair[1]))]))
        anew = started(*there)
        assert names.missing(range(8)) == anew.missing(range(8))
        for name in range(1, 8):
            assert names.prefix([name]) == [] or names.prefix([name])[0] in {
                key(n) for m, n in there if m == name
            }
