"""What this router has put on each replica, held by leases.

Nothing else changes that load: a lease is taken per attempt, shrinks as tokens arrive, and is
released exactly once, however the attempt ends.

    with table.take("r0@e1", prefill_tokens=120, prefill_pairs=7200, decode_tokens=64) as lease:
        ...
        lease.generated(1)

Who decides by that load is told of it (`on_change`), so that nobody has to ask per decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType


@dataclass(slots=True)
class LeasedLoad:
    """What this router expects one replica still to do for it."""

    requests: int = 0
    sequences: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_pairs: float = 0.0  # of the same tokens (`router.cost.attention_pairs`); sums of halves are exact


@dataclass(slots=True)
class _Target:
    load: LeasedLoad = field(default_factory=LeasedLoad)
    idle: asyncio.Event | None = None


OnChange = Callable[[str, LeasedLoad], None]


class LeaseTable:
    """Leases by replica key. Invariant: a replica without leases takes no memory and has no load.

    `on_change(key, load)` is called after requests, sequences or prefill tokens of a key changed;
    not per generated token, so `load.decode_tokens` is only as fresh as that. `load` is the table's
    own: read it at once, keep nothing of it. It must not block, raise, or take or release leases.
    """

    def __init__(self, on_change: OnChange | None = None) -> None:
        self._targets: dict[str, _Target] = {}
        self._on_change = on_change

    def take(
        self,
        key: str,
        *,
        prefill_tokens: int,
        decode_tokens: int,
        prefill_pairs: float = 0.0,
        sequences: int = 1,
    ) -> Lease:
        """Add a request to the load of `key`; enter the lease as a context manager, or release it."""
        target = self._targets.setdefault(key, _Target())
        share = LeasedLoad(1, sequences, prefill_tokens, decode_tokens, prefill_pairs)
        return Lease(self, target, key, share)

    def load(self, key: str) -> LeasedLoad:
        """The present load of one replica (a copy)."""
        target = self._targets.get(key)
        if target is None:
            return LeasedLoad()
        return replace(target.load)

    def sequences(self, key: str) -> int:
        """Sequences leased on one replica."""
        target = self._targets.get(key)
        return 0 if target is None else target.load.sequences

    def held(self) -> Mapping[str, LeasedLoad]:
        """Every replica that has a lease, with its load."""
        return {key: self.load(key) for key in self._targets}

    async def idle(self, key: str) -> None:
        """Return when `key` has no lease. The caller sets the deadline."""
        target = self._targets.get(key)
        if target is None:
            return
        if target.idle is None:
            target.idle = asyncio.Event()
        await target.idle.wait()

    def _changed(self, key: str, load: LeasedLoad) -> None:
        if self._on_change is not None:
            self._on_change(key, load)

    def _drop_if_unused(self, key: str, target: _Target) -> None:
        if target.load.requests == 0:
            assert target.load == LeasedLoad(), f"leases of {key} released unevenly: {target.load}"
            del self._targets[key]
            if target.idle is not None:
                target.idle.set()


class Lease:
    """One attempt's share of a replica's load. `release` is idempotent."""

    __slots__ = ("_key", "_left", "_load", "_released", "_table", "_target")

    def __init__(self, table: LeaseTable, target: _Target, key: str, share: LeasedLoad) -> None:
        self._table, self._target, self._key, self._left = table, target, key, share
        self._load = target.load
        self._released = False
        self._load.requests += share.requests
        self._load.sequences += share.sequences
        self._load.prefill_tokens += share.prefill_tokens
        self._load.decode_tokens += share.decode_tokens
        self._load.prefill_pairs += share.prefill_pairs
        table._changed(key, self._load)

    def generated(self, tokens: int) -> None:
        """`tokens` more have arrived: the prompt is prefilled, and that much less is left to decode."""
        if self._released:
            return
        left = self._left
        done = min(tokens, left.decode_tokens)
        left.decode_tokens -= done
        self._load.decode_tokens -= done
        if left.prefill_tokens:
            self._load.prefill_tokens -= left.prefill_tokens
            self._load.prefill_pairs -= left.prefill_pairs
            left.prefill_tokens, left.prefill_pairs = 0, 0.0
            self._table._changed(self._key, self._load)

    def release(self) -> None:
        """Give back what is left of it."""
        if self._released:
            return
        self._released = True
        self._load.requests -= self._left.requests
        self._load.sequences -= self._left.sequences
        self._load.prefill_tokens -= self._left.prefill_tokens
        self._load.decode_tokens -= self._left.decode_tokens
        self._load.prefill_pairs -= self._left.prefill_pairs
        self._table._drop_if_unused(self._key, self._target)
        self._table._changed(self._key, self._load)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
