"""The router's metrics, made from outside through the hooks of `router.observe` and read from its state.

Names: kvorum.router.* in the units that OpenTelemetry's conventions ask for (seconds, tokens as {token}).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from protos import admin_pb2, common_pb2
from protos.errors import KvorumError
from router.observe import AttemptScope, Metadata, Observer, Outcome, RequestFacts, RequestScope

if TYPE_CHECKING:
    from router.decide import Decision
    from router.group import Placement

_LATENCY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
_ERROR_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouterMetrics:
    """Counts what happens to requests; gauges show the state that was last `read`.

    They are collected in threads of the exporter, which must not look into what the event loop changes.
    """

    def __init__(self, meter: Meter) -> None:
        self._state = admin_pb2.RouterState()
        self._decision = meter.create_histogram(
            "kvorum.router.decision.duration",
            "s",
            "hashing, lookup, cost and pick of one request",
            explicit_bucket_boundaries_advisory=_LATENCY_S,
        )
        self._wait = meter.create_histogram(
            "kvorum.router.queue.wait",
            "s",
            "time a request waited for a replica",
            explicit_bucket_boundaries_advisory=_WAIT_S,
        )
        self._ttft_error = meter.create_histogram(
            "kvorum.router.ttft.error",
            "s",
            "|predicted - measured| time to first token",
            explicit_bucket_boundaries_advisory=_ERROR_S,
        )
        self._cached_error = meter.create_histogram(
            "kvorum.router.cached.error", "{token}", "|predicted - actual| cached prompt tokens"
        )
        self._prompt = meter.create_counter("kvorum.router.prompt", "{token}", "prompt tokens routed")
        self._hits = meter.create_counter("kvorum.router.prompt.cached", "{token}", "of them, found cached")
        self._refused = meter.create_counter("kvorum.router.refused", "{request}", "refusals by reason")
        for name, unit, about, read in (
            ("kvorum.router.queue.length", "{request}", "requests waiting for a replica", _lengths),
            ("kvorum.router.queue.oldest_wait", "s", "how long the first of them has waited", _oldest),
            ("kvorum.router.queue.drain", "s", "predicted time to empty the queue", _drains),
            (
                "kvorum.router.replica.degraded",
                "1",
                "1 while its cache is not known exactly",
                _degraded,
            ),
            ("kvorum.router.replica.blocks", "{block}", "blocks indexed as resident", _blocks),
            ("kvorum.router.replica.views_dropped", "{view}", "views found wrong and dropped", _dropped),
        ):
            meter.create_observable_gauge(name, [self._reading(read)], unit, about)

    def read(self, state: admin_pb2.RouterState) -> None:
        """What gauges show from now on; `state` must not change any more."""
        self._state = state

    def placed(self, placement: Placement) -> None:
        """A request found its place."""
        self._decision.record(placement.decided_in_s)
        self._wait.record(placement.waited_s)

    def refused(self, reason: common_pb2.Reason.ValueType) -> None:
        """A request ended with an error."""
        self._refused.add(1, {"reason": common_pb2.Reason.Name(reason)})

    def answered(self, decision: Decision, outcome: Outcome) -> None:
        """An attempt is over: prediction against outcome, where it had a first token."""
        if outcome.first_token_s is None:
            return
        here = {"replica": decision.replica}
        expected = decision.cached_tokens + decision.pending_tokens
        self._ttft_error.record(abs(decision.ttft_ms / 1e3 - outcome.first_token_s), here)
        self._cached_error.record(abs(expected - outcome.cached_tokens), here)
        self._prompt.add(decision.prompt_tokens, here)
        self._hits.add(outcome.cached_tokens, here)

    def _reading(
        self, read: Callable[[admin_pb2.RouterState], Iterable[Observation]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _options: read(self._state)


def _lengths(state: admin_pb2.RouterState) -> Iterable[Observation]:
    return [Observation(queue.length, {"model": queue.model}) for queue in state.queues]


def _oldest(state: admin_pb2.RouterState) -> Iterable[Observation]:
    return [Observation(queue.oldest_wait_s, {"model": queue.model}) for queue in state.queues]


def _drains(state: admin_pb2.RouterState) -> Iterable[Observation]:
    return [Observation(queue.predicted_drain_s, {"model": queue.model}) for queue in state.queues]


def _degraded(state: admin_pb2.RouterState) -> Iterable[Observation]:
    return [Observation(int(bool(view.degraded)), {"replica": view.replica}) for view in state.replicas]


def _blocks(state: admin_pb2.RouterState) -> Iterable[Observation]:
    return [Observation(view.blocks, {"replica": view.replica}) for view in state.replicas]


def _dropped(state: admin_pb2.RouterState) -> Iterable[Observation]:
    return [Observation(view.views_dropped, {"replica": view.replica}) for view in state.replicas]


class MeasuringObserver:
    """Tells `metrics` what it passes on to `inner`."""

    def __init__(self, inner: Observer, metrics: RouterMetrics) -> None:
        self._inner, self._metrics = inner, metrics

    def request(self, facts: RequestFacts, metadata: Metadata) -> RequestScope:
        """Measure one request."""
        return _MeasuredRequest(self._inner.request(facts, metadata), self._metrics)


class _MeasuredRequest:
    def __init__(self, inner: RequestScope, metrics: RouterMetrics) -> None:
        self._inner, self._metrics = inner, metrics

    @property
    def trace_id(self) -> str:
        return self._inner.trace_id

    def tokenized(self, model: str, prompt_tokens: int, started_ns: int) -> None:
        self._inner.tokenized(model, prompt_tokens, started_ns)

    def placed(self, placement: Placement, started_ns: int) -> None:
        self._inner.placed(placement, started_ns)
        self._metrics.placed(placement)

    def unplaced(self, error: KvorumError, started_ns: int) -> None:
        self._inner.unplaced(error, started_ns)

    def attempt(self, decision: Decision, number: int) -> AttemptScope:
        return _MeasuredAttempt(self._inner.attempt(decision, number), decision, self._metrics)

    def finished(self, outcome: Outcome) -> None:
        self._inner.finished(outcome)
        if outcome.error is not None:
            self._metrics.refused(outcome.error.reason)


class _MeasuredAttempt:
    def __init__(self, inner: AttemptScope, decision: Decision, metrics: RouterMetrics) -> None:
        self._inner, self._decision, self._metrics = inner, decision, metrics
        self.metadata: Sequence[tuple[str, str]] = inner.metadata

    def first_token(self) -> None:
        self._inner.first_token()

    def finished(self, outcome: Outcome) -> None:
        self._inner.finished(outcome)
        self._metrics.answered(self._decision, outcome)
