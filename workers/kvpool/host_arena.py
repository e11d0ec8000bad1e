"""One arena of an agent's host: blocks out of it for other hosts, and other hosts' blocks into it.

Everything here may block, for the arenas' deadlines and for as long as copies take: call it on a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import NamedTuple

from workers.kvpool.arena import Arena
from workers.kvpool.block_names import BlockNames
from workers.kvpool.checksum import checksum
from workers.kvpool.errors import (
    ArenaBusy,
    ArenaClosedError,
    NotAttachedError,
    SlotLostError,
)
from workers.kvpool.file import Identity
from workers.kvpool.index import Lease, Seal, Slot
from workers.kvpool.layout import Geometry, State
from workers.kvpool.usage import Counters, Usage
from workers.kvpool.wire import Block, Part


class Written(NamedTuple):
    """What became of blocks that came from another host."""

    there: dict[int, bytes]
    """Those that are ready in the arena now: their keys by their names, in order."""
    false: int
    """1 when one was not what its checksum says, else 0. It was dropped, and what came after it."""


class HostArena:
    """One arena, as an agent uses it; several threads may.

    Args:
        arena: attached. It is closed by `close`, or with the last reference: never under a thread's hands.
    """

    def __init__(self, arena: Arena, identity: Identity) -> None:
        self._arena = arena
        self._names = BlockNames()
        self._following = threading.Lock()
        self.identity = identity
        self.lost = False
        """This object is of no use any more: open the arena anew."""

    @property
    def geometry(self) -> Geometry:
        return self._arena.header.geometry

    def usage(self) -> Usage:
        return self._arena.usage()

    def counters(self) -> Counters:
        return self._arena.counters()

    def follow(self) -> None:
        """Learn what has become ready, and what is gone. Raises ArenaBusy, having learned nothing."""
        with self._watched(), self._following:
            changes = self._arena.changes(self._names.position)
            if changes is not None:
                self._names.follow(changes)
            else:
                self._names.start(self._arena.snapshot())

    def missing(self, names: Sequence[int]) -> list[int]:
        """Those of the router's keys that no ready block has, in order."""
        self._catch_up()
        with self._following:
            return self._names.missing(names)

    def prefix(self, names: Iterable[int]) -> list[bytes]:
        """The engine's keys of the leading ones that are ready."""
        self._catch_up()
        with self._following:
            return self._names.prefix(names)

    def read(self, keys: Sequence[bytes], first: int) -> list[Block]:
        """Verified copies of the leading blocks that are ready, counted from `first`.

        They are leased while they are copied, and not while they are sent: a receiver that is slow, stopped
        or gone holds nothing back here. Raises ArenaBusy, and other ArenaErrors.
        """
        blocks: list[Block] = []
        with self._watched():
            leases = self._arena.lease(keys)
            try:
                for key, lease in zip(keys, leases, strict=True):
                    parts = self._copied(lease) if lease is not None else None
                    if parts is None:
                        break
                    blocks.append(Block(first + len(blocks), key, parts))
            finally:
                self._arena.release([lease for lease in leases if lease is not None])
        return blocks

    def write(self, blocks: Sequence[Block], names: Sequence[int]) -> Written:
        """Take in blocks of another host, in the prefix's order; `names` are the router's.

        Each is what its sender's checksum says, or is dropped. One that the arena has no room for, or does
        not admit, is not among those that are there. Raises ArenaBusy and other ArenaErrors: then it may have
        taken none of them in, or all.
        """
        true = list(takewhile(_is_true, blocks))
        keys = [block.key for block in true]
        there: dict[int, bytes] = {}
        with self._watched():
            slots = self._arena.allocate(keys, list(names[: len(true)]), asked=True)
            taken = [(block, slot) for block, slot in zip(true, slots, strict=True) if slot is not None]
            kept = self._store(taken) if taken else set()
            states: list[State | None] = [None] * len(keys)
            if len(kept) < len(keys):
                with suppress(ArenaBusy):  # then those that others have stored are asked for in vain once
                    states = [*self._arena.lookup(keys, asked=False)]
            for name, key, slot, state in zip(names, keys, slots, states, strict=False):
                if slot in kept or state is State.READY:
                    there[name] = key
        return Written(there, int(len(true) < len(blocks)))

    def used(self, keys: Sequence[bytes]) -> None:
        """The blocks of one prefix, in order: the first is evicted last."""
        with self._watched():
            self._arena.touch(keys)

    def close(self) -> None:
        """When no thread uses it any more."""
        self._arena.close()

    def _catch_up(self) -> None:
        with suppress(ArenaBusy):  # then what was known a second ago has to do
            self.follow()

    def _copied(self, lease: Lease) -> list[Part] | None:
        """None for a block that is gone or damaged; a damaged one is not served to anybody again."""
        parts = []
        for rank in range(self.geometry.ranks):
            try:
                copy = bytes(self._arena.read_part(*lease, rank))
            except SlotLostError:
                return None
            digest = checksum(copy)
            if not self._arena.verify(*lease, rank, digest):
                self._arena.corrupt(*lease)
                return None
            parts.append(Part([copy], digest))
        return parts

    def _store(self, taken: Sequence[tuple[Block, Slot]]) -> set[Slot]:
        """Those slots that are ready now."""
        slots = [slot for _, slot in taken]
        try:
            for block, slot in taken:
                for rank, part in enumerate(block.parts):
                    _fill(self._arena.write_part(*slot, rank), part)
            for rank in range(self.geometry.ranks):
                seals = [Seal(*slot, block.parts[rank].checksum) for block, slot in taken]
                self._arena.seal_parts(rank, seals)
            kept = self._arena.commit(slots)
        except BaseException:
            self._arena.abandon(slots)
            raise
        return {slot for slot, ready in zip(slots, kept, strict=True) if ready}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (NotAttachedError, ArenaClosedError):
            self.lost = True
            raise


def _is_true(block: Block) -> bool:
    return all(checksum(*part.pieces) == part.checksum for part in block.parts)


def _fill(target: memoryview, part: Part) -> None:
    at = 0
    for piece in part.pieces:
        target[at : at + len(piece)] = piece
        at += len(piece)
