"""The router's spans, made from outside through the hooks of `router.observe`.

kvorum.router.request            below the caller's span, or a root
├─ kvorum.router.tokenize        the prompt becomes tokens, and all that was asked is checked
├─ kvorum.router.admit            only when it had to wait, or was refused
├─ kvorum.router.route            every candidate with every term of its cost
└─ kvorum.router.forward         one per attempt; its context goes to the replica

They are written when the request is over: nothing but ids is made in the way of its first token, and by
then it is known whether a request that was not sampled is worth recording (`telemetry.tail`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind
from opentelemetry.util.types import AttributeValue

from protos import common_pb2, inference_pb2
from protos.errors import KvorumError
from router.observe import AttemptScope, Metadata, Outcome, Reader, RequestFacts, RequestScope
from router.span_attributes import Attributes, of_fetch, of_forward, of_route
from telemetry import spans
from telemetry.logs import speak_of
from telemetry.messages import Answers, Message, to_json
from telemetry.setup import Telemetry
from telemetry.tail import Tail

if TYPE_CHECKING:
    from router.decide import Decision
    from router.group import Placement


class TracingObserver:
    """Makes the spans of every request with `telemetry`; those still open when that ends are failed."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self._open: set[_RequestSpans] = set()
        telemetry.at_shutdown(self._abandon)

    def request(self, facts: RequestFacts, metadata: Metadata) -> RequestScope:
        """Start the request's span below the context that the call's metadata carries."""
        scope = _RequestSpans(self.telemetry, facts, spans.extract(metadata), self._open.discard)
        self._open.add(scope)
        return scope

    def _abandon(self) -> None:
        for scope in list(self._open):
            scope.finished(Outcome(error=_ended()))


@dataclass(slots=True, eq=False)
class _Part:
    """A child of the request's span. `ended_ns` is 0 while it lasts.

    `span` is that of an attempt, which the replica knows; it may be one that records nothing.
    """

    name: str
    started_ns: int
    ended_ns: int
    attributes: Callable[[], Attributes]
    error: str = ""
    span: Span | None = None
    outcome: Outcome | None = None

    @property
    def first_token_ns(self) -> int | None:
        """Of an attempt that had one."""
        after_s = self.outcome.first_token_s if self.outcome is not None else None
        return None if after_s is None else min(self.started_ns + int(after_s * 1e9), self.ended_ns)


class _RequestSpans:
    def __init__(
        self,
        telemetry: Telemetry,
        facts: RequestFacts,
        caller: Context,
        over: Callable[[_RequestSpans], None],
    ) -> None:
        self._telemetry, self._facts, self._caller, self._over = telemetry, facts, caller, over
        self._model, self._parts, self._finished = "", list[_Part](), False
        config = telemetry.config
        self._answers = Answers(config.max_attribute_chars) if config.record_prompts else None
        self._started_ns = time.time_ns()
        self._span = spans.start(
            telemetry.tracer, spans.ROUTER_REQUEST, caller, kind=SpanKind.SERVER, start_ns=self._started_ns
        )
        self._context = spans.below(self._span, caller)
        speak_of(facts.request_id, self._span.get_span_context())

    @property
    def trace_id(self) -> str:
        return spans.trace_id_hex(self._span)

    def tokenized(self, model: str, prompt_tokens: int, started_ns: int) -> None:
        self._model = model
        told = {spans.GEN_AI_USAGE_INPUT_TOKENS: prompt_tokens}
        self._parts.append(_Part(spans.ROUTER_TOKENIZE, started_ns, time.time_ns(), lambda: told))

    def _checked(self, at_ns: int) -> None:
        """The request was ready to be placed then."""
        if self._parts and self._parts[-1].name == spans.ROUTER_TOKENIZE:
            self._parts[-1].ended_ns = at_ns

    def placed(self, placement: Placement, started_ns: int) -> None:
        self._checked(started_ns)
        waited_ns = int(placement.waited_s * 1e9)
        decided_ns = placement.started_ns + int(placement.decided_in_s * 1e9)
        if waited_ns:
            self._parts.append(_Part(spans.ROUTER_ADMIT, started_ns, started_ns + waited_ns, dict))
            started_ns = placement.started_ns  # else the prompt was hashed in between
        decision = placement.decision
        self._parts.append(_Part(spans.ROUTER_ROUTE, started_ns, decided_ns, lambda: of_route(decision)))

    def unplaced(self, error: KvorumError | None, started_ns: int) -> None:
        self._checked(started_ns)
        reason = "cancelled" if error is None else common_pb2.Reason.Name(error.reason)
        self._parts.append(_Part(spans.ROUTER_ADMIT, started_ns, time.time_ns(), dict, reason))

    def attempt(self, decision: Decision, number: int) -> AttemptScope:
        started_ns = time.time_ns()
        span = spans.start(
            self._telemetry.tracer,
            spans.ROUTER_FORWARD,
            self._context,
            kind=SpanKind.CLIENT,
            start_ns=started_ns,
        )
        part = _Part(spans.ROUTER_FORWARD, started_ns, 0, lambda: of_forward(decision, number), span=span)
        self._parts.append(part)
        reader = None if self._answers is None else _reader(self._answers)
        return _AttemptSpan(part, spans.inject(spans.below(span, self._context)), reader)

    def finished(self, outcome: Outcome) -> None:
        if self._finished:
            return
        self._finished = True
        self._over(self)
        now_ns = time.time_ns()
        tail, why = self._telemetry.tail, ""
        if not self._span.is_recording():
            took_s = (now_ns - self._started_ns) / 1e9
            if tail is None or not (why := tail.why(failed=outcome.error is not None, took_s=took_s)):
                return
        self._write(outcome, now_ns, tail if why else None, why)

    def _write(self, outcome: Outcome, now_ns: int, tail: Tail | None, why: str) -> None:
        """Make the spans, by `tail` those of a trace that was not sampled."""
        span, own = self._span, self._span.get_span_context()
        if tail is not None:
            above = trace.get_current_span(self._caller).get_span_context()
            span = tail.start(
                spans.ROUTER_REQUEST, own, above, kind=SpanKind.SERVER, start_ns=self._started_ns
            )
            span.set_attribute(spans.SAMPLED_BY, why)
        for part in self._parts:
            if not part.ended_ns:
                part.ended_ns, part.outcome = now_ns, outcome
            kind = SpanKind.INTERNAL if part.span is None else SpanKind.CLIENT
            if tail is not None:
                known = None if part.span is None else part.span.get_span_context()
                child = tail.start(part.name, known, own, kind=kind, start_ns=part.started_ns)
            else:
                child = part.span or spans.start(
                    self._telemetry.tracer, part.name, self._context, start_ns=part.started_ns
                )
            child.set_attributes(part.attributes())
            if (at_ns := part.first_token_ns) is not None:
                child.add_event(spans.FIRST_TOKEN, timestamp=at_ns)
            if part.outcome is not None:
                _end(child, part.outcome, part.ended_ns, part.outcome.first_token_s)
            else:
                spans.finish(child, part.error or None, end_ns=part.ended_ns)
        span.set_attributes(self._attributes())
        firsts = [at_ns for part in self._parts if (at_ns := part.first_token_ns) is not None]
        _end(span, outcome, now_ns, (min(firsts) - self._started_ns) / 1e9 if firsts else None)

    def _attributes(self) -> Attributes:
        facts, answers = self._facts, self._answers
        told: dict[str, AttributeValue | None] = {
            spans.GEN_AI_OPERATION_NAME: facts.operation,
            spans.GEN_AI_PROVIDER_NAME: "kvorum",
            spans.REQUEST_ID: facts.request_id,
            spans.GEN_AI_REQUEST_CHOICE_COUNT: facts.sequences,
            spans.TENANT: facts.tenant or None,
            spans.GEN_AI_REQUEST_MODEL: facts.model or self._model or None,
            spans.GEN_AI_RESPONSE_MODEL: self._model or None,
            spans.GEN_AI_REQUEST_MAX_TOKENS: facts.max_tokens,
            spans.GEN_AI_REQUEST_TEMPERATURE: facts.temperature,
        }
        if answers is not None:
            limit = self._telemetry.config.max_attribute_chars
            for name, messages in (
                (spans.GEN_AI_INPUT_MESSAGES, _asked(facts)),
                (spans.GEN_AI_OUTPUT_MESSAGES, answers.messages()),
            ):
                told[name] = to_json(messages, limit) if messages else None
        return {name: value for name, value in told.items() if value is not None}


class _AttemptSpan:
    __slots__ = ("_part", "metadata", "reader")

    def __init__(self, part: _Part, metadata: Sequence[tuple[str, str]], reader: Reader | None) -> None:
        self._part, self.metadata, self.reader = part, metadata, reader

    def finished(self, outcome: Outcome) -> None:
        self._part.ended_ns, self._part.outcome = time.time_ns(), outcome


def _end(span: Span, outcome: Outcome, ended_ns: int, first_token_s: float | None) -> None:
    """What happened, and the error where one ended it."""
    span.set_attributes(
        {
            spans.OUTCOME: outcome.name,
            spans.GEN_AI_USAGE_INPUT_TOKENS: outcome.prompt_tokens,
            spans.GEN_AI_USAGE_OUTPUT_TOKENS: outcome.generated_tokens,
            spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: outcome.cached_tokens,
            **of_fetch(outcome),
        }
    )
    if first_token_s is not None:
        span.set_attribute(spans.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, first_token_s)
    error, message = None, ""
    if outcome.error is not None:
        error, message = common_pb2.Reason.Name(outcome.error.reason), outcome.error.message
    elif outcome.cancelled:
        error, message = "cancelled", "the client left, its deadline passed, or the router stops"
    spans.finish(span, error, message, end_ns=ended_ns)


def _reader(answers: Answers) -> Reader:
    def read(message: common_pb2.GenerateResponse) -> None:
        for choice in message.choices:
            answers.add(choice.index, choice.text)

    return read


def _asked(facts: RequestFacts) -> list[Message]:
    """The prompt, where it came as text."""
    request = facts.message
    if isinstance(request, inference_pb2.GenerateRequest) and request.WhichOneof("prompt") == "text":
        return [("user", request.text)]
    return [(m.role, m.content) for m in request.chat.messages] if request is not None else []


def _ended() -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.ROUTER_DRAINING,
        "the router's process ended amid this request",
    )
