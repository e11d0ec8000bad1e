"""vLLM's scheduler and both halves of its connector, as in an engine, around a model that can be checked.

The "model" writes to each token's place in the KV cache bytes that follow from all tokens up to it, and
stops at a place that holds anything else: one wrong byte, copied anywhere, fails the test. It samples a
token that follows from the prefix, so that equal prompts are answered equally.
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from workers import engine_args
from workers.checkpoint import PreparedModel
from workers.config import EngineConfig
from workers.journal import Journal
from workers.kv_messages import Event, decode
from workers.kvpool.stats import PoolStats
from workers.placement import ReplicaPlacement
from workers.resident import ResidentBlocks

BLOCK = 32
LAYERS = 2
HEADS = 2
HEAD_BYTES = 2 * 32 * 4
"""Of a token in one head: key and value of 32 numbers in float32, as tiny_models has them."""
VOCABULARY = 500
REVISION = "a revision"


def vllm_config(model: Path, pool: Path | None, tp: int = 1, blocks: int = 64, **settings: Any) -> VllmConfig:
    """By our own engine arguments, of a tiny model; `pool`: the folder of the arena."""
    arguments = {"block_size": BLOCK, "async_scheduling": False, "skip_tokenizer_init": True}
    arguments |= settings.pop("engine_args", {})
    config = EngineConfig(
        **{
            "model": str(model),
            "dtype": "float32",
            "tensor_parallel_size": tp,
            "kv_pool_gib": 0.01 if pool else 0.0,
            "kv_pool_folder": str(pool) if pool else None,
            "max_num_batched_tokens": 256,
            "engine_args": arguments,
        }
        | settings
    )
    prepared = PreparedModel("tiny", model, str(model), REVISION, tp, False, model)
    placement = ReplicaPlacement("r0", "e0", "tests", "", "cpu", "gloo", ())
    args = engine_args.build(config, prepared, placement, ("ipc://none", "ipc://none"))
    made = replace(args, distributed_executor_backend="mp" if tp > 1 else "uni").create_engine_config()
    made.kv_events_config.publisher = "null"  # see ScheduledEngine.publish
    made.cache_config.num_gpu_blocks = blocks
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


@dataclass
class Answer:
    tokens: list[int]
    cached: int
    """Prompt tokens that were not computed."""


@dataclass
class _Sequence:
    tokens: list[int]
    blocks: list[int]
    digests: list[bytes] = field(default_factory=list)

    def content(self, position: int, width: int, kind: bytes) -> bytes:
        """Of the token there, in a layer of a rank."""
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else b""
            token = self.tokens[len(self.digests)].to_bytes(4, "little")
            self.digests.append(hashlib.blake2b(before + token, digest_size=16).digest())
        return hashlib.blake2b(self.digests[position] + kind, digest_size=32).digest() * (width // 32)


class Rank:
    """What a shard does in a step, in vLLM's order (`KVConnectorModelRunnerMixin`)."""

    def __init__(self, config: VllmConfig, kv: KVCacheConfig, rank: int) -> None:
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        spec = kv.kv_cache_groups[0].kv_cache_spec
        self.rank = rank
        self.width = spec.page_size_bytes // BLOCK
        self.memory = np.full((LAYERS, kv.num_blocks, BLOCK, self.width), rank + 1, np.uint8)
        self.connector: Any = None
        self._sequences: dict[str, _Sequence] = {}
        if config.kv_transfer_config is not None:
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv)
            shape = (kv.num_blocks, spec.num_kv_heads, BLOCK, 2 * spec.head_size)
            layers = torch.from_numpy(self.memory).view(torch.float32)
            names = kv.kv_cache_groups[0].layer_names
            self.connector.register_kv_caches(
                {n: layer.view(shape) for n, layer in zip(names, layers, strict=True)}
            )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self.connector is None:
            return self._compute(step)
        self.connector.handle_preemptions(step.kv_connector_metadata)
        self.connector.bind_connector_metadata(step.kv_connector_metadata)
        output = self._compute(step)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        moved = self.connector.get_transfer_results(step.finished_req_ids)
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=moved.finished_sending,
            finished_recving=moved.finished_recving,
            failed_recving=moved.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return output

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        computed: dict[str, int] = {}
        for name in step.finished_req_ids:
            self._sequences.pop(name, None)
        for new in step.scheduled_new_reqs:
            self._sequences[new.req_id] = _Sequence(list(new.prompt_token_ids), list(new.block_ids[0]))
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            sequence = self._sequences[name]
            blocks = cached.new_block_ids[index]
            sequence.blocks += blocks[0] if blocks else []
            if name in cached.resumed_req_ids:
                sequence.blocks = list(blocks[0])
                sequence.tokens = list(cached.all_token_ids[name])
                del sequence.digests[len(sequence.tokens) :]
            computed[name] = cached.num_computed_tokens[index]
        names = list(step.num_scheduled_tokens)
        sampled = [self._forward(name, computed[name], step.num_scheduled_tokens[name]) for name in names]
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)

    def _forward(self, name: str, start: int, count: int) -> list[int]:
        sequence = self._sequences[name]
        for position in range(start + count):
            block, at = sequence.blocks[position // BLOCK], position % BLOCK
            for layer in range(LAYERS):
                place = self.memory[layer, block, at]
                right = sequence.content(position, self.width, bytes([layer, self.rank]))
                if position >= start:
                    place[:] = np.frombuffer(right, np.uint8)
                else:
                    assert place.tobytes() == right, (
                        f"{name}: token {position}, layer {layer}, rank {self.rank}"
                    )
        if start + count < len(sequence.tokens):
            return []
        token = int.from_bytes(sequence.digests[start + count - 1][:4], "little") % VOCABULARY
        sequence.tokens.append(token)
        return [token]


class ScheduledEngine:
    """One engine's EngineCore and shards, in one thread."""

    def __init__(self, config: VllmConfig) -> None:
        tp, blocks = config.parallel_config.tensor_parallel_size, config.cache_config.num_gpu_blocks
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=HEADS // tp, head_size=32, dtype=torch.float32
        )
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        page = spec.page_size_bytes
        tensors = [
            KVCacheTensor(LAYERS * blocks * page, names, layer_stride=blocks * page, block_stride=page)
        ]
        kv = KVCacheConfig(blocks, tensors, [KVCacheGroupSpec(names, spec)], kv_cache_layout="LBHNC")
        self.config = config
        self.ranks = [Rank(config, kv, rank) for rank in range(tp)]  # first, as in an EngineCore
        overlapping = bool(config.scheduler_config.async_scheduling)
        kind = AsyncScheduler if overlapping else Scheduler
        self.scheduler: Any = kind(
            config, kv, StructuredOutputManager(config), block_size=BLOCK, log_stats=True
        )
        self._ahead = int(overlapping)
        self._computed: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(algorithm)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, algorithm)
        self._gather = KVOutputAggregator(tp)
        self._cached: dict[str, int] = {}
        self.stats = PoolStats()
        self.preemptions = 0
        self.resident = ResidentBlocks(REVISION, Journal())
        self.scheduler.kv_event_publisher = self
        self.events: list[Event] = []

    def publish(self, batch: Any) -> None:
        """In the place of vLLM's publisher: what it would send, as a replica takes it."""
        events = decode(msgspec.msgpack.encode(batch))
        self.events += events
        self.resident.apply(events)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int = 4,
        salt: str = "",
        lora: LoRARequest | None = None,
    ) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        request = Request(
            name,
            list(prompt),
            params,
            None,
            cache_salt=salt or None,
            lora_request=lora,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[str, list[int]]:
        """One step; returns the tokens of each request that it gave some.

        With asynchronous scheduling the scheduler hears of a step when the next one is computed, too.
        """
        if self.scheduler.has_requests() or not self._computed:
            step = self.scheduler.schedule()
            self._computed.append((step, self._execute(step)))
            if len(self._computed) <= self._ahead and self.scheduler.has_requests():
                return {}
        return self._hear(*self._computed.popleft())

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        outputs = [rank.execute(step) for rank in self.ranks]
        assert all(output.sampled_token_ids == outputs[0].sampled_token_ids for output in outputs)
        return self._gather.aggregate(outputs) if self.ranks[0].connector is not None else outputs[0]

    def _hear(self, step: SchedulerOutput, computed: ModelRunnerOutput) -> dict[str, list[int]]:
        told: dict[str, list[int]] = {}
        for of_client in self.scheduler.update_from_output(step, computed).values():
            self._take(of_client.scheduler_stats)
            for output in of_client.outputs:
                assert output.finish_reason is None or str(output.finish_reason) in ("length", "abort")
                told.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.prefill_stats is not None:
                    self._cached.setdefault(output.request_id, output.prefill_stats.num_cached_tokens)
        return told

    def finish(self, steps: int = 20_000) -> dict[str, Answer]:
        """Until there is nothing left to do, transfers included."""
        tokens: dict[str, list[int]] = {}
        for _ in range(steps):
            if not self.scheduler.has_requests() and not self._computed:
                return {name: Answer(given, self._cached.get(name, 0)) for name, given in tokens.items()}
            for name, given in self.step().items():
                tokens.setdefault(name, []).extend(given)
        raise AssertionError(f"not done after {steps} steps")

    def ask(self, name: str, prompt: Sequence[int], tokens: int = 4, **more: Any) -> Answer:
        self.add(name, prompt, tokens, **more)
        return self.finish()[name]

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        for rank in self.ranks:
            if rank.connector is not None:
                rank.connector.shutdown()
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()

    def _take(self, stats: SchedulerStats | None) -> None:
        if stats is not None:
            self.preemptions = max(
                [self.preemptions, *(r.num_preemptions for r in self.scheduler.requests.values())]
            )
            self.stats = self.stats.plus(stats.kv_connector_stats)


@contextmanager
def engines(count: int, config: VllmConfig) -> Iterator[list[ScheduledEngine]]:
    """So many replicas of one configuration."""
    started = [ScheduledEngine(copy.deepcopy(config)) for _ in range(count)]
    try:
        yield started
    finally:
        for engine in started:
            engine.close()
