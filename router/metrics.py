"""The router's metrics, made from outside through the hooks of `router.observe` and read from its state.

Names: kvorum.router.* in the units that OpenTelemetry's conventions ask for (seconds, tokens as {token}).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from protos import admin_pb2, common_pb2
from protos.errors import KvorumError
from router.observe import AttemptScope, Metadata, Observer, Outcome, Reader, RequestFacts, RequestScope
from telemetry.metrics import Meters, Reading

if TYPE_CHECKING:
    from router.decide import Decision
    from router.group import Placement

_DECISION_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
_LATENCY_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)

_MOST_TENANTS = 100
_OTHER_TENANTS = "other"

State = admin_pb2.RouterState


class RouterMetrics:
    """Counts what happens to requests; gauges show the state that was last `read`.

    They are collected in threads of the exporter, which must not look into what the event loop changes.

    Args:
        tenants: count requests by tenant, too; all beyond the first hundred as "other".
    """

    def __init__(self, meters: Meters, *, tenants: bool = False) -> None:
        self._state = State()
        self._tenants: set[str] | None = set() if tenants else None
        counter, histogram = meters.counter, meters.histogram
        self._requests = counter(
            "kvorum.router.requests",
            "{request}",
            "requests by how they ended",
            keys=("outcome", "model", "tenant"),
        )
        self._duration = histogram(
            "kvorum.router.request.duration",
            "s",
            "from a request's arrival to the end of its stream",
            bounds=_LATENCY_S,
            keys=("outcome", "model"),
        )
        self._ttft = histogram(
            "kvorum.router.ttft",
            "s",
            "from a request's arrival to its first token",
            bounds=_LATENCY_S,
            keys=("replica",),
        )
        self._attempts = counter(
            "kvorum.router.attempts", "{attempt}", "calls of a replica", keys=("replica", "retried")
        )
        self._decision = histogram(
            "kvorum.router.decision.duration",
            "s",
            "hashing, lookup, cost and pick of one request",
            bounds=_DECISION_S,
        )
        self._wait = histogram(
            "kvorum.router.queue.wait", "s", "time a request waited for a replica", bounds=_WAIT_S
        )
        self._ttft_error = histogram(
            "kvorum.router.ttft.error",
            "s",
            "|predicted - measured| time to first token",
            bounds=_LATENCY_S,
            keys=("replica",),
        )
        self._cached_error = histogram(
            "kvorum.router.cached.error",
            "{token}",
            "|predicted - actual| cached prompt tokens",
            bounds=_TOKENS,
            keys=("replica",),
        )
        self._prompt = counter("kvorum.router.prompt", "{token}", "prompt tokens routed", keys=("replica",))
        self._hits = counter(
            "kvorum.router.prompt.cached",
            "{token}",
            "of them, found cached, by where the router expected them",
            keys=("replica", "tier"),
        )
        self._fetches = counter(
            "kvorum.router.kv_fetch",
            "{request}",
            "requests for which another host was asked for blocks, by what came",
            keys=("replica", "outcome"),
        )
        self._fetch_error = histogram(
            "kvorum.router.kv_fetch.error",
            "s",
            "|predicted - measured| time of pulls from other hosts",
            bounds=_LATENCY_S,
            keys=("replica",),
        )
        self._refused = counter("kvorum.router.refused", "{request}", "errors by reason", keys=("reason",))
        for name, unit, about, read in _GAUGES:
            meters.gauge(name, unit, about, self._reading(read))

    def read(self, state: State) -> None:
        """What gauges show from now on; `state` must not change any more."""
        self._state = state

    def placed(self, placement: Placement, started_ns: int) -> None:
        """A request that was ready to be placed at `started_ns` found its place."""
        waited_s, decided_s = placement.waited_s, placement.decided_in_s
        if waited_s == 0:  # the prompt was hashed in between
            decided_s += max(placement.started_ns - started_ns, 0) / 1e9
        self._decision.record(decided_s)
        self._wait.record(waited_s)

    def finished(self, outcome: Outcome, *, model: str, tenant: str, took_s: float) -> None:
        """A request is over. `model` is one that is served; empty when it never came to that."""
        name = outcome.name
        self._requests.add(1, name, model, self._known(tenant))
        self._duration.record(took_s, name, model)
        if outcome.error is not None:
            self._refused.add(1, common_pb2.Reason.Name(outcome.error.reason))

    def attempted(self, decision: Decision, number: int) -> None:
        """A replica is called."""
        self._attempts.add(1, decision.replica, number > 1)

    def answered(self, decision: Decision, outcome: Outcome, before_s: float) -> None:
        """An attempt is over that began `before_s` after its request: prediction against outcome."""
        if outcome.first_token_s is None:
            return
        replica, cached = decision.replica, outcome.cached_tokens
        resident, pending = decision.cached_tokens, decision.pending_tokens
        left = max(cached - resident - pending, 0)
        self._ttft.record(before_s + outcome.first_token_s, replica)
        self._ttft_error.record(abs(decision.ttft_ms / 1e3 - outcome.first_token_s), replica)
        self._cached_error.record(abs(decision.expected_cached - cached), replica)
        self._prompt.add(decision.prompt_tokens, replica)
        for tier, tokens in (
            ("resident", min(cached, resident)),
            ("pending", min(max(cached - resident, 0), pending)),
            ("pooled", min(left, decision.pooled_tokens)),
            ("unexpected", max(left - decision.pooled_tokens, 0)),
        ):
            if tokens:
                self._hits.add(tokens, replica, tier)
        if (fetch := outcome.fetch) is not None:
            found = "ok" if not fetch.failed else "partial" if fetch.blocks else "failed"
            self._fetches.add(1, replica, found)
            if fetch.blocks and decision.pull is not None:
                self._fetch_error.record(abs(decision.pull.total_ms / 1e3 - fetch.seconds), replica)

    def _known(self, tenant: str) -> str:
        if self._tenants is None or not tenant:
            return ""
        if tenant not in self._tenants:
            if len(self._tenants) >= _MOST_TENANTS:
                return _OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant

    def _reading(self, read: Callable[[State], Iterable[Reading]]) -> Callable[[], Iterable[Reading]]:
        return lambda: read(self._state)


def _of_queues(value: Callable[[admin_pb2.QueueState], float]) -> Callable[[State], Iterable[Reading]]:
    return lambda state: [(value(queue), {"model": queue.model}) for queue in state.queues]


def _of_replicas(value: Callable[[admin_pb2.ReplicaView], float]) -> Callable[[State], Iterable[Reading]]:
    return lambda state: [(value(view), {"replica": view.replica}) for view in state.replicas]


_GAUGES: tuple[tuple[str, str, str, Callable[[State], Iterable[Reading]]], ...] = (
    ("kvorum.router.in_flight", "{request}", "streams now being served", lambda s: [(s.in_flight, {})]),
    (
        "kvorum.router.queue.length",
        "{request}",
        "requests waiting for a replica",
        _of_queues(lambda queue: queue.length),
    ),
    (
        "kvorum.router.queue.oldest_wait",
        "s",
        "how long the first of them has waited",
        _of_queues(lambda queue: queue.oldest_wait_s),
    ),
    (
        "kvorum.router.queue.drain",
        "s",
        "predicted time to empty the queue",
        _of_queues(lambda queue: queue.predicted_drain_s),
    ),
    (
        "kvorum.router.leases",
        "{request}",
        "this router's requests on a replica",
        _of_replicas(lambda view: view.leases),
    ),
    (
        "kvorum.router.replica.degraded",
        "1",
        "1 while its cache is not known exactly",
        _of_replicas(lambda view: int(bool(view.degraded))),
    ),
    (
        "kvorum.router.replica.blocks",
        "{block}",
        "blocks indexed as resident",
        _of_replicas(lambda view: view.blocks),
    ),
    (
        "kvorum.router.replica.views_dropped",
        "{view}",
        "views found wrong and dropped",
        _of_replicas(lambda view: view.views_dropped),
    ),
)


class MeasuringObserver:
    """Tells `metrics` what it passes on to `inner`."""

    def __init__(self, inner: Observer, metrics: RouterMetrics) -> None:
        self._inner, self._metrics = inner, metrics

    def request(self, facts: RequestFacts, metadata: Metadata) -> RequestScope:
        """Measure one request."""
        return _MeasuredRequest(self._inner.request(facts, metadata), self._metrics, facts.tenant)


class _MeasuredRequest:
    __slots__ = ("_began", "_inner", "_metrics", "_model", "_tenant")

    def __init__(self, inner: RequestScope, metrics: RouterMetrics, tenant: str) -> None:
        self._inner, self._metrics, self._tenant = inner, metrics, tenant
        self._model, self._began = "", time.monotonic()

    @property
    def trace_id(self) -> str:
        return self._inner.trace_id

    def tokenized(self, model: str, prompt_tokens: int, started_ns: int) -> None:
        self._model = model
        self._inner.tokenized(model, prompt_tokens, started_ns)

    def placed(self, placement: Placement, started_ns: int) -> None:
        self._inner.placed(placement, started_ns)
        self._metrics.placed(placement, started_ns)

    def unplaced(self, error: KvorumError | None, started_ns: int) -> None:
        self._inner.unplaced(error, started_ns)

    def attempt(self, decision: Decision, number: int) -> AttemptScope:
        self._metrics.attempted(decision, number)
        before_s = time.monotonic() - self._began
        return _MeasuredAttempt(self._inner.attempt(decision, number), decision, self._metrics, before_s)

    def finished(self, outcome: Outcome) -> None:
        self._inner.finished(outcome)
        took_s = time.monotonic() - self._began
        self._metrics.finished(outcome, model=self._model, tenant=self._tenant, took_s=took_s)


class _MeasuredAttempt:
    __slots__ = ("_before_s", "_decision", "_inner", "_metrics", "metadata", "reader")

    def __init__(
        self, inner: AttemptScope, decision: Decision, metrics: RouterMetrics, before_s: float
    ) -> None:
        self._inner, self._decision, self._metrics = inner, decision, metrics
        self._before_s = before_s
        self.metadata: Sequence[tuple[str, str]] = inner.metadata
        self.reader: Reader | None = inner.reader

    def finished(self, outcome: Outcome) -> None:
        self._inner.finished(outcome)
        self._metrics.answered(self._decision, outcome, self._before_s)
