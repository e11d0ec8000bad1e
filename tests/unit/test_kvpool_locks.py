"""Locks on bytes of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.kvpool.errors import ArenaBusy, ArenaClosedError
from workers.kvpool.locks import ByteLocks, Mutex


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "locked").touch()
    return str(tmp_path / "locked")


@pytest.fixture
def pair(path: str) -> Iterator[tuple[ByteLocks, ByteLocks]]:
    opened = ByteLocks(path), ByteLocks(path)
    yield opened
    for locks in opened:
        locks.close()


def test_a_byte_is_held_by_one_opening_at_a_time(pair: tuple[ByteLocks, ByteLocks]) -> None:
    one, two = pair
    assert one.take(5)
    assert one.take(5)
    assert not two.take(5)
    assert two.take(4)
    assert two.take(6)
    one.drop(5)
    assert two.take(5)


def test_what_others_hold_is_seen_without_taking_it(pair: tuple[ByteLocks, ByteLocks]) -> None:
    one, two = pair
    one.take(5)
    assert two.held_elsewhere(5)
    assert not one.held_elsewhere(5)
    assert not two.held_elsewhere(4)
    assert one.take(4)


def test_closing_drops_all(pair: tuple[ByteLocks, ByteLocks]) -> None:
    one, two = pair
    one.take(1)
    one.take(2)
    one.close()
    assert one.closed
    assert two.take(1)
    assert two.take(2)


def test_closing_another_opening_of_the_file_drops_nothing(
    pair: tuple[ByteLocks, ByteLocks], path: str
) -> None:
    """Unlike POSIX locks."""
    one, two = pair
    one.take(1)
    os.close(os.open(path, os.O_RDWR))
    assert not two.take(1)


def test_a_mutex_is_given_up_however_its_block_ends(pair: tuple[ByteLocks, ByteLocks]) -> None:
    one, two = (Mutex(locks, 0, "it") for locks in pair)
    with pytest.raises(ZeroDivisionError), one.held(1):
        _ = 1 // 0
    with two.held(0):
        with pytest.raises(ArenaBusy, match="it was locked by somebody else for 1 ms"), one.held(0.001):
            pytest.fail("it is held by the other")
        with pytest.raises(ArenaBusy), two.held(0.001):
            pytest.fail("it is not reentrant")
    with one.held(0):
        pass


def test_a_closed_mutex_says_so(pair: tuple[ByteLocks, ByteLocks]) -> None:
    mutex = Mutex(pair[0], 0, "it")
    pair[0].close()
    with pytest.raises(ArenaClosedError, match="it was closed"), mutex.held(1):
        pytest.fail("it is closed")
