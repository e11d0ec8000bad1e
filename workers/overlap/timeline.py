"""How long a schedule takes on two resources, compute and channel, and how short it can get at best. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from workers.overlap.schedule import Action, Op

REDUCED_BY = {Action.AWAIT_ATTENTION: Action.REDUCE_ATTENTION, Action.AWAIT_MLP: Action.REDUCE_MLP}
"""What each AWAIT_* waits for."""


@dataclass(frozen=True)
class Contention:
    """How much longer each resource takes while the other one is busy too; 1.0: they share nothing."""

    compute: float = 1.0
    channel: float = 1.0

    def __post_init__(self) -> None:
        if not (1.0 <= self.compute < math.inf and 1.0 <= self.channel < math.inf):
            raise ValueError(f"contention slows down, so both factors are finite and at least 1: {self}")


@dataclass(frozen=True)
class Timeline:
    """Seconds of one schedule."""

    total_s: float
    """From the first operation to the end of the last one."""
    exposed_s: float
    """During which compute only waited for an AllReduce."""
    channel_s: float
    """During which an AllReduce was in flight."""


ALONE = Contention()


def simulate(ops: Iterable[Op], seconds: Callable[[Op], float], contention: Contention = ALONE) -> Timeline:
    """Run `ops` in order on compute; each REDUCE_* joins a channel that serves one AllReduce at a time.

    `seconds(op)` is what an operation takes with nothing beside it: of compute, or of the channel for a
    REDUCE_*, whose issue is free. AWAIT_* costs nothing but waiting. An AllReduce that nothing awaits may
    outlast the schedule and then counts up to the schedule's end.

    Raises ValueError on an AWAIT_* without the REDUCE_* before it, and on one chunk reduced twice unawaited.
    """
    run = _Run(contention)
    for op in ops:
        if (reduced_by := REDUCED_BY.get(op.action)) is not None:
            run.wait(Op(reduced_by, op.chunk))
        elif op.action in REDUCED_BY.values():
            run.issue(op, seconds(op))
        else:
            run.compute(seconds(op))
    return Timeline(run.now, run.exposed, run.busy)


class _Run:
    """A simulated clock with the channel's queue; the work left in it is in seconds of a channel alone."""

    def __init__(self, contention: Contention) -> None:
        self.now = self.exposed = self.busy = 0.0
        self._contention = contention
        self._queue: deque[tuple[Op, float]] = deque()
        self._done: set[Op] = set()

    def issue(self, reduce: Op, work: float) -> None:
        if reduce in self._done or any(queued == reduce for queued, _ in self._queue):
            raise ValueError(f"{reduce} is issued again before it was awaited")
        self._queue.append((reduce, work))

    def compute(self, work: float) -> None:
        while work > 0 and self._queue:
            left = self._queue[0][1]
            together = work * self._contention.compute
            elapsed = min(together, left * self._contention.channel)
            self._serve(elapsed, self._contention.channel)
            work = max(0.0, work - elapsed / self._contention.compute) if elapsed < together else 0.0
        self.now += work

    def wait(self, reduce: Op) -> None:
        while reduce not in self._done:
            if not self._queue:
                raise ValueError(f"{reduce} is awaited but was not issued")
            self.exposed += self._queue[0][1]
            self._serve(self._queue[0][1], 1.0)
        self._done.remove(reduce)

    def _serve(self, elapsed: float, slow_down: float) -> None:
        """Let the channel's first AllReduce run for `elapsed` seconds, which it does not outlive."""
        reduce, left = self._queue[0]
        self.now += elapsed
        self.busy += elapsed
        if left * slow_down <= elapsed:
            self._queue.popleft()
            self._done.add(reduce)
        else:
            self._queue[0] = (reduce, max(0.0, left - elapsed / slow_down))


def bound(attention_s: float, compute_s: float, all_reduce_s: float) -> float:
    """Highest speed-up of a layer with two AllReduces: (A + C + 2m) / (A + max(C, 2m)).

    A is attention, which cannot overlap; C all other compute; m one AllReduce. Whatever the number of
    chunks, neither resource can do its work in less time, and both have to wait for attention.
    """
    best = attention_s + max(compute_s, 2 * all_reduce_s)
    return (attention_s + compute_s + 2 * all_reduce_s) / best if best > 0 else 1.0
