"""Work that blocks, off the event loop, on a bounded number of threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class WorkThreads:
    """Each piece of work ends by itself, soon: what is asked of an arena has a deadline."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Whoever is cancelled meanwhile leaves the work to end by itself."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(work, *arguments))

    async def close(self) -> None:
        """When what has begun is done; what has not is dropped."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
