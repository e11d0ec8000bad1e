"""Waiting on vLLM's shared-memory queues without burning a core."""

from __future__ import annotations

import time
from typing import Any

_ACTIVE_S = 1.0
_ACTIVE_POLL_MS = 4
_IDLE_POLL_MS = 50

SHARD_SPIN_S = 0.002
"""A shard's core is its own, and the next step mostly comes at once: a short spin saves a wake-up."""


def sleep_instead_of_spinning(queue: Any, spin_s: float = 0.0) -> None:
    """Make a reader of a vLLM MessageQueue sleep, after a spin of `spin_s`, until it is notified.

    vLLM's readers spin for a second after each read. Where processes outnumber cores that takes
    the core from the very step they wait for. No-op for a writer, and for a queue over TCP.
    """
    condition = getattr(queue, "_spin_condition", None)
    if condition is not None and condition.is_reader:
        condition.busy_loop_s = spin_s
        queue._spin_condition = _SleepingCondition(condition)


class _SleepingCondition:
    """vLLM's SpinCondition, asleep on its socket from the start, and never for long.

    Short sleeps, because the notification can be lost: the subscriber keeps only the latest message
    (ZMQ_CONFLATE), and libzmq drops one that arrives just as the reader looks; about one in a
    hundred steps was seen to. The data itself is in shared memory, so a lost notification costs one
    poll interval and nothing else.
    """

    def __init__(self, condition: Any) -> None:
        self._condition = condition
        self.is_reader = True

    def wait(self, timeout_ms: int | None = None) -> None:
        idle = time.monotonic() - self._condition.last_read > _ACTIVE_S
        poll_ms = _IDLE_POLL_MS if idle else _ACTIVE_POLL_MS
        self._condition.wait(poll_ms if timeout_ms is None else min(timeout_ms, poll_ms))

    def record_read(self) -> None:
        self._condition.record_read()

    def cancel(self) -> None:
        self._condition.cancel()
