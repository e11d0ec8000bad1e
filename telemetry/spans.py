"""Names of spans and attributes, and the few ways in which the servers make spans.

Attribute names follow OpenTelemetry's generative-AI conventions (gen_ai.*) where one exists;
ours start with kvorum. Spans are passed explicitly, as a Context, so that streams which hop
between tasks and async generators keep their parent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry import baggage, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
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
REPLICA_KV_FETCH: Final = "kvorum.replica.kv_fetch"
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
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"  # JSON; on request only
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

GEN_AI_TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105 - input or output

REQUEST_ID: Final = "kvorum.request.id"
OUTCOME: Final = "kvorum.outcome"
REPLICA: Final = "kvorum.replica"
EPOCH: Final = "kvorum.epoch"
RANK: Final = "kvorum.rank"
SAMPLED_BY: Final = "kvorum.sampled_by"  # error or slow: not sampled, so the replica has recorded nothing
ATTEMPT: Final = "kvorum.attempt"
POLICY: Final = "kvorum.policy"
CANDIDATES: Final = "kvorum.candidates"  # one string per replica considered, with its terms
WHY: Final = "kvorum.why"
DEGRADED: Final = "kvorum.degraded"  # why the chosen replica's cache is not known exactly
TENANT: Final = "kvorum.tenant"
PREDICTED_TTFT_S: Final = "kvorum.predicted.ttft_s"
PREDICTED_CACHED_TOKENS: Final = "kvorum.predicted.cached_tokens"
PREDICTED_POOLED_TOKENS: Final = "kvorum.predicted.pooled_tokens"  # of them, from hosts' memory
PREDICTED_FETCH_S: Final = "kvorum.predicted.fetch_s"
CACHED_TOKENS: Final = "kvorum.cached_tokens"
POOLED_TOKENS: Final = "kvorum.pooled_tokens"  # of the cached ones, those loaded from the host's KV pool
COMPUTED_TOKENS: Final = "kvorum.computed_tokens"
KV_FETCH_BLOCKS: Final = "kvorum.kv_fetch.blocks"  # that came
KV_FETCH_BYTES: Final = "kvorum.kv_fetch.bytes"
KV_FETCH_SOURCE: Final = "kvorum.kv_fetch.source"  # host:port of the agent that was asked
KV_FETCH_FAILED: Final = "kvorum.kv_fetch.failed"  # why fewer came than were asked for
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
_UNREADABLE = "?"
_tracecontext = TraceContextTextMapPropagator()
_baggage = W3CBaggagePropagator()

# They log each malformed header with its text: whoever can call us could fill the log.
for _name in (
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


malformed: Counter[str] = Counter()
"""Headers that callers sent to this process and that were ignored, by name."""


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """The caller's trace and baggage, from a call's metadata, apart from this task's own context.

    What is malformed, too long or given twice is as if it were absent, and counted; never raises.
    """
    found: dict[str, list[str]] = {}
    for key, value in metadata:
        if key in {_PARENT, _STATE, _BAGGAGE}:
            found.setdefault(key, []).append(_text(value))
    context = Context()
    if not found:
        return context
    if len(",".join(found.get(_STATE, ()))) > _MAX_STATE_CHARS:
        malformed[_STATE] += 1
        del found[_STATE]
    if parents := found.get(_PARENT):
        if len(parents) == 1:
            context = _tracecontext.extract(found, context)
        if not context:
            malformed[_PARENT] += 1
    if _BAGGAGE in found:
        context = _with_baggage(context, ",".join(found[_BAGGAGE]))
    return context


def _with_baggage(context: Context, entries: str) -> Context:
    if len(entries) <= _MAX_BAGGAGE_CHARS:
        context = _baggage.extract({_BAGGAGE: entries}, context)
    # The propagator leaves out what it cannot read, and does not say so.
    if len(baggage.get_all(context)) < sum(bool(entry.strip()) for entry in entries.split(",")):
        malformed[_BAGGAGE] += 1
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


def _text(value: str | bytes) -> str:
    """A header's value; one that is not ASCII becomes one that is refused."""
    try:
        text = value.decode("ascii") if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return _UNREADABLE
    return text if text.isascii() else _UNREADABLE
