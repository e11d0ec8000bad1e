"""The port of a host's agent, remembered beside the arenas: others keep the address they know while the agent
keeps its port, and learn the new one when it cannot."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from workers.placement import ReplicaPlacement

log = logging.getLogger(__name__)


def port_file(folder: Path, node_id: str) -> Path:
    """Of the agent of this Ray node: two nodes of one host share the folder, and have an agent each."""
    return folder / f"agent-{node_id}.port"


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
        """An agent that cannot is none the worse until it is restarted. The file then names no port at all:
        a wrong one would send replicas to whoever listens there."""
        if self._file is None:
            return
        try:
            whole = self._file.with_suffix(".new")
            whole.write_text(str(port), encoding="ascii")
            whole.replace(self._file)
        except OSError as error:
            log.warning("the agent's port cannot be remembered in %s: %s", self._file, error)
            with suppress(OSError):
                self._file.unlink(missing_ok=True)


class AgentAddress:
    """Where the agent of a replica's host listens: as the replica was told when it was made, until the
    agent's file names another port.

    Args:
        told: host:port; empty: there was no agent then.
        host: that an agent started later listens at.
        file: of the agent's port; None: what was told holds.
    """

    def __init__(self, told: str, host: str = "", file: Path | None = None) -> None:
        self._known = told
        self._host = host
        self._port = AgentPort(file)

    @classmethod
    def of(cls, placement: ReplicaPlacement, folder: Path) -> AgentAddress:
        """For a replica placed like this, whose host's arenas are in `folder`."""
        told = placement.kv_agent
        if not placement.slots:
            return cls(told)
        slot = placement.slots[0]  # a replica with a pool has all its shards on one node
        return cls(told, told.rpartition(":")[0] or slot.node_ip, port_file(folder, slot.node_id))

    def now(self) -> str:
        """Reads the file, so not on an event loop. A file that is gone or broken changes nothing."""
        if port := self._port.remembered():
            self._known = f"{self._host}:{port}"
        return self._known
