"""The requests of a dead process are closed by the next one that looks; `telemetry.journal` noted them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, Tracer

from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.destinations import journal_folder, open_pipes
from telemetry.ids import GivenIds
from telemetry.journal import TICK_S, Left, LeftSpan, collect
from telemetry.otlp import sdk_is_disabled

logger = logging.getLogger(__name__)

_FLUSH_S = 2.0

LOST = "process_lost"
"""error.type of a request whose process died in its midst."""


def recover(folder: Path, pipes: Iterable[SpanProcessor], ids: GivenIds) -> int:
    """End what dead processes left open, and export it through `pipes` as theirs; returns how many spans.

    An open one ends when its process was last known to live. Never raises: it is not what a process is for.
    """
    count = 0
    try:
        for left in collect(folder):
            count += _end_all(left, pipes, ids)
    except OSError as error:
        logger.warning("open spans of dead processes in %s are not looked for: %s", folder, error)
    return count


def settle(config: TelemetryConfig) -> int:
    """As `recover`, where no process is going to start that would: opens what spans go to meanwhile.

    Blocks for at most `_FLUSH_S`.
    """
    if not config.enabled or sdk_is_disabled(os.environ) or not journal_folder(config).is_dir():
        return 0
    pipes = open_pipes(config, None)
    count = recover(journal_folder(config), pipes.values(), GivenIds())
    deadline = time.monotonic() + _FLUSH_S
    for pipe in pipes.values():
        pipe.shutdown(max(deadline - time.monotonic(), 0.0))
    return count


def _end_all(left: Left, pipes: Iterable[SpanProcessor], ids: GivenIds) -> int:
    if not left.spans:
        return 0
    provider = TracerProvider(
        sampler=ALWAYS_ON, resource=Resource(dict(left.resource)), shutdown_on_exit=False, id_generator=ids
    )
    for pipe in pipes:
        provider.add_span_processor(pipe)
    tracer = provider.get_tracer("kvorum")
    for span in left.spans:
        _end(tracer, ids, span, left.alive_ns)
    return len(left.spans)


def _end(tracer: Tracer, ids: GivenIds, left: LeftSpan, alive_ns: int) -> None:
    above = spans.remote(spans.elsewhere(left.trace_id, left.parent_id) if left.parent_id else None)
    with ids.given(left.trace_id, left.span_id):
        span = spans.start(tracer, left.name, above, kind=SpanKind.SERVER, start_ns=left.start_ns)
    if left.end_ns:
        message = "its process died before it had told more of it"
        spans.finish(span, left.error or None, message if left.error else "", end_ns=left.end_ns)
        return
    message = f"its process died amid it; when is known to {TICK_S:g} s"
    spans.finish(span, LOST, message, end_ns=max(min(alive_ns, time.time_ns()), left.start_ns))
