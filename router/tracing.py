"""The router's spans, made from outside through the hooks of `router.observe`.

kvorum.router.request            below the caller's span, or a root
├─ kvorum.router.tokenize
├─ kvorum.router.admit            only when it had to wait, or was refused
├─ kvorum.router.route            every candidate with every term of its cost
└─ kvorum.router.forward         one per attempt; its context goes to the replica
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from protos import common_pb2
from protos.errors import KvorumError
from router.observe import AttemptScope, Metadata, Outcome, RequestFacts, RequestScope
from router.picker import Candidate
from telemetry import spans

if TYPE_CHECKING:
    from router.decide import Decision
    from router.group import Placement

_MOST_CANDIDATES = 32
"""On a span; a router of hundreds of replicas does not list them all."""


class TracingObserver:
    """Makes spans with `tracer`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def request(self, facts: RequestFacts, metadata: Metadata) -> RequestScope:
        """Start the request's span below the context that the call's metadata carries."""
        return _RequestSpans(self._tracer, facts, spans.extract(metadata))


class _RequestSpans:
    def __init__(self, tracer: Tracer, facts: RequestFacts, caller: Context) -> None:
        self._tracer = tracer
        attributes: dict[str, AttributeValue] = {
            spans.GEN_AI_OPERATION_NAME: facts.operation,
            spans.REQUEST_ID: facts.request_id,
            spans.GEN_AI_REQUEST_CHOICE_COUNT: facts.sequences,
        }
        if facts.tenant:
            attributes[spans.TENANT] = facts.tenant
        if facts.model:
            attributes[spans.GEN_AI_REQUEST_MODEL] = facts.model
        if facts.max_tokens is not None:
            attributes[spans.GEN_AI_REQUEST_MAX_TOKENS] = facts.max_tokens
        if facts.temperature is not None:
            attributes[spans.GEN_AI_REQUEST_TEMPERATURE] = facts.temperature
        self._span = spans.start(
            tracer, spans.ROUTER_REQUEST, caller, kind=SpanKind.SERVER, attributes=attributes
        )
        self._context = spans.below(self._span, caller)

    @property
    def trace_id(self) -> str:
        return spans.trace_id_hex(self._span)

    def tokenized(self, model: str, prompt_tokens: int, started_ns: int) -> None:
        self._span.set_attribute(spans.GEN_AI_RESPONSE_MODEL, model)
        span = spans.start(
            self._tracer,
            spans.ROUTER_TOKENIZE,
            self._context,
            attributes={spans.GEN_AI_USAGE_INPUT_TOKENS: prompt_tokens},
            start_ns=started_ns,
        )
        spans.finish(span)

    def placed(self, placement: Placement, started_ns: int) -> None:
        decided_ns = placement.started_ns
        if placement.waited_s > 0:
            self._admit(started_ns, started_ns + int(placement.waited_s * 1e9))
        span = spans.start(self._tracer, spans.ROUTER_ROUTE, self._context, start_ns=decided_ns)
        if span.is_recording():
            span.set_attributes(_route(placement.decision))
        spans.finish(span, end_ns=decided_ns + int(placement.decided_in_s * 1e9))

    def unplaced(self, error: KvorumError, started_ns: int) -> None:
        self._admit(started_ns, None, common_pb2.Reason.Name(error.reason))

    def _admit(self, started_ns: int, ended_ns: int | None, error: str | None = None) -> None:
        spans.finish(
            spans.start(self._tracer, spans.ROUTER_ADMIT, self._context, start_ns=started_ns),
            error,
            end_ns=ended_ns,
        )

    def attempt(self, decision: Decision, number: int) -> AttemptScope:
        span = spans.start(
            self._tracer,
            spans.ROUTER_FORWARD,
            self._context,
            kind=SpanKind.CLIENT,
            attributes={
                spans.REPLICA: decision.replica,
                spans.EPOCH: decision.epoch,
                spans.ATTEMPT: number,
                spans.PREDICTED_TTFT_S: decision.ttft_ms / 1e3,
                spans.PREDICTED_CACHED_TOKENS: decision.cached_tokens + decision.pending_tokens,
            },
        )
        return _AttemptSpan(span, self._context)

    def finished(self, outcome: Outcome) -> None:
        _end(self._span, outcome)


class _AttemptSpan:
    def __init__(self, span: Span, request: Context) -> None:
        self._span = span
        self.metadata: Sequence[tuple[str, str]] = spans.inject(spans.below(span, request))

    def first_token(self) -> None:
        self._span.add_event(spans.FIRST_TOKEN)

    def finished(self, outcome: Outcome) -> None:
        _end(self._span, outcome)


def _end(span: Span, outcome: Outcome) -> None:
    """What happened, and the error where one ended it."""
    span.set_attributes(
        {
            spans.OUTCOME: _outcome(outcome),
            spans.GEN_AI_USAGE_INPUT_TOKENS: outcome.prompt_tokens,
            spans.GEN_AI_USAGE_OUTPUT_TOKENS: outcome.generated_tokens,
            spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: outcome.cached_tokens,
        }
    )
    if outcome.first_token_s is not None:
        span.set_attribute(spans.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, outcome.first_token_s)
    if outcome.error is not None:
        spans.finish(span, common_pb2.Reason.Name(outcome.error.reason), outcome.error.message)
    elif outcome.cancelled:
        spans.finish(span, "cancelled", "the client left, its deadline passed, or the router stops")
    else:
        spans.finish(span)


def _outcome(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "error"
    return "cancelled" if outcome.cancelled else "ok"


def _route(decision: Decision) -> dict[str, AttributeValue]:
    listed = decision.candidates()
    first = [candidate for candidate in listed if candidate.chosen]
    rest = [candidate for candidate in listed if not candidate.chosen]
    attributes: dict[str, AttributeValue] = {
        spans.POLICY: decision.policy,
        spans.WHY: decision.why,
        spans.REPLICA: decision.replica,
        spans.EPOCH: decision.epoch,
        spans.CANDIDATES: [_line(candidate) for candidate in (first + rest)[:_MOST_CANDIDATES]],
    }
    if decision.degraded:
        attributes[spans.DEGRADED] = decision.degraded
    return attributes


def _line(candidate: Candidate) -> str:
    """One candidate as a reader of the trace wants it; times in ms."""
    degraded = f" degraded={candidate.degraded!r}" if candidate.degraded else ""
    return (
        f"{candidate.key} cached={candidate.cached_tokens} pending={candidate.pending_tokens} "
        f"pooled={candidate.pooled_tokens} uncached={candidate.uncached_tokens} "
        f"queue={candidate.queue_ms:.1f} prefill={candidate.prefill_ms:.1f} fetch={candidate.fetch_ms:.1f} "
        f"interference={candidate.interference_ms:.1f} overhead={candidate.overhead_ms:.1f} "
        f"ttft={candidate.ttft_ms:.1f} harm={candidate.harm_ms:.1f} affinity={candidate.affinity_ms:.1f} "
        f"score={candidate.score_ms:.1f} sequences={candidate.sequences} "
        f"backlog={candidate.backlog_tokens} kv={candidate.kv_usage:.2f}{degraded}"
    )
