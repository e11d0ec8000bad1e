"""Tail sampling where a request ends: those that failed or were slow are recorded after all.

A process that knows how a request went, and all spans of it that are its own, writes them then. What other
processes did for the request is not recorded: they were told that it is not sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from telemetry import spans
from telemetry.ids import GivenIds

_MOST_PER_S = 50.0
"""A flood of refusals must not become a flood of spans."""

Why = Literal["", "error", "slow"]


class Tail:
    """Which requests that were not sampled are recorded, and how.

    Args:
        tracer: samples everything.
        ids: that tracer's id generator.
        slow_s: a request that took longer is slow.
        clock: seconds.
    """

    def __init__(
        self, tracer: Tracer, ids: GivenIds, *, slow_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracer, self._ids, self._slow_s, self._clock = tracer, ids, slow_s, clock
        self._left, self._since = _MOST_PER_S, clock()

    def why(self, *, failed: bool, took_s: float) -> Why:
        """Why this request is to be recorded, "" if it is not. At most 50 requests a second are."""
        if not failed and took_s <= self._slow_s:
            return ""
        now = self._clock()
        self._left = min(self._left + (now - self._since) * _MOST_PER_S, _MOST_PER_S)
        self._since = now
        if self._left < 1:
            return ""
        self._left -= 1
        return "error" if failed else "slow"

    def start(
        self,
        name: str,
        own: SpanContext | None,
        parent: SpanContext,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
        start_ns: int,
    ) -> Span:
        """A span that began at `start_ns`; end it with `spans.finish`.

        Args:
            own: the ids it is known by already; None: it gets new ones.
            parent: an invalid one makes it the first of its trace.
        """
        above = (
            spans.remote(spans.elsewhere(parent.trace_id, parent.span_id)) if parent.is_valid else Context()
        )
        if own is None:
            return spans.start(self._tracer, name, above, kind=kind, attributes=attributes, start_ns=start_ns)
        with self._ids.given(own.trace_id, own.span_id):
            return spans.start(self._tracer, name, above, kind=kind, attributes=attributes, start_ns=start_ns)
