"""What is recorded of HTTP requests: the root span of a trace, and how long each took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind
from opentelemetry.util.types import AttributeValue

from cluster.openai.asgi import Receive, Scope
from cluster.openai.call_scope import CallScope
from cluster.openai.transcript import Overheard
from telemetry import spans
from telemetry.logs import speak_of
from telemetry.messages import Answers, to_json
from telemetry.setup import Telemetry

if TYPE_CHECKING:
    from cluster.openai.exchange import Exchange

CLIENT_CLOSED = 499
"""nginx's status for a client that left before it had its answer."""

OTHER = "other"
"""The route of what no app has a route for."""

_TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate", b"baggage"})
_CHATS: Final = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_OTHER_METHOD = "_OTHER"
"""The conventions' word for a method that is none, so that nobody makes up labels."""

_FAILED = 500
_REFUSED = 400
_MAX_NAME_CHARS = 256

# Those that the conventions advise, and more for answers that are streamed.
_DURATION_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120)


class HttpObserver:
    """Records with `telemetry`; spans still open when that ends have failed."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self.duration = telemetry.meters.histogram(
            "http.server.request.duration",
            "s",
            "HTTP requests by route and status; 499: the client left first",
            bounds=_DURATION_S,
            keys=(spans.HTTP_METHOD, spans.HTTP_ROUTE, spans.HTTP_STATUS, spans.ERROR_TYPE),
        )
        self._open: set[HttpRecord] = set()
        telemetry.at_shutdown(self._abandon)

    def begin(self, scope: Scope, call: CallScope, *, traced: bool) -> HttpRecord:
        """A request has come; its call gets its trace."""
        record = HttpRecord(self, scope, call, traced=traced)
        self._open.add(record)
        return record

    def forget(self, record: HttpRecord) -> None:
        """It is over."""
        self._open.discard(record)

    def _abandon(self) -> None:
        for record in list(self._open):
            record.abandon()


class HttpRecord:
    """One request, to its `end`."""

    def __init__(self, owner: HttpObserver, scope: Scope, call: CallScope, *, traced: bool) -> None:
        self._owner, self._call = owner, call
        self._method = scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD
        self._path: str = scope["path"]
        self._began_ns, self._began = time.time_ns(), time.monotonic()
        self._span: Span = trace.INVALID_SPAN
        self._caller = Context()
        self._overheard: Overheard | None = None
        telemetry = owner.telemetry
        if traced:
            carried = [(name.decode(), value) for name, value in scope["headers"] if name in _TRACE_HEADERS]
            self._caller = spans.extract(carried)
            self._span = spans.start(
                telemetry.tracer,
                spans.HTTP_REQUEST,
                self._caller,
                kind=SpanKind.SERVER,
                start_ns=self._began_ns,
            )
            call.context = spans.below(self._span, self._caller)
            call.trace_id = spans.trace_id_hex(self._span)
            if telemetry.config.record_prompts:
                call.answers = Answers(telemetry.config.max_attribute_chars)
        speak_of(call.request_id, self._span.get_span_context())

    def receiving(self, receive: Receive) -> Receive:
        """What the app is to receive by."""
        if self._call.answers is None:
            return receive
        self._overheard = Overheard(receive)
        return self._overheard.receive

    def end(self, route: str, exchange: Exchange, status: int) -> None:
        """All has been said."""
        failed, error, message = status >= _FAILED, str(status) if status >= _REFUSED else "", ""
        if exchange.gone:
            error, message = "cancelled", "the client left before it had the whole answer"
        elif exchange.broken is not None:
            failed, error, message = True, str(exchange.broken.status), exchange.broken.message
        took_s = time.monotonic() - self._began
        self._owner.duration.record(took_s, self._method, route, status, error)
        self._finish(route, status, error, message, failed=failed, took_s=took_s)

    def abandon(self) -> None:
        """The process ends amid the request."""
        took_s = time.monotonic() - self._began
        message = "the ingress ended amid this request"
        self._finish(OTHER, 0, "terminated", message, failed=True, took_s=took_s)

    def _finish(
        self, route: str, status: int, error: str, message: str, *, failed: bool, took_s: float
    ) -> None:
        owner, span = self._owner, self._span
        owner.forget(self)
        if not span.is_recording():
            tail, own = owner.telemetry.tail, span.get_span_context()
            why = tail.why(failed=failed, took_s=took_s) if tail is not None and own.is_valid else ""
            if tail is None or not why:
                return
            above = trace.get_current_span(self._caller).get_span_context()
            span = tail.start(spans.HTTP_REQUEST, own, above, kind=SpanKind.SERVER, start_ns=self._began_ns)
            span.set_attribute(spans.SAMPLED_BY, why)
        span.set_attributes(self._attributes(route, status))
        if failed or error == "cancelled":
            spans.finish(span, error, message)
        else:
            if error:  # the client's fault, by the conventions no error of this span
                span.set_attribute(spans.ERROR_TYPE, error)
            spans.finish(span)

    def _attributes(self, route: str, status: int) -> dict[str, AttributeValue]:
        call, done, telemetry = self._call, self._call.generated, self._owner.telemetry
        told: dict[str, AttributeValue | None] = {
            spans.HTTP_METHOD: self._method,
            spans.HTTP_ROUTE: None if route == OTHER else route,
            spans.HTTP_STATUS: status or None,
            spans.REQUEST_ID: call.request_id,
            spans.TENANT: call.tenant[:_MAX_NAME_CHARS] or None,
        }
        if done.model:
            chat = any(self._path.endswith(path) for path in _CHATS)
            told |= {
                spans.GEN_AI_OPERATION_NAME: "chat" if chat else "text_completion",
                spans.GEN_AI_PROVIDER_NAME: "kvorum",
                spans.GEN_AI_REQUEST_MODEL: done.model,
                spans.GEN_AI_RESPONSE_MODEL: done.model,
                spans.GEN_AI_USAGE_INPUT_TOKENS: done.prompt_tokens,
                spans.GEN_AI_USAGE_OUTPUT_TOKENS: done.generated_tokens,
                spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: done.cached_tokens,
                spans.GEN_AI_RESPONSE_FINISH_REASONS: done.finish_reasons or None,
            }
            if done.first_at:
                told[spans.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = max(
                    done.first_at - self._began_ns / 1e9, 0.0
                )
        if call.answers is not None:
            asked = self._overheard.messages() if self._overheard is not None else []
            for name, messages in (
                (spans.GEN_AI_INPUT_MESSAGES, asked),
                (spans.GEN_AI_OUTPUT_MESSAGES, call.answers.messages()),
            ):
                told[name] = to_json(messages, telemetry.config.max_attribute_chars) if messages else None
        return {name: value for name, value in told.items() if value is not None}
