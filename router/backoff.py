"""Pauses between reconnections."""

from __future__ import annotations

import random


class Backoff:
    """Doubling pauses in seconds; each is drawn at random, so that peers do not retry in step."""

    def __init__(self, first_s: float = 0.1, most_s: float = 2.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._next_s = first_s

    def reset(self) -> None:
        """What was tried has worked."""
        self._next_s = self._first_s

    def pause_s(self) -> float:
        """How long to wait before the next try."""
        pause = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311 (jitter, no secret)
        self._next_s = min(self._next_s * 2, self._most_s)
        return pause
