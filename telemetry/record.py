"""A finished span as plain data: what the local store keeps and the tree view shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"

Attributes = Mapping[str, Any]
"""Strings, booleans, numbers, or lists of one of these."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A moment within a span; the time is nanoseconds since the epoch."""

    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredLink:
    """A span of another trace that this one refers to."""

    trace_id: str
    span_id: str
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """One span. Ids are lower-case hex (32 and 16 digits), times nanoseconds since the epoch.

    `status` is UNSET, OK or ERROR; `kind` is INTERNAL, SERVER, CLIENT, PRODUCER or CONSUMER.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: str
    start_ns: int
    end_ns: int
    status: str = "UNSET"
    status_message: str = ""
    attributes: Attributes = field(default_factory=dict)
    events: tuple[StoredEvent, ...] = ()
    links: tuple[StoredLink, ...] = ()
    resource: Attributes = field(default_factory=dict)

    @property
    def service(self) -> str:
        """The resource's service.name."""
        return str(self.resource.get(SERVICE_NAME, ""))

    @property
    def instance(self) -> str:
        """The resource's service.instance.id."""
        return str(self.resource.get(SERVICE_INSTANCE, ""))

    @property
    def is_error(self) -> bool:
        return self.status == "ERROR"

    @classmethod
    def from_readable(cls, span: ReadableSpan) -> StoredSpan:
        """The plain form of a finished SDK span."""
        context = span.get_span_context()
        assert context is not None, "a finished span has a context"
        start_ns = span.start_time or 0
        return cls(
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            parent_id=f"{span.parent.span_id:016x}" if span.parent is not None else None,
            name=span.name,
            kind=span.kind.name,
            start_ns=start_ns,
            end_ns=span.end_time or start_ns,
            status=span.status.status_code.name,
            status_message=span.status.description or "",
            attributes=dict(span.attributes or {}),
            events=tuple(StoredEvent(e.name, e.timestamp, dict(e.attributes or {})) for e in span.events),
            links=tuple(
                StoredLink(
                    f"{ln.context.trace_id:032x}", f"{ln.context.span_id:016x}", dict(ln.attributes or {})
                )
                for ln in span.links
            ),
            resource=span.resource.attributes or {},
        )


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """One line about a trace. `root` is its topmost recorded span; the time is epoch nanoseconds."""

    trace_id: str
    root: str
    service: str
    start_ns: int
    duration_ns: int
    spans: int
    errors: int


def roots(spans: Sequence[StoredSpan]) -> list[StoredSpan]:
    """Spans whose parent was not recorded (or that have none), earliest first."""
    known = {span.span_id for span in spans}
    tops = [span for span in spans if span.parent_id is None or span.parent_id not in known]
    return sorted(tops, key=lambda span: (span.start_ns, span.span_id))


def summarise(trace_id: str, spans: Sequence[StoredSpan]) -> TraceSummary:
    """The summary of one trace's spans, of which there is at least one."""
    top = next(iter(roots(spans)), None) or min(spans, key=lambda span: span.start_ns)
    start_ns = min(span.start_ns for span in spans)
    return TraceSummary(
        trace_id=trace_id,
        root=top.name,
        service=top.service,
        start_ns=start_ns,
        duration_ns=max(span.end_ns for span in spans) - start_ns,
        spans=len(spans),
        errors=sum(span.is_error for span in spans),
    )
