"""Traces in the shape of Jaeger's query API, which Grafana and other tools read.

https://www.jaegertracing.io/docs/latest/architecture/apis/#query-json-over-http
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from telemetry.record import Attributes, StoredSpan
from telemetry.store_format import SpanQuery
from telemetry.viewer.queries import QuestionError, plain
from telemetry.viewer.skew import PlacedSpan, place

_MAX_LIMIT: Final = 500
_MAX_TEXT: Final = 256
_MOST_TAGS: Final = 16
_FOREVER_NS: Final = (1 << 63) - 1
_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|µs|μs|ms|s|m|h)")
_UNIT_NS: Final = {
    "ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9,
    "h": 3600 * 10**9,
}  # fmt: skip
_DURATIONS: Final = re.compile(rf"(?:{_DURATION.pattern})+")


@dataclass(frozen=True, slots=True)
class Search:
    """A search as Jaeger means it: one span of the service for which all conditions hold.

    `tags` are compared as text with the span's and its process's attributes; the store does not know them.
    """

    query: SpanQuery
    tags: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parsed(cls, parameters: Mapping[str, str]) -> Search:
        """From the parameters of /api/traces. Raises QuestionError."""
        service = parameters.get("service", "")
        if not service:
            raise QuestionError("give service=NAME, or traceID=ID")
        tags = _tags(parameters)
        return cls(
            SpanQuery(
                service=service[:_MAX_TEXT],
                operation=parameters.get("operation", "")[:_MAX_TEXT] or None,
                from_ns=_microseconds(parameters, "start", 0),
                until_ns=_microseconds(parameters, "end", _FOREVER_NS),
                least_ns=_duration(parameters, "minDuration", 0),
                most_ns=_duration(parameters, "maxDuration", _FOREVER_NS),
                failed=tags.pop("error", "").lower() == "true",
                limit=_limit(parameters),
            ),
            tags,
        )

    def widened(self, times: int) -> SpanQuery:
        """What to ask the store for: more traces, where tags will leave some of them out."""
        return replace(self.query, limit=self.query.limit * times) if self.tags else self.query

    def matches(self, spans: Iterable[StoredSpan]) -> bool:
        """Whether one of them has all tags; only those of the service and the operation count."""
        return not self.tags or any(
            self._has_tags(span)
            for span in spans
            if span.service == self.query.service and self.query.operation in {None, span.name}
        )

    def _has_tags(self, span: StoredSpan) -> bool:
        known = {**span.resource, **span.attributes, "span.kind": span.kind.lower()}
        return all(name in known and _text(known[name]) == value for name, value in self.tags.items())


def envelope(data: Any, total: int | None = None) -> dict[str, Any]:
    """What every answer is wrapped in."""
    count = total if total is not None else len(data) if isinstance(data, Sequence) else 0
    return {"data": data, "total": count, "limit": 0, "offset": 0, "errors": None}


def trace(spans: Sequence[StoredSpan]) -> dict[str, Any]:
    """One trace, of which there is at least one span; times corrected for skew, as Jaeger does it."""
    processes: dict[str, dict[str, Any]] = {}
    ids: dict[tuple[str, str], str] = {}
    found = []
    for one in place(spans):
        span = one.span
        resource = {name: value for name, value in span.resource.items() if name != "service.name"}
        process = ids.setdefault(
            (span.service, json.dumps(resource, sort_keys=True, default=str)), f"p{len(ids) + 1}"
        )
        processes.setdefault(process, {"serviceName": span.service or "unknown", "tags": _fields(resource)})
        found.append(_span(one, process))
    return {"traceID": spans[0].trace_id, "spans": found, "processes": processes, "warnings": None}


def _span(one: PlacedSpan, process: str) -> dict[str, Any]:
    span = one.span
    tags = _fields(span.attributes) + _fields({"span.kind": span.kind.lower()})
    if span.status != "UNSET":
        tags += _fields({"otel.status_code": span.status})
    if span.is_error:
        tags += _fields({"error": True})
    if span.status_message:
        tags += _fields({"otel.status_description": span.status_message})
    parents = [_reference("CHILD_OF", span.trace_id, span.parent_id)] if span.parent_id else []
    moved = f"clock skew: moved by {one.skew_ns / 1e6:.3f} ms to lie within its parent, on another host"
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "flags": 1,
        "operationName": span.name,
        "references": parents
        + [_reference("FOLLOWS_FROM", link.trace_id, link.span_id) for link in span.links],
        "startTime": one.start_ns // 1000,
        "duration": (one.end_ns - one.start_ns) // 1000,
        "tags": tags,
        "logs": [
            {
                "timestamp": (event.time_ns + one.skew_ns) // 1000,
                "fields": _fields({"event": event.name, **event.attributes}),
            }
            for event in span.events
        ],
        "processID": process,
        "warnings": [moved] if one.skew_ns else None,
    }


def _reference(kind: str, trace_id: str, span_id: str) -> dict[str, str]:
    return {"refType": kind, "traceID": trace_id, "spanID": span_id}


def _fields(attributes: Attributes) -> list[dict[str, Any]]:
    found = []
    for name, value in attributes.items():
        shown = plain(value)
        if isinstance(shown, bool):
            kind = "bool"
        elif isinstance(shown, int):
            kind = "int64"
        elif isinstance(shown, float):
            kind = "float64"
        else:
            kind, shown = "string", _text(value)
        found.append({"key": name, "type": kind, "value": shown})
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def _tags(parameters: Mapping[str, str]) -> dict[str, str]:
    """`tags` is a JSON object; `tag`, as older clients send it, one name:value."""
    tags: dict[str, str] = {}
    if given := parameters.get("tags", ""):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise QuestionError('tags is a JSON object: {"name":"value"}')
        tags |= {str(name): _text(value) for name, value in found.items()}
    if given := parameters.get("tag", ""):
        name, _, value = given.partition(":")
        tags[name] = value
    if len(tags) > _MOST_TAGS:
        raise QuestionError(f"at most {_MOST_TAGS} tags")
    return tags


def _limit(parameters: Mapping[str, str]) -> int:
    given = parameters.get("limit", "") or "20"
    if not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise QuestionError("limit is a whole number")
    return max(1, min(int(given), _MAX_LIMIT))


def _microseconds(parameters: Mapping[str, str], name: str, default_ns: int) -> int:
    given = parameters.get(name, "")
    if not given:
        return default_ns
    if not (given.isascii() and given.isdigit() and len(given) <= 18):
        raise QuestionError(f"{name} is a whole number, microseconds since the epoch")
    return min(int(given) * 1000, _FOREVER_NS)


def _duration(parameters: Mapping[str, str], name: str, default_ns: int) -> int:
    given = parameters.get(name, "").strip()
    if not given:
        return default_ns
    if len(given) > _MAX_TEXT or not _DURATIONS.fullmatch(given):
        raise QuestionError(f"{name} is a duration such as 1.5s or 200ms")
    total = sum(float(number) * _UNIT_NS[unit] for number, unit in _DURATION.findall(given))
    return min(int(total), _FOREVER_NS)
