"""Requests that go to a replica together: held until enough have gathered or the first waited enough.

Trades a little waiting for fuller prefill batches. Off by default.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Batch(Generic[T]):
    due: float
    items: dict[T, int] = field(default_factory=dict)  # item: its tokens
    tokens: int = 0


class Window(Generic[T]):
    """The batches being gathered, one per replica. Pure: `now` comes in, in seconds.

    A batch is complete when `max_wait_ms` have passed since its first request, or as soon as it has
    `max_batch_tokens` (0: no such limit). So no request waits longer than `max_wait_ms` here.
    `max_wait_ms` 0 turns the window off: every `add` returns its item at once.
    Every operation is O(1), but for the items that it returns.

    Raises:
        ValueError: a limit is negative.
    """

    def __init__(self, max_wait_ms: float = 0.0, max_batch_tokens: int = 0) -> None:
        if not 0 <= max_wait_ms < float("inf"):
            raise ValueError(f"max_wait_ms is {max_wait_ms}: expected 0 (off) or more")
        if max_batch_tokens < 0:
            raise ValueError(f"max_batch_tokens is {max_batch_tokens}: expected 0 (no limit) or more")
        self._max_wait_s, self._max_tokens = max_wait_ms / 1000, max_batch_tokens
        self._batches: OrderedDict[str, _Batch[T]] = OrderedDict()  # in order of `due`: all wait equally long
        self._held = 0

    @property
    def off(self) -> bool:
        """Nothing is ever held."""
        return self._max_wait_s == 0

    def __len__(self) -> int:
        """Requests held."""
        return self._held

    def add(self, replica: str, item: T, tokens: int, now: float) -> list[T]:
        """Hold `item`, of so many prompt tokens to compute, for `replica`.

        Returns:
            What goes to the replica now, in order of arrival: empty while the batch gathers.

        Raises:
            ValueError: it is held already.
        """
        if self._max_wait_s == 0:
            return [item]
        batch = self._batches.get(replica)
        if batch is None:
            batch = self._batches[replica] = _Batch(now + self._max_wait_s)
        if item in batch.items:
            raise ValueError(f"this request is held for replica {replica} already")
        batch.items[item] = tokens
        batch.tokens += tokens
        self._held += 1
        complete = now >= batch.due or (0 < self._max_tokens <= batch.tokens)
        return self.take(replica) if complete else []

    def next_due(self) -> float | None:
        """When `due` will have something to return."""
        return next(iter(self._batches.values())).due if self._batches else None

    def due(self, now: float) -> list[tuple[str, list[T]]]:
        """Remove and return the batches, by replica, whose first request has waited long enough."""
        complete = []
        while (due := self.next_due()) is not None and due <= now:
            replica = next(iter(self._batches))
            complete.append((replica, self.take(replica)))
        return complete

    def take(self, replica: str) -> list[T]:
        """Remove and return what is held for a replica, as when it has gone."""
        batch = self._batches.pop(replica, None)
        if batch is None:
            return []
        self._held -= len(batch.items)
        return list(batch.items)

    def discard(self, replica: str, item: T) -> bool:
        """The request was cancelled; False when it is not held. The others wait no longer for it."""
        batch = self._batches.get(replica)
        if batch is None or item not in batch.items:
            return False
        batch.tokens -= batch.items.pop(item)
        self._held -= 1
        if not batch.items:
            del self._batches[replica]
        return True
