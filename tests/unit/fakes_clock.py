"""An event loop whose clock jumps to the next timer: hours pass in no time, and in a fixed order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class _FakeWait(selectors.BaseSelector):
    """Never blocks: waiting moves the clock."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits for something that no timer will bring"
        self.now += max(0.0, timeout)
        return self._real.select(0)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class FakeClockLoop(asyncio.SelectorEventLoop):
    """Its `time()` is virtual seconds."""

    def __init__(self) -> None:
        self._wait = _FakeWait()
        super().__init__(self._wait)

    def time(self) -> float:
        return self._wait.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end; fails when it would wait for ever."""
    with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
        return runner.run(work)
