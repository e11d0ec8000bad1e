"""What the scheduler's side of the pool answers, on a real arena that two replicas share."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpool_parts import (
    BLOCK_TOKENS,
    Replica,
    arena_at,
    assert_nothing_is_held,
    block_keys,
    replicas,
    request,
)
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ScheduleEndContext, make_offload_key
from vllm.v1.request import Request

from protos import blockkeys
from workers.kvpool import patience
from workers.kvpool.arena import Arena, Timing
from workers.kvpool.errors import ArenaBusy
from workers.kvpool.keys import arena_keys
from workers.kvpool.layout import State
from workers.kvpool.manager import LOADS_PER_REQUEST, ArenaManager, router_keys_of
from workers.kvpool.no_pool import NoPool
from workers.kvpool.router_keys import UNNAMED, RouterKeys
from workers.kvpool.slots import GONE
from workers.kvpool.stats import PoolStats

KEYS = block_keys(range(8))
BLOCKS = list(range(8))
STEP = ScheduleEndContext([], [])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.arena"


@pytest.fixture
def pair(path: Path) -> Iterator[tuple[Replica, Replica]]:
    with replicas(path) as (one, other):
        yield one, other


def stats(manager: ArenaManager, before: PoolStats | None = None) -> PoolStats:
    manager._gauges_at = 0.0
    return (before or PoolStats()).plus(manager.get_stats().to_dict())


def test_what_one_replica_stored_another_finds(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    asking = request("b", KEYS)
    assert other.found(asking, KEYS) == [False] * 8
    one.store(request("a", KEYS[:5]), KEYS[:5], BLOCKS[:5])
    assert other.found(asking, KEYS) == [True] * 5 + [False] * 3


def test_a_block_that_is_being_written_is_a_miss_until_it_is_stored(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    storing = request("a", KEYS)
    output = one.manager.prepare_store(KEYS, storing)
    assert other.found(request("b", KEYS), KEYS) == [False] * 8
    assert other.manager.prepare_store(KEYS, request("c", KEYS)).keys_to_store == []
    one.copy_out(BLOCKS, output.store_spec)
    assert other.found(request("b", KEYS), KEYS) == [False] * 8
    one.manager.complete_store(set(KEYS), storing)
    assert other.found(request("b", KEYS), KEYS) == [True] * 8


def vllm_request(name: str, salt: str | None = None, lora: LoRARequest | None = None, **more: Any) -> Request:
    """As the EngineCore sees it, with the hashes that vLLM makes of its blocks."""
    algorithm = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(algorithm)
    return Request(
        name,
        list(range(8 * BLOCK_TOKENS)),
        SamplingParams(max_tokens=1),
        None,
        cache_salt=salt,
        lora_request=lora,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, algorithm),
        **more,
    )


def keys_of(asking: Request) -> list[OffloadKey]:
    return [make_offload_key(block, 0) for block in asking.block_hashes]


def test_the_same_tokens_under_another_salt_or_adapter_are_never_found(path: Path) -> None:
    adapters = [LoRARequest("law", 1, "/law"), LoRARequest("law", 1, "/law-2"), LoRARequest("med", 2, "/law")]
    askers = [
        vllm_request("plain"),
        vllm_request("salt", "tenant"),
        vllm_request("salt-2", "tenant-2"),
        *(vllm_request(f"lora-{n}", lora=adapter) for n, adapter in enumerate(adapters)),
        vllm_request("both", "tenant", adapters[0]),
    ]
    for stored in askers:
        with replicas(path.with_suffix(f".{stored.request_id}")) as (writer, reader):
            keys = keys_of(stored)
            writer.store(request("a", keys), keys, BLOCKS)
            for asking in askers:
                found = reader.found(request(asking.request_id, keys_of(asking)), keys_of(asking))
                assert found == [asking is stored] * 8, (stored.request_id, asking.request_id)


def test_every_process_gives_equal_prompts_equal_keys() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        elsewhere = pool.apply(_keys_elsewhere)
    assert elsewhere == keys_of(vllm_request("plain"))


def _keys_elsewhere() -> list[OffloadKey]:
    return keys_of(vllm_request("another name"))


@pytest.mark.parametrize("key", [make_offload_key(b"x" * 32, 1), make_offload_key(b"x" * 16, 0), b""])
def test_keys_that_are_not_hashes_of_group_0_are_refused(key: OffloadKey) -> None:
    with pytest.raises(ValueError, match="SHA-256 hashes of blocks of KV group 0"):
        arena_keys([key])


def test_a_request_asks_the_arena_once_a_step_and_counts_as_demand_once(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    one.store(request("a", KEYS[:5]), KEYS[:5], BLOCKS[:5])
    calls: list[tuple[int, bool]] = []
    lookup = Arena.lookup

    def counted(arena: Arena, keys: list[bytes], asked: bool = True) -> list[State]:
        calls.append((len(keys), asked))
        return lookup(arena, keys, asked)

    monkeypatch.setattr(Arena, "lookup", counted)
    asking = request("b", KEYS)
    for _ in range(3):
        assert other.found(asking, KEYS[2:]) == [True] * 3 + [False] * 3
    assert calls == [(6, True), (6, False), (6, False)]
    told = stats(other.manager)
    assert (told.hits, told.misses) == (3, 3)


def test_a_lookup_sees_what_was_stored_since_the_last_step(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    asking = request("b", KEYS)
    for count in (2, 5, 8):
        one.store(request(f"a{count}", KEYS[:count]), KEYS[:count], BLOCKS[:count])
        assert other.found(asking, KEYS) == [True] * count + [False] * (8 - count)


def test_a_key_that_the_request_does_not_name_is_looked_up_alone(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, BLOCKS)
    assert other.found(request("b", []), KEYS[:2]) == [True, True]


def test_leases_last_until_the_load_is_done(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, BLOCKS)
    loading = request("b", KEYS)
    other.manager.prepare_load(KEYS, loading)
    assert one.arena.usage().leased == 8
    flood = block_keys(range(100, 140))
    one.store(request("c", flood), flood, list(range(40)))
    assert other.found(request("d", KEYS), KEYS) == [True] * 8
    other.manager.complete_load(set(KEYS), loading)
    assert_nothing_is_held(one.arena)


def test_a_block_that_is_gone_gets_no_slot(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS[:3]), KEYS[:3], BLOCKS[:3])
    slots = other.manager.prepare_load(KEYS[:4], request("b", KEYS)).slots
    assert [slot == GONE for slot in slots] == [False, False, False, True]


def test_a_request_whose_loads_fail_again_and_again_computes(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, BLOCKS)
    asking = request("b", KEYS)
    for _ in range(LOADS_PER_REQUEST):
        assert other.found(asking, KEYS) == [True] * 8
        other.load(asking, KEYS, BLOCKS)
    assert other.found(asking, KEYS) == [False] * 8
    assert other.found(request("c", KEYS), KEYS) == [True] * 8


def test_a_prefix_that_a_request_used_is_kept_although_it_was_not_loaded(path: Path) -> None:
    with replicas(path, slots=16) as (one, other):
        one.store(request("a", KEYS), KEYS, BLOCKS)
        more = block_keys(range(10, 18))
        one.store(request("b", more), more, BLOCKS)
        using = request("c", KEYS)  # whose blocks are in its engine's own cache
        other.manager.on_new_request(using)
        other.manager.on_request_finished(using)
        flood = block_keys(range(20, 28))
        one.store(request("d", flood), flood, BLOCKS)
        assert other.found(request("e", KEYS), KEYS) == [True] * 8
        assert other.found(request("f", more), more) == [False] * 8


def test_a_full_arena_evicts_what_was_used_least_lately_and_says_so(path: Path) -> None:
    with replicas(path, count=1, slots=8) as (one,):
        assert one.store(request("a", KEYS), KEYS, BLOCKS) == KEYS
        more = block_keys(range(10, 13))
        assert one.store(request("b", more), more, BLOCKS[:3]) == more
        assert one.found(request("c", KEYS), KEYS) == [True] * 5 + [False] * 3  # a prefix from its end
        told = stats(one.manager)
        assert (told.stored, told.evicted, told.slots, told.ready) == (11, 3, 8, 8)


def test_an_arena_in_which_nothing_can_be_evicted_stores_nothing(path: Path) -> None:
    with replicas(path, slots=8) as (one, other):
        one.store(request("a", KEYS), KEYS, BLOCKS)
        loading = request("b", KEYS)
        other.manager.prepare_load(KEYS, loading)
        more = block_keys(range(10, 13))
        assert one.store(request("c", more), more, BLOCKS[:3]) == []
        assert stats(one.manager).refused == 3
        other.manager.complete_load(set(KEYS), loading)
        assert one.store(request("d", more), more, BLOCKS[:3]) == more


def test_blocks_that_are_there_are_not_stored_twice(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS[:6]), KEYS[:6], BLOCKS[:6])
    assert other.store(request("b", KEYS), KEYS, BLOCKS) == KEYS[6:]


def test_a_store_that_failed_is_given_up(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    storing = request("a", KEYS)
    one.manager.prepare_store(KEYS, storing)
    one.manager.complete_store(set(KEYS), storing, success=False)
    assert_nothing_is_held(one.arena)
    assert other.found(request("b", KEYS), KEYS) == [False] * 8


def test_a_reset_gives_back_what_this_engine_holds_and_keeps_what_is_ready(
    pair: tuple[Replica, Replica],
) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, BLOCKS)
    one.manager.prepare_load(KEYS, request("b", KEYS))
    more = block_keys(range(10, 13))
    storing = request("c", more)
    one.manager.prepare_store(more, storing)
    one.manager.reset_cache()
    assert_nothing_is_held(one.arena)
    one.manager.complete_store(set(more), storing)  # vLLM does not call it; it would do no harm
    assert other.found(request("d", KEYS + more), KEYS + more) == [True] * 8 + [False] * 3


def test_a_replica_that_ends_leaves_its_blocks_and_nothing_else(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, BLOCKS)
    one.manager.prepare_load(KEYS, request("b", KEYS))
    one.manager.prepare_store(more := block_keys(range(10, 13)), request("c", more))
    one.manager.shutdown()
    assert_nothing_is_held(other.arena)
    assert other.found(request("d", KEYS), KEYS) == [True] * 8


def test_no_event_tells_the_router_that_this_engine_holds_the_pools_blocks(
    pair: tuple[Replica, Replica],
) -> None:
    one, other = pair
    one.store(request("a", KEYS), KEYS, BLOCKS)
    other.load(request("b", KEYS), KEYS, BLOCKS)
    assert [*one.manager.take_events(), *other.manager.take_events()] == []


class Stopped:
    """Somebody who was stopped inside the arena, from `with` to its end."""

    def __init__(self, path: Path) -> None:
        self._arena = Arena.open(path)

    def __enter__(self) -> None:
        self._inside = self._arena._guard.entered(10.0)
        self._inside.__enter__()

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(None, None, None)
        self._arena.close()


def test_a_neighbour_stopped_inside_the_arena_costs_a_miss_and_one_deadline(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = 0.05
    one = Replica(arena_at(path, timing=Timing(lookup_s=deadline, other_s=deadline)), seed=0)
    one.store(request("a", KEYS), KEYS, BLOCKS)
    loading, storing = request("b", KEYS), request("c", more := block_keys(range(10, 13)))
    one.manager.prepare_load(KEYS[:2], loading)
    one.copy_out(BLOCKS[:3], one.manager.prepare_store(more, storing).store_spec)
    lookups = 0

    def counted(*_: object, **__: object) -> list[State]:
        nonlocal lookups
        lookups += 1
        raise ArenaBusy("somebody is stopped")

    with Stopped(path):
        started = time.monotonic()
        assert one.found(request("d", KEYS), KEYS) == [False] * 8
        assert one.manager.prepare_load(KEYS, request("e", KEYS)).slots == (GONE,) * 8
        assert one.manager.prepare_store(KEYS, request("f", KEYS)).keys_to_store == []
        one.manager.complete_load(set(KEYS[:2]), loading)
        one.manager.complete_store(set(more), storing)
        one.manager.touch(KEYS, loading)
        one.manager.get_stats()
        for number in range(50):
            assert one.found(request(f"d{number}", KEYS), KEYS) == [False] * 8
        assert time.monotonic() - started < 10 * deadline  # and not 50 times a deadline
        monkeypatch.setattr(Arena, "lookup", counted)
        one.found(request("g", KEYS), KEYS)
        assert lookups == 0  # it is left alone
        monkeypatch.undo()

    one.manager._patience._until = 0.0  # a second later
    assert one.found(request("h", KEYS + more), KEYS + more) == [True] * 11  # what was owed is done
    assert_nothing_is_held(one.arena)
    assert stats(one.manager).stored == 3  # and the eight before
    one.close()


@pytest.mark.parametrize("error", [ArenaBusy("busy"), ValueError("a bug"), OSError("no locks")])
def test_whatever_an_arena_raises_is_a_miss_and_nothing_stored(
    pair: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    one, _ = pair
    monkeypatch.setattr(patience, "BUSY_PAUSE_S", 0.0)
    monkeypatch.setattr(patience, "FAULT_PAUSE_S", 0.0)

    def fails(*_: object, **__: object) -> None:
        raise error

    for name in ("lookup", "lease", "allocate", "commit", "release", "touch", "usage", "close"):
        monkeypatch.setattr(Arena, name, fails)
    asking = request("a", KEYS)
    assert one.manager.lookup(KEYS[0], asking) is LookupResult.MISS
    assert one.manager.prepare_load(KEYS, asking).slots == (GONE,) * 8
    one.manager.complete_load(set(KEYS), asking)
    assert one.manager.prepare_store(KEYS, asking).keys_to_store == []
    one.manager.complete_store(set(), asking)
    one.manager.touch(KEYS, asking)
    one.manager.on_schedule_end(STEP)
    one.manager.reset_cache()
    assert stats(one.manager).busy >= 4
    one.manager.shutdown()
    monkeypatch.undo()


def test_an_engine_without_a_pool_finds_and_stores_nothing() -> None:
    none, asking = NoPool("a reason"), request("a", KEYS)
    none.on_new_request(asking)
    assert none.lookup(KEYS[0], asking) is LookupResult.MISS
    assert none.prepare_store(KEYS, asking).keys_to_store == []
    assert none.prepare_load(KEYS, asking).slots == (GONE,) * 8
    assert PoolStats().plus(none.get_stats()).slots == 0


def test_the_arena_learns_the_routers_keys_of_blocks(pair: tuple[Replica, Replica]) -> None:
    one, _ = pair
    asking = vllm_request("a", "tenant", LoRARequest("law", 1, "/law"))
    keys = keys_of(asking)
    storing = request("a", keys)
    one.manager.announce("a", router_keys_of(asking, "revision", BLOCK_TOKENS))
    one.manager.on_new_request(storing)
    one.store(storing, keys[:3], BLOCKS[:3])
    one.store(storing, keys[3:], BLOCKS[3:])
    root = blockkeys.root("revision", "law", "tenant")
    tokens = list(asking.all_token_ids)
    expected = dict(
        zip(arena_keys(keys), blockkeys.keys(np.array(tokens), BLOCK_TOKENS, root).tolist(), strict=True)
    )
    there = one.arena.snapshot()
    assert dict(zip(there.keys, there.extras, strict=True)) == expected


def test_router_keys_grow_with_the_request() -> None:
    tokens = list(range(10))
    names = RouterKeys(tokens, 4, root=5)
    assert names.ending_at(12) == UNNAMED
    first = names.ending_at(4)
    tokens += [10, 11]
    assert names.ending_at(12) not in (UNNAMED, first)
    assert RouterKeys(tokens, 4, root=5).ending_at(12) == names.ending_at(12)
    assert [names.ending_at(token) for token in (None, 0, 3, 16)] == [UNNAMED] * 4


def test_statistics_add_up_over_steps(pair: tuple[Replica, Replica]) -> None:
    one, other = pair
    one.store(request("a", KEYS[:5]), KEYS[:5], BLOCKS[:5])
    first = stats(one.manager)
    assert (first.stored, first.slots, first.ready) == (5, 32, 5)
    one.store(request("b", KEYS), KEYS, BLOCKS)
    second = stats(one.manager, first)
    assert (second.stored, second.refused, second.ready) == (8, 5, 8)
    asking = request("c", KEYS)
    other.found(asking, KEYS)
    other.load(asking, KEYS, BLOCKS)
    other.manager.failed(2)
    told = stats(other.manager)
    assert (told.hits, told.misses, told.loaded, told.lost) == (8, 0, 8, 2)
    assert told.plus(None) == told
