"""Holds requests back so that they go to a replica together: the asyncio shell of `router.window`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from router.window import Window

_Held = asyncio.Future[None]


class Gather:
    """Not thread-safe. One timer, for the batch that is due first."""

    def __init__(self, max_wait_ms: float = 0.0, max_batch_tokens: int = 0) -> None:
        """Limits and errors as `router.window.Window`."""
        self._window: Window[_Held] = Window(max_wait_ms, max_batch_tokens)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def off(self) -> bool:
        """Nothing is ever held: `wait` need not be called."""
        return self._window.off

    def __len__(self) -> int:
        """Requests held."""
        return len(self._window)

    async def wait(self, replica: str, tokens: int) -> float:
        """Return when the request, of so many prompt tokens to compute, may go to `replica`.

        Never later than `max_wait_ms`; returns the seconds waited.
        """
        if self._window.off:
            return 0.0
        loop = asyncio.get_running_loop()
        now = loop.time()
        held: _Held = loop.create_future()
        self._let_go(self._window.add(replica, held, tokens, now))
        if not held.done():
            self._arm(loop)
            try:
                await held
            finally:
                if self._window.discard(replica, held):
                    self._arm(loop)
        return loop.time() - now

    def let_go(self, replica: str) -> None:
        """Hold nothing for this replica any longer: it has gone, or its room is needed now."""
        self._let_go(self._window.take(replica))

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for _replica, batch in self._window.due(loop.time()):
            self._let_go(batch)
        self._arm(loop)

    def _let_go(self, batch: Iterable[_Held]) -> None:
        for held in batch:
            if not held.done():
                held.set_result(None)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._window.next_due()
        if self._timer is not None:
            if due is not None and self._timer.when() <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = loop.call_at(due, self._tick)
