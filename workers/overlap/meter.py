"""Where the time of each engine step went, on one shard."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from workers.overlap.channel import ChannelClock
from workers.overlap.report import PathTotals, StepObserver, StepRecord
from workers.overlap.streams import PassMarks, StreamClock

_Path = Literal["stock", "overlapped"]


class StepMeter(ABC):
    """Times forward passes and keeps their totals.

    Args:
        observer: told of every step; None: only the totals are kept.
    """

    def __init__(self, observer: StepObserver | None) -> None:
        self._observer = observer
        self._number = 0
        self._requests: tuple[tuple[str, int], ...] = ()
        self._blocking_known = False
        self._totals: dict[_Path, PathTotals] = {"stock": PathTotals(), "overlapped": PathTotals()}

    @property
    def stock(self) -> PathTotals:
        return self._totals["stock"]

    @property
    def overlapped(self) -> PathTotals:
        return self._totals["overlapped"]

    def watch(self, communicator: Any) -> None:
        """Time the engine's own blocking AllReduces too.

        Not where torch.compile traces them: it would trace the stopwatch.
        """
        communicator.all_reduce = self._timed(communicator.all_reduce)
        self._blocking_known = True

    def unwatch(self, communicator: Any) -> None:
        """Leave the communicator as it was."""
        if self._blocking_known:
            del communicator.all_reduce  # the instance's; the class's own is below it
        self._blocking_known = False

    def expect(self, requests: tuple[tuple[str, int], ...]) -> None:
        """What the next step computes: (engine's request id, tokens)."""
        self._requests = requests

    @property
    def expecting(self) -> bool:
        """Whether the next pass is a step of requests, not one of the engine's own."""
        return bool(self._requests)

    @abstractmethod
    def step(self, tokens: int, chunks: int) -> AbstractContextManager[None]:
        """Around one forward pass; one that raises is not counted, nor one without requests.

        The latter are the engine's own, to profile and to warm up.
        """

    @abstractmethod
    def _timed(self, all_reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same AllReduce, which nothing runs beside, timed."""

    def _add(self, record: StepRecord) -> None:
        path = _path(record.chunks)
        totals = self._totals[path]
        self._totals[path] = PathTotals(
            steps=totals.steps + 1,
            tokens=totals.tokens + record.tokens,
            forward_s=totals.forward_s + record.forward_s,
            all_reduce_s=totals.all_reduce_s + (record.all_reduce_s or 0.0),
            exposed_s=totals.exposed_s + (record.exposed_s or 0.0),
            timed_steps=totals.timed_steps + (record.all_reduce_s is not None),
        )
        if self._observer is not None:
            self._observer.step(record)


class CpuMeter(StepMeter):
    """On a CPU a call returns when its work is done, so a stopwatch around it is all there is to it.

    Args:
        clock: of the overlapped channel.
    """

    def __init__(self, clock: ChannelClock, observer: StepObserver | None = None) -> None:
        super().__init__(observer)
        self._clock = clock
        self._blocked_s = 0.0

    @contextmanager
    def step(self, tokens: int, chunks: int) -> Iterator[None]:
        self._clock.reset()
        self._blocked_s = 0.0
        started_ns, before = time.time_ns(), time.perf_counter()
        yield
        forward_s = time.perf_counter() - before
        requests, self._requests = self._requests, ()
        if not requests:
            return
        self._number += 1
        blocked_s = self._blocked_s if self._blocking_known else None
        all_reduce_s = exposed_s = blocked_s
        if chunks > 1:
            all_reduce_s = self._clock.busy_s + (blocked_s or 0.0)
            exposed_s = self._clock.waited_s + (blocked_s or 0.0)
        self._add(
            StepRecord(
                number=self._number,
                started_ns=started_ns,
                tokens=tokens,
                chunks=chunks,
                forward_s=forward_s,
                all_reduce_s=all_reduce_s,
                exposed_s=exposed_s,
                requests=requests,
            )
        )

    def _timed(self, all_reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        clock = time.perf_counter

        def timed(tensor: Any) -> Any:
            before = clock()
            reduced = all_reduce(tensor)
            self._blocked_s += clock() - before
            return reduced

        return timed


@dataclass(frozen=True)
class _Flight:
    """A pass that was launched and may not be done."""

    number: int
    started_ns: int
    tokens: int
    chunks: int
    requests: tuple[tuple[str, int], ...]
    all_reduces: bool
    marks: PassMarks


class StreamMeter(StepMeter):
    """On an accelerator, where a call only launches work: a step is told of when a later one finds it done.

    The duration of every step is measured; its AllReduces are in the first `FIRST` steps of a path and
    in one of `EVERY` from then on, for a mark around each costs the CPU more than the two of a step.

    Args:
        clock: of the overlapped channel.
    """

    FIRST, EVERY = 4, 64
    IN_FLIGHT = 8
    """Steps launched and not done; an engine has two or three. Beyond, the oldest is waited for."""

    def __init__(self, clock: StreamClock, observer: StepObserver | None = None) -> None:
        super().__init__(observer)
        self._clock = clock
        self._seen: dict[_Path, int] = {"stock": 0, "overlapped": 0}
        self._flights: deque[_Flight] = deque()

    def expect(self, requests: tuple[tuple[str, int], ...]) -> None:
        super().expect(requests)
        self.settle()

    def settle(self) -> None:
        """Tell of the steps that are done by now, in their order. Only in the thread that launches them."""
        while self._flights and self._flights[0].marks.passed:
            self._land(self._flights.popleft())

    @contextmanager
    def step(self, tokens: int, chunks: int) -> Iterator[None]:
        requests, self._requests = self._requests, ()
        if not requests:
            yield
            return
        path = _path(chunks)
        seen = self._seen[path]
        self._seen[path] += 1
        # Without its blocking AllReduces a stock pass has nothing to mark.
        wanted = chunks > 1 or self._blocking_known
        all_reduces = wanted and (seen < self.FIRST or seen % self.EVERY == 0)
        started_ns = time.time_ns()
        with self._clock.timing(all_reduces=all_reduces) as marks:
            yield
        self._number += 1
        self._flights.append(_Flight(self._number, started_ns, tokens, chunks, requests, all_reduces, marks))
        if len(self._flights) > self.IN_FLIGHT:
            self._flights[0].marks.end.synchronize()
            self.settle()

    def _timed(self, all_reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(tensor: Any) -> Any:
            with self._clock.blocking():
                return all_reduce(tensor)

        return timed

    def _land(self, flight: _Flight) -> None:
        times = self._clock.read(flight.marks)
        self._add(
            StepRecord(
                number=flight.number,
                started_ns=flight.started_ns,
                tokens=flight.tokens,
                chunks=flight.chunks,
                forward_s=times.forward_s,
                all_reduce_s=times.all_reduce_s if flight.all_reduces else None,
                exposed_s=times.exposed_s if flight.all_reduces else None,
                requests=flight.requests,
            )
        )


def _path(chunks: int) -> _Path:
    """The path of a step in so many chunks."""
    return "overlapped" if chunks > 1 else "stock"
