"""A trace's spans in the order and at the times in which they are shown: as a tree, clocks made to agree.

Hosts' clocks differ by more than spans last. A span cannot begin before the one that caused it, on
another host, nor a call's answer come after the call: a child that sticks out of its parent is put in
the parent's middle, as if both ways over the network took equally long (the assumption of NTP, RFC 5905).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telemetry.record import StoredSpan, roots

_HOST = "host.name"


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """A span in its tree. Times in nanoseconds; `skew_ns` was added to the span's own."""

    span: StoredSpan
    depth: int
    skew_ns: int

    @property
    def start_ns(self) -> int:
        return self.span.start_ns + self.skew_ns

    @property
    def end_ns(self) -> int:
        return self.span.end_ns + self.skew_ns


def host_of(span: StoredSpan) -> str:
    """The host that recorded it; empty when it does not say."""
    return str(span.resource.get(_HOST, ""))


def place(spans: Sequence[StoredSpan]) -> list[PlacedSpan]:
    """Every span once, parents before children, siblings by their corrected start.

    The shift of a span holds for what lies below it on the same host, and a call that comes back to
    a host finds that host's shift again. Parents that were not recorded, or go in a circle, are
    done without. Works for traces of any depth.
    """
    children: dict[str | None, list[StoredSpan]] = {}
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)
    left = {span.span_id: span for span in sorted(spans, key=lambda span: span.start_ns)}
    placed: list[PlacedSpan] = []
    tops = roots(spans)
    while left:
        # What no root leads to has parents that go in a circle.
        for top in tops or [next(iter(left.values()))]:
            stack: list[tuple[PlacedSpan, Mapping[str, int]]] = [(PlacedSpan(top, 0, 0), {host_of(top): 0})]
            while stack:
                one, shifts = stack.pop()
                if left.pop(one.span.span_id, None) is None:
                    continue
                placed.append(one)
                below = [_below(one, child, shifts) for child in children.get(one.span.span_id, ())]
                below.sort(key=lambda entry: entry[0].start_ns, reverse=True)
                stack += below
        tops = []
    return placed


def host_shifts(placed: Sequence[PlacedSpan]) -> dict[str, int]:
    """By how many nanoseconds the clock of each host was corrected, where its first span was placed."""
    shifts: dict[str, int] = {}
    for one in placed:
        shifts.setdefault(host_of(one.span), one.skew_ns)
    return shifts


def _below(
    parent: PlacedSpan, child: StoredSpan, shifts: Mapping[str, int]
) -> tuple[PlacedSpan, Mapping[str, int]]:
    """The child, and the shifts that are known below it."""
    host = host_of(child)
    if host == host_of(parent.span):
        return PlacedSpan(child, parent.depth + 1, parent.skew_ns), shifts
    shift = shifts.get(host, 0)
    start_ns, end_ns = child.start_ns + shift, child.end_ns + shift
    room_ns = (parent.end_ns - parent.start_ns) - (child.end_ns - child.start_ns)
    if room_ns < 0:  # it went on without its parent, as after a cancel: only its start can be judged
        outside = not parent.start_ns <= start_ns <= parent.end_ns
        ahead_ns = 0
    else:
        outside = start_ns < parent.start_ns or end_ns > parent.end_ns
        ahead_ns = room_ns // 2
    if outside:
        shift = parent.start_ns + ahead_ns - child.start_ns
    return PlacedSpan(child, parent.depth + 1, shift), {**shifts, host: shift}
