"""What a replica reports of its engine's load, gathered from vLLM's step statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

from protos import common_pb2

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class LoadRecorder:
    """The latest load of one engine. Filled by a StatLogger, read by WatchReplica."""

    def __init__(self) -> None:
        self._load = common_pb2.ReplicaLoad()
        self.changes = 0

    def stat_logger(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """The factory that AsyncLLM calls once per engine."""
        self._load.kv_blocks = config.cache_config.num_gpu_blocks or 0
        self._load.block_size = config.cache_config.block_size
        return _StatLogger(self)

    def snapshot(self) -> common_pb2.ReplicaLoad:
        """A copy of the latest load."""
        copy = common_pb2.ReplicaLoad()
        copy.CopyFrom(self._load)
        return copy

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Take in one engine step."""
        load = self._load
        if scheduler is not None:
            load.running = scheduler.num_running_reqs
            load.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            load.kv_usage = scheduler.kv_cache_usage
            load.prefix_queries_tokens += scheduler.prefix_cache_stats.queries
            load.prefix_hits_tokens += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            load.generated_tokens += iteration.num_generation_tokens
            load.preemptions += iteration.num_preempted_reqs
        self.changes += 1


class _StatLogger(StatLoggerBase):
    """Hands every step to the recorder."""

    def __init__(self, recorder: LoadRecorder) -> None:
        self._recorder = recorder

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        self._recorder.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        return
