"""Blocks come out of the pool as they went in, or are told to have not: never a wrong one."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kvpool_parts import (
    BLOCKS,
    LAYERS,
    PAGE,
    RANKS,
    Rank,
    Replica,
    arena_at,
    assert_nothing_is_held,
    block_keys,
    flip,
    gpu,
    replicas,
    request,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor

from workers.kvpool import copier as copying
from workers.kvpool import jobs
from workers.kvpool.arena import Arena
from workers.kvpool.checksum import checksum
from workers.kvpool.copier import Copier
from workers.kvpool.index import Seal, Slot
from workers.kvpool.pages import BlockPages, Blocks, Bytes
from workers.kvpool.slots import ArenaSlots
from workers.pinning import settle_thread

KEYS = block_keys(range(12))
HERE, THERE = list(range(20, 32)), [7, 3, 39, 0, 11, 5, 30, 2, 1, 38, 17, 4]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Replica, Replica]]:
    with replicas(tmp_path / "pool.arena") as (one, other):
        yield one, other


@pytest.mark.parametrize("staging", [1, 5 * LAYERS * PAGE, 4 << 20])
def test_a_block_of_one_replica_is_byte_for_byte_what_another_loads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: int
) -> None:
    monkeypatch.setattr(copying, "STAGING_BYTES", staging)
    with replicas(tmp_path / "pool.arena") as (one, other):
        wrote = one.content(HERE)
        untouched = sorted(set(range(BLOCKS)) - set(THERE))
        before = other.content(untouched)
        assert one.store(request("a", KEYS), KEYS, HERE) == KEYS
        assert other.load(request("b", KEYS), KEYS, THERE) == set()
        assert other.content(THERE) == wrote
        assert other.content(untouched) == before
        assert one.content(HERE) == wrote
        assert_nothing_is_held(one.arena)


def test_layers_that_are_padded_or_interleaved_keep_what_lies_between_them(tmp_path: Path) -> None:
    with replicas(tmp_path / "pool.arena") as (one, other):
        other.ranks = [Rank(rank, seed=9, stride=PAGE + 68) for rank in range(RANKS)]
        between = [rank.memory[:, :, PAGE:].clone() for rank in other.ranks]
        one.store(request("a", KEYS), KEYS, HERE)
        assert other.load(request("b", KEYS), KEYS, THERE) == set()
        assert other.content(THERE) == one.content(HERE)
        assert all(
            torch.equal(rank.memory[:, :, PAGE:], kept)
            for rank, kept in zip(other.ranks, between, strict=True)
        )


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_flipped_bit_is_told_and_the_block_never_served_again(
    pair: tuple[Replica, Replica], rank: int
) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, HERE)
    asking = request("b", KEYS)
    leased = other.manager.prepare_load(KEYS, asking)
    flip(one.arena, leased.slots[4], rank)
    before = other.ranks[rank].block(THERE[4])

    assert other.copy_in(leased, THERE) == {THERE[4]}
    other.manager.complete_load(set(KEYS), asking)

    assert other.ranks[rank].block(THERE[4]) == before  # not even for a moment
    whole = [index for index in range(12) if index != 4]
    assert other.content([THERE[i] for i in whole]) == one.content([HERE[i] for i in whole])
    assert other.found(request("c", KEYS), KEYS) == [index != 4 for index in range(12)]
    assert one.arena.counters().corrupt == 1
    assert_nothing_is_held(one.arena)


def test_a_stray_write_to_a_slot_is_not_sealed(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    arena = one.arena
    output = one.manager.prepare_store(KEYS, asking := request("a", KEYS))
    seal = Arena.seal_parts

    def late(self: Arena, rank: int, seals: Sequence[Seal]) -> list[bool]:
        flip(arena, seals[3].slot, rank)
        return seal(self, rank, seals)

    def of_copy(data: memoryview) -> int:
        assert any(
            np.shares_memory(np.asarray(data), rank.copier._staging) for rank in one.ranks + other.ranks
        )
        return checksum(data)

    monkeypatch.setattr(Arena, "seal_parts", late)
    monkeypatch.setattr(copying, "checksum", of_copy)  # of our own copy: a slot may change at any time
    one.copy_out(HERE, output.store_spec)
    one.manager.complete_store(set(KEYS), asking)
    assert other.load(request("b", KEYS), KEYS, THERE) == {THERE[3]}


def test_a_block_evicted_between_lookup_and_lease_is_told(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, HERE)
    asking = request("b", KEYS)
    assert all(other.found(asking, KEYS))
    others = block_keys(range(100, 121))
    one.store(request("c", others), others, list(range(21)))  # 32 slots: one of the twelve has to go
    assert other.load(asking, KEYS, THERE) == {THERE[-1]}  # a prefix is evicted from its end
    assert other.content(THERE[:-1]) == one.content(HERE[:-1])


def test_a_slot_that_holds_another_block_by_now_is_told(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, HERE)
    asking = request("b", KEYS)
    leased = other.manager.prepare_load(KEYS, asking)
    other.manager.reset_cache()  # forgets the leases, whatever its ranks do
    others = block_keys(range(100, 132))
    one.store(request("c", others), others, list(range(32)))
    before = other.content(THERE)
    assert other.copy_in(leased, THERE) == set(THERE)
    assert other.content(THERE) == before
    assert one.arena.counters().corrupt == 0  # those that came later are whole


def test_what_a_dead_replica_was_writing_is_neither_stored_nor_written_over_others(
    pair: tuple[Replica, Replica],
) -> None:
    one, other = pair
    output = one.manager.prepare_store(KEYS, request("a", KEYS))
    one.manager.shutdown()  # its ranks live on for a moment
    others = block_keys(range(100, 132))
    assert other.store(request("b", others), others, list(range(32))) == others

    one.copy_out(HERE, output.store_spec)

    assert other.found(request("c", KEYS), KEYS) == [False] * 12
    into = list(range(32))[::-1]
    wrote = other.content(range(32))
    assert other.load(request("d", others), others, into) == set()
    assert other.content(into) == wrote


def test_a_block_that_one_rank_did_not_write_is_not_stored(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    asking = request("a", KEYS)
    output = one.manager.prepare_store(KEYS, asking)
    one.ranks[0].copier.submit_store(1, gpu(HERE), output.store_spec)
    one.ranks[0].finish({1})
    one.manager.complete_store(set(KEYS), asking)
    assert other.found(request("b", KEYS), KEYS) == [False] * 12
    assert_nothing_is_held(one.arena)


def test_a_slot_that_was_lost_does_not_keep_the_others_from_being_stored(
    pair: tuple[Replica, Replica],
) -> None:
    one, other = pair
    asking = request("a", KEYS)
    output = one.manager.prepare_store(KEYS, asking)
    one.arena.abandon([Slot(output.store_spec.slots[5], output.store_spec.generations[5])])
    one.copy_out(HERE, output.store_spec)
    one.manager.complete_store(set(KEYS), asking)
    assert other.found(request("b", KEYS), KEYS) == [index != 5 for index in range(12)]


def test_loads_from_an_arena_that_cannot_be_opened_are_told(tmp_path: Path) -> None:
    rank = Rank(0, seed=0)
    before = [rank.block(block) for block in range(BLOCKS)]
    rank.copier.submit_load(1, ArenaSlots.of(str(tmp_path / "none.arena"), [(0, 1), None]), gpu([4, 5]))
    assert rank.finish({1}) == {4, 5}
    assert [rank.block(block) for block in range(BLOCKS)] == before


def test_loads_from_an_arena_of_other_blocks_are_told(tmp_path: Path) -> None:
    with arena_at(tmp_path / "pool.arena") as arena:
        small = BlockPages([np.zeros((4, PAGE), np.uint8)])
        copier = Copier(small, rank=0, ranks=RANKS)
        copier.submit_load(1, ArenaSlots.of(str(arena.path), [(0, 1)]), gpu([2]))
        copier.wait({1})
        copier.shutdown()
        assert copier.take_failed() == {2}


def test_as_many_blocks_as_slots_or_none_at_all(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, HERE)
    asking = request("b", KEYS)
    leased = other.manager.prepare_load(KEYS, asking)
    assert other.copy_in(leased, THERE[:-1]) == set(THERE[:-1])


class Held:
    """Stops each rank before it copies from its engine's blocks for the `nth` time, until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int = 1) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        gather, calls = BlockPages.gather, Counter[int]()

        def slow(pages: BlockPages, blocks: Blocks, rows: Bytes) -> None:
            calls[id(pages)] += 1
            if calls[id(pages)] == nth:
                self.reached.set()
                assert self.go.wait(30)
            gather(pages, blocks, rows)

        monkeypatch.setattr(BlockPages, "gather", slow)


@pytest.mark.parametrize("nth", [1, 4])
def test_waiting_for_a_store_lasts_until_its_blocks_may_be_written_again(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    one, other = pair
    held = Held(monkeypatch, nth)
    for rank in one.ranks:
        rank.copier._staging = rank.copier._staging[:3]
    copier = one.ranks[0].copier
    asking = request("a", KEYS)
    output = one.manager.prepare_store(KEYS, asking)
    wrote = one.content(HERE)
    for rank in one.ranks:
        rank.copier.submit_store(1, gpu(HERE), output.store_spec)
    assert held.reached.wait(30)
    waiting = threading.Thread(target=copier.wait, args=({1},))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert copier.get_finished() == []
    held.go.set()
    waiting.join(30)
    assert not waiting.is_alive()
    for rank in one.ranks:
        rank.copier.wait({1})
        rank.memory.zero_()  # the engine computes something else there
        rank.finish({1})
    one.manager.complete_store(set(KEYS), asking)
    assert other.load(request("b", KEYS), KEYS, THERE) == set()
    assert other.content(THERE) == wrote


def test_waiting_for_a_store_does_not_wait_for_the_mutex(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    output = one.manager.prepare_store(KEYS, request("a", KEYS))
    free = threading.Event()
    seal = Arena.seal_parts
    monkeypatch.setattr(Arena, "seal_parts", lambda *args: free.wait(30) and seal(*args))
    copier = one.ranks[0].copier
    copier.submit_store(1, gpu(HERE), output.store_spec)
    copier.wait({1})
    assert copier.get_finished() == []
    free.set()
    one.ranks[0].finish({1})


def test_waiting_for_unknown_and_finished_jobs_returns(pair: tuple[Replica, Replica]) -> None:
    pair[0].ranks[0].copier.wait({77})


def test_stores_beyond_the_bound_are_dropped_and_loads_are_not(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, HERE)
    monkeypatch.setattr(jobs, "STORES_WAITING_BYTES", 3 * LAYERS * PAGE)
    held = Held(monkeypatch)
    copier = other.ranks[0].copier
    keys = block_keys(range(50, 58))
    slots = [
        other.manager.prepare_store([key], request(str(n), keys)).store_spec for n, key in enumerate(keys)
    ]
    copier.submit_store(0, gpu([0]), slots[0])
    assert held.reached.wait(30)  # the first is at hand, and waits no more
    for number in range(1, 8):
        copier.submit_store(number, gpu([number]), slots[number])
    leased = other.manager.prepare_load(KEYS, request("b", KEYS))
    copier.submit_load(100, leased, gpu(THERE))
    assert {result.job_id for result in copier.get_finished()} == {4, 5, 6, 7}
    held.go.set()
    assert other.ranks[0].finish({0, 1, 2, 3, 100}) == set()
    assert [other.ranks[0].block(block) for block in THERE] == [one.ranks[0].block(block) for block in HERE]


def test_a_store_larger_than_the_bound_is_done_when_nothing_else_waits(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    monkeypatch.setattr(jobs, "STORES_WAITING_BYTES", 1)
    assert one.store(request("a", KEYS), KEYS, HERE) == KEYS
    assert other.load(request("b", KEYS), KEYS, THERE) == set()


def test_a_load_overtakes_a_long_store(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, HERE)
    rank = other.ranks[0]
    rank.copier._staging = rank.copier._staging[:2]
    held = Held(monkeypatch)
    keys = block_keys(range(50, 60))
    output = other.manager.prepare_store(keys, request("c", keys))
    leased = other.manager.prepare_load(KEYS, request("b", KEYS))
    rank.copier.submit_store(1, gpu(range(20, 30)), output.store_spec)
    assert held.reached.wait(30)
    rank.copier.submit_load(2, leased, gpu(THERE))
    held.go.set()
    order: list[int] = []
    while len(order) < 2:
        order += [result.job_id for result in rank.copier.get_finished()]
    assert order == [2, 1]
    assert rank.copier.take_failed() == set()
    assert [rank.block(block) for block in THERE] == [one.ranks[0].block(block) for block in HERE]


def test_transfers_left_when_a_shard_ends_are_told_as_failed_and_nobody_waits_for_them(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    held = Held(monkeypatch)
    output = one.manager.prepare_store(KEYS, request("a", KEYS))
    copier = one.ranks[0].copier
    copier.submit_store(1, gpu(HERE), output.store_spec)
    assert held.reached.wait(30)
    copier.submit_load(2, ArenaSlots.of(str(one.arena.path), [None]), gpu([9]))
    ending = threading.Thread(target=copier.shutdown)
    ending.start()
    copier.wait({2})
    held.go.set()
    ending.join(30)
    copier.submit_load(3, ArenaSlots.of(str(one.arena.path), [None]), gpu([8]))
    copier.wait({1, 3})
    assert copier.take_failed() == {8, 9}
    assert {result.job_id for result in copier.get_finished()} == {1, 2, 3}


def test_a_cache_on_another_device_is_refused() -> None:
    somewhere = torch.empty((4, 8), dtype=torch.int8, device="meta")
    with pytest.raises(NotImplementedError, match="no KV pool on META yet"):
        BlockPages.of(CanonicalKVCaches([CanonicalKVCacheTensor(somewhere, 8)], [[]]))


def test_copies_run_where_they_are_told_to_although_a_pinned_thread_starts_them() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    seen: list[set[int]] = []

    def look(cores: tuple[int, ...]) -> None:
        settle_thread(cores)
        seen.append(os.sched_getaffinity(0))

    def pinned() -> None:
        os.sched_setaffinity(0, {allowed[0]})
        for cores in ((), (len(allowed) - 1,)):
            copying = threading.Thread(target=look, args=(cores,))
            copying.start()
            copying.join()

    computing = threading.Thread(target=pinned)
    computing.start()
    computing.join()
    assert seen == [set(allowed), {allowed[-1]}]
