"""Where overlapped AllReduces run: beside the computation, in the order they were issued.

A channel has a process group of its own, so that its collectives never interleave with those of the
engine. Every rank must issue the same collectives in the same order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup, all_reduce, all_to_all_single

from workers.overlap.streams import Device, Event, StreamClock


class Reduction(Protocol):
    """An AllReduce under way. The tensor holds the sum once `wait` has returned, not before."""

    def wait(self) -> None:
        """Let nothing that follows run before the sum is there.

        Raises:
            RuntimeError: a rank or its link is gone, or the group's timeout is over.
        """


class Channel(Protocol):
    """Sums tensors over the ranks, in place, beside the computation."""

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        """Start summing a contiguous tensor, which stays untouched by others until `wait` has returned."""


class ChannelClock:
    """How long a channel was busy, and how long somebody did nothing but wait for it; seconds."""

    def __init__(self) -> None:
        self._busy = self.waited_s = 0.0
        self._last_done = 0.0

    def reset(self) -> None:
        """Begin a new step."""
        self._busy = self.waited_s = 0.0

    def served(self, issued: float, done: float) -> None:
        """One AllReduce was under way; those before it had been issued earlier and are served first."""
        self._busy += max(0.0, done - max(issued, self._last_done))
        self._last_done = max(done, self._last_done)

    @property
    def busy_s(self) -> float:
        """During which at least one AllReduce was under way; never less than the waiting for it."""
        return max(self._busy, self.waited_s)


class GlooChannel:
    """gloo on a CPU: its threads move the bytes while the caller computes.

    Two ranks exchange what they have and add it themselves: as many bytes on the link as an AllReduce of two,
    and the same sum to the last bit, since each element is one addition of the same two numbers. But gloo
    adds element by element in a thread of its own, which takes a core from the computation beside it for
    longer than the link needs; torch adds all at once. A chunk of 256 rows of 576 numbers in bf16 on two
    hosts of one core and 1 Gbit/s, with 3.7 ms of compute beside it: 4.6 ms, with gloo's AllReduce 5.5, with
    its all-gather, which copies everything twice more, 5.0.
    """

    def __init__(self, group: ProcessGroup, clock: ChannelClock | None = None) -> None:
        self._group = group
        self._peer = 1 - group.rank() if group.size() == 2 else None
        self.clock = clock or ChannelClock()

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        if self._peer is None:
            work = all_reduce(tensor, group=self._group, async_op=True)
            return _GlooReduction(work, tensor, self.clock)
        theirs = torch.empty_like(tensor)
        rows = [0, 0]
        rows[self._peer] = len(tensor)
        work = all_to_all_single(theirs, tensor, rows, rows, group=self._group, async_op=True)
        return _GlooReduction(work, tensor, self.clock, theirs)


class _GlooReduction:
    def __init__(
        self, work: Any, tensor: torch.Tensor, clock: ChannelClock, theirs: torch.Tensor | None = None
    ) -> None:
        """`theirs`: what to add in the end; None: the work sums by itself."""
        self._work, self._clock = work, clock
        self._tensor: torch.Tensor | None = tensor  # alive until the sum is in it
        self._theirs = theirs
        self._done_at = 0.0
        self._issued = time.perf_counter()
        work.get_future().add_done_callback(self._done)

    def _done(self, _future: Any) -> None:  # in a thread of gloo's
        self._done_at = time.perf_counter()

    def wait(self) -> None:
        before = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        self._clock.waited_s += now - before
        self._clock.served(self._issued, self._done_at or now)
        if self._tensor is not None and self._theirs is not None:
            self._tensor += self._theirs
        self._tensor = self._theirs = None


class StreamChannel:
    """A stream of its own on an accelerator, joined with the computing stream by events alone.

    Nothing here blocks the CPU: `wait` makes the computing stream wait. The collective sees the tensor
    only when the computation before it is done; the computation after `wait` sees the sum.

    Memory: a reduction holds its tensor until `wait`, after which whatever the computing stream does with
    that memory comes after the sum. So the allocator need not know of the channel's stream. Telling it
    (`record_stream`) would keep it from reusing any of a pass's tensors before the GPU is there, which is
    a whole pass behind the CPU; only a reduction that an error leaves unawaited pays that price.

    Args:
        collective: sums a tensor over the ranks, in place and in the order of the current stream; it
            may raise.
        stream: of the channel alone.
        clock: times the passes that its meter wants timed.
    """

    _POOL = 64
    """Events kept for reuse; more are in flight only if a pass has more chunks than that."""

    def __init__(
        self,
        collective: Callable[[torch.Tensor], None],
        stream: Any,
        device: Device,
        clock: StreamClock | None = None,
    ) -> None:
        self._collective, self._stream, self._device = collective, stream, device
        self.clock = clock or StreamClock(device)
        self._free: deque[Event] = deque(maxlen=self._POOL)

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        event = self._free.popleft() if self._free else self._device.event()
        event.record(self._device.current_stream())
        self._stream.wait_event(event)
        reduction = _StreamReduction(self, event, tensor)
        with self._device.stream(self._stream):
            began = self.clock.mark(self._stream)
            self._collective(tensor)
            self.clock.note(began, self._stream, busy=True)
        event.record(self._stream)  # the stream has taken the event's first meaning already
        return reduction

    def join(self, done: Event) -> None:
        """Make the computing stream wait, and take the event back."""
        computing = self._device.current_stream()
        began = self.clock.mark(computing)
        computing.wait_event(done)
        self.clock.note(began, computing, exposed=True)
        self._free.append(done)

    def abandon(self, tensor: torch.Tensor) -> None:
        """Nobody will wait for this sum any more, and the memory is about to be let go."""
        self._device.keep(tensor, self._stream)


class _StreamReduction:
    def __init__(self, channel: StreamChannel, done: Event, tensor: torch.Tensor) -> None:
        self._channel, self._done = channel, done
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        if self._tensor is None:  # the event may serve another reduction by now
            return
        self._channel.join(self._done)
        self._tensor = None

    def __del__(self) -> None:
        if self._tensor is not None:
            self._channel.abandon(self._tensor)
