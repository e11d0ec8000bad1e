"""How fast a queue drains: measured from what left it, with a prediction until then."""

from __future__ import annotations

import math

_SAMPLE_S = 0.5
_FORGET_S = 30.0
_PRIOR_S = 5.0
_MOST_CHANGE = 4.0


class DrainRate:
    """Tokens per second that leave a queue while something waits in it.

    Time in which nothing waits says nothing about the capacity and is left out. Each half second of
    waiting is one sample; a sample may differ from the present rate by a factor of 4 at most (one
    stall or one burst does not decide), and is forgotten exponentially over 30 s of waiting. A
    prediction of the caller counts like 5 s of measurement.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._open_s = 0.0
        self._open_tokens = 0
        self._mean = 0.0
        self._weight = 0.0  # in seconds, below _FORGET_S

    def waiting(self, now: float) -> None:
        """Something waits, and only for capacity. Idempotent."""
        if self._since is None:
            self._since = now
        else:
            self._advance(now)

    def pause(self, now: float) -> None:
        """Nothing waits, or not for capacity. Idempotent."""
        self._advance(now)
        self._since = None

    def released(self, tokens: int, now: float) -> None:
        """So many tokens left the queue. Ignored while paused."""
        if self._since is not None:
            self._open_tokens += tokens
            self._advance(now)

    def tokens_per_s(self, predicted: float | None = None) -> float | None:
        """The present rate; None when it was neither measured nor predicted."""
        prior_s = _PRIOR_S if predicted is not None and predicted > 0 else 0.0
        total_s = self._weight + prior_s
        if total_s == 0:
            return None
        return (self._mean * self._weight + (predicted or 0.0) * prior_s) / total_s

    def _advance(self, now: float) -> None:
        if self._since is None:
            return
        self._open_s += max(0.0, now - self._since)
        self._since = max(now, self._since)
        if self._open_s < _SAMPLE_S:
            return
        sample = self._open_tokens / self._open_s
        if self._weight:
            sample = min(max(sample, self._mean / _MOST_CHANGE), self._mean * _MOST_CHANGE)
        elif not self._open_tokens:
            return  # nothing to compare a stall with yet: the first sample ends with a release
        kept = math.exp(-self._open_s / _FORGET_S)
        fresh_s = _FORGET_S * (1 - kept)
        weight = self._weight * kept + fresh_s
        self._mean = (self._mean * self._weight * kept + sample * fresh_s) / weight
        self._weight = weight
        self._open_s, self._open_tokens = 0.0, 0
