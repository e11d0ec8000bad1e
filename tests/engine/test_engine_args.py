"""vLLM's own parser judges engine arguments before anything is placed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from workers.checkpoint import PreparedModel, prepare
from workers.config import EngineConfig
from workers.engine_args import EngineArgsError, build, check, no_events
from workers.kvpool.pool_config import PoolConfig

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepare("smollm2")


def _check(prepared: PreparedModel, **settings: Any) -> None:
    check(EngineConfig(**settings), prepared)


def test_the_defaults_are_accepted_and_leave_no_environment_behind(prepared: PreparedModel) -> None:
    before = dict(os.environ)
    _check(prepared)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"engine_args": {"kv_cache_dtyp": "fp8"}}, "did you mean kv_cache_dtype"),
        ({"engine_args": {"tensor_parallel_size": 2}}, "set engine.tensor_parallel_size instead"),
        ({"engine_args": {"kv_events_config": {}}}, "set engine.kv_events instead"),
        ({"engine_args": {"gpu_memory_utilization": 7.0}}, "gpu_memory_utilization"),
        ({"engine_args": {"block_size": "many"}}, "block_size"),
        ({"max_model_len": 1_000_000}, "max_model_len"),
        ({"dtype": "float12"}, "dtype"),
    ],
)
def test_what_vllm_would_refuse_is_refused_on_one_line(
    prepared: PreparedModel, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineArgsError, match=says) as refused:
        _check(prepared, **settings)
    assert "\n" not in str(refused.value)


def test_any_further_engine_argument_passes_through(prepared: PreparedModel) -> None:
    args = build(EngineConfig(engine_args={"block_size": 64, "seed": 5}), prepared)
    assert (args.block_size, args.seed) == (64, 5)


def test_steps_on_cpu_are_short_enough_for_a_cancel(prepared: PreparedModel) -> None:
    assert build(EngineConfig(), prepared).max_num_batched_tokens == 512
    assert build(EngineConfig(max_num_batched_tokens=64), prepared).max_num_batched_tokens == 64


def test_kv_events_are_published_where_the_replica_listens_and_nowhere_else(prepared: PreparedModel) -> None:
    config = build(EngineConfig(), prepared, None, ("ipc:///x/events", "ipc:///x/replay")).kv_events_config
    assert (config.enable_kv_cache_events, config.publisher) == (True, "zmq")
    assert (config.endpoint, config.replay_endpoint) == ("ipc:///x/events", "ipc:///x/replay")
    assert build(EngineConfig(), prepared).kv_events_config is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, ""),
        ({"kv_events": False}, "engine.kv_events"),
        ({"engine_args": {"enable_prefix_caching": False}}, "engine_args.enable_prefix_caching"),
    ],
)
def test_an_engine_without_events_says_why(settings: dict[str, Any], why: str) -> None:
    assert why in (said := no_events(EngineConfig(**settings)))
    assert bool(said) == bool(why)


def test_an_engine_shares_no_blocks_unless_it_is_told_to(prepared: PreparedModel, tmp_path: Path) -> None:
    assert build(EngineConfig(), prepared).kv_transfer_config is None
    pool = EngineConfig(kv_pool_gib=0.01, kv_pool_folder=str(tmp_path / "pool"))
    shared = build(pool, prepared).kv_transfer_config
    assert (shared.kv_role, shared.kv_load_failure_policy) == ("kv_both", "recompute")
    assert PoolConfig.from_extra(shared.kv_connector_extra_config).revision == prepared.revision
    check(pool, prepared)
    assert not (tmp_path / "pool").exists()


def test_an_engine_that_can_have_no_pool_is_started_without(prepared: PreparedModel) -> None:
    config = EngineConfig(kv_pool_gib=1.0, pipeline_parallel_size=2)
    assert build(config, prepared).kv_transfer_config is None
