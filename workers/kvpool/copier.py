"""A rank's side of the pool, in its shard: copies blocks to and from the arena, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from workers.kvpool.arena import Arena
from workers.kvpool.checksum import checksum
from workers.kvpool.errors import ArenaError, ArenaMismatchError, SlotLostError
from workers.kvpool.index import Seal
from workers.kvpool.jobs import Job, Jobs
from workers.kvpool.pages import BlockPages, Bytes
from workers.kvpool.slots import GONE, ArenaSlots
from workers.pinning import settle_thread

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

log = logging.getLogger(__name__)

STAGING_BYTES: Final = 4 << 20
"""Copied at a time, through memory of our own: about what a core's second cache holds, so that the second and
third pass over a block (checksum, copy) find it there."""

_STOP_WITHIN_S: Final = 10.0


class Copier(OffloadingWorker):
    """vLLM's worker of the offloading connector. vLLM calls it from the thread that computes.

    A block that is loaded is the one that was stored, or is told by `take_failed`: it is copied from its
    slot, the copy verified, and only then written to the engine's block. What is stored is copied from the
    engine's block first, and its checksum is that copy's: readers find out what else was written to the slot.

    Transfers never fail by vLLM's terms (`TransferResult.success`), which knows no failures: a store that
    does not happen leaves its slots unsealed, and `Arena.commit` frees them.
    """

    def __init__(self, pages: BlockPages, rank: int, ranks: int, cores: tuple[int, ...] = ()) -> None:
        """`cores`: where to copy, as in `PoolConfig.copy_cores`."""
        self._pages = pages
        self._rank, self._ranks = rank, ranks
        self._cores = cores
        self._jobs = Jobs(pages.row_bytes)
        self._arena: Arena | None = None
        self._staging: Bytes = np.empty((max(1, STAGING_BYTES // pages.row_bytes), pages.row_bytes), np.uint8)
        self._results_lock = threading.Lock()
        self._results: list[TransferResult] = []
        self._failed: set[int] = set()
        self._complaint = ""
        self._thread: threading.Thread | None = None

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: ArenaSlots) -> bool:
        """Always True. Dropped when too much waits already (`jobs.STORES_WAITING_BYTES`)."""
        return self._submit(Job(job_id, src_spec.block_ids, dst_spec, loads=False))

    def submit_load(self, job_id: int, src_spec: ArenaSlots, dst_spec: GPULoadStoreSpec) -> bool:
        """Always True."""
        return self._submit(Job(job_id, dst_spec.block_ids, src_spec, loads=True))

    def get_finished(self) -> list[TransferResult]:
        with self._results_lock:
            finished, self._results = self._results, []
        return finished

    def take_failed(self) -> set[int]:
        """The engine's blocks that loads left without their content, since the last call.

        A load's are here before `get_finished` tells that it is done.
        """
        with self._results_lock:
            failed, self._failed = self._failed, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Until these jobs neither read nor write the engine's blocks any more."""
        self._jobs.wait(job_ids)

    def shutdown(self) -> None:
        for job in self._jobs.close():
            self._give_up(job)
        if self._thread is not None:
            self._thread.join(_STOP_WITHIN_S)
        if self._arena is not None:
            self._arena.close()

    def _submit(self, job: Job) -> bool:
        if not self._jobs.put(job):
            self._give_up(job)
        elif self._thread is None:
            # Only now, so that a shard that frees its other threads from its cores does not move this one.
            self._thread = threading.Thread(target=self._run, name="kvorum-pool-copy", daemon=True)
            self._thread.start()
        return True

    def _run(self) -> None:
        settle_thread(self._cores)
        while (job := self._jobs.take()) is not None:
            self._do(job)

    def _do(self, job: Job) -> None:
        started = time.monotonic()
        try:
            if not job.fits:
                raise ValueError(f"{len(job.blocks)} blocks for {len(job.slots.slots)} slots")
            moved = self._load(job) if job.loads else self._store(job)
        except Exception as error:
            self._complain(job, error)
            self._give_up(job)
        else:
            self._finish(job, moved * self._pages.row_bytes, time.monotonic() - started)

    def _load(self, job: Job) -> int:
        """Returns the blocks loaded."""
        arena, loaded = self._open(job.slots.path), 0
        for span in self._spans(job):
            good: list[int] = []
            for index in span:
                if self._fetch(arena, job.slots, index, self._staging[len(good)]):
                    good.append(index)
            self._pages.scatter(job.blocks[good], self._staging[: len(good)])
            self._fail(job, set(span) - set(good))
            loaded += len(good)
        job.copied.set()
        return loaded

    def _fetch(self, arena: Arena, slots: ArenaSlots, index: int, row: Bytes) -> bool:
        """A verified copy of this rank's part of a slot, in `row`; False when there is none."""
        slot, generation = slots.slots[index], slots.generations[index]
        if slot == GONE:
            return False
        try:
            row[:] = np.frombuffer(arena.read_part(slot, generation, self._rank), np.uint8)
        except SlotLostError:
            return False
        if arena.verify(slot, generation, self._rank, checksum(row.data)):
            return True
        arena.corrupt(slot, generation)
        return False

    def _store(self, job: Job) -> int:
        """Returns the blocks stored."""
        arena, seals = self._open(job.slots.path), list[Seal]()
        for span in self._spans(job):
            while (load := self._jobs.take_load()) is not None:
                self._do(load)
            rows = self._staging[: len(span)]
            self._pages.gather(job.blocks[span.start : span.stop], rows)
            if span.stop == len(job.blocks):
                job.copied.set()
            for index, row in zip(span, rows, strict=True):
                slot, generation = job.slots.slots[index], job.slots.generations[index]
                try:
                    part = arena.write_part(slot, generation, self._rank)
                except SlotLostError:  # the scheduler died, or has forgotten all
                    continue
                np.frombuffer(part, np.uint8)[:] = row
                seals.append(Seal(slot, generation, checksum(row.data)))
        return sum(arena.seal_parts(self._rank, seals))

    def _spans(self, job: Job) -> Iterator[range]:
        """Of the job's blocks, each of which fits in the staging."""
        step, count = len(self._staging), len(job.blocks)
        return (range(start, min(start + step, count)) for start in range(0, count, step))

    def _open(self, path: str) -> Arena:
        """The arena that the scheduler names. Raises ArenaError."""
        if self._arena is None or str(self._arena.path) != path:
            arena = Arena.open(Path(path))
            shape = arena.header.geometry
            if (shape.ranks, shape.rank_bytes) != (self._ranks, self._pages.row_bytes):
                arena.close()
                raise ArenaMismatchError(
                    f"{path} has blocks of {shape.ranks} × {shape.rank_bytes} bytes, and this engine's have "
                    f"{self._ranks} × {self._pages.row_bytes}: its scheduler and shards differ in version"
                )
            self._arena = arena
        return self._arena

    def _complain(self, job: Job, error: Exception) -> None:
        """Once for each kind of trouble that lasts, not for each transfer."""
        level = logging.DEBUG if str(error) == self._complaint else logging.WARNING
        self._complaint = str(error)
        done = "loaded from" if job.loads else "stored in"
        unexpected = not isinstance(error, ArenaError)
        log.log(
            level, "%d blocks were not %s the KV pool: %s", len(job.blocks), done, error, exc_info=unexpected
        )

    def _give_up(self, job: Job) -> None:
        if job.loads:
            self._fail(job, set(range(len(job.blocks))))
        self._finish(job, 0, 0.0)

    def _fail(self, job: Job, indices: set[int]) -> None:
        with self._results_lock:
            self._failed.update(int(job.blocks[index]) for index in indices)

    def _finish(self, job: Job, size: int, seconds: float) -> None:
        self._jobs.done(job)
        with self._results_lock:
            self._results.append(
                TransferResult(job.id, success=True, transfer_size=size, transfer_time=seconds)
            )
