"""Processes that are killed or stopped anywhere in an arena, and what that costs the others."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_kvpool import (
    FREE,
    PATIENT,
    READY,
    WRITING,
    another,
    assert_ready_blocks_are_true,
    key,
    keys,
    make,
    read,
    store,
)
from helpers_kvpool_children import Children

from workers.kvpool.arena import Arena, Timing
from workers.kvpool.errors import ArenaBusy

KILLS = 60


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.close()


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with make(tmp_path / "a.arena", slots=16) as made:
        yield made


def leased(arena: Arena) -> int:
    return arena.usage().leased


def test_kills_at_any_moment_leave_a_whole_arena_of_true_blocks(arena: Arena, children: Children) -> None:
    rng = random.Random(5)
    survivor = children.start("mutate", arena.path)
    seen = 0
    for kill in range(KILLS):
        victim = children.start("mutate", arena.path, seed=100 + kill)
        time.sleep(rng.random() * 0.01)
        children.kill(victim)
        assert arena.check() == []
        seen += assert_ready_blocks_are_true(arena)
    children.kill(survivor)
    arena.reap()
    assert arena.check() == []
    assert (arena.usage().writing, leased(arena), len(arena.usage().owners)) == (0, 0, 1)
    counters = arena.counters()
    assert counters.owners_lost == KILLS + 1
    assert counters.recovered > 0, "no kill hit a mutation"
    assert seen > 0
    assert len(store(arena, keys(range(1000, 1016)))) == 16  # no slot was lost


def test_a_writer_killed_half_way_leaves_nothing_to_be_read(arena: Arena, children: Children) -> None:
    writer = children.start("write_half", arena.path)
    assert arena.lookup(keys([0, 1])) == [WRITING, WRITING]
    assert arena.reap() == 0
    children.kill(writer)
    assert arena.reap() == 1
    assert arena.lookup(keys([0, 1])) == [FREE, FREE]
    assert arena.counters().reclaimed == 2
    assert store(arena, keys([0, 1])) == keys([0, 1])
    assert assert_ready_blocks_are_true(arena) == 2


def test_a_reader_killed_while_it_copies_holds_nothing_back(arena: Arena, children: Children) -> None:
    store(arena, keys(range(16)))
    reader = children.start("lease", arena.path)
    assert leased(arena) == 2
    assert len(store(arena, keys(range(100, 116)))) == 14
    assert arena.lookup(keys([0, 1])) == [READY, READY]
    children.kill(reader)
    assert arena.reap() == 1
    assert leased(arena) == 0
    assert len(store(arena, keys(range(200, 216)))) == 16
    assert arena.check() == []


def test_allocation_that_finds_nothing_looks_for_the_dead(tmp_path: Path, children: Children) -> None:
    with make(tmp_path / "a.arena", slots=2) as arena:
        writer = children.start("write_half", arena.path)
        assert arena.allocate(keys([7]), [7]) == [None]
        children.kill(writer)
        assert store(arena, keys([7])) == keys([7])


@pytest.mark.parametrize("reap_every_s", [0.0, 1000.0])
def test_lookups_look_for_the_dead_but_not_each_time(
    tmp_path: Path, children: Children, reap_every_s: float
) -> None:
    timing = Timing(PATIENT.lookup_s, PATIENT.other_s, reap_every_s)
    with make(tmp_path / "a.arena", slots=2, timing=timing) as arena:
        arena.lookup(keys([0]))
        children.kill(children.start("write_half", arena.path))
        assert arena.lookup(keys([0])) == [WRITING if reap_every_s else FREE]


def test_whoever_dies_in_the_mutex_leaves_it_and_a_whole_arena(arena: Arena, children: Children) -> None:
    store(arena, keys(range(20)))
    there = [name for name in keys(range(20)) if arena.lookup([name]) == [READY]]
    position = arena.snapshot().position
    children.kill(children.start("hold", arena.path))
    assert arena.lookup(there) == [READY] * 16
    assert arena.counters().recovered == 1
    assert arena.check() == []
    assert arena.changes(position) is None
    snapshot = arena.snapshot()
    assert sorted(snapshot.keys) == sorted(there)
    assert arena.changes(snapshot.position) == (snapshot.position, [])


def test_a_stopped_process_in_the_mutex_costs_others_a_miss_until_it_goes_on(
    arena: Arena, children: Children
) -> None:
    store(arena, keys(range(3)))
    hasty = another(arena, Timing(lookup_s=0.01, other_s=0.02))
    (lease,) = hasty.lease(keys([0]))
    assert lease is not None
    holder = children.start("hold", arena.path)
    os.kill(holder, signal.SIGSTOP)
    os.kill(holder, signal.SIGUSR1)  # goes on when it runs again
    for call in (
        lambda: hasty.lookup(keys([0])),
        lambda: hasty.lease(keys([1])),
        lambda: hasty.allocate(keys([9]), [9]),
        lambda: hasty.changes(0),
        hasty.check,
    ):
        with pytest.raises(ArenaBusy, match="take it as a miss"):
            call()
    assert read(hasty, lease, 0) is not None  # what is leased can be read
    hasty.release([lease])
    assert leased(arena) == 1  # owed
    os.kill(holder, signal.SIGCONT)
    assert arena.lookup(keys([0, 1, 2])) == [READY] * 3
    hasty._timing = PATIENT
    hasty.lookup(keys([0]))
    assert leased(arena) == 0  # made up for
    assert arena.check() == []
    assert arena.counters().recovered == 0  # it has finished what it was at
    children.kill(holder)
    hasty.close()


def test_a_forked_child_neither_uses_its_parents_arena_nor_keeps_it_alive(
    arena: Arena, children: Children
) -> None:
    store(arena, keys([0, 1]))
    parent = children.start("fork", arena.path)
    assert leased(arena) == 2
    children.kill(parent)
    assert arena.reap() == 1
    assert leased(arena) == 0


def test_a_stale_writer_scribbles_over_a_block_and_its_reader_notices(
    arena: Arena, children: Children
) -> None:
    with another(arena) as writer:
        (slot,) = writer.allocate(keys([1]), [1])
        assert slot is not None
        scribble = writer.write_part(*slot, 0)
        writer.abandon([slot])
        store(arena, keys([2]))
        (lease,) = arena.lease(keys([2]))
        assert lease is not None
        assert lease.slot == slot.slot
        scribble[:4] = b"oops"
        assert read(arena, lease, 0) is None
        arena.corrupt(*lease)
        assert arena.lookup([key(2)]) == [FREE]
