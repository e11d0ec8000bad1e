"""Ctrl-C, SIGTERM and SIGHUP, told apart by order: the first stops the work, a second hurries."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 for Ctrl-C."""
        return 128 + self.signum


class Interrupts:
    """While entered, the first signal raises `Interrupted`; later ones only set `hurry`, so that they
    cannot break the clean-up that the first one began. Does nothing outside the main thread.
    """

    def __init__(self) -> None:
        self.received = 0
        self.hurry = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self.install()
        return self

    def install(self) -> None:
        """Take the handlers, again if a library took them in between."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in _CAUGHT:
            previous = signal.signal(signum, self._receive)
            self._before.setdefault(signum, previous)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def defer(self) -> None:
        """From here on every signal hurries and none raises."""
        self.received += 1

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received += 1
        if self.received > 1:
            self.hurry.set()
            return
        raise Interrupted(signum)
