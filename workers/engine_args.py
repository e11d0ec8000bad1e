"""From our settings to vLLM's, checked by vLLM before anything is placed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from rapidfuzz import process

from workers.config import EngineConfig
from workers.cpu_dtype import resolve_dtype
from workers.kv_events import REPLAY_BATCHES
from workers.kvpool.pool_config import CONNECTOR, CONNECTOR_MODULE, no_pool, pool_config
from workers.placement import CONFIG_KEY, ReplicaPlacement
from workers.step_tracing import TELEMETRY_KEY

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from telemetry.config import TelemetryConfig
    from workers.checkpoint import PreparedModel

CPU_STEP_TOKENS = 512
"""Default tokens per engine step on CPU. A cancel takes effect between steps, so a step must be
well under a second; at about 1 ms a token this is half of one."""

_OURS = {
    "model": "engine.model",
    "tokenizer": "engine.model",
    "served_model_name": "engine.served_name",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "pipeline_parallel_size": "engine.pipeline_parallel_size",
    "max_model_len": "engine.max_model_len",
    "dtype": "engine.dtype",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "enforce_eager": "engine.compile",
    "distributed_executor_backend": "nothing: shards are always Ray actors",
    "data_parallel_size": "replicas",
    "kv_events_config": "engine.kv_events",
    "enable_logging_iteration_details": "nothing: the load report needs it",
    "additional_config": "nothing: Kvorum uses it",
    "worker_extension_cls": "nothing: Kvorum uses it",
}


class EngineArgsError(ValueError):
    """vLLM would refuse these engine arguments; the message is one line."""


def resolve_device(wanted: str) -> Literal["cpu", "cuda"]:
    """The device shards run on; `auto` asks vLLM which build this is."""
    if wanted in ("cpu", "cuda"):
        return "cuda" if wanted == "cuda" else "cpu"
    from vllm.platforms import current_platform  # noqa: PLC0415

    return "cuda" if current_platform.is_cuda() else "cpu"


def no_events(config: EngineConfig) -> str:
    """Why this engine publishes no KV events; empty when it does."""
    if not config.kv_events:
        return "KV events are off (engine.kv_events)"
    if not config.engine_args.get("enable_prefix_caching", True):
        return "prefix caching is off (engine_args.enable_prefix_caching)"
    return ""


def dtype_note(config: EngineConfig, prepared: PreparedModel) -> str:
    """What the user should know of the data type that `auto` is on this host; empty when nothing."""
    device = resolve_device(config.device)
    if resolve_dtype(config.dtype, device, prepared.path, config.engine_args) == config.dtype:
        return ""
    return (
        "computing in float32: this CPU has no AVX-512, without which bfloat16 is several times slower; "
        "--dtype bfloat16 takes half the memory"
    )


def build(
    config: EngineConfig,
    prepared: PreparedModel,
    placement: ReplicaPlacement | None = None,
    event_endpoints: tuple[str, str] | None = None,
    telemetry: TelemetryConfig | None = None,
) -> AsyncEngineArgs:
    """vLLM's arguments for one replica; without a placement they are only good for checking.

    Args:
        event_endpoints: where the engine is to publish KV events and to replay them; None for no events.
        telemetry: what the shards are to record of their steps; None for nothing.

    Raises:
        EngineArgsError: an unknown argument, or one that has a Kvorum setting of its own.
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the shard pins itself
    from vllm.config import KVTransferConfig  # noqa: PLC0415
    from vllm.config.kv_events import KVEventsConfig  # noqa: PLC0415
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415

    from workers.executor import RayShardExecutor  # noqa: PLC0415

    _refuse_unknown(config.engine_args, {field.name for field in fields(AsyncEngineArgs)})
    device = placement.device if placement else resolve_device(config.device)
    values: dict[str, Any] = {
        "model": str(prepared.path),
        "served_model_name": config.served_name or prepared.name,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "max_model_len": config.max_model_len,
        "dtype": resolve_dtype(config.dtype, device, prepared.path, config.engine_args),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "distributed_executor_backend": RayShardExecutor,
        "enable_prefix_caching": True,
        "enable_log_requests": False,
        "worker_extension_cls": "workers.overlap.worker.OverlapWorker",
        "disable_log_stats": True,  # our own stat logger is used instead
        "enable_logging_iteration_details": True,  # only our stat logger sees them
    }
    if device == "cpu":
        values["enforce_eager"] = not config.compile
        values["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        values["max_num_batched_tokens"] = config.max_num_batched_tokens or max(
            CPU_STEP_TOKENS, config.max_num_seqs
        )
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        # Without it a rank that waits for a lost one is told after half an hour.
        values["distributed_timeout_seconds"] = max(1, int(config.start_timeout_s))
        values["cpu_distributed_timeout_seconds"] = values["distributed_timeout_seconds"]
    if config.lora_modules:
        values["enable_lora"] = True
        values["max_loras"] = len(config.lora_modules)
    if event_endpoints is not None:
        values["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=event_endpoints[0],
            replay_endpoint=event_endpoints[1],
            buffer_steps=REPLAY_BATCHES,
        )
    if not no_pool(config, device, placement):
        values["kv_transfer_config"] = KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=pool_config(config, prepared.revision, placement).to_extra(),
        )
    if placement is not None:
        values["additional_config"] = {CONFIG_KEY: placement.to_config()}
        if telemetry is not None:
            values["additional_config"][TELEMETRY_KEY] = telemetry.model_dump(mode="json")
    return AsyncEngineArgs(**(values | config.engine_args))


def check(config: EngineConfig, prepared: PreparedModel) -> None:
    """Let vLLM validate everything it can without a device.

    Raises:
        EngineArgsError: with vLLM's own reason, on one line.
    """
    from pydantic import ValidationError  # noqa: PLC0415

    with _unchanged_environment():
        try:
            build(config, prepared).create_engine_config()
        except EngineArgsError:
            raise
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise EngineArgsError(_one_line(f"{where}: {message}" if where else message)) from error
        except (ValueError, TypeError, NotImplementedError, AssertionError, OSError, KeyError) as error:
            raise EngineArgsError(_one_line(str(error) or type(error).__name__)) from error


def _refuse_unknown(given: dict[str, Any], known: set[str]) -> None:
    for name in given:
        if name in _OURS:
            raise EngineArgsError(f"engine_args.{name}: set {_OURS[name]} instead")
        if name not in known:
            near = process.extractOne(name, known)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise EngineArgsError(f"engine_args.{name}: vLLM has no such engine argument{hint}")


@contextmanager
def _unchanged_environment() -> Iterator[None]:
    """vLLM's config objects write environment variables; a check must leave none behind."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
