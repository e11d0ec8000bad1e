"""vLLM's step statistics, handed to the load recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

    from workers.load import LoadRecorder


class StepLogger(StatLoggerBase):
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
