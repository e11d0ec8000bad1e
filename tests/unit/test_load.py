"""Load is what the replica has accepted and not finished, and speeds are robust to a stall."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes_kv import stored

from workers.accepted import Accepted
from workers.journal import Journal
from workers.kvpool.load_speed import LoadSpeed
from workers.kvpool.pool_keys import Transitions
from workers.kvpool.stats import PoolStats
from workers.load import LoadRecorder
from workers.resident import ResidentBlocks
from workers.speed import StepSpeed


def prefix_of(resident: set[int]) -> Any:
    def prefix(keys: Sequence[int], start: int) -> int:
        while start < len(keys) and keys[start] in resident:
            start += 1
        return start

    return prefix


def test_every_sequence_counts_from_acceptance_to_the_end() -> None:
    accepted = Accepted()
    with accepted.accept(4, 100) as first:
        first.first_token()
        with accepted.accept(1, 10):
            assert accepted.sequences == 5
        assert accepted.sequences == 4
    assert accepted.sequences == 0


def test_a_request_that_breaks_releases_all_it_held() -> None:
    accepted = Accepted()
    with pytest.raises(RuntimeError), accepted.accept(2, 100):
        raise RuntimeError("broke")
    assert accepted.sequences == 0
    assert accepted.backlog(prefix_of(set())) == (0, 0.0)


def test_the_backlog_is_what_follows_each_resident_prefix() -> None:
    accepted, resident = Accepted(), {1, 2}
    with (
        accepted.accept(1, 50, keys=[1, 2, 3], block_size=16),
        accepted.accept(1, 40, keys=[9, 2], block_size=16),
    ):
        assert accepted.backlog(prefix_of(resident)).tokens == (50 - 32) + 40


def test_the_backlog_shrinks_as_chunks_become_resident_and_ends_with_the_first_token() -> None:
    accepted, resident = Accepted(), set[int]()
    with accepted.accept(1, 50, keys=[1, 2, 3], block_size=16) as held:
        seen = []
        for key in (1, 2, 3):
            resident.add(key)
            seen.append(accepted.backlog(prefix_of(resident)).tokens)
        assert seen == [34, 18, 2]
        held.first_token()
        held.first_token()
        assert accepted.backlog(prefix_of(resident)) == (0, 0.0)
        assert accepted.sequences == 1


def test_pairs_of_the_backlog_are_those_of_computing_what_is_left_token_by_token() -> None:
    accepted, resident = Accepted(), {1, 2, 9}
    with (
        accepted.accept(1, 50, keys=[1, 2, 3], block_size=16),
        accepted.accept(1, 40, keys=[9, 2], block_size=16),
    ):
        one_by_one = sum(before + 0.5 for before in [*range(32, 50), *range(16 * 2, 40)])
        assert accepted.backlog(prefix_of(resident)).pairs == one_by_one


def test_long_prompt_has_more_pairs_than_short_ones_of_as_many_tokens() -> None:
    one, many = Accepted(), Accepted()
    with ExitStack() as held:
        held.enter_context(one.accept(1, 1000))
        for _ in range(10):
            held.enter_context(many.accept(1, 100))
        (tokens, pairs), (same, fewer) = one.backlog(prefix_of(set())), many.backlog(prefix_of(set()))
    assert tokens == same
    assert pairs == 10 * fewer


def test_chunk_takes_its_pairs_from_the_backlog() -> None:
    accepted, resident = Accepted(), set[int]()
    with accepted.accept(1, 48, keys=[1, 2, 3], block_size=16):
        before = accepted.backlog(prefix_of(resident)).pairs
        resident.add(1)
        assert before - accepted.backlog(prefix_of(resident)).pairs == 16 * 16 / 2
        resident.add(2)
        assert before - accepted.backlog(prefix_of(resident)).pairs == 32 * 32 / 2


def test_a_wholly_cached_prompt_still_has_its_last_token_to_compute() -> None:
    accepted = Accepted()
    with accepted.accept(1, 32, keys=[1, 2], block_size=16):
        assert accepted.backlog(prefix_of({1, 2})) == (1, 31.5)  # it attends to all the others


def test_without_block_keys_the_routers_expectation_counts() -> None:
    accepted = Accepted()
    with (
        accepted.accept(1, 100, expected_cached_tokens=64),
        accepted.accept(1, 10, expected_cached_tokens=99),
    ):
        assert accepted.backlog(prefix_of(set())) == (36 + 1, 36 * (64 + 18) + 9.5)


def test_speeds_are_unknown_before_any_step() -> None:
    speed = StepSpeed()
    assert speed.prefill_ms_per_token == speed.decode_step_ms == 0


def test_one_stalled_step_does_not_move_the_speeds() -> None:
    speed = StepSpeed()
    for _ in range(9):
        speed.step(15.0, 0, 8)
        speed.step(500.0, 500, 0)
    speed.step(9_000.0, 0, 8)
    speed.step(60_000.0, 500, 0)
    assert speed.decode_step_ms == 15
    assert speed.prefill_ms_per_token == 1


def test_short_prefills_do_not_hide_the_speed_of_long_ones() -> None:
    speed = StepSpeed()
    for _ in range(20):
        speed.step(20.0, 4, 0)  # the fixed cost of a step, mostly
    speed.step(512.0, 512, 0)
    assert speed.prefill_ms_per_token == 1


def test_decoding_beside_a_prefill_is_not_charged_to_it() -> None:
    speed = StepSpeed()
    speed.step(12.0, 0, 4)
    speed.step(512.0, 500, 4)
    assert speed.prefill_ms_per_token == 1


def test_steps_that_computed_nothing_are_ignored() -> None:
    speed = StepSpeed()
    speed.step(0.0, 10, 0)
    speed.step(7.0, 0, 0)
    assert speed.prefill_ms_per_token == speed.decode_step_ms == 0


def test_the_recorder_reports_the_engines_steps_and_what_was_accepted() -> None:
    changes: list[int] = []
    resident = ResidentBlocks("revision", Journal())
    recorder = LoadRecorder(resident, lambda: changes.append(1))
    step = SimpleNamespace(elapsed_ms=40.0, num_ctx_tokens=20, num_generation_requests=0, is_dummy=False)
    scheduler: Any = SimpleNamespace(
        num_running_reqs=2,
        num_waiting_reqs=1,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=SimpleNamespace(queries=100, hits=60),
        kv_connector_stats={
            "data": {"kvorum:kv_pool_hits": {(): 3}, "vllm:kv_offload_load_bytes": {(): 4096}}
        },
        iteration_details=step,
    )
    iteration: Any = SimpleNamespace(num_generation_tokens=2, num_preempted_reqs=1)
    recorder.record(scheduler, iteration)
    recorder.record(None, iteration)
    assert recorder.pool == PoolStats(hits=3, loaded_bytes=4096)
    resident.apply([stored([1, 2, 3, 4])])
    keys = resident.prompt_keys(np.array([1, 2, 3, 4, 5, 6]))
    with recorder.accepted.accept(3, 6, keys=keys, block_size=4):
        load = recorder.snapshot()
    assert (load.running, load.waiting, load.kv_usage) == (2, 2, 0.25)
    assert (load.prefix_queries_tokens, load.prefix_hits_tokens) == (100, 60)
    assert (load.generated_tokens, load.preemptions) == (4, 2)
    assert (load.sequences, load.prefill_backlog_tokens, load.block_size) == (3, 2, 4)
    assert load.prefill_backlog_pairs == 2 * (4 + 1)
    assert load.prefill_ms_per_token == 2
    assert len(changes) == 2


def test_speed_of_loads_is_unknown_before_the_first() -> None:
    speed = LoadSpeed()
    speed.loaded(0, 1.0)  # what failed to load
    speed.loaded(100, 0.0)
    assert speed.ms(1 << 20) == 0


def test_one_stalled_load_does_not_move_the_speed() -> None:
    speed = LoadSpeed()
    for _ in range(9):
        speed.loaded(4_000_000, 0.002)
    speed.loaded(4_000_000, 30.0)
    speed.loaded(1000, 0.01)  # small ones are mostly their fixed cost
    assert speed.ms(1_000_000) == pytest.approx(0.5)


def of_pool(**told: float) -> Any:
    """A step in which the pool's connector told these numbers."""
    return SimpleNamespace(
        num_running_reqs=0,
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=0.0,
        prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
        kv_connector_stats={"data": {name.replace("__", ":"): {(): value} for name, value in told.items()}},
        iteration_details=None,
    )


def test_the_recorder_reports_the_pool_and_how_fast_it_loads() -> None:
    recorder = LoadRecorder(ResidentBlocks("revision", Journal()), lambda: None)
    assert recorder.snapshot().pool_slots == 0
    recorder.pool_part_bytes = 1_000_000
    recorder.record(of_pool(kvorum__kv_pool_slots=40, kvorum__kv_pool_ready=7), None)
    # Two ranks loaded two blocks each, at the same time, in 3 ms.
    recorder.record(of_pool(vllm__kv_offload_load_bytes=4_000_000, vllm__kv_offload_load_time=0.006), None)
    recorder.record(of_pool(), None)
    load = recorder.snapshot()
    assert (load.pool_slots, load.pool_ready_blocks) == (40, 7)
    assert load.pool_load_ms_per_block == pytest.approx(1.5)
    recorder.forget_speeds()
    assert recorder.snapshot().pool_load_ms_per_block == 0


def test_what_the_pool_holds_is_nothing_to_compute() -> None:
    resident = ResidentBlocks("revision", Journal())
    recorder = LoadRecorder(resident, lambda: None)
    resident.apply([stored([1, 2, 3, 4])])
    keys = resident.prompt_keys(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 9]))
    with recorder.accepted.accept(1, 10, keys=keys, block_size=4):
        assert recorder.snapshot().prefill_backlog_tokens == 6
        resident.pool.apply(Transitions([keys[1]], []))
        assert recorder.snapshot().prefill_backlog_tokens == 2
