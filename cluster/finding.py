"""A finding of `kvorum doctor`, and the measures by which its rules judge. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cluster.evidence import RequestRecord

Symptom = Literal["high TTFT", "high TPOT", "low throughput", "failures"]
Cause = Literal[
    "replica-down",
    "failing-requests",
    "kv-space",
    "batching-limit",
    "queue",
    "cold-cache",
    "slow-replica",
    "exposed-communication",
    "batch-too-large",
    "kv-bandwidth",
    "prefills-delay-decodes",
    "prefill",
]


LEAST_SHARE: Final = 0.2
"""Of the time that a symptom is about: what explains less is not worth a change."""
LEAST_S: Final = 0.02
_LEAST_COMPUTED = 64
"""Prompt tokens below which a prefill says little of a speed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, what proves it, and what to do.

    `cost_s` is the time of a mean request that the change may take away; 0 where it cannot be told.
    """

    cause: Cause
    symptom: Symptom
    figures: str
    change: str
    effect: str
    cost_s: float


def is_worth(cost_s: float, of_s: float, share: float = LEAST_SHARE) -> bool:
    """Whether this much of a time deserves a change."""
    return cost_s >= max(LEAST_S, share * of_s)


def ttft_s(request: RequestRecord) -> float:
    """0.0 of a request without a first token."""
    return request.ttft_s or 0.0


def prefill_s_per_token(requests: Sequence[RequestRecord]) -> float:
    """Of prompts long enough to say it; 0.0 without any."""
    long = [r for r in requests if r.computed >= _LEAST_COMPUTED]
    return sum(r.prefill_s for r in long) / sum(r.computed for r in long) if long else 0.0


def most_at_once(requests: Sequence[RequestRecord]) -> dict[str, int]:
    """By replica, the most requests that were there, or on their way there, at one time; busiest first."""
    found = {}
    for name in {r.replica for r in requests}:
        mine = [r for r in requests if r.replica == name]
        found[name] = _peak([(r.start_s, r.start_s + r.duration_s) for r in mine])
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def most_in_batch(requests: Sequence[RequestRecord]) -> int:
    """The most that were computed at one time."""
    return _peak(
        [(r.first_token_s - r.prefill_s, r.first_token_s + r.decode_s) for r in requests if r.first_token_s]
    )


def _peak(intervals: Sequence[tuple[float, float]]) -> int:
    """The most intervals that share a moment; one that ends when another begins does not."""
    moments = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    now = most = 0
    for _moment, change in moments:
        now += change
        most = max(most, now)
    return most
