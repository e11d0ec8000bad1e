"""From finished spans to one exporter: a bounded queue, a worker thread, exact counts.

The SDK's BatchSpanProcessor ignores the timeout of a flush, waits up to 30 s in shutdown, and
does not say how many spans it dropped. A server that drains before it exits needs all three.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


class ReportingExporter(SpanExporter):
    """An exporter that says why its last export failed, instead of logging it each time."""

    last_error: str = ""


@dataclass(frozen=True)
class PipeCounts:
    """Spans so far. accepted = exported + failed + pending; refused ones found the queue full or closed."""

    accepted: int
    exported: int
    failed: int
    refused: int

    @property
    def dropped(self) -> int:
        """Spans that ended and will never be seen."""
        return self.failed + self.refused

    @property
    def pending(self) -> int:
        return self.accepted - self.exported - self.failed


class SpanPipe(SpanProcessor):
    """Hands finished spans to `exporter` in batches, from a thread of its own.

    Ending a span never waits: when `max_queue` spans are waiting, the new one is dropped and
    counted. Failures are logged at most once a minute. After a fork the child starts with an
    empty queue and its own thread; the parent exports what the parent recorded.

    Args:
        done: told, in any thread, of spans that were exported or dropped; it must not raise.
    """

    def __init__(
        self,
        exporter: ReportingExporter,
        *,
        target: str,
        max_queue: int,
        max_batch: int,
        delay_s: float,
        done: Callable[[Sequence[ReadableSpan]], None] | None = None,
    ) -> None:
        self._exporter = exporter
        self._target = target
        self._max_queue = max_queue
        self._max_batch = max_batch
        self._delay_s = delay_s
        self._done = done or (lambda _spans: None)
        self._next_log = 0.0
        self._reset()
        # The SDK offers no hook for forks; a weak method lets a discarded pipe be collected.
        reset = weakref.WeakMethod(self._reset)
        os.register_at_fork(after_in_child=lambda: (method := reset()) and method())

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._queue: collections.deque[ReadableSpan] = collections.deque()
        self._accepted = self._exported = self._failed = self._refused = 0
        self._flush_to = 0
        self._closed = False
        self._worker: threading.Thread | None = None

    @property
    def counts(self) -> PipeCounts:
        with self._changed:
            return PipeCounts(self._accepted, self._exported, self._failed, self._refused)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        if not self._put(span):
            self._done([span])

    def _put(self, span: ReadableSpan) -> bool:
        """Whether there was room for it."""
        with self._changed:
            waiting = len(self._queue)
            if self._closed or waiting >= self._max_queue:
                self._refused += 1
                return False
            self._queue.append(span)
            self._accepted += 1
            if self._worker is None:
                self._start_worker()
            elif waiting == 0 or waiting + 1 == self._max_batch:
                self._changed.notify_all()
            return True

    def start(self) -> None:
        """Start the exporting thread now, not at the first span: it inherits its starter's CPU affinity."""
        with self._changed:
            if self._worker is None and not self._closed:
                self._start_worker()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every span that ended before the call was exported or dropped.

        Returns False when that takes longer than `timeout_s` seconds; the export goes on.
        """
        with self._changed:
            goal = self._accepted
            self._flush_to = max(self._flush_to, goal)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._exported + self._failed >= goal, timeout_s)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self.flush(timeout_millis / 1e3)

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Refuse new spans, export the waiting ones for at most `timeout_s`, drop the rest."""
        with self._changed:
            self._closed = True
        self.flush(timeout_s)
        with self._changed:
            self._failed += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        self._exporter.shutdown()

    def _start_worker(self) -> None:
        self._worker = threading.Thread(target=self._run, name=f"spans-to-{self._target}", daemon=True)
        try:
            self._worker.start()
        except RuntimeError:  # the interpreter is going down; shutdown() counts what is left
            self._closed = True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                self._changed.wait_for(self._is_due, self._delay_s)
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]
            if batch:
                self._export(batch)

    def _is_due(self) -> bool:
        flushing = self._flush_to > self._exported + self._failed
        return flushing or self._closed or len(self._queue) >= self._max_batch

    def _export(self, batch: list[ReadableSpan]) -> None:
        try:
            succeeded = self._exporter.export(batch) is SpanExportResult.SUCCESS
            reason = self._exporter.last_error
        except Exception as error:  # whatever an exporter raises must not end its thread
            succeeded, reason = False, f"{type(error).__name__}: {error}"
        self._done(batch)
        with self._changed:
            if succeeded:
                self._exported += len(batch)
            else:
                self._failed += len(batch)
            dropped = self._failed + self._refused
            self._changed.notify_all()
        if not succeeded:
            self._report(dropped, reason)

    def _report(self, dropped: int, reason: str) -> None:
        now = time.monotonic()
        if now < self._next_log:
            return
        self._next_log = now + LOG_INTERVAL_S
        logger.warning(
            "cannot export spans to %s: %s; %d spans dropped so far, serving goes on",
            self._target,
            reason,
            dropped,
        )
