"""A bound on bytes that are held at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """Whoever wants some waits until they are free, in the order of asking. Use it within one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        return self._most - self._free

    @asynccontextmanager
    async def holding(self, size: int) -> AsyncIterator[None]:
        """Hold so many bytes; all there are when it is more than that, as it must go through."""
        size = min(size, self._most)
        await self._take(size)
        try:
            yield
        finally:
            self._give(size)

    async def _take(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._grant()  # it may have kept smaller ones waiting
            else:  # granted at the same time
                self._give(size)
            raise

    def _give(self, size: int) -> None:
        self._free += size
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if size > self._free:
                    return
                self._free -= size
                turn.set_result(None)
            self._waiting.popleft()
