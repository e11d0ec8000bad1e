"""What replicas of one host see of each other's blocks, through several openings of one arena."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers_kvpool import (
    FREE,
    NAMESPACE,
    RANKS,
    READY,
    WRITING,
    another,
    assert_ready_blocks_are_true,
    content,
    header,
    key,
    keys,
    make,
    read,
    store,
    write,
)

from workers.kvpool.arena import Arena, Timing
from workers.kvpool.changes import Change, ChangeKind
from workers.kvpool.checksum import checksum
from workers.kvpool.errors import (
    ArenaBusy,
    ArenaClosedError,
    NotAttachedError,
    OwnersFullError,
    SlotLostError,
)
from workers.kvpool.index import Lease, Seal, Slot
from workers.kvpool.layout import OWNERS
from workers.kvpool.owners import OwnerKind


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with make(tmp_path / "a.arena", slots=4) as made:
        yield made


@pytest.fixture
def other(arena: Arena) -> Iterator[Arena]:
    with another(arena) as opened:
        yield opened


def leases(arena: Arena, numbers: list[int]) -> list[Lease]:
    found = [lease for lease in arena.lease(keys(numbers)) if lease is not None]
    assert len(found) == len(numbers)
    return found


def allocated(arena: Arena, numbers: list[int]) -> list[Slot]:
    found = [slot for slot in arena.allocate(keys(numbers), numbers) if slot is not None]
    assert len(found) == len(numbers)
    return found


def test_a_block_stored_by_one_is_read_by_another(arena: Arena, other: Arena) -> None:
    assert other.lookup(keys([1, 2])) == [FREE, FREE]
    store(arena, keys([1, 2]))
    assert other.lookup(keys([1, 2, 3])) == [READY, READY, FREE]
    held = leases(other, [1, 2])
    for name, lease in zip(keys([1, 2]), held, strict=True):
        assert [read(other, lease, rank) for rank in range(RANKS)] == [content(name, 0), content(name, 1)]
    other.release(held)
    counters = other.counters()
    assert (counters.stored, counters.hits, counters.misses) == (2, 2, 3)


def test_a_block_is_not_there_before_every_rank_has_sealed_it(arena: Arena, other: Arena) -> None:
    whole, half = allocated(arena, [1, 2])
    assert other.lookup(keys([1])) == [WRITING]
    assert other.allocate(keys([1]), [1]) == [None]  # somebody is at it
    assert other.lease(keys([1])) == [None]
    write(other, whole, key(1))  # a rank's process has an opening of its own
    write(other, half, key(2), ranks=[1])
    assert arena.commit([whole, half]) == [True, False]
    assert other.lookup(keys([1, 2])) == [READY, FREE]
    assert arena.counters().abandoned == 1


def test_seals_of_what_a_slot_held_before_do_not_count(arena: Arena) -> None:
    store(arena, keys(range(4)))
    slots = allocated(arena, [10, 11, 12, 13])
    assert arena.commit(slots) == [False] * 4


def test_a_prefix_that_was_read_is_evicted_from_its_end(arena: Arena) -> None:
    store(arena, keys(range(4)))
    arena.release(leases(arena, [0, 1, 2, 3]))
    store(arena, keys([10, 11]))
    assert arena.lookup(keys(range(4))) == [READY, READY, FREE, FREE]


def test_only_the_allocator_commits_or_abandons(arena: Arena, other: Arena) -> None:
    (slot,) = allocated(arena, [1])
    write(arena, slot, key(1))
    assert other.commit([slot]) == [False]
    other.abandon([slot])
    assert arena.lookup(keys([1])) == [WRITING]
    assert arena.commit([slot, slot]) == [True, True]
    assert arena.check() == []


def test_an_abandoned_slot_is_lost_to_its_writers(arena: Arena, other: Arena) -> None:
    (slot,) = allocated(arena, [1])
    arena.abandon([slot])
    with pytest.raises(SlotLostError, match="drop the block"):
        other.write_part(*slot, 0)
    assert other.seal_parts(0, [Seal(*slot, 5)]) == [False]
    assert arena.commit([slot]) == [False]
    assert arena.lookup(keys([1])) == [FREE]


def test_what_is_leased_or_being_written_is_not_evicted(arena: Arena, other: Arena) -> None:
    store(arena, keys([1, 2]))
    held = leases(other, [1])
    allocated(other, [3])
    assert store(arena, keys([4, 5, 6, 7])) == keys([4, 5])
    assert arena.lookup(keys([1, 2, 3, 4, 5])) == [READY, FREE, WRITING, READY, READY]
    assert (arena.counters().evicted, arena.counters().full) == (1, 2)
    other.release(held)
    assert store(arena, keys([8, 9, 10])) == keys([8, 9, 10])
    assert arena.lookup(keys([1])) == [FREE]


def test_a_full_arena_of_leases_lets_nothing_in(arena: Arena) -> None:
    store(arena, keys(range(4)))
    leases(arena, [0, 1, 2, 3])
    assert arena.allocate(keys([9]), [9]) == [None]
    assert arena.lookup(keys(range(4))) == [READY] * 4


def test_a_block_leased_twice_is_held_until_released_twice(arena: Arena, other: Arena) -> None:
    store(arena, keys([1]))
    (first,), (second,), (third,) = leases(arena, [1]), leases(arena, [1]), leases(other, [1])
    for lease, opening, left in ((first, arena, 1), (third, other, 1), (second, arena, 0)):
        opening.release([lease])
        assert arena.usage().leased == left
    arena.release([first])  # once too often
    assert arena.usage().leased == 0
    assert arena.check() == []


def test_a_flipped_byte_is_noticed_and_the_block_never_served_again(arena: Arena, other: Arena) -> None:
    store(arena, keys([1, 2]))
    (lease,) = leases(other, [1])
    arena._segment.part(lease.slot, 1)[77] ^= 1
    assert read(other, lease, 0) == content(key(1), 0)
    assert read(other, lease, 1) is None
    other.corrupt(*lease)
    other.corrupt(*lease)
    assert arena.lookup(keys([1, 2])) == [FREE, READY]
    assert arena.counters().corrupt == 1
    with pytest.raises(SlotLostError, match="recompute"):
        other.read_part(*lease, 0)
    other.release([lease])
    assert store(arena, keys([1])) == keys([1])
    assert assert_ready_blocks_are_true(other) == 2


def test_a_reader_of_what_a_slot_held_before_harms_nothing_by_calling_it_corrupt(arena: Arena) -> None:
    store(arena, keys(range(4)))
    (lease,) = leases(arena, [0])
    copy = checksum(bytes(arena.read_part(*lease, 0)))
    assert arena.verify(*lease, 0, copy)
    arena.release([lease])
    store(arena, keys([10, 11, 12, 13]))
    assert not arena.verify(*lease, 0, copy)
    arena.corrupt(*lease)
    assert arena.lookup(keys([10, 11, 12, 13])) == [READY] * 4


def test_parts_are_read_only_to_readers_and_of_a_ranks_size(arena: Arena) -> None:
    store(arena, keys([1]))
    (lease,) = leases(arena, [1])
    part = arena.read_part(*lease, 1)
    assert (len(part), part.readonly) == (arena.header.geometry.rank_bytes, True)


def test_followers_are_told_what_comes_and_goes(arena: Arena, other: Arena) -> None:
    snapshot = other.snapshot()
    assert snapshot.keys == []
    store(arena, keys([1]))
    (lease,) = leases(arena, [1])
    arena.corrupt(*lease)
    extra = int.from_bytes(key(1)[:8], "little")
    changes = other.changes(snapshot.position)
    assert changes is not None
    assert changes.items == [
        Change(ChangeKind.STORED, extra, key(1)),
        Change(ChangeKind.REMOVED, extra, key(1)),
    ]
    assert other.changes(changes.position) == (changes.position, [])
    store(arena, keys([2, 3]))
    found = other.snapshot()
    assert dict(zip(found.keys, found.extras, strict=True)) == {
        name: int.from_bytes(name[:8], "little") for name in keys([2, 3])
    }


@pytest.mark.parametrize("position", [-1, 10_000])
def test_a_follower_with_a_position_that_never_was_starts_over(arena: Arena, position: int) -> None:
    assert arena.changes(position) is None


def test_a_follower_that_lags_beyond_the_ring_starts_over(tmp_path: Path) -> None:
    with make(tmp_path / "a.arena", slots=2, changes=6) as arena:
        position = arena.snapshot().position
        store(arena, keys([1, 2]))
        store(arena, keys([3, 4]))
        changes = arena.changes(position)
        assert changes is not None
        assert len(changes.items) == 6
        store(arena, keys([5]))
        assert arena.changes(position) is None
        assert arena.changes(position + 2) is not None


def test_only_owners_lease_and_allocate(arena: Arena) -> None:
    store(arena, keys([1]))
    with Arena.open(arena.path) as guest:
        for call in (
            lambda: guest.lease(keys([1])),
            lambda: guest.allocate(keys([2]), [2]),
            lambda: guest.commit([]),
        ):
            with pytest.raises(NotAttachedError, match="attach"):
                call()
        position = arena.snapshot().position
        assert guest.lookup(keys([1])) == [READY]
    assert arena.changes(position) is not None  # refusals changed nothing
    assert arena.counters().recovered == 0
    with pytest.raises(ValueError, match="attached already"):
        arena.attach(OwnerKind.AGENT)


def test_there_are_as_many_owners_as_entries_and_one_that_leaves_makes_room(arena: Arena) -> None:
    guests = [another(arena) for _ in range(OWNERS - 1)]
    late = Arena.open(arena.path)
    with pytest.raises(OwnersFullError, match="64 owners of this arena are alive: run fewer"):
        late.attach(OwnerKind.AGENT)
    guests.pop().close()
    late.attach(OwnerKind.AGENT)
    assert [owner.kind for owner in arena.usage().owners].count(OwnerKind.AGENT) == 1
    for guest in (*guests, late):
        guest.close()
    assert len(arena.usage().owners) == 1
    assert arena.check() == []


def test_the_last_owners_bit_is_held_and_released_like_any(arena: Arena) -> None:
    guests = [another(arena) for _ in range(OWNERS - 1)]
    store(arena, keys([1]))
    held = leases(guests[-1], [1])
    assert int(arena._segment.readers[held[0].slot]) == 1 << 63
    guests[-1].release(held)
    assert arena.usage().leased == 0
    for guest in guests:
        guest.close()


def test_closing_gives_back_all_that_was_held(arena: Arena) -> None:
    store(arena, keys([1]))
    guest = another(arena)
    leases(guest, [1])
    (slot,) = allocated(guest, [2])
    view = guest.write_part(*slot, 0)
    guest.close()
    guest.close()
    view[:3] = b"abc"  # is no crash
    assert (arena.usage().leased, arena.usage().writing, arena.counters().reclaimed) == (0, 0, 0)
    assert arena.check() == []
    for call in (guest.usage, guest.check, lambda: guest.lookup([]), lambda: guest.read_part(0, 0, 0)):
        with pytest.raises(ArenaClosedError, match="open it anew"):
            call()


def test_an_opening_that_is_dropped_without_closing_is_reaped(arena: Arena) -> None:
    guest = another(arena)
    allocated(guest, [1])
    guest._file.locks.close()  # as the collector would
    assert arena.reap() == 1
    assert arena.lookup(keys([1])) == [FREE]


def test_an_owner_whose_lock_was_lost_is_refused_and_does_no_harm(arena: Arena, other: Arena) -> None:
    store(arena, keys([1]))
    held = leases(other, [1])
    (slot,) = allocated(other, [2])
    other._file.locks.drop(1 + 1)
    assert arena.reap() == 1
    (taken,) = allocated(arena, [3])
    assert taken.slot == slot.slot
    with pytest.raises(NotAttachedError, match="was taken from this process"):
        other.commit([slot])
    other.release(held)
    other.abandon([slot])
    assert arena.lookup(keys([1, 2, 3])) == [READY, FREE, WRITING]
    assert arena.check() == []


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda arena: arena.lookup([b"short"]), "32 bytes"),
        (lambda arena: arena.allocate([key(1)], []), "as many extras"),
        (lambda arena: arena.allocate([key(1)], [1 << 64]), "64 bits"),
        (lambda arena: arena.allocate([key(1)], [-1]), "64 bits"),
        (lambda arena: arena.seal_parts(0, [Seal(0, 0, 0)]), "not 0"),
        (lambda arena: arena.seal_parts(RANKS, [Seal(0, 0, 1)]), "no rank 2"),
        (lambda arena: arena.read_part(-1, 0, 0), "slot -1"),
        (lambda arena: arena.corrupt(4, 0), "slot 4"),
    ],
)
def test_mistakes_are_refused_before_anything_changes(
    arena: Arena, call: Callable[[Arena], object], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        call(arena)
    assert arena.counters().recovered == 0


def test_an_error_in_the_middle_of_a_mutation_is_recovered_from(
    arena: Arena, other: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(arena, keys([1, 2]))

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(arena._index._table, "insert", fail)
        with pytest.raises(MemoryError):
            arena.allocate(keys([3]), [3])
    assert other.lookup(keys([1, 2])) == [READY, READY]
    assert other.counters().recovered == 1
    assert other.check() == []
    assert len(store(arena, keys([4, 5, 6]))) == 3


def test_threads_of_one_process_share_an_opening(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with make(tmp_path / "a.arena", slots=12) as arena:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(60):
                    some = keys(range(start := rng.randrange(20), start + 3))
                    store(arena, some)
                    held = [lease for lease in arena.lease(some) if lease is not None]
                    assert all(read(arena, lease, 1) for lease in held)
                    arena.release(held)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert arena.check() == []
        assert arena.usage().leased == 0


def test_a_thread_in_the_mutex_makes_another_busy_by_its_deadline(tmp_path: Path) -> None:
    with (
        make(tmp_path / "a.arena", slots=2) as arena,
        Arena.open(tmp_path / "a.arena", timing=Timing(0.01, 0.01)) as hasty,
    ):
        with hasty._guard.entered(1.0):
            found: list[type[BaseException]] = []

            def ask() -> None:
                try:
                    hasty.lookup(keys([1]))
                except ArenaBusy as error:
                    found.append(type(error))

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        assert found == [ArenaBusy]
        assert arena.lookup(keys([1])) == hasty.lookup(keys([1])) == [FREE]


def test_usage_says_what_operators_ask_for(arena: Arena, other: Arena) -> None:
    store(arena, keys([1, 2]))
    leases(other, [1])
    allocated(other, [3])
    usage = arena.usage()
    assert (usage.slots, usage.ready, usage.leased, usage.writing) == (4, 2, 1, 1)
    assert usage.total_bytes == arena.path.stat().st_size
    assert arena.header == header(4)
    assert arena.header.namespace == NAMESPACE
