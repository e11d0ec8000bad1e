"""The last changes of what is ready, so that others can follow: a ring in the segment. Pure."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.kvpool.layout import CHANGE, KEY_BYTES, Segment, Word

_RECORD = struct.Struct("=QQB32s7x")
assert _RECORD.size == CHANGE.itemsize


class ChangeKind(IntEnum):
    STORED = 1
    REMOVED = 2


_KINDS = {int(kind): kind for kind in ChangeKind}


class Change(NamedTuple):
    kind: ChangeKind
    extra: int
    """The router's key of the block."""
    key: bytes


class Changes(NamedTuple):
    """In the order in which they happened."""

    position: int
    """To ask from next time."""
    items: list[Change]

    @classmethod
    def of(cls, position: int, records: npt.NDArray[np.void]) -> Changes:
        """`records`: of dtype CHANGE."""
        kinds, extras = records["kind"].tolist(), records["extra"].tolist()
        keys = split_keys(records["key"].tobytes())
        rows = zip(kinds, extras, keys, strict=True)
        return cls(position, [Change(_KINDS[kind], extra, key) for kind, extra, key in rows])


class Snapshot(NamedTuple):
    """All that was ready at a position."""

    position: int
    keys: list[bytes]
    extras: list[int]


class ChangeRing:
    """Positions count changes. Invariant: the records after position p, applied in order to what was ready at
    p, give what is ready now."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._records = segment.changes
        self._bytes = segment.changes.view(np.uint8).data
        self._words, self._extra = segment.words.data, segment.extra.data

    @property
    def position(self) -> int:
        return self._words[Word.SEQ]

    @property
    def oldest(self) -> int:
        """The earliest position after which all is known."""
        return max(self._words[Word.FLOOR], self.position - len(self._records))

    def append(self, kind: ChangeKind, slot: int) -> None:
        """Record what happened to the key in the slot's record. O(1)."""
        seq = self._words[Word.SEQ]
        at = seq % len(self._records) * _RECORD.size
        _RECORD.pack_into(self._bytes, at, seq + 1, self._extra[slot], kind, self._segment.key(slot))
        self._words[Word.SEQ] = seq + 1

    def after(self, position: int) -> npt.NDArray[np.void] | None:
        """A copy of the records; None when some are no longer known. O(records)."""
        if not self.oldest <= position <= self.position:
            return None
        wanted: npt.NDArray[np.void] = self._records[np.arange(position, self.position) % len(self._records)]
        return wanted

    def interrupt(self) -> None:
        """Some change may be missing: every follower starts over."""
        self._words[Word.FLOOR] = self._words[Word.SEQ] = self.position + 1


def split_keys(joined: bytes) -> list[bytes]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
