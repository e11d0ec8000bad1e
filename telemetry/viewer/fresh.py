"""An answer that many ask for and that is dear to get: asked for once at a time, kept for a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Fresh(Generic[T]):
    """What `ask` says, at most `max_age_s` old; so is a failure.

    Args:
        timeout_s: an answer that takes longer is a TimeoutError.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], *, max_age_s: float, timeout_s: float) -> None:
        self._ask = ask
        self._max_age_s, self._timeout_s = max_age_s, timeout_s
        self._answered = 0.0
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The answer. Raises what `ask` raised, or TimeoutError. Who waits may be cancelled, alone."""
        task = self._task
        if task is None or (task.done() and time.monotonic() - self._answered >= self._max_age_s):
            task = self._task = asyncio.create_task(self._fetch())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Give up what is under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _fetch(self) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask()
        finally:
            self._answered = time.monotonic()
