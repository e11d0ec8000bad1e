"""A small span store on local disk: one SQLite file that all processes of a host write and read.

Write-ahead logging lets readers and one writer work at a time; writers queue on SQLite's lock.
A process killed in mid-write loses that batch and nothing else. The store is for looking at
recent requests on one machine; a collector (OTLP) is for anything more.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from telemetry.pipe import ReportingExporter
from telemetry.record import StoredEvent, StoredLink, StoredSpan, TraceSummary, summarise

_FORMAT = 1
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS spans (
    trace_id TEXT NOT NULL, span_id TEXT NOT NULL, parent_id TEXT, name TEXT NOT NULL, kind TEXT NOT NULL,
    start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, status TEXT NOT NULL, status_message TEXT NOT NULL,
    attributes TEXT NOT NULL, events TEXT NOT NULL, links TEXT NOT NULL, resource TEXT NOT NULL,
    UNIQUE (trace_id, span_id)
);
PRAGMA user_version = {_FORMAT};
"""
_COLUMNS = (
    "trace_id, span_id, parent_id, name, kind, start_ns, end_ns, status, status_message,"
    " attributes, events, links, resource"
)
# IGNORE: an exporter that retries a batch must not double it.
_INSERT = f"INSERT OR IGNORE INTO spans ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"  # noqa: S608
_SELECT = f"SELECT {_COLUMNS} FROM spans WHERE trace_id = ? ORDER BY start_ns, rowid"  # noqa: S608
# Rows are numbered in the order of their insertion, so the oldest ones are a prefix.
_TRIM_COUNT = "DELETE FROM spans WHERE rowid <= (SELECT max(rowid) FROM spans) - ?"
_TRIM_AGE = (
    "DELETE FROM spans WHERE rowid < ifnull("
    "(SELECT rowid FROM spans WHERE end_ns >= ? ORDER BY rowid LIMIT 1), 1 << 62)"
)
_TRIM_EIGHTH = (
    "DELETE FROM spans WHERE rowid <= (SELECT min(rowid) + (max(rowid) - min(rowid)) / 8 FROM spans)"
)
_RECENT = "SELECT trace_id FROM spans GROUP BY trace_id ORDER BY max(rowid) DESC LIMIT ?"

_inherited: list[sqlite3.Connection] = []
"""Connections of a parent process: SQLite forbids even closing them in a forked child."""


class StoreError(Exception):
    """The store could not be read or written; the message says which file and what to do."""


def default_store_path() -> Path:
    """traces.db in the user's state folder."""
    return Path(platformdirs.user_state_dir("kvorum")) / "traces.db"


class SpanStore:
    """Spans of this host, bounded by count, age and bytes; the oldest go first.

    After every write at most `max_spans` remain, the oldest of them ended within `max_age_s`
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
        self._max_spans = max_spans
        self._max_age_ns = int(max_age_s * 1e9)
        self._max_bytes = max_bytes
        self._busy_timeout_s = busy_timeout_s
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._opened_id: tuple[int, int] | None = None

    def write(self, batch: Sequence[StoredSpan]) -> None:
        """Add spans, all or none, then delete what is over the bounds.

        Raises:
            StoreError: the file cannot be opened or written (read-only or full disk, not a store).
        """
        rows = list(_to_rows(batch))
        with self._using("write to", create=True) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(_INSERT, rows)
                self._trim(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def trace(self, trace_id: str) -> list[StoredSpan]:
        """All spans of a trace (32 hex digits), by start time; empty when there are none.

        Raises:
            StoreError: the file cannot be read.
        """
        if not self.path.exists():
            return []
        with self._using("read", create=False) as connection:
            return [_from_row(row) for row in connection.execute(_SELECT, (trace_id.lower(),))]

    def recent(self, limit: int = 20) -> list[TraceSummary]:
        """The `limit` traces that got a span last, latest first.

        Raises:
            StoreError: the file cannot be read.
        """
        if not self.path.exists():
            return []
        with self._using("read", create=False) as connection:
            ids = [str(row[0]) for row in connection.execute(_RECENT, (limit,))]
        traces = ((trace_id, self.trace(trace_id)) for trace_id in ids)
        # A writer may have trimmed a trace between the two queries.
        return [summarise(trace_id, spans) for trace_id, spans in traces if spans]

    def last(self) -> TraceSummary | None:
        """The trace that got a span last, if there is any.

        Raises:
            StoreError: the file cannot be read.
        """
        return next(iter(self.recent(1)), None)

    def close(self) -> None:
        """Close the file; a later call opens it again. A write in progress keeps it open."""
        if self._lock.acquire(timeout=0.5):
            try:
                self._drop_connection()
            finally:
                self._lock.release()

    @contextmanager
    def _using(self, verb: str, *, create: bool) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._opened(create)
            except (sqlite3.Error, OSError, ValueError) as error:
                self._drop_connection()
                raise StoreError(
                    f"cannot {verb} the span store {self.path}: {error}; "
                    "free or permit the disk, delete the file (with its -wal and -shm),"
                    " or choose another store_path"
                ) from error

    def _opened(self, create: bool) -> sqlite3.Connection:
        if self._connection is not None and (self._pid != os.getpid() or self._file_id() != self._opened_id):
            self._drop_connection()  # forked, or somebody deleted or replaced the file
        if self._connection is None:
            self._connection = self._open(create)
            self._pid, self._opened_id = os.getpid(), self._file_id()
        return self._connection

    def _file_id(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _open(self, create: bool) -> sqlite3.Connection:
        if create:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Prompts may be on spans: only the owner reads them. SQLite's side files inherit the mode.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode=rw",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        found = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if found not in {0, _FORMAT}:
            raise ValueError(f"it has format {found}, this version reads format {_FORMAT}")
        _set_wal(connection, self._busy_timeout_s)
        connection.execute(
            "PRAGMA synchronous = NORMAL"
        )  # survives kill -9; a power cut may lose the last batches
        connection.execute("PRAGMA journal_size_limit = 4194304")
        if found == 0:
            connection.executescript("BEGIN IMMEDIATE;" + _SCHEMA + "COMMIT;")

    def _trim(self, connection: sqlite3.Connection) -> None:
        connection.execute(_TRIM_COUNT, (self._max_spans,))
        connection.execute(_TRIM_AGE, (self._clock_ns() - self._max_age_ns,))
        while _used_bytes(connection) > self._max_bytes:
            if connection.execute(_TRIM_EIGHTH).rowcount <= 0:
                return

    def _drop_connection(self) -> None:
        if self._connection is not None:
            if self._pid == os.getpid():
                self._connection.close()
            else:
                _inherited.append(self._connection)
            self._connection = None


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


def _set_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Turn write-ahead logging on; SQLite does not wait by itself when another process does the same."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _to_rows(batch: Sequence[StoredSpan]) -> Iterator[tuple[Any, ...]]:
    resource, resource_json = None, ""
    for span in batch:
        if span.resource is not resource:  # one process's spans share it
            resource, resource_json = span.resource, _json(dict(span.resource))
        yield (
            span.trace_id,
            span.span_id,
            span.parent_id,
            _utf8(span.name),
            span.kind,
            span.start_ns,
            span.end_ns,
            span.status,
            _utf8(span.status_message),
            _json(span.attributes),
            _json([(event.name, event.time_ns, event.attributes) for event in span.events]),
            _json([(link.trace_id, link.span_id, link.attributes) for link in span.links]),
            resource_json,
        )


def _from_row(row: tuple[Any, ...]) -> StoredSpan:
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


def _utf8(text: str) -> str:
    """SQLite takes no lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
