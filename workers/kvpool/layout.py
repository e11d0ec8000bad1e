"""Where everything lies in an arena's file: geometry, sections and typed views. Pure.

    header      one page of u64 words (`Word`), one page with the namespace (JSON)
    owners      64 entries {incarnation, pid, kind}
    table       hash index: slot + 1, or 0 when empty
    free        stack of free slots
    next, prev  circular list of what may be evicted, the oldest first; entry `slots` is its head
    slots       an array for each field of a slot's record: the truth, from which the four above follow
    counters    sketch of how often keys were asked for, and the doorkeeper before it
    changes     ring of the last changes
    payload     slot i at `payload_offset + i * slot_stride`, rank r at `r * rank_bytes` in it

Integers have the host's byte order: a segment never leaves its host, and the magic tells a foreign one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from mmap import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from workers.kvpool.errors import ArenaTooSmallError

KEY_BYTES: Final = 32
OWNERS: Final = 64  # as many as a slot's bitmap of readers has bits
PAGE: Final = 4096
LARGEST_SLOTS: Final = (1 << 32) - 2  # slot + 1 and the list's head fit in 32 bits
SKETCH_ROWS: Final = 4
NO_OWNER: Final = 0  # an owner entry's incarnation

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

OWNER: Final = np.dtype([("incarnation", "u8"), ("pid", "u4"), ("kind", "u1"), ("", "V3")])
CHANGE: Final = np.dtype([("seq", "u8"), ("extra", "u8"), ("kind", "u1"), ("key", "V32"), ("", "V7")])

_SECTION_ALIGNMENT: Final = 64  # a cache line


class Word:
    """Indices of the u64 words of the header. Plain numbers, as an enum's members are slow to name."""

    MAGIC: Final = 0
    FORMAT: Final = 1
    SLOTS: Final = 2
    RANKS: Final = 3
    RANK_BYTES: Final = 4
    CHANGES: Final = 5
    POLICY: Final = 6
    NAMESPACE_BYTES: Final = 7
    MULTIPLIER: Final = 8  # odd and secret: where keys land in the table cannot be arranged from outside
    CONDITION: Final = 9
    CLOCK: Final = 10  # touches so far
    FREE: Final = 11  # depth of the free stack
    SEQ: Final = 12  # changes so far
    FLOOR: Final = 13  # changes up to here may be incomplete
    SAMPLES: Final = 14  # keys counted by the sketch since it was last halved
    STORED: Final = 16
    EVICTED: Final = 17
    HITS: Final = 18
    MISSES: Final = 19
    REFUSED: Final = 20
    FULL: Final = 21
    CORRUPT: Final = 22
    ABANDONED: Final = 23
    RECLAIMED: Final = 24
    OWNERS_LOST: Final = 25
    RECOVERED: Final = 26


class Condition(IntEnum):
    """Of the segment, for whoever enters it."""

    WHOLE = 0
    CHANGING = 1  # somebody died inside a mutation
    NEW = 2  # nobody was inside yet


class State(IntEnum):
    """Of a slot, and of a key: a key is missing when no slot holds it."""

    FREE = 0
    WRITING = 1
    READY = 2


@dataclass(frozen=True)
class Section:
    """An array at a byte offset of the segment."""

    offset: int
    dtype: npt.DTypeLike
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """What two processes must agree on to share a segment. Raises ValueError on values that cannot be."""

    slots: int
    """Blocks that fit."""
    ranks: int
    """Tensor-parallel ranks; each has its own part of every block."""
    rank_bytes: int
    """Of one rank's part of one block."""
    changes: int = 8192
    """Kept for followers that lag."""

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= LARGEST_SLOTS:
            raise ValueError(f"an arena has 1 to {LARGEST_SLOTS} slots, not {self.slots}")
        if min(self.ranks, self.rank_bytes, self.changes) < 1:
            raise ValueError(f"ranks, rank_bytes and changes must be at least 1: {self}")

    @classmethod
    def fit(cls, budget_bytes: int, ranks: int, rank_bytes: int, changes: int = 8192) -> Geometry:
        """The most slots whose whole segment, index included, takes at most `budget_bytes`.

        Raises ArenaTooSmallError, with the bytes needed, when that is not even one.
        """
        single = cls(1, ranks, rank_bytes, changes)
        if budget_bytes < single.total_bytes:
            raise ArenaTooSmallError(
                f"{budget_bytes} bytes do not hold one block of {ranks} × {rank_bytes} bytes with its index: "
                f"give the KV pool at least {single.total_bytes} bytes, {single.slot_stride} for each more"
            )
        most = min(budget_bytes // (ranks * rank_bytes), LARGEST_SLOTS)
        sizes = range(1, most + 1)
        slots = bisect_right(
            sizes, budget_bytes, key=lambda n: cls(n, ranks, rank_bytes, changes).total_bytes
        )
        return cls(slots, ranks, rank_bytes, changes)

    @property
    def slot_bytes(self) -> int:
        return self.ranks * self.rank_bytes

    @property
    def slot_stride(self) -> int:
        """`slot_bytes` rounded up to whole pages."""
        return _round_up(self.slot_bytes, PAGE)

    @property
    def table_size(self) -> int:
        """A power of two, at most half full."""
        return _power_of_two(2 * self.slots)

    @cached_property
    def sections(self) -> Mapping[str, Section]:
        slots, u4, u8 = self.slots, np.uint32, np.uint64
        shapes: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
            "words": (u8, (PAGE // 8,)),
            "namespace": (np.uint8, (PAGE,)),
            "owners": (OWNER, (OWNERS,)),
            "table": (u4, (self.table_size,)),
            "free": (u4, (slots,)),
            "next": (u4, (slots + 1,)),
            "prev": (u4, (slots + 1,)),
            "keys": (np.uint8, (slots, KEY_BYTES)),
            "state": (np.uint8, (slots,)),
            "owner": (np.uint8, (slots,)),
            "generation": (u4, (slots,)),
            "readers": (u8, (slots,)),
            "used": (u8, (slots,)),
            "extra": (u8, (slots,)),
            "checksums": (u8, (slots, self.ranks)),
            "counters": (np.uint8, (SKETCH_ROWS, _power_of_two(max(64, 4 * slots)))),
            "doorkeeper": (np.uint8, (_power_of_two(64 * slots),)),
            "changes": (CHANGE, (self.changes,)),
        }
        sections: dict[str, Section] = {}
        offset = 0
        for name, (dtype, shape) in shapes.items():
            sections[name] = Section(offset, dtype, shape)
            end = offset + np.dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
            offset = _round_up(end, _SECTION_ALIGNMENT)
        sections["payload"] = Section(_round_up(offset, PAGE), np.uint8, (slots * self.slot_stride,))
        return sections

    @property
    def payload_offset(self) -> int:
        return self.sections["payload"].offset

    @property
    def total_bytes(self) -> int:
        """Of the whole segment."""
        return self.payload_offset + self.slots * self.slot_stride


class Segment:
    """Typed arrays over a segment's bytes. For scalars, `array.data[i]` is several times faster than
    `array[i]`.

    Raises ValueError when the buffer is smaller than the geometry says.
    """

    def __init__(self, buffer: mmap | bytearray, geometry: Geometry) -> None:
        if len(buffer) < geometry.total_bytes:
            raise ValueError(f"{len(buffer)} bytes do not hold {geometry}: {geometry.total_bytes} are needed")
        self.buffer = buffer
        self.geometry = geometry
        self.key_offset = geometry.sections["keys"].offset
        self.words: U64 = self._array("words")
        self.owners: npt.NDArray[np.void] = self._array("owners")
        self.table: U32 = self._array("table")
        self.free: U32 = self._array("free")
        self.next: U32 = self._array("next")
        self.prev: U32 = self._array("prev")
        self.keys: U8 = self._array("keys")
        self.state: U8 = self._array("state")
        self.owner: U8 = self._array("owner")
        self.generation: U32 = self._array("generation")
        self.readers: U64 = self._array("readers")
        self.used: U64 = self._array("used")
        self.extra: U64 = self._array("extra")
        self.checksums: U64 = self._array("checksums")
        self.counters: U8 = self._array("counters")
        self.doorkeeper: U8 = self._array("doorkeeper")
        self.changes: npt.NDArray[np.void] = self._array("changes")
        self.payload = self._array("payload").data

    def key(self, slot: int) -> bytes:
        start = self.key_offset + slot * KEY_BYTES
        return bytes(self.buffer[start : start + KEY_BYTES])

    def part(self, slot: int, rank: int) -> memoryview:
        """One rank's bytes of a slot's payload. Raises ValueError outside the geometry."""
        shape = self.geometry
        if not (0 <= slot < shape.slots and 0 <= rank < shape.ranks):
            raise ValueError(f"no rank {rank} of slot {slot}: the arena has {shape}")
        start = slot * shape.slot_stride + rank * shape.rank_bytes
        return self.payload[start : start + shape.rank_bytes]

    def _array(self, name: str) -> npt.NDArray[Any]:
        section = self.geometry.sections[name]
        return np.ndarray(section.shape, section.dtype, self.buffer, section.offset)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
