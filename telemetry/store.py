"""A small span store on local disk: one SQLite file that all processes of a host write and read.

Write-ahead logging lets readers and one writer work at a time; writers queue on SQLite's lock.
A process killed in mid-write loses that batch and nothing else. The store is for looking at
recent requests on one machine; a collector (OTLP) is for anything more.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import platformdirs
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from telemetry.pipe import ReportingExporter
from telemetry.record import StoredSpan, TraceSummary, summarise
from telemetry.store_file import StoreError, StoreFile, transaction
from telemetry.store_format import (
    COUNT,
    INSERT,
    OPERATIONS,
    SELECT,
    SERVICES,
    RequestQuery,
    RequestRow,
    SpanQuery,
    from_row,
    to_rows,
    utf8,
)

__all__ = [
    "RequestQuery",
    "RequestRow",
    "SpanQuery",
    "SpanStore",
    "StoreError",
    "StoreSpanExporter",
    "default_store_path",
]

# Rows are numbered in the order of their insertion, so the oldest ones are a prefix.
_TRIM_COUNT = "DELETE FROM spans WHERE rowid <= (SELECT max(rowid) FROM spans) - ?"
_TRIM_AGE = (
    "DELETE FROM spans WHERE rowid < ifnull("
    "(SELECT rowid FROM spans WHERE stored_ns >= ? ORDER BY rowid LIMIT 1), 1 << 62)"
)
_TRIM_EIGHTH = (
    "DELETE FROM spans WHERE rowid <= (SELECT min(rowid) + (max(rowid) - min(rowid)) / 8 FROM spans)"
)
_RECENT = "SELECT trace_id FROM spans GROUP BY trace_id ORDER BY max(rowid) DESC LIMIT ?"


def default_store_path() -> Path:
    """traces.db in the user's state folder."""
    return Path(platformdirs.user_state_dir("kvorum")) / "traces.db"


class SpanStore:
    """Spans of this host, bounded by count, age and bytes; the oldest go first.

    After every write at most `max_spans` remain, the oldest of them was written within `max_age_s`
    seconds, and they occupy at most `max_bytes`; the file may exceed that by one batch and the
    write-ahead log (a few MiB). Safe to share between threads, processes, and across a fork.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_spans: int = 200_000,
        max_age_s: float = 7 * 86_400,
        max_bytes: int = 256 * 1024 * 1024,
        busy_timeout_s: float = 5.0,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.path = path.absolute()
        self._file = StoreFile(self.path, busy_timeout_s)
        self._max_spans = max_spans
        self._max_age_ns = int(max_age_s * 1e9)
        self._max_bytes = max_bytes
        self._busy_timeout_s = busy_timeout_s
        self._clock_ns = clock_ns

    def write(self, batch: Sequence[StoredSpan]) -> None:
        """Add spans, all or none, then delete what is over the bounds.

        Raises:
            StoreError: the file cannot be opened or written (read-only or full disk, not a store).
        """
        rows = list(to_rows(batch, self._clock_ns()))
        with self._file.using("write to", create=True) as connection, transaction(connection):
            connection.executemany(INSERT, rows)
            self._trim(connection)

    def trace(self, trace_id: str, limit: int = -1) -> list[StoredSpan]:
        """The spans of a trace (32 hex digits), by start time; empty when there are none.

        Args:
            limit: of a trace with more spans, the ones that requests consist of are kept, then the earliest.

        Raises:
            StoreError: the file cannot be read.
        """
        found = [from_row(row) for row in self._read(SELECT, [utf8(trace_id.lower()), limit])]
        return sorted(found, key=lambda span: span.start_ns)

    def size(self, trace_id: str) -> int:
        """How many spans of a trace are there. Raises StoreError."""
        return int(self._read(COUNT, [utf8(trace_id.lower())])[0][0]) if self.path.exists() else 0

    def requests(self, query: RequestQuery) -> list[RequestRow]:
        """The requests that the query asks for, latest start first.

        Raises:
            StoreError: the file cannot be read.
        """
        return [RequestRow(str(row[0]), int(row[1])) for row in self._read(*query.sql())]

    def search(self, query: SpanQuery) -> list[str]:
        """Ids of the traces that the query asks for, latest first.

        Raises:
            StoreError: the file cannot be read.
        """
        return [str(row[0]) for row in self._read(*query.sql())]

    def services(self, limit: int = 1000) -> list[str]:
        """Names of the services with spans here. Raises StoreError."""
        return [str(row[0]) for row in self._read(SERVICES, [limit])]

    def operations(self, service: str, limit: int = 1000) -> list[tuple[str, str]]:
        """(name, kind) of the spans of a service; of several kinds one is shown. Raises StoreError."""
        name = utf8(service)
        return [(str(row[0]), str(row[1])) for row in self._read(OPERATIONS, [name, name, name, limit])]

    def recent(self, limit: int = 20) -> list[TraceSummary]:
        """The `limit` traces that got a span last, latest first.

        Raises:
            StoreError: the file cannot be read.
        """
        ids = [str(row[0]) for row in self._read(_RECENT, [limit])]
        traces = ((trace_id, self.trace(trace_id)) for trace_id in ids)
        # A writer may have trimmed a trace between the two queries.
        return [summarise(trace_id, spans) for trace_id, spans in traces if spans]

    def last(self) -> TraceSummary | None:
        """The trace that got a span last, if there is any.

        Raises:
            StoreError: the file cannot be read.
        """
        return next(iter(self.recent(1)), None)

    def twin(self) -> SpanStore:
        """Another handle on the file: readers and a writer of one process need not wait for each other."""
        return SpanStore(
            self.path,
            max_spans=self._max_spans,
            max_age_s=self._max_age_ns / 1e9,
            max_bytes=self._max_bytes,
            busy_timeout_s=self._busy_timeout_s,
            clock_ns=self._clock_ns,
        )

    def close(self) -> None:
        """Close the file; a later call opens it again. A write in progress keeps it open."""
        self._file.close()

    def _read(self, statement: str, values: Sequence[str | int]) -> list[tuple[Any, ...]]:
        if not self.path.exists():
            return []
        with self._file.using("read", create=False) as connection:
            return connection.execute(statement, values).fetchall()

    def _trim(self, connection: sqlite3.Connection) -> None:
        connection.execute(_TRIM_COUNT, (self._max_spans,))
        connection.execute(_TRIM_AGE, (self._clock_ns() - self._max_age_ns,))
        while _used_bytes(connection) > self._max_bytes:
            if connection.execute(_TRIM_EIGHTH).rowcount <= 0:
                return


class StoreSpanExporter(ReportingExporter):
    """Exports to a SpanStore. A store that cannot be written is a failed export, never an exception."""

    def __init__(self, store: SpanStore) -> None:
        self._store = store

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._store.write([StoredSpan.from_readable(span) for span in spans])
        except StoreError as error:
            self.last_error = str(error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._store.close()


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size
