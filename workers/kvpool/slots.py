"""What the engine's scheduler tells its ranks about a transfer: which slots of which arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec

GONE = -1
"""In the place of a slot: the block was evicted after it had been found."""


@dataclass(frozen=True)
class ArenaSlots(LoadStoreSpec):
    """Slots of one arena, in the order of the engine's blocks that they go with.

    It names the arena, so that no rank can copy from another one than that in which the scheduler looked.
    """

    path: str
    slots: tuple[int, ...]
    """`GONE` for a block that cannot be loaded."""
    generations: tuple[int, ...]

    @classmethod
    def of(cls, path: str, taken: Sequence[tuple[int, int] | None]) -> ArenaSlots:
        """From leases or slots of the arena at `path`; None stands for one that is gone."""
        pairs = [(GONE, 0) if one is None else one for one in taken]
        return cls(path, tuple(slot for slot, _ in pairs), tuple(generation for _, generation in pairs))
