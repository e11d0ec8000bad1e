"""This process among the owners of an arena: its own entry, and the end of those whose process is gone."""

from __future__ import annotations

import os
import secrets

from workers.kvpool.errors import NotAttachedError, OwnersFullError
from workers.kvpool.file import owner_byte
from workers.kvpool.index import Index
from workers.kvpool.layout import OWNERS, Segment, Word
from workers.kvpool.locks import ByteLocks
from workers.kvpool.owners import OwnerKind, OwnerTable


class Presence:
    """An owner lives exactly as long as its byte is locked; the kernel unlocks it however the process ends.

    Every method is called under the mutex, inside a mutation.
    """

    def __init__(self, segment: Segment, index: Index, locks: ByteLocks) -> None:
        self._words = segment.words.data
        self._owners = OwnerTable(segment)
        self._index = index
        self._locks = locks
        self._own: int | None = None
        self._incarnation = 0

    @property
    def attached(self) -> bool:
        return self._own is not None

    @property
    def entry(self) -> int | None:
        """This process's own, if it has one and it is still its own."""
        if self._own is None or self._owners.incarnation(self._own) != self._incarnation:
            return None
        return self._own

    def require(self) -> int:
        """The same. Raises NotAttachedError when there is none."""
        entry = self.entry
        if entry is not None:
            return entry
        if self._own is None:
            raise NotAttachedError("this process owns nothing in the arena: call attach() first")
        raise NotAttachedError(
            f"owner entry {self._own} was taken from this process, since something closed the descriptor "
            "that holds its lock: close this Arena and open another"
        )

    def enter(self, kind: OwnerKind) -> None:
        """Take a free entry. Raises OwnersFullError."""
        for entry in self._owners.free():
            if self._locks.take(owner_byte(entry)):
                self._own, self._incarnation = entry, secrets.randbits(64) or 1
                self._owners.claim(entry, kind, os.getpid(), self._incarnation)
                return
        raise OwnersFullError(
            f"all {OWNERS} owners of this arena are alive: run fewer replicas of one namespace on this host"
        )

    def leave(self) -> None:
        """Free all that this process holds, and its entry."""
        entry = self.entry
        if entry is not None:
            self._index.reclaim(entry)
            self._owners.vacate(entry)
            self._locks.drop(owner_byte(entry))
        self._own = None

    def reap(self) -> int:
        """Free all that dead owners held; returns their number. O(owners), and O(slots) for each dead one."""
        dead = [
            entry
            for entry in self._owners.in_use()
            if entry != self._own and not self._locks.held_elsewhere(owner_byte(entry))
        ]
        for entry in dead:
            self._words[Word.RECLAIMED] += self._index.reclaim(entry)
            self._owners.vacate(entry)  # last: until then, whoever dies here leaves it to be reaped again
            self._words[Word.OWNERS_LOST] += 1
        return len(dead)
