"""What a process has open is noted outside of it, so that its requests are closed even if it cannot do so.

A killed process loses the spans that it has not exported, and of a request only the process that began its
root can tell that it ended. So the beginning of each request is noted in a file that is mapped into memory:
the kernel keeps what was written there, however the process dies. `telemetry.recovery` reads it then.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import SpanKind

from telemetry import spans

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span

logger = logging.getLogger(__name__)

SUFFIX = ".open"
SLOTS = 4096
"""Requests noted at a time; more are served as well, and lost with their process."""
TICK_S = 1.0
"""How exactly the end of a process is known."""

_MAGIC = b"kvspans1"
_HEADER_BYTES = 8192
_ALIVE = struct.Struct("<Q")
_ALIVE_AT = len(_MAGIC)
_LENGTH = struct.Struct("<I")
_LENGTH_AT = _ALIVE_AT + _ALIVE.size
_RESOURCE_AT = _LENGTH_AT + _LENGTH.size
_SLOT = struct.Struct("<B7x16s8s8sQQ40s32s")
"""State, trace, span and parent ids, start, end, name, error.type."""
_END, _END_AT = struct.Struct("<Q"), 48
_ERROR, _ERROR_AT = struct.Struct("<32s"), 96
_FREE, _OPEN, _ENDED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class LeftSpan:
    """A span that a dead process had begun and not exported."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    """0: none."""
    start_ns: int
    end_ns: int
    """0: it was open."""
    error: str
    """error.type, of one that had ended."""


@dataclass(frozen=True, slots=True)
class Left:
    """All that a dead process left. Times are nanoseconds since the epoch."""

    resource: Mapping[str, str | int]
    alive_ns: int
    """It was still alive then, and at most `TICK_S` longer if anything was open."""
    spans: tuple[LeftSpan, ...]


class SpanJournal(SpanProcessor):
    """Notes the spans of kind SERVER, of which each request has one in each process.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path, resource: Mapping[str, object]) -> None:
        told = {name: value for name, value in resource.items() if isinstance(value, str | int)}
        text = json.dumps(told).encode()
        if len(text) > _HEADER_BYTES - _RESOURCE_AT:
            text = b"{}"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        draft = self.path.with_suffix(".new")  # nobody looks at it before it is locked
        self._fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, _HEADER_BYTES + SLOTS * _SLOT.size)
            self._map = mmap.mmap(self._fd, 0)
            self._map[: len(_MAGIC)] = _MAGIC
            _LENGTH.pack_into(self._map, _LENGTH_AT, len(text))
            self._map[_RESOURCE_AT : _RESOURCE_AT + len(text)] = text
            draft.rename(self.path)
        except OSError:
            draft.unlink(missing_ok=True)
            os.close(self._fd)
            raise
        self._free = list(range(SLOTS - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._closed = threading.Event()
        # The hook stays for ever; weak, it does not keep a journal that is done with.
        leave = weakref.WeakMethod(self._leave_to_parent)
        os.register_at_fork(after_in_child=lambda: (method := leave()) and method())
        threading.Thread(target=self._tick, name="spans-journal", daemon=True).start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """O(1); two microseconds of the request's time."""
        context = span.context
        if span.kind is not SpanKind.SERVER or context is None or self._closed.is_set():
            return
        try:
            slot = self._free.pop()
        except IndexError:
            return
        parent = span.parent.span_id if span.parent is not None else 0
        at = _HEADER_BYTES + slot * _SLOT.size
        _SLOT.pack_into(
            self._map, at, _FREE, context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"),
            parent.to_bytes(8, "big"), span.start_time or 0, 0, span.name.encode()[:40], b"",
        )  # fmt: skip
        self._map[at] = _OPEN  # last: a slot that was not written to its end is free
        self._slots[context.span_id] = slot

    def on_end(self, span: ReadableSpan) -> None:
        """It has ended, and is not exported yet."""
        slot = self._slots.get(span.context.span_id) if span.context is not None else None
        if slot is None or self._closed.is_set():
            return
        at = _HEADER_BYTES + slot * _SLOT.size
        error = str((span.attributes or {}).get(spans.ERROR_TYPE, "")).encode()[:32]
        _END.pack_into(self._map, at + _END_AT, span.end_time or 0)
        _ERROR.pack_into(self._map, at + _ERROR_AT, error)
        self._map[at] = _ENDED

    def exported(self, batch: Iterable[ReadableSpan]) -> None:
        """These have arrived, or never will: nobody need care for them any more."""
        for span in batch:
            slot = self._slots.pop(span.context.span_id, None) if span.context is not None else None
            if slot is not None:  # also after `shutdown`: the last export may take longer
                self._map[_HEADER_BYTES + slot * _SLOT.size] = _FREE
                self._free.append(slot)

    def shutdown(self) -> None:
        """Delete the file, if all that it holds was exported; else leave it to whoever comes next."""
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._slots:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def _tick(self) -> None:
        """Note that the process lives while it has anything open."""
        while not self._closed.wait(TICK_S):
            if self._slots:
                _ALIVE.pack_into(self._map, _ALIVE_AT, time.time_ns())

    def _leave_to_parent(self) -> None:
        """In a fork: what is noted here is the parent's, and so is the lock."""
        self._slots = {}
        if not self._closed.is_set():
            self._closed.set()
            with suppress(OSError):
                os.close(self._fd)


def collect(folder: Path) -> Iterator[Left]:
    """What dead processes left there. A file is deleted when the next value is asked for."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # another was quicker
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                yield _read(fd)
                path.unlink(missing_ok=True)
        except BlockingIOError:
            continue  # its process lives
        except (OSError, ValueError) as error:
            logger.warning("open spans in %s cannot be read, and are given up: %s", path, error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)


def _read(fd: int) -> Left:
    """Raises OSError, or ValueError when the content is not what a journal writes."""
    content = os.pread(fd, _HEADER_BYTES + SLOTS * _SLOT.size, 0)
    if content[: len(_MAGIC)] != _MAGIC or len(content) < _HEADER_BYTES:
        raise ValueError("it is no journal of this version")
    (alive_ns,) = _ALIVE.unpack_from(content, _ALIVE_AT)
    (length,) = _LENGTH.unpack_from(content, _LENGTH_AT)
    resource = json.loads(content[_RESOURCE_AT : _RESOURCE_AT + length])
    if not isinstance(resource, dict):
        raise ValueError("it does not say whose it is")
    found = []
    usable = (len(content) - _HEADER_BYTES) // _SLOT.size * _SLOT.size
    for state, trace_id, span_id, parent_id, start_ns, end_ns, name, error in _SLOT.iter_unpack(
        content[_HEADER_BYTES : _HEADER_BYTES + usable]
    ):
        if state not in (_OPEN, _ENDED) or not any(trace_id) or not any(span_id):
            continue
        found.append(
            LeftSpan(
                name=name.rstrip(b"\0").decode(errors="replace"),
                trace_id=int.from_bytes(trace_id, "big"),
                span_id=int.from_bytes(span_id, "big"),
                parent_id=int.from_bytes(parent_id, "big"),
                start_ns=start_ns,
                end_ns=end_ns if state == _ENDED else 0,
                error=error.rstrip(b"\0").decode(errors="replace") if state == _ENDED else "",
            )
        )
    return Left(resource, alive_ns, tuple(found))
