"""How an engine asks an arena: whatever goes wrong there costs a miss, and little time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from workers.kvpool.errors import ArenaBusy

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_PAUSE_S: Final = 1.0
FAULT_PAUSE_S: Final = 10.0
"""For which an arena is left alone after it did not answer in time, or failed."""


class Patience:
    """Asks, until an answer is late; then not at all for a while.

    A process that is stopped while it holds the arena's mutex thus costs its neighbours one deadline a
    second, not one for every request that waits.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self.given_up = 0
        """Times that the arena did not answer."""

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """The arena's answer; `otherwise` when there is none. Raises nothing: no cache may end an engine."""
        if time.monotonic() < self._until:
            return otherwise
        try:
            return question()
        except ArenaBusy as error:
            self._pause(BUSY_PAUSE_S)
            log.info("%s", error)
        except Exception as error:
            self._pause(FAULT_PAUSE_S)
            log.warning("the KV pool is left alone for %.0f s: %s", FAULT_PAUSE_S, error, exc_info=True)
        return otherwise

    def _pause(self, seconds: float) -> None:
        self.given_up += 1
        self._until = time.monotonic() + seconds
