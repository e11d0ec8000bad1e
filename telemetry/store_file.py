"""The SQLite file of the span store: opened when it is needed, again after a fork or a replacement."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from telemetry.store_format import FORMAT, REPLACED, SCHEMA

_inherited: list[sqlite3.Connection] = []
"""Connections of a parent process: SQLite forbids even closing them in a forked child."""


class StoreError(Exception):
    """The store could not be read or written; the message says which file and what to do."""


class StoreFile:
    """One connection to the file, for all threads of the process in turn.

    Args:
        path: absolute.
        busy_timeout_s: how long to wait for another process that writes.
    """

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._opened_id: tuple[int, int] | None = None

    def close(self) -> None:
        """Close the file; a later use opens it again. A write in progress keeps it open."""
        if self._lock.acquire(timeout=0.5):
            try:
                self._drop_connection()
            finally:
                self._lock.release()

    @contextmanager
    def using(self, verb: str, *, create: bool) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread; `verb` says in messages what for, `create` makes a missing file.

        Raises:
            StoreError: the file cannot be opened, or what the block did failed for the file's sake.
        """
        with self._lock:
            try:
                yield self._opened(create)
            except (sqlite3.Error, OSError, ValueError, OverflowError) as error:
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
            self._prepare(connection, create)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection, create: bool) -> None:
        found = _format(connection)
        if found in REPLACED and not create:
            raise ValueError(
                f"it has format {found} of an earlier version; what is recorded next replaces it"
            )
        if found not in {0, FORMAT, *REPLACED}:
            raise ValueError(f"it has format {found}, this version reads format {FORMAT}")
        _set_wal(connection, self._busy_timeout_s)
        connection.execute(
            "PRAGMA synchronous = NORMAL"
        )  # survives kill -9; a power cut may lose the last batches
        connection.execute("PRAGMA journal_size_limit = 4194304")
        if found != FORMAT:
            with transaction(connection):
                if _format(connection) != FORMAT:  # nobody else was quicker
                    for statement in SCHEMA:
                        connection.execute(statement)

    def _drop_connection(self) -> None:
        if self._connection is not None:
            if self._pid == os.getpid():
                self._connection.close()
            else:
                _inherited.append(self._connection)
            self._connection = None


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written within the block, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _format(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


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
