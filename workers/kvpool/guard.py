"""The way into a shared segment: one at a time, and never on top of what somebody left half done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from workers.kvpool.errors import ArenaBusy, ArenaError
from workers.kvpool.layout import Condition, Segment, Word
from workers.kvpool.locks import Mutex
from workers.kvpool.recovery import recover

SlotChange = Callable[[int, int], None]
"""Takes a slot and its generation."""


class Guard:
    """Outside `entered` only payload, states, generations and checksums of slots may be read."""

    def __init__(self, segment: Segment, mutex: Mutex) -> None:
        self._segment = segment
        self._mutex = mutex
        self._words = segment.words.data
        self._owed: deque[tuple[SlotChange, int, int]] = deque()

    @property
    def owes(self) -> bool:
        return bool(self._owed)

    @contextmanager
    def entered(self, deadline_s: float) -> Iterator[None]:
        """Alone with a segment that is whole. Raises ArenaBusy when the mutex is not free by the deadline."""
        with self._mutex.held(deadline_s):
            condition = self._words[Word.CONDITION]
            if condition != Condition.WHOLE:
                recover(self._segment)
                self._words[Word.RECOVERED] += condition == Condition.CHANGING
                self._words[Word.CONDITION] = Condition.WHOLE
            yield

    @contextmanager
    def mutation(self) -> Iterator[None]:
        """Around each change, inside `entered`; what is owed is done first.

        An ArenaError raised in it must come before the first change.
        """
        self._words[Word.CONDITION] = Condition.CHANGING
        while self._owed:
            change, slot, generation = self._owed.popleft()
            change(slot, generation)
        try:
            yield
        except ArenaError:
            self._words[Word.CONDITION] = Condition.WHOLE
            raise
        self._words[Word.CONDITION] = Condition.WHOLE  # not after other errors: they leave things half done

    @contextmanager
    def changing(self, deadline_s: float) -> Iterator[None]:
        """Both."""
        with self.entered(deadline_s), self.mutation():
            yield

    def owe(self, change: SlotChange, slots: Iterable[tuple[int, int]], deadline_s: float) -> None:
        """What must not be left undone: make this change of each slot now, or else at the next mutation."""
        self._owed.extend((change, slot, generation) for slot, generation in slots)
        with suppress(ArenaBusy), self.changing(deadline_s):
            pass
