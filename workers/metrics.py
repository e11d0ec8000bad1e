"""A replica's metrics: of its requests by OpenTelemetry's generative-AI conventions, of its engine by vLLM's
last step. The engine's own, vllm:*, are in `workers.engine_metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from protos import common_pb2, replica_pb2
from protos.errors import KvorumError, is_refusal
from telemetry import spans
from telemetry.metrics import Meters, Reading
from workers.kvpool.metrics import PullMetrics, watch_pool
from workers.kvpool.stats import PoolStats
from workers.observe import GenerateObserver, GenerateScope, Metadata, Sent

# Buckets of gen_ai.server.* are those that the conventions advise.
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_PHASE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ReplicaMetrics:
    """Counts requests as they end.

    Args:
        model: its name.
        load: what vLLM's last step told, read from other threads.
        pool: what the engine's pool did until then, likewise.
    """

    def __init__(
        self,
        meters: Meters,
        model: str,
        load: Callable[[], common_pb2.ReplicaLoad],
        pool: Callable[[], PoolStats],
    ) -> None:
        fixed = {
            spans.GEN_AI_OPERATION_NAME: "text_completion",
            spans.GEN_AI_PROVIDER_NAME: "kvorum",
            spans.GEN_AI_REQUEST_MODEL: model,
        }
        histogram, of_model = meters.histogram, {spans.GEN_AI_REQUEST_MODEL: model}
        self._duration = histogram(
            "gen_ai.server.request.duration",
            "s",
            "from a request's arrival at the replica to its end",
            bounds=_DURATION_S,
            keys=(spans.ERROR_TYPE,),
            fixed=fixed,
        )
        self._ttft = histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "from a request's arrival at the replica to its first token",
            bounds=_TTFT_S,
            fixed=fixed,
        )
        self._tpot = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "of a sequence that finished, for each token after the first",
            bounds=_TPOT_S,
            fixed=fixed,
        )
        self._queue, self._prefill = (
            histogram(name, "s", about, bounds=_PHASE_S, fixed=of_model)
            for name, about in (
                ("kvorum.replica.queue.duration", "wait in the engine's queue"),
                ("kvorum.replica.prefill.duration", "from leaving the engine's queue to the first token"),
            )
        )
        self._tokens = meters.counter(
            "kvorum.replica.tokens",
            "{token}",
            "prompt tokens taken in and tokens generated",
            keys=(spans.GEN_AI_TOKEN_TYPE,),
            fixed=of_model,
        )
        self._requests = meters.counter(
            "kvorum.replica.requests",
            "{request}",
            "requests by how they ended",
            keys=("outcome",),
            fixed=of_model,
        )
        for name, unit, about, field in (
            ("kvorum.replica.running", "{request}", "sequences in the engine's batch", "running"),
            ("kvorum.replica.waiting", "{request}", "sequences in the engine's queue", "waiting"),
            ("kvorum.replica.kv.usage", "1", "share of the KV cache's blocks in use", "kv_usage"),
            ("kvorum.replica.kv.blocks", "{block}", "blocks of the KV cache", "kv_blocks"),
        ):
            meters.gauge(name, unit, about, partial(_reading, load, field))
        watch_pool(meters, pool)
        self._pulls = PullMetrics(meters)

    def finished(self, sent: Sent, error: BaseException | None, began: float, sequences: int) -> None:
        """A request is over that came at `began`, by time.monotonic()."""
        self._requests.add(1, outcome(error))
        self._duration.record(time.monotonic() - began, error_type(error))
        if sent.fetch_at:
            self._pulls.ended(sent.fetch)
        if not sent.first_at:
            return
        self._tokens.add(sent.prompt_tokens, "input")
        self._tokens.add(sent.generated_tokens, "output")
        self._ttft.record(sent.first_at - began)
        if (times := sent.times) is None:
            return
        self._queue.record(max(times.scheduled_ts - times.queued_ts, 0.0))
        self._prefill.record(max(times.first_token_ts - times.scheduled_ts, 0.0))
        more = sent.generated_tokens / sequences - 1
        if error is None and more > 0:
            self._tpot.record(max(times.last_token_ts - times.first_token_ts, 0.0) / more)


def _reading(load: Callable[[], common_pb2.ReplicaLoad], field: str) -> list[Reading]:
    return [(getattr(load(), field), {})]


def outcome(error: BaseException | None) -> str:
    """ok, cancelled, refused or error; as the router says it."""
    if error is None:
        return "ok"
    if isinstance(error, KvorumError):
        return "refused" if is_refusal(error) else "error"
    return "cancelled" if spans.error_type(error) == "cancelled" else "error"


def error_type(error: BaseException | None) -> str:
    """The value of error.type; empty of none."""
    if isinstance(error, KvorumError):
        return common_pb2.Reason.Name(error.reason)
    return "" if error is None else spans.error_type(error)


class MeasuringObserver:
    """Tells `metrics` what it passes on to `inner`."""

    def __init__(self, inner: GenerateObserver, metrics: ReplicaMetrics) -> None:
        self._inner, self._metrics = inner, metrics

    def start(self, request: replica_pb2.ReplicaGenerateRequest, metadata: Metadata) -> GenerateScope:
        """Measure one request."""
        return _Measured(self._inner.start(request, metadata), self._metrics, max(request.sampling.n, 1))


class _Measured:
    __slots__ = ("_began", "_inner", "_metrics", "_sequences")

    def __init__(self, inner: GenerateScope, metrics: ReplicaMetrics, sequences: int) -> None:
        self._inner, self._metrics, self._sequences = inner, metrics, sequences
        self._began = time.monotonic()

    def finish(self, error: BaseException | None, sent: Sent) -> None:
        self._inner.finish(error, sent)
        self._metrics.finished(sent, error, self._began, self._sequences)
