"""What changed in the resident set since a position, on balance. Pure; shared by all watchers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import xor

import numpy as np

from protos.blockkeys import Keys

_LIMIT = 262_144
"""Changes kept for watchers that lag; one that lags further is better served with a snapshot."""


@dataclass(frozen=True)
class TierChange:
    """Apply in this order: forget the tier if `cleared`, forget `removed`, add `stored`."""

    tier: int
    cleared: bool
    removed: Keys
    stored: Keys

    @property
    def size(self) -> int:
        return len(self.removed) + len(self.stored) + self.cleared


@dataclass(frozen=True)
class Sum:
    """All keys of a set, over all tiers: their number and their XOR."""

    count: int = 0
    xor: int = 0


class Journal:
    """Collects true transitions (a key became resident, ceased to be) and serves them coalesced.

    Positions count the cuts. Between two cuts, and over any span of cuts, a key that ends as it
    began is in neither list. Invariant: what `since(p)` returns, applied to the resident set as of
    position p, gives the set as of the last cut.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._open: dict[int, _Net] = {}
        self._deltas: deque[tuple[TierChange, ...]] = deque()
        self._held = 0
        self._memo: dict[int, tuple[TierChange, ...]] = {}
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._xors: defaultdict[int, int] = defaultdict(int)
        self.position = 0
        self.sum = Sum()
        """Of what is resident as of the last cut."""

    def store(self, tier: int, key: int) -> None:
        """The key became resident in this tier."""
        self._net(tier).store(key)
        self._counts[tier] += 1
        self._xors[tier] ^= key

    def remove(self, tier: int, key: int) -> None:
        """The key ceased to be resident in this tier."""
        self._net(tier).remove(key)
        self._counts[tier] -= 1
        self._xors[tier] ^= key

    def clear(self, tier: int) -> None:
        """Nothing is resident in this tier any more."""
        self._net(tier).clear()
        self._counts[tier] = self._xors[tier] = 0

    def cut(self) -> int:
        """End the open span; returns the position that now includes everything recorded."""
        delta = tuple(net.change(tier) for tier, net in self._open.items() if net.changed)
        self._open = {}
        if delta:
            self._deltas.append(delta)
            self._held += _size(delta)
            self._memo = {}
            self.position += 1
            self.sum = Sum(sum(self._counts.values()), reduce(xor, self._xors.values(), 0))
            while self._held > self._limit and len(self._deltas) > 1:
                self._held -= _size(self._deltas.popleft())
        return self.position

    def since(self, position: int) -> tuple[TierChange, ...] | None:
        """The net changes between a position and the last cut; None when they are no longer kept.

        Watchers at the same position share one result.
        """
        behind = self.position - position
        if behind > len(self._deltas):
            return None
        if position not in self._memo:
            recent = list(self._deltas)[len(self._deltas) - behind :]
            self._memo[position] = recent[0] if behind == 1 else _merge(recent)
        return self._memo[position]

    def _net(self, tier: int) -> _Net:
        net = self._open.get(tier)
        if net is None:
            net = self._open[tier] = _Net()
        return net


class _Net:
    """One tier's balance over a span."""

    __slots__ = ("cleared", "removed", "stored")

    def __init__(self) -> None:
        self.cleared = False
        self.removed: set[int] = set()
        self.stored: set[int] = set()

    @property
    def changed(self) -> bool:
        return self.cleared or bool(self.removed) or bool(self.stored)

    def store(self, key: int) -> None:
        if key in self.removed:
            self.removed.discard(key)
        else:
            self.stored.add(key)

    def remove(self, key: int) -> None:
        if key in self.stored:
            self.stored.discard(key)
        elif not self.cleared:
            self.removed.add(key)

    def clear(self) -> None:
        self.cleared = True
        self.removed.clear()
        self.stored.clear()

    def change(self, tier: int) -> TierChange:
        return TierChange(tier, self.cleared, _array(self.removed), _array(self.stored))


def _merge(deltas: Iterable[tuple[TierChange, ...]]) -> tuple[TierChange, ...]:
    nets: dict[int, _Net] = {}
    for delta in deltas:
        for change in delta:
            net = nets.setdefault(change.tier, _Net())
            if change.cleared:
                net.clear()
            for key in change.removed.tolist():
                net.remove(key)
            for key in change.stored.tolist():
                net.store(key)
    return tuple(net.change(tier) for tier, net in nets.items() if net.changed)


def _size(delta: tuple[TierChange, ...]) -> int:
    return sum(change.size for change in delta)


def _array(keys: set[int]) -> Keys:
    return np.fromiter(keys, np.uint64, len(keys))
