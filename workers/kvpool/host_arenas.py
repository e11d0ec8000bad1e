"""All arenas of an agent's host that its cluster has there.

Everything here may block, for the arenas' deadlines: call it on a thread.
"""

from __future__ import annotations

import logging
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from workers.kvpool.arena import Arena, Timing
from workers.kvpool.errors import ArenaBusy, ArenaClosedError, ArenaError, ArenaMissingError
from workers.kvpool.file import Identity, identity_of
from workers.kvpool.host_arena import HostArena
from workers.kvpool.owners import OwnerKind
from workers.kvpool.usage import Counters, Usage

log = logging.getLogger(__name__)

_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


class ArenaFigures(NamedTuple):
    """What operators see of one arena."""

    namespace: str
    usage: Usage
    counters: Counters


class HostArenas:
    """Those in one folder, opened when they are first asked for, by the digest of their namespace."""

    def __init__(self, folder: Path, timing: Timing | None = None) -> None:
        self.folder = folder
        self._timing = timing or Timing()
        self._open: dict[str, HostArena] = {}
        self._lock = threading.Lock()
        self._closed = False

    def get(self, namespace: str) -> HostArena:
        """The arena that has this namespace now. A file that was replaced is opened anew.

        Raises ArenaMissingError, other ArenaErrors, ArenaBusy, and ValueError for what is no digest. After
        `close` none is opened any more: ArenaClosedError.
        """
        if not _DIGEST.fullmatch(namespace):  # it becomes part of a path
            raise ValueError(f"a namespace is 32 hex digits, not {namespace[:40]!r}")
        path = self.folder / f"{namespace}.arena"
        with self._lock:
            if self._closed:
                raise ArenaClosedError(f"the agent of {self.folder} has ended")
            identity = identity_of(path)
            arena = self._open.get(namespace)
            if arena is not None and not arena.lost and arena.identity == identity:
                return arena
            self._open.pop(namespace, None)
            if identity is None:
                raise ArenaMissingError(f"no arena of namespace {namespace} in {self.folder}")
            arena = self._open[namespace] = self._opened(path, identity)
            return arena

    def all(self) -> dict[str, HostArena]:
        """Those that can be opened."""
        found: dict[str, HostArena] = {}
        for path in sorted(self.folder.glob("*.arena")):
            try:
                found[path.stem] = self.get(path.stem)
            except (ArenaError, ValueError) as error:  # half made, just removed, or none of ours
                log.debug("%s is left out: %s", path, error)
        return found

    def figures(self) -> list[ArenaFigures]:
        """Of those that can be opened."""
        found: list[ArenaFigures] = []
        for namespace, arena in self.all().items():
            with suppress(ArenaClosedError):  # since
                found.append(ArenaFigures(namespace, arena.usage(), arena.counters()))
        return found

    def follow(self) -> None:
        """Every open one; one that is busy is followed next time."""
        with self._lock:
            arenas = dict(self._open)
        for namespace, arena in arenas.items():
            try:
                arena.follow()
            except ArenaBusy:
                continue
            except ArenaError as error:
                log.warning("the arena of namespace %s is opened anew: %s", namespace, error)
                arena.lost = True

    def close(self) -> None:
        """When no thread uses them any more."""
        with self._lock:
            self._closed = True
            for arena in self._open.values():
                arena.close()
            self._open.clear()

    def _opened(self, path: Path, identity: Identity) -> HostArena:
        arena = Arena.open(path, timing=self._timing)
        try:
            arena.attach(OwnerKind.AGENT)
        except BaseException:
            arena.close()
            raise
        return HostArena(arena, identity)
