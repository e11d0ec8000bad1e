"""What a replica reports of its engine's load, gathered from vLLM's step statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from protos import common_pb2
from workers.accepted import Accepted
from workers.kvpool.load_speed import LoadSpeed
from workers.kvpool.stats import PoolStats
from workers.resident import ResidentBlocks
from workers.speed import StepSpeed

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class LoadRecorder:
    """The latest load of one engine. Filled by a stat logger and by Generate, read by WatchReplica."""

    def __init__(self, resident: ResidentBlocks, changed: Callable[[], None]) -> None:
        self._load = common_pb2.ReplicaLoad()
        self._resident = resident
        self._changed = changed
        self._speed = StepSpeed()
        self._load_speed = LoadSpeed()
        self.accepted = Accepted()
        self.pool = PoolStats()
        """Of the KV pool, as of the last step; may be read from any thread."""
        self.pool_part_bytes = 0
        """Of one rank's part of one block of the pool, once it is known."""

    def stat_logger(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """The factory that AsyncLLM calls once per engine."""
        from workers.stat_logger import StepLogger  # noqa: PLC0415 - imports vLLM

        self._load.kv_blocks = config.cache_config.num_gpu_blocks or 0
        self._load.block_size = config.cache_config.block_size
        self._load.max_sequences = config.scheduler_config.max_num_seqs
        self._load.max_batch_tokens = config.scheduler_config.max_num_batched_tokens
        return StepLogger(self)

    def snapshot(self) -> common_pb2.ReplicaLoad:
        """The load as it is now."""
        load = common_pb2.ReplicaLoad()
        load.CopyFrom(self._load)
        load.block_size = self._resident.block_size or load.block_size
        load.sequences = self.accepted.sequences
        # What the pool has will be loaded: it is nothing to compute, nor for a request behind to wait for.
        backlog = self.accepted.backlog(self._resident.local_prefix)
        load.prefill_backlog_tokens, load.prefill_backlog_pairs = backlog
        load.prefill_ms_per_token = self._speed.prefill_ms_per_token
        load.decode_step_ms = self._speed.decode_step_ms
        load.pool_load_ms_per_block = self._load_speed.ms(self.pool_part_bytes)
        load.pool_ready_blocks, load.pool_slots = self.pool.ready, self.pool.slots
        return load

    @property
    def last_step(self) -> common_pb2.ReplicaLoad:
        """What vLLM's last step told, and goes on telling: its numbers may be read from any thread."""
        return self._load

    def forget_speeds(self) -> None:
        """What was measured until now is not typical."""
        self._speed = StepSpeed()
        self._load_speed = LoadSpeed()

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Take in one engine step."""
        load = self._load
        if scheduler is not None:
            load.running = scheduler.num_running_reqs
            load.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            load.kv_usage = scheduler.kv_cache_usage
            load.prefix_queries_tokens += scheduler.prefix_cache_stats.queries
            load.prefix_hits_tokens += scheduler.prefix_cache_stats.hits
            before, self.pool = self.pool, self.pool.plus(scheduler.kv_connector_stats)
            self._load_speed.loaded(
                self.pool.loaded_bytes - before.loaded_bytes, self.pool.load_seconds - before.load_seconds
            )
            if (step := scheduler.iteration_details) is not None and not step.is_dummy:
                self._speed.step(step.elapsed_ms, step.num_ctx_tokens, step.num_generation_requests)
        if iteration is not None:
            load.generated_tokens += iteration.num_generation_tokens
            load.preemptions += iteration.num_preempted_reqs
        self._changed()
