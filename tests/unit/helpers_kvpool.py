"""Segments in plain memory, arenas on disk, and blocks whose bytes follow from their key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from workers.kvpool.admission import Policy
from workers.kvpool.arena import Arena, Timing
from workers.kvpool.checksum import checksum
from workers.kvpool.header import Header
from workers.kvpool.index import Lease, Seal, Slot
from workers.kvpool.layout import Condition, Geometry, Segment, State, Word
from workers.kvpool.owners import OwnerKind, OwnerTable
from workers.kvpool.recovery import recover

FREE, WRITING, READY = State
NAMESPACE = {"model": "org/tiny", "revision": "abc", "block_size": 16}
RANKS = 2
MULTIPLIER = 0x9E3779B97F4A7C15
PART = 5000
"""Bytes; two of them are no whole number of pages."""
PATIENT = Timing(lookup_s=20.0, other_s=20.0)
"""On a machine as busy as it likes."""


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def content(of: bytes, rank: int) -> bytes:
    """What a rank's part of this key's block holds in these tests."""
    return (of + bytes([rank])) * (PART // 33) + bytes(PART % 33)


def header(slots: int, policy: Policy = Policy.LRU, changes: int = 64) -> Header:
    return Header(Geometry(slots, RANKS, PART, changes), NAMESPACE, policy)


def fresh_segment(slots: int, policy: Policy = Policy.LRU, changes: int = 64, owners: int = 2) -> Segment:
    """In a bytearray, with some owner entries in use."""
    wanted = header(slots, policy, changes)
    buffer = bytearray(wanted.geometry.total_bytes)
    first = wanted.encode(multiplier=MULTIPLIER)
    buffer[: len(first)] = first
    segment = Segment(buffer, wanted.geometry)
    recover(segment)
    segment.words[Word.CONDITION] = Condition.WHOLE
    for owner in range(owners):
        OwnerTable(segment).claim(owner, OwnerKind.ENGINE, pid=1, incarnation=owner + 1)
    return segment


def make(
    path: Path, slots: int, policy: Policy = Policy.LRU, timing: Timing = PATIENT, changes: int = 64
) -> Arena:
    """An arena of this many slots, attached."""
    arena = Arena.create(path, header(slots, policy, changes), timing)
    arena.attach(OwnerKind.ENGINE)
    return arena


def another(arena: Arena, timing: Timing = PATIENT) -> Arena:
    """A second opening of the same arena, attached: to the locks, another process."""
    opened = Arena.open(arena.path, arena.header, timing)
    opened.attach(OwnerKind.ENGINE)
    return opened


def write(arena: Arena, slot: Slot, of: bytes, ranks: Sequence[int] = range(RANKS)) -> None:
    """All parts, or those of some ranks, sealed."""
    for rank in ranks:
        arena.write_part(slot.slot, slot.generation, rank)[:] = content(of, rank)
        assert arena.seal_parts(rank, [Seal(*slot, checksum(content(of, rank)))]) == [True]


def store(arena: Arena, wanted: Sequence[bytes]) -> list[bytes]:
    """Allocate, write and commit; returns the keys that were let in."""
    slots = arena.allocate(wanted, [int.from_bytes(name[:8], "little") for name in wanted])
    taken = [(name, slot) for name, slot in zip(wanted, slots, strict=True) if slot is not None]
    for name, slot in taken:
        write(arena, slot, name)
    assert all(arena.commit([slot for _, slot in taken]))
    return [name for name, _ in taken]


def read(arena: Arena, lease: Lease, rank: int) -> bytes | None:
    """A verified copy of a part."""
    copy = bytes(arena.read_part(*lease, rank))
    return copy if arena.verify(*lease, rank, checksum(copy)) else None


def assert_ready_blocks_are_true(arena: Arena) -> int:
    """Every ready block verifies and holds what its key says; returns how many there are."""
    ready = arena.snapshot().keys
    leases = arena.lease(ready)
    held = [(name, lease) for name, lease in zip(ready, leases, strict=True) if lease is not None]
    for name, lease in held:
        assert [read(arena, lease, rank) for rank in range(RANKS)] == [
            content(name, rank) for rank in range(RANKS)
        ]
    arena.release([lease for _, lease in held])
    return len(held)
