"""The two halves of an engine's pool without an engine: a manager on a real arena, ranks with tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from workers.kvpool.admission import Policy
from workers.kvpool.arena import Arena, Timing
from workers.kvpool.copier import Copier
from workers.kvpool.header import Header
from workers.kvpool.layout import Geometry
from workers.kvpool.manager import ArenaManager
from workers.kvpool.owners import OwnerKind
from workers.kvpool.pages import BlockPages
from workers.kvpool.slots import ArenaSlots

RANKS = 2
LAYERS = 3
BLOCKS = 40
PAGE = 700
"""Bytes of one layer of a block: no whole number of cache lines."""
BLOCK_TOKENS = 4
NAMESPACE = {"model": "tests"}
PATIENT = Timing(lookup_s=20.0, other_s=20.0)


def arena_at(path: Path, slots: int = 32, timing: Timing = PATIENT) -> Arena:
    """One replica's opening of the arena, made if need be, attached."""
    arena = Arena.create(path, Header(Geometry(slots, RANKS, LAYERS * PAGE), NAMESPACE, Policy.LRU), timing)
    arena.attach(OwnerKind.ENGINE)
    return arena


def block_keys(numbers: Iterable[int], salt: str = "") -> list[OffloadKey]:
    """As vLLM names blocks: by a hash of all that is in them, salt and adapter included."""
    return [make_offload_key(hashlib.sha256(f"{salt} {n}".encode()).digest(), 0) for n in numbers]


def request(name: str, keys: Sequence[OffloadKey]) -> ReqContext:
    context = ReqContext(name)
    for position, key in enumerate(keys, start=1):
        context.set_offload_key_position(key, position * BLOCK_TOKENS)
    return context


def gpu(blocks: Sequence[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(blocks), group_sizes=[len(blocks)], block_indices=[0])


class Rank:
    """One rank's KV cache, of random bytes, as vLLM hands it to a worker: layers in one allocation."""

    def __init__(self, rank: int, seed: int, stride: int = PAGE) -> None:
        dice = torch.Generator().manual_seed(1000 * seed + rank)
        self.memory = torch.randint(-128, 128, (LAYERS, BLOCKS, stride), dtype=torch.int8, generator=dice)
        tensors = [CanonicalKVCacheTensor(layer[:, :PAGE], PAGE) for layer in self.memory]
        self.copier = Copier(BlockPages.of(CanonicalKVCaches(tensors, [[]])), rank, RANKS)

    def block(self, number: int) -> bytes:
        """Its bytes in all layers."""
        return self.memory[:, number, :PAGE].numpy().tobytes()

    def finish(self, jobs: set[int]) -> set[int]:
        """Wait for these jobs to be reported; returns the engine's blocks that failed to load."""
        finished: set[int] = set()
        while not jobs <= finished:
            self.copier.wait(jobs)
            results = self.copier.get_finished()
            assert all(result.success for result in results)  # vLLM knows no other
            finished |= {result.job_id for result in results}
        return self.copier.take_failed()


class Replica:
    """An engine's manager and ranks; `store` and `load` take the steps that vLLM's connector takes."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self.arena = arena
        self.manager = ArenaManager(arena)
        self.ranks = [Rank(rank, seed) for rank in range(RANKS)]
        self._jobs = 0

    def store(
        self, context: ReqContext, keys: Sequence[OffloadKey], blocks: Sequence[int]
    ) -> list[OffloadKey]:
        """Returns the keys that were given slots."""
        output = self.manager.prepare_store(keys, context)
        place = dict(zip(keys, blocks, strict=True))
        self.copy_out([place[key] for key in output.keys_to_store], output.store_spec)
        self.manager.complete_store(set(output.keys_to_store), context)
        return list(output.keys_to_store)

    def load(self, context: ReqContext, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> set[int]:
        """Returns the blocks that some rank failed to load."""
        failed = self.copy_in(self.manager.prepare_load(keys, context), blocks)
        self.manager.complete_load(set(keys), context)
        return failed

    def copy_out(self, blocks: Sequence[int], slots: ArenaSlots) -> None:
        self._jobs += 1
        for rank in self.ranks:
            assert rank.copier.submit_store(self._jobs, gpu(blocks), slots)
        for rank in self.ranks:
            assert rank.finish({self._jobs}) == set()

    def copy_in(self, slots: ArenaSlots, blocks: Sequence[int]) -> set[int]:
        self._jobs += 1
        for rank in self.ranks:
            assert rank.copier.submit_load(self._jobs, slots, gpu(blocks))
        return set().union(*(rank.finish({self._jobs}) for rank in self.ranks))

    def found(self, context: ReqContext, keys: Iterable[OffloadKey]) -> list[bool]:
        """What a lookup in a new step says of each key."""
        self.manager.on_schedule_end(ScheduleEndContext([], []))
        return [self.manager.lookup(key, context).name == "HIT" for key in keys]

    def content(self, blocks: Iterable[int]) -> list[list[bytes]]:
        return [[rank.block(block) for rank in self.ranks] for block in blocks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.copier.shutdown()
        self.manager.shutdown()


@contextmanager
def replicas(path: Path, count: int = 2, slots: int = 32) -> Iterator[list[Replica]]:
    """So many engines that share the arena at `path`."""
    started = [Replica(arena_at(path, slots), seed) for seed in range(count)]
    try:
        yield started
    finally:
        for replica in started:
            replica.close()


def assert_nothing_is_held(arena: Arena) -> None:
    """No lease, and no slot that somebody writes."""
    usage = arena.usage()
    assert (usage.leased, usage.writing) == (0, 0)
    assert arena.check() == []


def flip(arena: Arena, slot: int, rank: int) -> None:
    """One bit of a slot's payload, as a stray write would."""
    part = np.frombuffer(arena._segment.part(slot, rank), np.uint8)
    part[-1] ^= 1
