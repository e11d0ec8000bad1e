"""The port of a host's agent, remembered beside the arenas: others keep the address they know."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


class AgentPort:
    """A file with one number; None: nothing is remembered."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def remembered(self) -> int:
        """0 when there is none."""
        if self._file is not None:
            with suppress(OSError, ValueError):
                port = int(self._file.read_text(encoding="ascii"))
                return port if 0 < port < 1 << 16 else 0
        return 0

    def remember(self, port: int) -> None:
        """An agent that cannot is none the worse until it is restarted."""
        if self._file is None:
            return
        try:
            whole = self._file.with_suffix(".new")
            whole.write_text(str(port), encoding="ascii")
            whole.replace(self._file)
        except OSError as error:
            log.warning("the agent's port cannot be remembered in %s: %s", self._file, error)
