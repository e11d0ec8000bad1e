"""Blocks of an arena by the names that routers give them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.kvpool.changes import ChangeKind, Changes, Snapshot
from workers.kvpool.router_keys import UNNAMED

NOWHERE = -1
"""A position before all others."""


class BlockNames:
    """Follows what is ready in one arena.

    A name has 64 bits and may stand for several blocks. It says which blocks are worth a transfer; what a
    block is, only the engine's key of 32 bytes says, which goes with it.
    """

    def __init__(self) -> None:
        self.position = NOWHERE
        """In the arena's changes; what came after it is not known yet."""
        self._keys: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def start(self, snapshot: Snapshot) -> None:
        """Forget all, and take what was ready then."""
        self._keys.clear()
        for key, name in zip(snapshot.keys, snapshot.extras, strict=True):
            self._add(name, key)
        self.position = snapshot.position

    def follow(self, changes: Changes) -> None:
        """Those after `position`, in order."""
        for kind, name, key in changes.items:
            if kind is ChangeKind.STORED:
                self._add(name, key)
            else:
                self._remove(name, key)
        self.position = changes.position

    def prefix(self, names: Iterable[int]) -> list[bytes]:
        """The keys of the leading ones that are known; of several blocks of one name, the youngest's."""
        found = []
        for name in names:
            keys = self._keys.get(name)
            if not keys:
                break
            found.append(keys[-1])
        return found

    def missing(self, names: Sequence[int]) -> list[int]:
        """Those that no block goes by, in order."""
        return [name for name in names if name not in self._keys]

    def _add(self, name: int, key: bytes) -> None:
        if name == UNNAMED:
            return
        keys = self._keys.setdefault(name, [])
        if key not in keys:
            keys.append(key)

    def _remove(self, name: int, key: bytes) -> None:
        keys = self._keys.get(name, [])
        if key in keys:
            keys.remove(key)
        if not keys:
            self._keys.pop(name, None)
