"""Background tasks with an owner: none dies unnoticed, none outlives its owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class TaskGroup:
    """The tasks of one object. A task that fails is logged with its name; `cancel` ends them all.

    In such tasks bound an await with `asyncio.timeout`, not `wait_for`: before Python 3.12 the
    latter swallows a cancellation that meets a result, and the task never ends.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, and keep hold of it until it ends."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self) -> None:
        """Wait until all have ended by themselves. Each must bound its own time."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel all and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s died", task.get_name(), exc_info=error)
