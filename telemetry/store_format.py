"""How the span store keeps a span: one row, with what lists are filtered by in columns of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from telemetry import spans
from telemetry.record import StoredEvent, StoredLink, StoredSpan

FORMAT: Final = 2
REPLACED: Final = frozenset({1})
"""Earlier formats, whose files a writer empties: a store of recent requests is not worth a conversion."""

# An entry is a span that a list of requests is made of; a covering index makes that list a scan of the index.
SCHEMA: Final = (
    "DROP TABLE IF EXISTS spans",
    """CREATE TABLE spans (
    trace_id TEXT NOT NULL, span_id TEXT NOT NULL, parent_id TEXT, name TEXT NOT NULL, kind TEXT NOT NULL,
    start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, status TEXT NOT NULL, status_message TEXT NOT NULL,
    attributes TEXT NOT NULL, events TEXT NOT NULL, links TEXT NOT NULL, resource TEXT NOT NULL,
    stored_ns INTEGER NOT NULL, service TEXT NOT NULL, entry INTEGER NOT NULL, failed INTEGER NOT NULL,
    tenant TEXT, replica TEXT,
    UNIQUE (trace_id, span_id)
)""",
    "CREATE INDEX entries ON spans (trace_id, start_ns, end_ns, failed, tenant, replica) WHERE entry = 1",
    "CREATE INDEX operations ON spans (service, name, start_ns, end_ns, trace_id)",
    f"PRAGMA user_version = {FORMAT}",
)

_SPAN = (
    "trace_id, span_id, parent_id, name, kind, start_ns, end_ns, status, status_message,"
    " attributes, events, links, resource"
)
_EXTRA = "stored_ns, service, entry, failed, tenant, replica"
# IGNORE: an exporter that retries a batch must not double it.
INSERT: Final = f"INSERT OR IGNORE INTO spans ({_SPAN}, {_EXTRA}) VALUES ({', '.join('?' * 19)})"  # noqa: S608
# Entries first: they are what must not be missing of a trace that is cut.
SELECT: Final = f"SELECT {_SPAN} FROM spans WHERE trace_id = ? ORDER BY entry DESC, start_ns, rowid LIMIT ?"  # noqa: S608
COUNT: Final = "SELECT count(*) FROM spans WHERE trace_id = ?"
# Distinct values by hops over the index; SQLite would read all of it.
SERVICES: Final = """WITH RECURSIVE hop(service) AS (
    SELECT min(service) FROM spans
    UNION ALL SELECT (SELECT min(service) FROM spans WHERE service > hop.service) FROM hop
    WHERE service NOT NULL
) SELECT service FROM hop WHERE service NOT NULL LIMIT ?"""
OPERATIONS: Final = """WITH RECURSIVE hop(name) AS (
    SELECT min(name) FROM spans WHERE service = ?
    UNION ALL SELECT (SELECT min(name) FROM spans WHERE service = ? AND name > hop.name) FROM hop
    WHERE name NOT NULL
) SELECT name, (SELECT kind FROM spans WHERE service = ? AND name = hop.name LIMIT 1)
FROM hop WHERE name NOT NULL LIMIT ?"""

_REQUESTS: Final = frozenset({spans.HTTP_REQUEST, spans.ROUTER_REQUEST})
_PARTS: Final = frozenset({spans.ROUTER_FORWARD, spans.REPLICA_GENERATE})
_MAX_NAME_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request in a list: its trace, and when its first recorded span began (epoch nanoseconds)."""

    trace_id: str
    start_ns: int


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Which requests; each condition that is set must hold for one of the spans that make up a request.

    A request is a trace with a span that has no parent, or one of the HTTP face, a router or a replica;
    traces of engine steps are none.

    Attributes:
        failed: only those that ended with an error or were cancelled; a retried attempt counts for nothing.
        slow_ns: only those that took at least so long.
        before: only those that come after this row of the list, which is ordered by start, latest first.
    """

    tenant: str | None = None
    replica: str | None = None
    failed: bool = False
    slow_ns: int = 0
    before: RequestRow | None = None
    limit: int = 50

    def sql(self) -> tuple[str, list[str | int]]:
        """A statement that finds (trace id, start), and its values."""
        having: list[str] = []
        values: list[str | int] = []
        for name, wanted in (("tenant", self.tenant), ("replica", self.replica)):
            if wanted is not None:
                having.append(f"max({name} = ?)")
                values.append(utf8(wanted))
        if self.failed:
            having.append("max(failed)")
        if self.slow_ns > 0:
            having.append("max(end_ns - start_ns) >= ?")
            values.append(self.slow_ns)
        if self.before is not None:
            having.append("(min(start_ns), trace_id) < (?, ?)")
            values += [self.before.start_ns, utf8(self.before.trace_id)]
        clause = f" HAVING {' AND '.join(having)}" if having else ""
        return (
            "SELECT trace_id, min(start_ns) AS begun FROM spans INDEXED BY entries WHERE entry = 1"  # noqa: S608
            f" GROUP BY trace_id{clause} ORDER BY begun DESC, trace_id DESC LIMIT ?",
            [*values, self.limit],
        )


@dataclass(frozen=True, slots=True)
class SpanQuery:
    """Traces with a span of one service for which all of this holds; times are epoch nanoseconds."""

    service: str
    operation: str | None = None
    from_ns: int = 0
    until_ns: int = (1 << 63) - 1
    least_ns: int = 0
    most_ns: int = (1 << 63) - 1
    failed: bool = False
    limit: int = 20

    def sql(self) -> tuple[str, list[str | int]]:
        """A statement that finds trace ids, those that began last first, and its values."""
        where = ["service = ?", "start_ns BETWEEN ? AND ?", "end_ns - start_ns BETWEEN ? AND ?"]
        values: list[str | int] = [
            utf8(self.service),
            self.from_ns,
            self.until_ns,
            self.least_ns,
            self.most_ns,
        ]
        if self.operation is not None:
            where.append("name = ?")
            values.append(utf8(self.operation))
        if self.failed:
            where.append("status = 'ERROR'")
        return (
            f"SELECT trace_id FROM spans INDEXED BY operations WHERE {' AND '.join(where)}"  # noqa: S608
            " GROUP BY trace_id ORDER BY max(start_ns) DESC LIMIT ?",
            [*values, self.limit],
        )


def to_rows(batch: Sequence[StoredSpan], stored_ns: int) -> Iterator[tuple[Any, ...]]:
    """The values of INSERT."""
    resource, resource_json, service = None, "", ""
    for span in batch:
        if span.resource is not resource:  # one process's spans share it
            resource, resource_json = span.resource, _json(dict(span.resource))
            service = utf8(span.service)
        is_request = span.name in _REQUESTS or (span.parent_id is None and span.name != spans.ENGINE_STEP)
        is_entry = is_request or span.name in _PARTS
        yield (
            span.trace_id,
            span.span_id,
            span.parent_id,
            utf8(span.name),
            span.kind,
            span.start_ns,
            span.end_ns,
            span.status,
            utf8(span.status_message),
            _json(span.attributes),
            _json([(event.name, event.time_ns, event.attributes) for event in span.events]),
            _json([(link.trace_id, link.span_id, link.attributes) for link in span.links]),
            resource_json,
            stored_ns,
            service,
            is_entry,
            is_request and span.is_error,
            _name(span.attributes.get(spans.TENANT)) if is_entry else None,
            _name(span.attributes.get(spans.REPLICA)) if is_entry else None,
        )


def from_row(row: tuple[Any, ...]) -> StoredSpan:
    """The span of a row of SELECT."""
    trace_id, span_id, parent_id, name, kind, start_ns, end_ns, status, message, *documents = row
    attributes, events, links, resource = (json.loads(document) for document in documents)
    return StoredSpan(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        kind=kind,
        start_ns=start_ns,
        end_ns=end_ns,
        status=status,
        status_message=message,
        attributes=attributes,
        events=tuple(StoredEvent(*event) for event in events),
        links=tuple(StoredLink(*link) for link in links),
        resource=resource,
    )


# default: OpenTelemetry also allows bytes as an attribute value.
_json = json.JSONEncoder(separators=(",", ":"), default=repr).encode


def utf8(text: str) -> str:
    """SQLite takes no lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _name(value: Any) -> str | None:
    return None if value is None else utf8(str(value))[:_MAX_NAME_CHARS]
