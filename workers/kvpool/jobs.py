"""Transfers that wait for a rank's copying thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from workers.kvpool.pages import Blocks
from workers.kvpool.slots import ArenaSlots

STORES_WAITING_BYTES: Final = 512 << 20
"""As many bytes may wait to be stored: what comes on top is dropped. It bounds to a fraction of a second how
long an engine whose blocks run out waits for them (`Jobs.wait`)."""


@dataclass(frozen=True)
class Job:
    id: int
    blocks: Blocks
    slots: ArenaSlots
    loads: bool
    copied: threading.Event = field(default_factory=threading.Event)
    """The engine's blocks are no more read or written."""

    @property
    def fits(self) -> bool:
        """Every block has its slot."""
        return len(self.blocks) == len(self.slots.slots)


class Jobs:
    """A queue in which loads, for which requests wait, overtake stores. Thread-safe.

    Loads need no bound: each has blocks of the engine's cache to itself.
    """

    def __init__(self, row_bytes: int) -> None:
        self._changed = threading.Condition()
        self._row_bytes = row_bytes
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._waiting_bytes = 0
        self._unfinished: dict[int, Job] = {}
        self._closed = False

    def put(self, job: Job) -> bool:
        """False when it is dropped: too much waits, or nobody copies any more."""
        with self._changed:
            if self._closed or (not job.loads and self._overfull(job)):
                return False
            self._unfinished[job.id] = job
            if job.loads:
                self._loads.append(job)
            else:
                self._stores.append(job)
                self._waiting_bytes += self._size(job)
            self._changed.notify()
        return True

    def take(self) -> Job | None:
        """The next one, waiting for it. None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._stores or self._closed)
            if self._closed:
                return None
            if self._loads:
                return self._loads.popleft()
            job = self._stores.popleft()
            self._waiting_bytes -= self._size(job)
            return job

    def take_load(self) -> Job | None:
        """One that need not wait for the store at hand."""
        with self._changed:
            return self._loads.popleft() if self._loads and not self._closed else None

    def done(self, job: Job) -> None:
        job.copied.set()
        with self._changed:
            self._unfinished.pop(job.id, None)

    def wait(self, ids: Iterable[int]) -> None:
        """Until none of these jobs reads or writes the engine's blocks. Copies take memory's time alone: no
        mutex is waited for."""
        with self._changed:
            waiting = [self._unfinished[job] for job in ids if job in self._unfinished]
        for job in waiting:
            job.copied.wait()

    def close(self) -> list[Job]:
        """Take no more; returns those that nobody will do."""
        with self._changed:
            self._closed = True
            left = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._changed.notify_all()
        return left

    def _overfull(self, store: Job) -> bool:
        """Too much waits already; never so when nothing waits, however large the store."""
        return bool(self._stores) and self._waiting_bytes + self._size(store) > STORES_WAITING_BYTES

    def _size(self, job: Job) -> int:
        return len(job.blocks) * self._row_bytes
