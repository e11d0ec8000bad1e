"""An accelerator's streams, simulated on a CPU with real tensors.

Within `with FakeDevice(...)`, a torch operation does not run when it is called: it joins the queue of the
current stream. Streams run their queues in any order that the events between them allow. What was not yet
computed reads as NaN: a missing wait shows in the result. Memory that no tensor sees any more is given away
in the order of the stream it came from; work on it that is left in another queue then is a RaceError.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


class RaceError(AssertionError):
    """The device did something whose outcome depends on luck."""


@dataclass
class Point:
    """One recording of an event; `at` is the stream's clock, seconds, once it has passed."""

    at: float | None = None


@dataclass(frozen=True)
class Work:
    """Something in a stream's queue: runs after `after`, takes `seconds`, uses the memory `touches`."""

    run: Callable[[], Any] = lambda: None
    after: Point | None = None
    reached: Point | None = None
    seconds: float = 0.0
    touches: frozenset[int] = frozenset()


class FakeStream:
    """As torch.cuda.Stream."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.queue, self.clock = device, deque[Work](), 0.0

    def wait_event(self, event: FakeEvent) -> None:
        if event.point is not None:
            self.device.enqueue(self, Work(after=event.point))

    @property
    def ready(self) -> bool:
        if not self.queue:
            return False
        after = self.queue[0].after
        return after is None or after.at is not None

    def run_next(self) -> Work:
        work = self.queue.popleft()
        if work.after is not None:
            assert work.after.at is not None
            self.clock = max(self.clock, work.after.at)
        self.clock += work.seconds
        work.run()
        if work.reached is not None:
            work.reached.at = self.clock
        return work


class FakeEvent:
    """As torch.cuda.Event."""

    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.point: Point | None = None
        self.device: FakeDevice | None = None

    def record(self, stream: FakeStream) -> None:
        self.point, self.device = Point(), stream.device
        stream.device.enqueue(stream, Work(reached=self.point))

    def query(self) -> bool:
        return self.point is None or self.point.at is not None

    def synchronize(self) -> None:
        while not self.query():
            assert self.device is not None
            self.device.run_some()

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.timing and end.timing and self.point and end.point):
            raise RuntimeError("both events must carry time and have been recorded")
        if self.point.at is None or end.point.at is None:
            raise RuntimeError("both events must have passed")
        return (end.point.at - self.point.at) * 1e3


@dataclass
class _Block:
    """Memory of the allocator: how many tensors see it, and which streams use it beside its own."""

    home: FakeStream
    memory: torch.Tensor
    tensors: int = 0
    used_by: list[FakeStream] = field(default_factory=list)


class FakeDevice(TorchDispatchMode):  # type: ignore[misc]
    """A device (see workers.overlap.streams.Device) whose streams interleave by a seeded choice.

    Some seeds let one stream run as far as it can before the others, some let the device keep up with
    the host, some let it begin only when the host is done.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        chance = random.Random(seed)
        self._chance = chance
        self._eager = chance.choice((0.0, 0.0, 0.3, 1.0))
        self._favour_first = chance.choice((0.0, 0.5, 1.0))
        self.streams: list[FakeStream] = []
        self._current = self.computing = self.new_stream()
        self._blocks: dict[int, _Block] = {}
        self._pending = Counter[int]()  # queued work by the memory it touches
        self.events: list[FakeEvent] = []

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    @property
    def lazy(self) -> bool:
        """It begins only when it must."""
        return self._eager == 0.0

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def event(self, *, timing: bool = False) -> FakeEvent:
        self.events.append(FakeEvent(timing))
        return self.events[-1]

    def keep(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is not None:
            block.used_by.append(stream)

    def spend(self, seconds: float) -> None:
        """Let the current stream be busy."""
        self.enqueue(self._current, Work(seconds=seconds))

    def enqueue(self, stream: FakeStream, work: Work) -> None:
        stream.queue.append(work)
        self._pending.update(work.touches)
        while self._chance.random() < self._eager and any(each.ready for each in self.streams):
            self.run_some()

    def run_some(self) -> None:
        """One piece of work of one stream."""
        ready = [stream for stream in self.streams if stream.ready]
        if not ready:
            raise AssertionError("every stream waits for another one")
        first = self._chance.random() < self._favour_first
        with _disable_current_modes(), torch.no_grad():
            work = (ready[0] if first else self._chance.choice(ready)).run_next()
        self._pending.subtract(work.touches)

    def finish(self) -> None:
        """Until all queues are empty."""
        while any(stream.queue for stream in self.streams):
            self.run_some()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # The queue must not keep alive what the caller has dropped, so it holds other tensors on the memory.
        held = tree_map_only(torch.Tensor, torch.Tensor.detach, (tuple(args), kwargs))
        sources = frozenset(_memory(each) for each in tree_leaves(held) if isinstance(each, torch.Tensor))
        if _writes(func):
            self.enqueue(self._current, Work(lambda: func(*held[0], **held[1]), touches=sources))
            return args[0]
        result = func(*args, **kwargs)
        outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        if all(_memory(tensor) in sources for tensor in outputs):  # a view
            self._track(outputs)
            return result
        for tensor in outputs:
            _spoil(tensor)
            self._blocks[_memory(tensor)] = _Block(self._current, tensor.detach())
        self._track(outputs)
        if "empty" not in func.__name__:
            compute = partial(_compute, func, held, [tensor.detach() for tensor in outputs])
            touches = sources | {_memory(tensor) for tensor in outputs}
            self.enqueue(self._current, Work(compute, touches=touches))
        return result

    def _track(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            memory = _memory(tensor)
            if memory in self._blocks:  # not one from outside
                self._blocks[memory].tensors += 1
                weakref.finalize(tensor, self._dropped, memory).atexit = False

    def _dropped(self, memory: int) -> None:
        """The last tensor on a block has gone: its own stream may overwrite it from now on."""
        block = self._blocks[memory]
        block.tensors -= 1
        if block.tensors:
            return
        del self._blocks[memory]
        spoil = Work(partial(self._give_away, block.memory))
        if not block.used_by:
            block.home.queue.append(spoil)  # and run nothing: what is raised amid a collection is lost
            return
        later = self.new_stream()
        for stream in (block.home, *block.used_by):
            passed = Point()
            stream.queue.append(Work(reached=passed))
            later.queue.append(Work(after=passed))
        later.queue.append(spoil)

    def _give_away(self, tensor: torch.Tensor) -> None:
        memory = _memory(tensor)
        if self._pending[memory]:
            raise RaceError("memory is given away while a stream has work on it")
        _spoil(tensor)


@lru_cache
def _writes(func: Any) -> bool:
    return any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _spoil(tensor: torch.Tensor) -> None:
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    whole.fill_(float("nan") if tensor.dtype.is_floating_point else -(2**30))


def _compute(func: Any, held: tuple[Any, Any], outputs: Sequence[torch.Tensor]) -> None:
    results = [t for t in tree_leaves(func(*held[0], **held[1])) if isinstance(t, torch.Tensor)]
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)
