"""Which blocks the pool of a replica's host holds, by the router's key. Pure.

in the follower's thread                        on the event loop
change = copies.take(arena's changes)           pool_keys.apply(change)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from protos.blockkeys import Keys
from workers.kvpool.changes import Change, ChangeKind
from workers.kvpool.router_keys import UNNAMED

if TYPE_CHECKING:
    from workers.resident import Changes as Hearer


class Transitions(NamedTuple):
    """Of a set of keys, on balance: no key is in both."""

    stored: list[int]
    removed: list[int]


class Copies:
    """How many of an arena's ready blocks have each key.

    Several may: of a key's 64 bits, or of what the engine's hash tells apart and the router's key does not.
    Blocks without a key (`UNNAMED`) are left out.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def reset(self, extras: Iterable[int]) -> Transitions:
        """These are all there are."""
        before, self._counts = self._counts, dict(Counter(extras))
        self._counts.pop(UNNAMED, None)
        return Transitions(
            [key for key in self._counts if key not in before],
            [key for key in before if key not in self._counts],
        )

    def take(self, changes: Iterable[Change]) -> Transitions:
        """Apply changes, in order."""
        counts, were = self._counts, dict[int, bool]()
        for kind, key, _ in changes:
            if key == UNNAMED:
                continue
            count = counts.get(key, 0)
            were.setdefault(key, count > 0)
            count += 1 if kind is ChangeKind.STORED else -1
            if count > 0:
                counts[key] = count
            else:
                counts.pop(key, None)
        return Transitions(
            [key for key, was in were.items() if not was and key in counts],
            [key for key, was in were.items() if was and key not in counts],
        )


class PoolKeys:
    """The published set: what `Copies` says, and what every hearer was told.

    Args:
        hearer: told of every key that joins or leaves.
        tier: under which it is told.
    """

    def __init__(self, hearer: Hearer, tier: int) -> None:
        self._hearer = hearer
        self._tier = tier
        self._held: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def keys(self) -> Keys:
        """A copy, in no particular order."""
        return np.fromiter(self._held, np.uint64, len(self._held))

    def prefix(self, keys: Sequence[int], start: int = 0) -> int:
        """How many leading keys are here, given that the first `start` are, or need not be."""
        held, end = self._held, len(keys)
        while start < end and keys[start] in held:
            start += 1
        return start

    def apply(self, change: Transitions) -> None:
        """Keys that are there already, or are gone, change nothing."""
        for key in change.removed:
            if key in self._held:
                self._held.discard(key)
                self._hearer.remove(self._tier, key)
        for key in change.stored:
            if key not in self._held:
                self._held.add(key)
                self._hearer.store(self._tier, key)

    def clear(self) -> None:
        """Nothing is known any more."""
        if self._held:
            self._held.clear()
            self._hearer.clear(self._tier)
