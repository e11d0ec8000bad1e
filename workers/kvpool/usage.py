"""What operators see of an arena. Pure; read without the mutex, so that numbers may be a call apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.kvpool.layout import Segment, State, Word
from workers.kvpool.owners import Owner, OwnerTable


@dataclass(frozen=True)
class Counters:
    """Since the arena was made, over all processes."""

    stored: int
    """Blocks that became ready."""
    evicted: int
    hits: int
    """Keys looked up that were ready."""
    misses: int
    refused: int
    """New blocks that the admission policy did not let in."""
    full: int
    """New blocks for which nothing could be evicted."""
    corrupt: int
    """Blocks freed since their bytes were not what was written."""
    abandoned: int
    """Slots whose writer gave up, or did not seal every part."""
    reclaimed: int
    """Slots that dead owners were writing."""
    owners_lost: int
    recovered: int
    """Times that the index was rebuilt since somebody had died inside a mutation."""

    @classmethod
    def of(cls, segment: Segment) -> Counters:
        return cls(
            **{name: int(segment.words[getattr(Word, name.upper())]) for name in cls.__dataclass_fields__}
        )


@dataclass(frozen=True)
class Usage:
    """Of an arena's slots, now."""

    slots: int
    writing: int
    ready: int
    leased: int
    """Of those ready, with at least one reader."""
    slot_bytes: int
    total_bytes: int
    """Of the whole segment."""
    owners: tuple[Owner, ...]

    @classmethod
    def of(cls, segment: Segment) -> Usage:
        """O(slots), vectorised."""
        by_state = np.bincount(segment.state, minlength=len(State)).tolist()
        return cls(
            slots=segment.geometry.slots,
            writing=by_state[State.WRITING],
            ready=by_state[State.READY],
            leased=int(np.count_nonzero(segment.readers)),
            slot_bytes=segment.geometry.slot_bytes,
            total_bytes=segment.geometry.total_bytes,
            owners=tuple(OwnerTable(segment).listed()),
        )
