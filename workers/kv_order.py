"""Puts numbered batches in order, each once. Pure."""

from __future__ import annotations

_WAITING = 4096
"""Batches kept while an earlier one is awaited; beyond it, what is missing is given up."""


class InOrder:
    """Hands out batches strictly by number, whether they came live, again, late or by replay.

    A batch is handed out once and never after a later one, so a replay cannot bring back a block
    that a later batch removed.

        order = InOrder()
        order.take(0, a)  -> [a]
        order.take(2, c)  -> []        and order.missing is True
        order.take(1, b)  -> [b, c]
    """

    def __init__(self) -> None:
        self.next = 0
        self._waiting: dict[int, bytes] = {}

    @property
    def missing(self) -> bool:
        """Whether later batches wait for one that has not come."""
        return bool(self._waiting)

    @property
    def overfull(self) -> bool:
        """Whether waiting longer would take too much memory."""
        return len(self._waiting) > _WAITING

    def take(self, number: int, payload: bytes) -> list[bytes]:
        """The batches that this one makes ready."""
        if number < self.next or number in self._waiting:
            return []
        self._waiting[number] = payload
        return self._ready()

    def give_up(self) -> tuple[int, list[bytes]]:
        """Go on without the missing batches: how many they are, and what is ready then."""
        first = min(self._waiting)
        lost, self.next = first - self.next, first
        return lost, self._ready()

    def _ready(self) -> list[bytes]:
        ready = []
        while (payload := self._waiting.pop(self.next, None)) is not None:
            ready.append(payload)
            self.next += 1
        return ready
