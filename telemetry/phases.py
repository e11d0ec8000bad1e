"""Queue, prefill and decode of a request as spans, laid out after the fact from the engine's own times."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, Tracer
from opentelemetry.util.types import AttributeValue

from telemetry import spans


@dataclass(frozen=True)
class PhaseBounds:
    """Where one phase ends the next begins; epoch nanoseconds, never decreasing."""

    queue_start_ns: int
    prefill_start_ns: int
    decode_start_ns: int
    decode_end_ns: int


def phase_bounds(
    arrival_ns: int, durations_s: tuple[float, float, float], *, earliest_ns: int, latest_ns: int
) -> PhaseBounds:
    """Lay queue, prefill and decode end to end from the arrival, within [earliest, latest].

    Clocks of two processes may disagree: phases that would stick out are moved back in whole,
    and shortened from the end only when they are longer than the window.
    """
    latest_ns = max(latest_ns, earliest_ns)
    window_ns = latest_ns - earliest_ns
    lengths = [_clamped_ns(seconds, window_ns) for seconds in durations_s]
    first = max(min(arrival_ns, latest_ns - sum(lengths)), earliest_ns)
    prefill = min(first + lengths[0], latest_ns)
    decode = min(prefill + lengths[1], latest_ns)
    return PhaseBounds(first, prefill, decode, min(decode + lengths[2], latest_ns))


def record_engine_times(
    tracer: Tracer,
    parent: Context,
    *,
    arrival_wall_s: float,
    queue_s: float,
    prefill_s: float | None,
    decode_s: float | None,
    prefill_attributes: Mapping[str, AttributeValue] | None = None,
    decode_attributes: Mapping[str, AttributeValue] | None = None,
    prefill_links: Sequence[Link] = (),
) -> None:
    """Add queue, prefill and decode spans below `parent` after the fact; call it before that ends.

    Args:
        arrival_wall_s: when the engine queued the request, seconds since the epoch
            (`spans.wall_from_monotonic` converts the engine's readings).
        queue_s, prefill_s, decode_s: the engine's durations. None: the request never got to that
            phase, which then has no span. Decode runs from the first token to the last; both are
            events on it.
        prefill_links: the shards' spans of the engine step in which the prefill began.
    """
    owner = trace.get_current_span(parent)
    if not owner.get_span_context().trace_flags.sampled:
        return
    now_ns = time.time_ns()
    known = owner if isinstance(owner, ReadableSpan) else None
    earliest_ns = (known.start_time if known else None) or 0
    latest_ns = (known.end_time if known else None) or now_ns
    arrival_ns = round(arrival_wall_s * 1e9) if math.isfinite(arrival_wall_s * 1e9) else latest_ns
    durations = (queue_s, prefill_s or 0.0, decode_s or 0.0)
    at = phase_bounds(arrival_ns, durations, earliest_ns=earliest_ns, latest_ns=latest_ns)

    phases: list[tuple[str, int, int, float, Mapping[str, AttributeValue] | None]] = [
        (spans.REPLICA_QUEUE, at.queue_start_ns, at.prefill_start_ns, queue_s, None)
    ]
    if prefill_s is not None:
        phases.append(
            (spans.REPLICA_PREFILL, at.prefill_start_ns, at.decode_start_ns, prefill_s, prefill_attributes)
        )
    if decode_s is not None:
        phases.append(
            (spans.REPLICA_DECODE, at.decode_start_ns, at.decode_end_ns, decode_s, decode_attributes)
        )
    for name, start_ns, end_ns, measured_s, attributes in phases:
        links = prefill_links if name == spans.REPLICA_PREFILL else ()
        span = spans.start(tracer, name, parent, attributes=attributes, links=links, start_ns=start_ns)
        if end_ns - start_ns != _clamped_ns(measured_s, None):
            span.set_attribute(spans.MEASURED_S, measured_s)
        if name == spans.REPLICA_DECODE:
            span.add_event(spans.FIRST_TOKEN, timestamp=start_ns)
            span.add_event(spans.LAST_TOKEN, timestamp=end_ns)
        spans.finish(span, end_ns=end_ns)


def _clamped_ns(seconds: float, most_ns: int | None) -> int:
    """Nanoseconds, 0 for what is no duration, at most `most_ns`."""
    nanoseconds = seconds * 1e9
    if not nanoseconds > 0:  # also false for NaN
        return 0
    if math.isinf(nanoseconds):
        return most_ns or 0
    return round(nanoseconds) if most_ns is None else min(round(nanoseconds), most_ns)
