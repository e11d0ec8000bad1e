"""OTLP spans as the store keeps them: checked, cut to bounds, never trusted.

https://opentelemetry.io/docs/specs/otlp/ and opentelemetry/proto/trace/v1/trace.proto
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from telemetry.record import StoredEvent, StoredLink, StoredSpan

MOST_SPANS: Final = 10_000
"""Of one export; a body of empty spans must not keep the receiver busy for long."""
_MOST_ITEMS: Final = 128
"""Attributes of one thing, events and links of a span, items of a list: the SDK's own limits."""
_MAX_NAME_CHARS: Final = 256
_MAX_SPAN_CHARS: Final = 65_536
"""Of all attributes of a span, its events and links: a trace of many spans must still fit into an answer."""
_MAX_RESOURCE_CHARS: Final = 4096
"""Kept with each span of a process."""
_MAX_AHEAD_NS: Final = 86_400 * 10**9
"""A clock that is further ahead than a day is no skew: its spans would head every list."""
_MAX_NS: Final = (1 << 63) - 1

_KINDS: Final = {2: "SERVER", 3: "CLIENT", 4: "PRODUCER", 5: "CONSUMER"}
_SCALARS: Final = frozenset({"bool_value", "int_value", "double_value"})
_STATUSES: Final = {Status.STATUS_CODE_OK: "OK", Status.STATUS_CODE_ERROR: "ERROR"}


class _InvalidError(ValueError):
    """Why a span cannot be kept."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The spans of an export that can be kept, how many cannot, and why the last one of these cannot."""

    spans: list[StoredSpan]
    rejected: int = 0
    reason: str = ""


def spans_of(request: ExportTraceServiceRequest, *, now_ns: int, max_chars: int) -> Decoded:
    """Everything that is valid in an export.

    Args:
        now_ns: our clock, nanoseconds since the epoch.
        max_chars: longer texts are cut.
    """
    kept: list[StoredSpan] = []
    seen = rejected = 0
    reason = ""
    for group in request.resource_spans:
        resource = attributes_of(group.resource.attributes, _MAX_RESOURCE_CHARS, _Room(_MAX_RESOURCE_CHARS))
        for scope in group.scope_spans:
            room = max(MOST_SPANS - seen, 0)
            seen += len(scope.spans)
            if len(scope.spans) > room:
                rejected += len(scope.spans) - room
                reason = f"an export holds at most {MOST_SPANS} spans"
            for span in scope.spans[:room]:
                try:
                    kept.append(_span(span, resource, now_ns, max_chars))
                except _InvalidError as error:
                    rejected += 1
                    reason = str(error)
    return Decoded(kept, rejected, reason)


class _Room:
    """Characters that one span may still take."""

    def __init__(self, chars: int) -> None:
        self.chars = chars


def attributes_of(pairs: Iterable[KeyValue], max_chars: int, room: _Room | None = None) -> dict[str, Any]:
    """Attributes as plain values; what is nested deeper than a list becomes JSON text.

    The first ones are kept, as many as there may be and there is room for.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        value = _value(pair.value, max_chars)
        if not pair.key or value is None:
            continue
        if room is not None:
            room.chars -= len(pair.key) + sum(map(_size, value if isinstance(value, list) else [value]))
        if len(found) == _MOST_ITEMS or (room is not None and room.chars < 0):
            break
        found[pair.key[:_MAX_NAME_CHARS]] = value
    return found


def _span(span: Span, resource: dict[str, Any], now_ns: int, max_chars: int) -> StoredSpan:
    start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
    if not 0 < start_ns <= now_ns + _MAX_AHEAD_NS:
        raise _InvalidError(
            "a span's start_time_unix_nano is missing, or more than a day ahead of this clock"
        )
    parent_id = span.parent_span_id
    room = _Room(_MAX_SPAN_CHARS)
    return StoredSpan(
        trace_id=_id(span.trace_id, 16, "trace_id"),
        span_id=_id(span.span_id, 8, "span_id"),
        parent_id=_id(parent_id, 8, "parent_span_id") if any(parent_id) else None,
        name=span.name[:_MAX_NAME_CHARS],
        kind=_KINDS.get(span.kind, "INTERNAL"),
        start_ns=start_ns,
        end_ns=min(max(end_ns, start_ns), now_ns + _MAX_AHEAD_NS),
        status=_STATUSES.get(span.status.code, "UNSET"),
        status_message=_cut(span.status.message, max_chars),
        attributes=attributes_of(span.attributes, max_chars, room),
        events=tuple(
            StoredEvent(
                event.name[:_MAX_NAME_CHARS],
                min(event.time_unix_nano, _MAX_NS),
                attributes_of(event.attributes, max_chars, room),
            )
            for event in span.events[:_MOST_ITEMS]
        ),
        links=tuple(_links(span, max_chars, room)),
        resource=resource,
    )


def _links(span: Span, max_chars: int, room: _Room) -> Iterator[StoredLink]:
    for link in span.links[:_MOST_ITEMS]:
        try:
            ids = _id(link.trace_id, 16, "trace_id"), _id(link.span_id, 8, "span_id")
        except _InvalidError:
            continue  # a link to nowhere is no reason to lose the span
        yield StoredLink(*ids, attributes_of(link.attributes, max_chars, room))


def _id(given: bytes, size: int, name: str) -> str:
    """Lower-case hex.

    OTLP's JSON has ids in hex where protobuf's JSON has base64. The parser, which knows the latter only,
    made 3 bytes of each 4 digits; encoding these again gives the digits back.
    """
    if len(given) == size * 3 // 2:
        text = base64.b64encode(given)
        try:
            given = bytes.fromhex(text.decode())
        except ValueError:
            given = b""
    if len(given) != size or not any(given):
        raise _InvalidError(f"a span's {name} is not {size} bytes, or zero")
    return given.hex()


def _value(value: AnyValue, max_chars: int) -> Any:
    kind = value.WhichOneof("value")
    if kind in _SCALARS:
        return getattr(value, kind)
    if kind == "string_value":
        return _cut(value.string_value, max_chars)
    if kind == "bytes_value":
        return _cut(base64.b64encode(value.bytes_value[:max_chars]).decode(), max_chars)
    if kind == "kvlist_value":
        return _json(attributes_of(value.kvlist_value.values, max_chars), max_chars)
    if kind == "array_value":
        items = [_value(item, max_chars) for item in value.array_value.values[:_MOST_ITEMS]]
        return [
            item if isinstance(item, str | bool | int | float) else _json(item, max_chars) for item in items
        ]
    return None


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else 8


def _json(value: Any, max_chars: int) -> str:
    return _cut(json.dumps(value, ensure_ascii=False), max_chars)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
