"""What the overlap needs of an accelerator's streams, and the time that passes in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream's work, as torch.cuda.Event.

    A stream that was told to wait for it waits for the point recorded last before it was told, so an
    event may be recorded anew at once.
    """

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        """Whether the work before the point is done."""

    def synchronize(self) -> None:
        """Block until it is."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two passed points of events that carry time."""


class Device(Protocol):
    """torch.cuda in life, a simulation in tests. Streams have `wait_event(event)`."""

    def current_stream(self) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    def event(self, *, timing: bool = False) -> Event: ...

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Reuse the tensor's memory only after all that `stream` has been given by the time it is let go."""


class CudaDevice:
    """torch.cuda."""

    def current_stream(self) -> Any:
        return torch.cuda.current_stream()

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def event(self, *, timing: bool = False) -> Event:
        event: Event = torch.cuda.Event(enable_timing=timing)
        return event

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


@dataclass(frozen=True)
class _Span:
    begin: Event
    end: Event
    busy: bool
    exposed: bool

    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1e3


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one forward pass on the device."""

    forward_s: float
    all_reduce_s: float
    """During which an AllReduce that was noted was under way; 0 in a pass whose AllReduces were not timed."""
    exposed_s: float
    """During which the computing stream stood waiting for one; likewise."""


@dataclass
class PassMarks:
    """The marks of one pass; they can be read once `passed`."""

    begin: Event
    end: Event
    spans: list[_Span] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        # Of a pass that has awaited all its AllReduces, as every pass does, this is the last mark.
        return self.end.query()


class StreamClock:
    """Marks in the streams of an accelerator. Placing one does not block, nor does asking if it has passed.

    A pass costs two marks; one whose AllReduces are timed two more for each AllReduce and for each wait.
    Used by one thread.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Event] = []  # as many as the passes in flight have needed at most
        self._marks: PassMarks | None = None

    @contextmanager
    def timing(self, *, all_reduces: bool) -> Iterator[PassMarks]:
        """Around the launch of a pass. With `all_reduces`, `mark` and `note` have an effect within it."""
        stream = self._device.current_stream()
        marks = PassMarks(self._event(), self._event())
        marks.begin.record(stream)
        self._marks = marks if all_reduces else None
        try:
            yield marks
        finally:
            self._marks = None
        marks.end.record(stream)

    def mark(self, stream: Any) -> Event | None:
        """The beginning of something on a stream; None when nobody wants to know."""
        if self._marks is None:
            return None
        event = self._event()
        event.record(stream)
        return event

    def note(self, began: Event | None, stream: Any, *, busy: bool = False, exposed: bool = False) -> None:
        """Its end: an AllReduce was under way (`busy`), the computing stream did nothing else (`exposed`)."""
        if began is None or self._marks is None:
            return
        end = self._event()
        end.record(stream)
        self._marks.spans.append(_Span(began, end, busy, exposed))

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around the launch of an AllReduce on the computing stream itself."""
        if self._marks is None:
            yield
            return
        stream = self._device.current_stream()
        began = self.mark(stream)
        yield
        self.note(began, stream, busy=True, exposed=True)

    def read(self, marks: PassMarks) -> PassTimes:
        """The times of a pass that has `passed`, whose events are taken back.

        Sums, since a stream runs its AllReduces one after the other, and none of ours beside a blocking one.
        """
        seconds = [(span, span.seconds()) for span in marks.spans]
        times = PassTimes(
            forward_s=marks.begin.elapsed_time(marks.end) / 1e3,
            all_reduce_s=sum(s for span, s in seconds if span.busy),
            exposed_s=sum(s for span, s in seconds if span.exposed),
        )
        self._free += (marks.begin, marks.end)
        for span in marks.spans:
            self._free += (span.begin, span.end)
        return times

    def _event(self) -> Event:
        return self._free.pop() if self._free else self._device.event(timing=True)
