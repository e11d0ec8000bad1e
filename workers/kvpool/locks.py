"""Locks on bytes of a file that the kernel drops when their holder dies, however it dies.

They are open file description locks (Linux ≥ 3.15, see fcntl(2)): they belong to one `open`, not to a
process, so they hold between two opens in one process and across PID namespaces, and not between threads that
share one.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from workers.kvpool.errors import ArenaBusy, ArenaClosedError

_FLOCK: Final = struct.Struct("hhqqi0q")  # type, whence, start, length, pid
_FIRST_NAP_S: Final = 20e-6
_LONGEST_NAP_S: Final = 1e-3


class ByteLocks:
    """Exclusive locks on single bytes of the file at `path`, through an open of its own.

    Its own, since a lock lasts until every descriptor *and every mapping* of its open is gone: were it the
    one that is mapped, a forked child would keep its dead parent's locks. Its descriptor is closed in such a
    child.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError when the file cannot be opened for writing."""
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC), "r+b", buffering=0)
        _inherited.add(self)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def take(self, byte: int) -> bool:
        """False when another open holds it; True when this one does already."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
        except BlockingIOError:
            return False
        return True

    def drop(self, byte: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))

    def held_elsewhere(self, byte: int) -> bool:
        """Whether another open holds it; one's own never counts."""
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Drops them all; in a forked child, none of its parent's."""
        self._file.close()


class Mutex:
    """One byte as a lock among processes, and among the threads of this one. Not reentrant."""

    def __init__(self, locks: ByteLocks, byte: int, name: str) -> None:
        self._locks = locks
        self._byte = byte
        self._name = name
        self._thread = threading.Lock()

    @contextmanager
    def held(self, deadline_s: float) -> Iterator[None]:
        """Raises ArenaBusy, holding nothing, when it is not free within `deadline_s`; ArenaClosedError.

        The kernel's locks know no deadline, so they are asked again and again, after naps that double up to 1
        ms.
        """
        if self._locks.closed:
            raise ArenaClosedError(f"{self._name} was closed, or opened by a parent process: open it anew")
        until = time.monotonic() + deadline_s
        if not self._thread.acquire(timeout=deadline_s):
            raise self._busy(deadline_s)
        try:
            nap = _FIRST_NAP_S
            while not self._locks.take(self._byte):
                left = until - time.monotonic()
                if left <= 0:
                    raise self._busy(deadline_s)
                time.sleep(min(nap, left))
                nap = min(2 * nap, _LONGEST_NAP_S)
            try:
                yield
            finally:
                self._locks.drop(self._byte)
        finally:
            self._thread.release()

    def _busy(self, deadline_s: float) -> ArenaBusy:
        return ArenaBusy(
            f"{self._name} was locked by somebody else for {deadline_s * 1e3:.0f} ms: take it as a miss; if "
            f"it lasts, a process that shares it is stopped or starved (`fuser {self._name}` lists them)"
        )


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


_inherited: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _close_inherited() -> None:
    for locks in list(_inherited):
        locks.close()


os.register_at_fork(after_in_child=_close_inherited)
