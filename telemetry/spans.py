"""Names of spans and attributes, and the few ways in which the servers make spans.

Attribute names follow OpenTelemetry's generative-AI conventions (gen_ai.*) where one exists;
ours start with kvorum. Spans are passed explicitly, as a Context, so that streams which hop
between tasks and async generators keep their parent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

HTTP_REQUEST: Final = "kvorum.http.request"
ROUTER_REQUEST: Final = "kvorum.router.request"
ROUTER_TOKENIZE: Final = "kvorum.router.tokenize"
ROUTER_ADMIT: Final = "kvorum.router.admit"
ROUTER_ROUTE: Final = "kvorum.router.route"
ROUTER_FORWARD: Final = "kvorum.router.forward"
REPLICA_GENERATE: Final = "kvorum.replica.generate"
REPLICA_QUEUE: Final = "kvorum.replica.queue"
REPLICA_PREFILL: Final = "kvorum.replica.prefill"
REPLICA_DECODE: Final = "kvorum.replica.decode"
ENGINE_STEP: Final = "kvorum.engine.step"

FIRST_TOKEN: Final = "kvorum.first_token"  # noqa: S105  (an event's name)
LAST_TOKEN: Final = "kvorum.last_token"  # noqa: S105

ERROR_TYPE: Final = "error.type"

HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"  # "chat" or "text_completion"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

REQUEST_ID: Final = "kvorum.request.id"
OUTCOME: Final = "kvorum.outcome"
REPLICA: Final = "kvorum.replica"
EPOCH: Final = "kvorum.epoch"
RANK: Final = "kvorum.rank"
ATTEMPT: Final = "kvorum.attempt"
POLICY: Final = "kvorum.policy"
CANDIDATES: Final = "kvorum.candidates"  # one string per replica considered, with its terms
WHY: Final = "kvorum.why"
DEGRADED: Final = "kvorum.degraded"  # why the chosen replica's cache is not known exactly
TENANT: Final = "kvorum.tenant"
PREDICTED_TTFT_S: Final = "kvorum.predicted.ttft_s"
PREDICTED_CACHED_TOKENS: Final = "kvorum.predicted.cached_tokens"
CACHED_TOKENS: Final = "kvorum.cached_tokens"
COMPUTED_TOKENS: Final = "kvorum.computed_tokens"
STEP_NUMBER: Final = "kvorum.step.number"  # counted from the engine's start, equal on all ranks
STEP_TOKENS: Final = "kvorum.step.tokens"
STEP_REQUEST_TOKENS: Final = "kvorum.step.request_tokens"  # those of the request the span is about
STEP_PATH: Final = "kvorum.step.path"  # stock or overlapped
STEP_CHUNKS: Final = "kvorum.step.chunks"
STEP_FORWARD_S: Final = "kvorum.step.forward_s"
STEP_COMPUTE_S: Final = "kvorum.step.compute_s"
STEP_ALL_REDUCE_S: Final = "kvorum.step.all_reduce_s"
STEP_EXPOSED_S: Final = "kvorum.step.exposed_s"
MEASURED_S: Final = "kvorum.measured_s"  # the engine's own figure, where the span had to be shortened

_MAX_MESSAGE_CHARS = 512
_MAX_STATE_CHARS = 512
"""What https://www.w3.org/TR/trace-context/#tracestate-limits asks to be passed on at least."""
_MAX_BAGGAGE_CHARS = 2048
"""gRPC refuses calls with more than 8 KiB of metadata: a client's baggage must not break our next hop."""

_PARENT, _STATE, _BAGGAGE = "traceparent", "tracestate", "baggage"
_tracecontext = TraceContextTextMapPropagator()
_baggage = W3CBaggagePropagator()

# They log each malformed header with its text: whoever can call us could fill the log.
for _name in (
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """The caller's trace and baggage, from a call's metadata, apart from this task's own context.

    What is malformed, too long or given twice is as if it were absent; never raises.
    """
    found: dict[str, list[str]] = {}
    for key, value in metadata:
        if key in {_PARENT, _STATE, _BAGGAGE} and (text := _text(value)) is not None:
            found.setdefault(key, []).append(text)
    context = Context()
    if len(",".join(found.get(_STATE, ()))) > _MAX_STATE_CHARS:
        del found[_STATE]
    if len(found.get(_PARENT, ())) == 1:
        context = _tracecontext.extract(found, context)
    entries = ",".join(found.get(_BAGGAGE, ()))
    if entries and len(entries) <= _MAX_BAGGAGE_CHARS:
        context = _baggage.extract({_BAGGAGE: entries}, context)
    return context


def inject(context: Context | None = None) -> list[tuple[str, str]]:
    """Metadata that carries `context` (the current one when None); empty when it holds none."""
    carrier: dict[str, str] = {}
    _tracecontext.inject(carrier, context)
    _baggage.inject(carrier, context)
    return list(carrier.items())


def start(
    tracer: Tracer,
    name: str,
    parent: Context | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
    links: Sequence[Link] = (),
    start_ns: int | None = None,
) -> Span:
    """Start a span below `parent` (the current context when None). End it with `finish`."""
    return tracer.start_span(name, parent, kind, attributes, links, start_time=start_ns)


def elsewhere(trace_id: int, span_id: int) -> SpanContext:
    """A recorded span of another process, known by its ids alone."""
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def remote(span: SpanContext | None) -> Context:
    """The context below a span of another process; None: below none, so that a trace begins."""
    return Context() if span is None else below(NonRecordingSpan(span))


def below(span: Span, parent: Context | None = None) -> Context:
    """The context whose new spans become children of `span`; the baggage is that of `parent`."""
    return trace.set_span_in_context(span, parent or Context())


def finish(
    span: Span, error: BaseException | str | None = None, message: str = "", *, end_ns: int | None = None
) -> None:
    """End a span. With `error` (an exception, or an error type such as a Reason's name) it has failed.

    A failed span has error.type and the status ERROR with `message` or the exception's text.
    Success leaves the status unset, as the conventions ask.
    """
    if error is not None and span.is_recording():
        text = message or (str(error) if isinstance(error, BaseException) else "")
        span.set_attribute(ERROR_TYPE, error if isinstance(error, str) else error_type(error))
        span.set_status(Status(StatusCode.ERROR, text[:_MAX_MESSAGE_CHARS]))
    span.end(end_ns)


def error_type(error: BaseException) -> str:
    """A low-cardinality name: cancelled, timeout, a gRPC status code, or the exception's class."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    if isinstance(error, TimeoutError):
        return "timeout"
    # KvorumError has a code, grpc.RpcError a method: this package needs neither import.
    code = getattr(error, "code", None)
    name = getattr(code() if callable(code) else code, "name", None)
    return name if isinstance(name, str) else type(error).__qualname__


@contextmanager
def recording(
    tracer: Tracer,
    name: str,
    parent: Context | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """A span around a block, current within it, ended with error.type when the block raises.

    Not around a `yield` of an async generator, which may be closed in another context.
    """
    span = start(tracer, name, parent, kind=kind, attributes=attributes)
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
    except BaseException as error:
        finish(span, error)
        raise
    finish(span)


def trace_id_hex(span: Span) -> str:
    """32 hex digits, or "" when the span belongs to no trace."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def wall_from_monotonic(monotonic_s: float) -> float:
    """Seconds since the epoch of a time.monotonic() reading taken on this host, in any process."""
    return time.time() - (time.monotonic() - monotonic_s)


@dataclass(frozen=True)
class PhaseBounds:
    """Where one phase ends the next begins; epoch nanoseconds, never decreasing."""

    queue_start_ns: int
    prefill_start_ns: int
    decode_start_ns: int
    decode_end_ns: int


def phase_bounds(
    arrival_ns: int, durations_s: tuple[float, float, float], *, earliest_ns: int, latest_ns: int
) -> PhaseBounds:
    """Lay queue, prefill and decode end to end from the arrival, within [earliest, latest].

    Clocks of two processes may disagree: phases that would stick out are moved back in whole,
    and shortened from the end only when they are longer than the window.
    """
    latest_ns = max(latest_ns, earliest_ns)
    window_ns = latest_ns - earliest_ns
    lengths = [_clamped_ns(seconds, window_ns) for seconds in durations_s]
    first = max(min(arrival_ns, latest_ns - sum(lengths)), earliest_ns)
    prefill = min(first + lengths[0], latest_ns)
    decode = min(prefill + lengths[1], latest_ns)
    return PhaseBounds(first, prefill, decode, min(decode + lengths[2], latest_ns))


def record_engine_times(
    tracer: Tracer,
    parent: Context,
    *,
    arrival_wall_s: float,
    queue_s: float,
    prefill_s: float | None,
    decode_s: float | None,
    prefill_attributes: Mapping[str, AttributeValue] | None = None,
    decode_attributes: Mapping[str, AttributeValue] | None = None,
    prefill_links: Sequence[Link] = (),
) -> None:
    """Add queue, prefill and decode spans below `parent` after the fact; call it before that ends.

    Args:
        arrival_wall_s: when the engine queued the request, seconds since the epoch
            (`wall_from_monotonic` converts the engine's readings).
        queue_s, prefill_s, decode_s: the engine's durations. None: the request never got to that
            phase, which then has no span. Decode runs from the first token to the last; both are
            events on it.
        prefill_links: the shards' spans of the engine step in which the prefill began.
    """
    owner = trace.get_current_span(parent)
    if not owner.get_span_context().trace_flags.sampled:
        return
    now_ns = time.time_ns()
    known = owner if isinstance(owner, ReadableSpan) else None
    earliest_ns = (known.start_time if known else None) or 0
    latest_ns = (known.end_time if known else None) or now_ns
    arrival_ns = round(arrival_wall_s * 1e9) if math.isfinite(arrival_wall_s * 1e9) else latest_ns
    durations = (queue_s, prefill_s or 0.0, decode_s or 0.0)
    at = phase_bounds(arrival_ns, durations, earliest_ns=earliest_ns, latest_ns=latest_ns)

    phases: list[tuple[str, int, int, float, Mapping[str, AttributeValue] | None]] = [
        (REPLICA_QUEUE, at.queue_start_ns, at.prefill_start_ns, queue_s, None)
    ]
    if prefill_s is not None:
        phases.append(
            (REPLICA_PREFILL, at.prefill_start_ns, at.decode_start_ns, prefill_s, prefill_attributes)
        )
    if decode_s is not None:
        phases.append((REPLICA_DECODE, at.decode_start_ns, at.decode_end_ns, decode_s, decode_attributes))
    for name, start_ns, end_ns, measured_s, attributes in phases:
        links = prefill_links if name == REPLICA_PREFILL else ()
        span = start(tracer, name, parent, attributes=attributes, links=links, start_ns=start_ns)
        if end_ns - start_ns != _clamped_ns(measured_s, None):
            span.set_attribute(MEASURED_S, measured_s)
        if name == REPLICA_DECODE:
            span.add_event(FIRST_TOKEN, timestamp=start_ns)
            span.add_event(LAST_TOKEN, timestamp=end_ns)
        finish(span, end_ns=end_ns)


def _clamped_ns(seconds: float, most_ns: int | None) -> int:
    """Nanoseconds, 0 for what is no duration, at most `most_ns`."""
    nanoseconds = seconds * 1e9
    if not nanoseconds > 0:  # also false for NaN
        return 0
    if math.isinf(nanoseconds):
        return most_ns or 0
    return round(nanoseconds) if most_ns is None else min(round(nanoseconds), most_ns)


def _text(value: str | bytes) -> str | None:
    try:
        text = value.decode("ascii") if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return None
    return text if text.isascii() else None
