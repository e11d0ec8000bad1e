"""The questions of the page and of Jaeger's clients, put to the store. Blocking: call it in a thread."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from telemetry.record import StoredSpan
from telemetry.store import RequestQuery, RequestRow, SpanStore
from telemetry.viewer import jaeger, queries
from telemetry.viewer.queries import QuestionError

_MOST_SPANS: Final = 2000
"""Of one trace, shown in full."""
_LISTED_SPANS: Final = 200
"""Of one trace, looked at for its line in a list."""
_MOST_REQUESTS: Final = 500
_MOST_STEP_TRACES: Final = 16
_STEP_SPANS: Final = 1024
_MAX_NAME_CHARS: Final = 256
_TRACE_ID: Final = re.compile(r"[0-9a-fA-F]{1,32}")
_CURSOR: Final = re.compile(r"([0-9]{1,19})-([0-9a-f]{32})")
_MAX_NS: Final = (1 << 63) - 1
_TAGGED: Final = 10
"""Traces looked at for each one that a search by tags may find."""


class StoreReader:
    """Answers as JSON values. Every method raises StoreError and QuestionError."""

    def __init__(self, store: SpanStore) -> None:
        self._store = store

    def requests(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """/api/requests: the latest requests that pass the filters, and where to go on."""
        query = _query(parameters)
        rows = self._store.requests(query)
        found = []
        for row in rows:
            spans = self._store.trace(row.trace_id, _LISTED_SPANS)
            if spans:  # else a writer has trimmed it since
                cut = len(spans) == _LISTED_SPANS
                found.append(queries.summary(spans, self._store.size(row.trace_id) if cut else None))
        more = f"{rows[-1].start_ns}-{rows[-1].trace_id}" if len(rows) == query.limit else None
        return {"requests": queries.listed(found), "next": more}

    def request(self, trace_id: str) -> dict[str, Any] | None:
        """/api/requests/{trace_id}: one request and the engine steps it links to; None: there is none."""
        spans = self._store.trace(_full(trace_id), _MOST_SPANS)
        if not spans:
            return None
        linked = dict.fromkeys(link.trace_id for span in spans for link in span.links)
        linked.pop(spans[0].trace_id, None)
        steps = [self._store.trace(other, _STEP_SPANS) for other in list(linked)[:_MOST_STEP_TRACES]]
        size = self._store.size(spans[0].trace_id)
        return queries.request_view(spans, [found for found in steps if found], size=size)

    def jaeger_services(self) -> dict[str, Any]:
        """/api/services."""
        return jaeger.envelope([name for name in self._store.services() if name])

    def jaeger_operations(self, service: str) -> dict[str, Any]:
        """/api/services/{service}/operations."""
        return jaeger.envelope([name for name, _ in self._store.operations(service[:_MAX_NAME_CHARS])])

    def jaeger_kinds(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """/api/operations?service=&spanKind=."""
        wanted = parameters.get("spanKind", "").lower()
        found = self._store.operations(parameters.get("service", "")[:_MAX_NAME_CHARS])
        known = [{"name": name, "spanKind": kind.lower()} for name, kind in found]
        return jaeger.envelope([one for one in known if wanted in {"", one["spanKind"]}])

    def jaeger_traces(self, parameters: Mapping[str, str], ids: Sequence[str]) -> dict[str, Any]:
        """/api/traces: by ids, or by search."""
        if ids:
            found = (self._store.trace(_full(one), _MOST_SPANS) for one in ids[:_MOST_STEP_TRACES])
            return jaeger.envelope([jaeger.trace(spans) for spans in found if spans])
        search = jaeger.Search.parsed(parameters)
        kept: list[list[StoredSpan]] = []
        for trace_id in self._store.search(search.widened(_TAGGED)):
            spans = self._store.trace(trace_id, _MOST_SPANS)
            if spans and search.matches(spans):
                kept.append(spans)
            if len(kept) == search.query.limit:
                break
        return jaeger.envelope([jaeger.trace(spans) for spans in kept])

    def jaeger_trace(self, trace_id: str) -> dict[str, Any] | None:
        """/api/traces/{trace_id}; None when there is none."""
        spans = self._store.trace(_full(trace_id), _MOST_SPANS)
        return jaeger.envelope([jaeger.trace(spans)], 1) if spans else None


def _full(trace_id: str) -> str:
    """Jaeger's clients leave leading zeros out."""
    if not _TRACE_ID.fullmatch(trace_id):
        raise QuestionError("a trace id is at most 32 hex digits")
    return trace_id.lower().zfill(32)


def _query(parameters: Mapping[str, str]) -> RequestQuery:
    tenant, replica = parameters.get("tenant", ""), parameters.get("replica", "")
    if max(len(tenant), len(replica)) > _MAX_NAME_CHARS:
        raise QuestionError(f"a tenant or a replica has at most {_MAX_NAME_CHARS} characters")
    limit = _number(parameters, "limit", 50)
    return RequestQuery(
        tenant=tenant or None,
        replica=replica or None,
        failed=parameters.get("error", "").lower() in {"1", "true"},
        slow_ns=min(round(_number(parameters, "slow_ms", 0) * 1e6), _MAX_NS),
        before=_cursor(parameters.get("before", "")),
        limit=max(1, min(int(limit), _MOST_REQUESTS)),
    )


def _number(parameters: Mapping[str, str], name: str, default: float) -> float:
    given = parameters.get(name, "") or str(default)
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise QuestionError(f"{name} is a number, 0 or more")
    return value


def _cursor(given: str) -> RequestRow | None:
    """`next` of the page before, or the start of its last request in ms since the epoch."""
    if not given:
        return None
    if exact := _CURSOR.fullmatch(given):
        return RequestRow(exact[2], min(int(exact[1]), _MAX_NS))
    moment = _number({"before": given}, "before", 0)
    # Starts are shown in whole microseconds, rounded down.
    return RequestRow("", min(round(moment * 1e3) * 1000, _MAX_NS))
