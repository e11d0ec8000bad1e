"""Log records of one process on stderr, with the trace and the request they belong to."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Literal

from opentelemetry import trace
from opentelemetry.trace import SpanContext

from telemetry.text import printable

LogFormat = Literal["text", "json"]

_MAX_REQUEST_ID_CHARS = 128

_subject: ContextVar[tuple[str, SpanContext] | None] = ContextVar("kvorum_log_subject", default=None)


def speak_of(request_id: str, span: SpanContext) -> None:
    """Name this request and span in the log records of this task, and of tasks it makes, from now on."""
    _subject.set((request_id, span))


def configure_logging(service: str, level: int | str = "INFO", format: LogFormat = "text") -> None:
    """Send this process's log records to stderr. Calling it again replaces the earlier settings.

    Args:
        service: which role is speaking, such as "kvorum.router".
        level: least severe level shown.
        format: one readable line, or one JSON object, per record. Both name the trace, span and request
            the record was made in, if any.

    Raises:
        ValueError: the level is unknown.
    """
    handler = _Handler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if format == "json" else _TextFormatter(service))
    root = logging.getLogger()
    root.setLevel(level.upper() if isinstance(level, str) else level)
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """A class of its own, so that ours can be told from others' handlers."""


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        lines = [printable(line) for line in record.getMessage().splitlines() or [""]]
        suffix = "".join(f" {name}={printable(value)}" for name, value in _ids().items())
        head = f"{moment}.{int(record.msecs):03d} {record.levelname:<7} {self._service}"
        text = f"{head} {record.name}: " + "\n    ".join(lines) + suffix
        return text if not record.exc_info else f"{text}\n{self.formatException(record.exc_info)}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= _ids()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _ids() -> dict[str, str]:
    """Of the span that is current here, else of the one that is spoken of."""
    request_id, span = _subject.get() or ("", trace.INVALID_SPAN_CONTEXT)
    current = trace.get_current_span().get_span_context()
    span = current if current.is_valid else span
    found = {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"} if span.is_valid else {}
    return found | ({"request_id": request_id[:_MAX_REQUEST_ID_CHARS]} if request_id else {})
