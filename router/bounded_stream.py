"""A stream that ends at its deadline, or sooner when told to, but always between two messages.

gRPC cannot send a status while a message of the same call is being written, and a write whose task is
cancelled goes on below. A task that is cancelled there leaves its client without any end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

_LAST_WRITE_S = 1.0
"""For a client that reads too slowly to take the message being written."""


class BoundedStream:
    """An async context manager around whatever calls `write`; raises TimeoutError at the end.

    Args:
        deadline: in the event loop's time.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[None]], deadline: float) -> None:
        self._write, self._deadline = write, deadline
        self._busy = self._over = False
        self._timer = asyncio.timeout(None)
        self._alarm: asyncio.TimerHandle | None = None

    async def write(self, message: bytes) -> None:
        """Write one message whole.

        Raises:
            TimeoutError: the stream is to end.
        """
        if self._over:
            raise TimeoutError
        self._busy = True
        try:
            await self._write(message)
        finally:
            self._busy = False
        if self._over:
            raise TimeoutError

    def end(self) -> None:
        """End it, after the message that is being written now. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._busy:
            self._arm(asyncio.get_running_loop().time() + _LAST_WRITE_S, self._cut)
        else:
            self._cut()

    async def __aenter__(self) -> Self:
        await self._timer.__aenter__()
        self._arm(self._deadline, self.end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        if self._alarm is not None:
            self._alarm.cancel()
        await self._timer.__aexit__(kind, error, trace)

    def _arm(self, when: float, then: Callable[[], None]) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(when, then)

    def _cut(self) -> None:
        self._timer.reschedule(0.0)
