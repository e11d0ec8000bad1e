"""One replica's resident blocks, kept in the index exactly as the replica publishes them. Pure.

Every change must fit what is held: a block that is removed was resident, one that is stored was not,
and the replica's own count and XOR of its keys equal ours. Whatever does not fit voids the view, so an
index entry is either right or gone.
"""

from __future__ import annotations

import numpy as np

from protos import replica_pb2
from protos.blockkeys import Keys
from router.index import BlockIndex
from router.replica_view import DesyncError

TIERS = len(replica_pb2.Tier.values())


class BlockView:
    """The blocks of one row of `index`; at most `most` of them."""

    def __init__(self, index: BlockIndex, row: int, *, most: int) -> None:
        self._index, self._row, self._most = index, row, most
        self._counts = [0] * TIERS
        self._xors = [0] * TIERS

    @property
    def count(self) -> int:
        """Keys held, over all tiers."""
        return sum(self._counts)

    def forget(self) -> None:
        """Nothing is known: the index gives this replica no credit."""
        self._index.clear(self._row)
        self._counts = [0] * TIERS
        self._xors = [0] * TIERS

    def apply(self, update: replica_pb2.ReplicaUpdate) -> None:
        """Take the blocks of one update; a snapshot replaces what was held.

        Raises:
            DesyncError: the changes contradict what is held, are malformed, or are too many; everything
                of this replica is then forgotten.
        """
        if update.HasField("snapshot"):
            self.forget()
        try:
            for change in update.blocks:
                self._change(change)
            if not update.blocks_more and update.HasField("blocks_count"):
                self._compare(update.blocks_count, update.blocks_xor)
        except DesyncError:
            self.forget()
            raise

    def _change(self, change: replica_pb2.BlockChange) -> None:
        tier = change.tier
        if not 0 <= tier < TIERS:
            raise DesyncError(f"unknown tier {tier}")
        if change.cleared:
            self._index.clear(self._row, tier)
            self._counts[tier] = self._xors[tier] = 0
        removed, stored = _keys(change.removed), _keys(change.stored)
        if self.count - len(removed) + len(stored) > self._most:
            raise DesyncError(f"more than {self._most} blocks claimed to be resident")
        if len(removed) and (gone := self._index.remove(self._row, removed, tier)) != len(removed):
            raise DesyncError(f"{len(removed) - gone} blocks were removed that were not resident")
        if len(stored) and (new := self._index.store(self._row, stored, tier)) != len(stored):
            raise DesyncError(f"{len(stored) - new} blocks were stored that were resident already")
        self._counts[tier] += len(stored) - len(removed)
        self._xors[tier] ^= _xor(removed) ^ _xor(stored)

    def _compare(self, count: int, xor: int) -> None:
        ours = 0
        for part in self._xors:
            ours ^= part
        if (self.count, ours) != (count, xor):
            raise DesyncError(f"the replica holds {count} blocks, this view {self.count}, or others")


def _keys(raw: bytes) -> Keys:
    if len(raw) % 8:
        raise DesyncError(f"{len(raw)} bytes are no list of 8-byte block keys")
    keys = np.frombuffer(raw, dtype="<u8")
    if not keys.all():
        raise DesyncError("0 is no block key")
    return keys


def _xor(keys: Keys) -> int:
    return int(np.bitwise_xor.reduce(keys)) if len(keys) else 0
