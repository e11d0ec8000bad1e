"""What the page shows of traces, as plain values: a request in a line, a request with all about it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from telemetry import spans as names
from telemetry.record import Attributes, StoredSpan
from telemetry.viewer.skew import PlacedSpan, host_of, host_shifts, place

_REQUESTS: Final = frozenset({names.HTTP_REQUEST, names.ROUTER_REQUEST})
_SERVING: Final = (names.ROUTER_FORWARD, names.REPLICA_GENERATE)
_MOST_PHASES: Final = 32
_MOST_CANDIDATES: Final = 256
_MOST_SECONDS: Final = 1e9
_EXACT: Final = 1 << 53
"""Beyond it a browser's numbers are not exact: larger ones go as text."""
_COUNTS: Final = ("cached", "pending", "pooled", "uncached", "sequences", "backlog")
_TERMS: Final = (
    "queue", "prefill", "fetch", "interference", "overhead", "ttft", "harm", "affinity", "score", "kv",
)  # fmt: skip


class QuestionError(ValueError):
    """A question to the viewer that makes no sense; the message is for the one who asked."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One line about a request. Times in ms, `start_ms` since the epoch; None where the trace does not say.

    Attributes:
        name, service: of its topmost recorded span, whose start and duration these are.
        status: ok, error, cancelled, refused, or incomplete: the span that ends last is not there (yet).
        replica: the one of its last attempt.
        ttft_ms: from the start to the first token, as the router saw it.
        tpot_ms: between later tokens of one sequence, on average.
        spans: recorded of its trace.
        phases_ms: total duration of the spans of each name.
    """

    trace_id: str
    start_ms: float
    duration_ms: float
    name: str
    service: str
    tenant: str
    replica: str
    status: str
    error_type: str
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    spans: int
    phases_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Marks:
    """First and last token of a request: ms since the epoch, and the latencies people name after them."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None


def summary(spans: Sequence[StoredSpan], size: int | None = None) -> RequestSummary:
    """The summary of a trace's spans, of which there is at least one; `size`: how many there are in all."""
    return _summary(place(spans), size)


def _summary(placed: Sequence[PlacedSpan], size: int | None = None) -> RequestSummary:
    top = placed[0]
    asked = [one.span for one in placed if one.span.name == names.ROUTER_REQUEST]
    served = [one.span for one in placed if one.span.name in _SERVING]
    counted = asked or [span for span in served if span.name == names.REPLICA_GENERATE]
    marks = _marks(placed)
    status, error_type = _status(top.span, asked)
    phases: dict[str, float] = {}
    for one in placed:
        if one.span.name in phases or len(phases) < _MOST_PHASES:
            lasted = (one.span.end_ns - one.span.start_ns) / 1e6
            phases[one.span.name] = round(phases.get(one.span.name, 0.0) + lasted, 3)
    return RequestSummary(
        trace_id=top.span.trace_id,
        start_ms=_moment(top.start_ns),
        duration_ms=_ms(top.end_ns - top.start_ns),
        name=top.span.name,
        service=top.span.service,
        tenant=_text(asked, names.TENANT),
        replica=_text(reversed(served), names.REPLICA),
        status=status,
        error_type=error_type,
        input_tokens=_total(counted, names.GEN_AI_USAGE_INPUT_TOKENS),
        output_tokens=_total(counted, names.GEN_AI_USAGE_OUTPUT_TOKENS),
        cached_tokens=_total(counted, names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS),
        ttft_ms=marks.ttft_ms,
        tpot_ms=marks.tpot_ms,
        spans=len(placed) if size is None else size,
        phases_ms=phases,
    )


def listed(summaries: Iterable[RequestSummary]) -> list[dict[str, Any]]:
    """Summaries for a list: without the phases."""
    return [{name: value for name, value in asdict(one).items() if name != "phases_ms"} for one in summaries]


def request_view(
    spans: Sequence[StoredSpan], steps: Iterable[Sequence[StoredSpan]], *, size: int
) -> dict[str, Any]:
    """All about one request, as JSON values: its spans as a tree on one clock, marks, candidates, steps.

    Args:
        spans: of its trace, at least one.
        steps: the traces of engine steps that it links to.
        size: how many spans its trace has in the store.
    """
    placed = place(spans)
    shifts = host_shifts(placed)
    moved = [
        PlacedSpan(one.span, one.depth, shifts.get(host_of(one.span), 0))
        for trace in steps
        for one in place(trace)
    ]
    return {
        "trace_id": spans[0].trace_id,
        "request": listed([_summary(placed, size)])[0],
        "spans": [_view(one) for one in placed],
        "candidates": [row for one in placed for row in candidates(one.span)][:_MOST_CANDIDATES],
        "marks": asdict(_marks(placed)),
        "steps": [{"trace_id": one.span.trace_id, **_view(one)} for one in moved],
        "truncated": size > len(placed),
    }


def candidates(span: StoredSpan) -> list[dict[str, Any]]:
    """The replicas that a routing decision considered, from the lines on its span; other lines are left out.

    Tokens are counts, the other terms predicted milliseconds, `kv` a share.
    """
    lines = span.attributes.get(names.CANDIDATES)
    if span.name != names.ROUTER_ROUTE or not isinstance(lines, list | tuple):
        return []
    chosen = str(span.attributes.get(names.REPLICA, "")), str(span.attributes.get(names.EPOCH, ""))
    rows = []
    for line in lines[:_MOST_CANDIDATES]:
        head, _, degraded = str(line).partition(" degraded=")
        key, *pairs = head.split()[:32] or [""]
        replica, _, epoch = key.rpartition("@")
        terms = dict(pair.partition("=")[::2] for pair in pairs)
        values: dict[str, Any] = {name: _number(terms.get(name), int) for name in _COUNTS}
        values |= {name: _number(terms.get(name), float) for name in _TERMS}
        if replica and any(value is not None for value in values.values()):
            whose = {
                "span_id": span.span_id,
                "replica": replica,
                "epoch": epoch,
                "chosen": (replica, epoch) == chosen,
            }
            rows.append({**whose, "degraded": degraded.strip("'\""), **values})
    return rows


def plain(value: Any, depth: int = 4) -> Any:
    """A value that JSON and browsers can hold: no NaN, no infinity, no whole number that would be rounded."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _EXACT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple) and depth:
        return [plain(item, depth - 1) for item in value]
    if isinstance(value, Mapping) and depth:
        return {str(key): plain(item, depth - 1) for key, item in value.items()}
    return str(value)


def _view(one: PlacedSpan) -> dict[str, Any]:
    span = one.span
    return {
        "span_id": span.span_id,
        "parent": span.parent_id,
        "depth": one.depth,
        "name": span.name,
        "kind": span.kind,
        "service": span.service,
        "instance": span.instance,
        "host": host_of(span),
        "start_ms": _moment(one.start_ns),
        "end_ms": _moment(one.end_ns),
        "duration_ms": _ms(one.end_ns - one.start_ns),
        "skew_ms": _ms(one.skew_ns),
        "status": span.status,
        "status_message": span.status_message,
        "error": span.is_error,
        "attributes": plain(span.attributes),
        "events": [
            {
                "name": event.name,
                "time_ms": _moment(event.time_ns + one.skew_ns),
                "attributes": plain(event.attributes),
            }
            for event in span.events
        ],
        "links": [
            {"trace_id": link.trace_id, "span_id": link.span_id, "attributes": plain(link.attributes)}
            for link in span.links
        ],
    }


def _marks(placed: Sequence[PlacedSpan]) -> Marks:
    """The router's word on the first token, where it is there; else the replica's."""
    seen: list[int] = []
    told: list[int] = []
    decoded: list[int] = []
    lasts: list[int] = []
    decode_s, later, sequences = 0.0, 0.0, 1
    for one in placed:
        span = one.span
        for event in span.events:
            if event.name == names.FIRST_TOKEN:
                (decoded if span.name == names.REPLICA_DECODE else seen).append(event.time_ns + one.skew_ns)
            elif event.name == names.LAST_TOKEN:
                lasts.append(event.time_ns + one.skew_ns)
        if span.name == names.ROUTER_REQUEST:
            sequences = max(_count(span.attributes, names.GEN_AI_REQUEST_CHOICE_COUNT) or 1, 1)
            waited_s = _seconds(span.attributes, names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK)
            told += [] if waited_s is None else [one.start_ns + round(waited_s * 1e9)]
        elif span.name == names.REPLICA_DECODE:
            measured_s = _seconds(span.attributes, names.MEASURED_S)
            decode_s += (span.end_ns - span.start_ns) / 1e9 if measured_s is None else measured_s
            tokens = _count(span.attributes, names.GEN_AI_USAGE_OUTPUT_TOKENS) or 0
            later += max(tokens / sequences - 1, 0)
    first, last = min(seen or told or decoded, default=None), max(lasts, default=None)
    return Marks(
        ttft_ms=None if first is None else _ms(first - placed[0].start_ns),
        tpot_ms=round(decode_s * 1e3 / later, 3) if later > 0 else None,
        first_token_ms=None if first is None else _moment(first),
        last_token_ms=None if last is None else _moment(last),
    )


def _status(top: StoredSpan, asked: Sequence[StoredSpan]) -> tuple[str, str]:
    known = [*asked, top]
    error_type = _text((span for span in known if span.is_error), names.ERROR_TYPE)
    if any(span.is_error for span in known):
        if error_type == "cancelled":
            return "cancelled", error_type
        return "refused" if _text(asked, names.OUTCOME) == "refused" else "error", error_type
    answered = _count(top.attributes, names.HTTP_STATUS) or 0
    if answered >= 400:  # to the conventions the client's own fault is no error of the server's span
        return "refused", str(answered)
    return "ok" if top.parent_id is None or top.name in _REQUESTS else "incomplete", ""


def _text(spans: Iterable[StoredSpan], name: str) -> str:
    return next((str(span.attributes[name]) for span in spans if name in span.attributes), "")


def _total(spans: Iterable[StoredSpan], name: str) -> int | None:
    found = [count for span in spans if (count := _count(span.attributes, name)) is not None]
    return min(sum(found), _EXACT) if found else None


def _count(attributes: Attributes, name: str) -> int | None:
    value = attributes.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _EXACT else None


def _seconds(attributes: Attributes, name: str) -> float | None:
    value = attributes.get(name)
    return value if isinstance(value, int | float) and 0 <= value < _MOST_SECONDS else None


def _number(text: str | None, kind: type[int] | type[float]) -> float | None:
    try:
        value = kind(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) <= _EXACT else None


def _ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 3)


def _moment(nanoseconds: int) -> float:
    """Epoch ms, rounded down to whole microseconds: what a double of that size still tells apart."""
    return nanoseconds // 1000 / 1e3
