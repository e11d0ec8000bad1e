"""Takes in OTLP exports, whatever they hold: spans into the store, metrics into the table, all counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from telemetry.pipe import LOG_INTERVAL_S
from telemetry.store import SpanStore, StoreError
from telemetry.text import printable
from telemetry.viewer.decode import spans_of
from telemetry.viewer.metric_table import MetricTable
from telemetry.viewer.settings import ViewerSettings
from telemetry.viewer.wire import fits

log = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]
Encoding = Literal["protobuf", "json"]
M = TypeVar("M", bound=Message)

_MAX_REASON_CHARS: Final = 300
_MOST_PARTS: Final = 1_000_000
"""Messages and strings in one export: ten thousand spans with twenty attributes each have 850,000."""
_MOST_OBJECTS: Final = 500_000
"""The same of JSON, where an attribute is two objects."""


class MalformedExportError(ValueError):
    """The body is no export; the message says why, in words fit for its sender."""


class ReceiverBusyError(Exception):
    """As many exports as may be are being taken in; try again."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of an export's spans or points; `message` says why some were not kept."""

    rejected: int = 0
    message: str = ""


class Slots:
    """How many exports one way in may have under way, so that none keeps the others out."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot. Raises ReceiverBusyError at once when there is none."""
        if self._left <= 0:
            raise ReceiverBusyError("too many exports are under way: try again")
        self._left -= 1
        try:
            yield
        finally:
            self._left += 1


class Receiver:
    """Exports are decoded and stored by one thread of its own, in turn: a huge one delays others, no more.

    A store that cannot be written costs the spans of that export; its sender is told and need not retry.
    """

    def __init__(
        self,
        store: SpanStore,
        table: MetricTable,
        settings: ViewerSettings,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store, self._table = store, table
        self._max_chars = settings.max_attribute_chars
        self._clock_ns = clock_ns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="otlp")
        self._counts: Counter[tuple[Signal, str]] = Counter()
        self._next_log = 0.0

    @property
    def counts(self) -> Mapping[tuple[Signal, str], int]:
        """By signal and outcome: spans and points that were accepted, rejected (invalid, or beyond a bound)
        or failed (the store); and whole exports that were malformed, too_large, or came while it was busy."""
        return dict(self._counts)

    def count(self, signal: Signal, outcome: str, number: int = 1) -> None:
        """Add to `counts`; for exports that a transport turns away."""
        if number:
            self._counts[signal, outcome] += number

    async def take(self, signal: Signal, body: bytes, encoding: Encoding) -> Receipt:
        """Take in one export.

        Raises:
            MalformedExportError: nothing of it can be read.
        """
        work = self._spans if signal == "traces" else self._metrics
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, body, encoding)

    def close(self) -> None:
        """Take nothing more in; what is under way goes on."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _spans(self, body: bytes, encoding: Encoding) -> Receipt:
        request = self._parsed("traces", ExportTraceServiceRequest(), body, encoding)
        found = spans_of(request, now_ns=self._clock_ns(), max_chars=self._max_chars)
        self.count("traces", "rejected", found.rejected)
        if found.spans:
            try:
                self._store.write(found.spans)
            except StoreError as error:
                self.count("traces", "failed", len(found.spans))
                self._report(error)
                return Receipt(found.rejected + len(found.spans), "the span store cannot be written")
        self.count("traces", "accepted", len(found.spans))
        return _receipt(found.rejected, found.reason)

    def _metrics(self, body: bytes, encoding: Encoding) -> Receipt:
        request = self._parsed("metrics", ExportMetricsServiceRequest(), body, encoding)
        found = self._table.take(request)
        self.count("metrics", "accepted", found.accepted)
        self.count("metrics", "rejected", found.rejected)
        return _receipt(found.rejected, found.reason)

    def _parsed(self, signal: Signal, request: M, body: bytes, encoding: Encoding) -> M:
        try:
            if encoding == "json":
                if not body.lstrip()[:1] == b"{":
                    raise json_format.ParseError("the body is no JSON object")
                if body.count(b"{") > _MOST_OBJECTS:
                    raise json_format.ParseError(f"it has more than {_MOST_OBJECTS} objects")
                json_format.Parse(body, request, ignore_unknown_fields=True)
            else:
                # A part takes two bytes at least.
                if len(body) > 2 * _MOST_PARTS and not fits(body, request.DESCRIPTOR, _MOST_PARTS):
                    raise DecodeError(f"it has more than {_MOST_PARTS} parts")
                request.ParseFromString(body)
        # The JSON parser lets errors of the values it is given through.
        except (
            DecodeError,
            json_format.Error,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            self.count(signal, "malformed")
            reason = f"the body is no OTLP export of {signal} in {encoding}: {type(error).__name__}: {error}"
            raise MalformedExportError(printable(reason, _MAX_REASON_CHARS)) from None
        return request

    def _report(self, error: StoreError) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            failed = self._counts["traces", "failed"]
            log.warning("received spans are lost: %s; %d so far, serving goes on", error, failed)


def _receipt(rejected: int, reason: str) -> Receipt:
    return Receipt(rejected, printable(reason, _MAX_REASON_CHARS)) if rejected else Receipt()
