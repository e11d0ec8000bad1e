"""Who shares the arena: the owner entries of a segment. Pure; whether an owner lives is for locks to say."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from workers.kvpool.layout import NO_OWNER, OWNERS, Segment


class OwnerKind(IntEnum):
    ENGINE = 1
    AGENT = 2


class Owner(NamedTuple):
    kind: OwnerKind
    pid: int
    """In its own PID namespace; for people, never compared."""


class OwnerTable:
    """Entries by index, 0 to `OWNERS` - 1. An entry is in use while its incarnation is not `NO_OWNER`."""

    def __init__(self, segment: Segment) -> None:
        self._entries = segment.owners

    def incarnation(self, index: int) -> int:
        return int(self._entries["incarnation"][index])

    def free(self) -> list[int]:
        return [index for index in range(OWNERS) if not self._entries["incarnation"][index]]

    def in_use(self) -> list[int]:
        return [index for index in range(OWNERS) if self._entries["incarnation"][index]]

    def claim(self, index: int, kind: OwnerKind, pid: int, incarnation: int) -> None:
        self._entries["pid"][index] = pid
        self._entries["kind"][index] = kind
        self._entries["incarnation"][index] = incarnation  # last: from here on it is in use

    def vacate(self, index: int) -> None:
        self._entries["incarnation"][index] = NO_OWNER

    def listed(self) -> list[Owner]:
        entries = self._entries[self.in_use()]
        return [
            Owner(OwnerKind(kind), pid)
            for kind, pid in zip(entries["kind"].tolist(), entries["pid"].tolist(), strict=True)
        ]
