"""What a replica reads of the arena that its EngineCore owns: which one it is, and which keys come and go.

It opens the arena and is no owner of it. Everything here blocks, for the arena's deadlines at most.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from workers.kvpool.arena import Arena, Timing
from workers.kvpool.errors import ArenaBusy, ArenaError, ArenaMissingError, NotAttachedError
from workers.kvpool.file import Identity, identity_of
from workers.kvpool.owners import OwnerKind
from workers.kvpool.pool_keys import Copies, Transitions

TIMING: Final = Timing(lookup_s=0.02, other_s=0.05)
"""Of a follower, which can wait for its next turn: the engines' own questions go first."""
OWNER_CHECK_S: Final = 5.0

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class ArenaTail:
    """Follows the changes of one arena, from one thread at a time.

    Args:
        arena: open; closed by `close`.
        core_pid: of the EngineCore that owns it.
        identity: of the file that is open.
    """

    def __init__(
        self,
        arena: Arena,
        core_pid: int,
        identity: Identity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self._core_pid = core_pid
        self._identity = identity
        self._clock = clock
        self._copies = Copies()
        self._position: int | None = None
        self._check_owner_at = clock() + OWNER_CHECK_S

    @property
    def name(self) -> str:
        """Equal in all processes that share this very file, whatever hosts they think they are on."""
        device, inode = self._identity
        return f"{_kernel()}-{device:x}-{inode}"

    @property
    def namespace(self) -> str:
        """The digest that the file is named by."""
        return self.arena.path.stem

    def read(self) -> Transitions:
        """What has changed since the last call; all there is at the first one.

        Raises ArenaBusy (nothing was read), ArenaMissingError (the file is gone, or another one),
        NotAttachedError (the engine has lost it), and other ArenaErrors.
        """
        if identity_of(self.arena.path) != self._identity:
            raise ArenaMissingError(f"the arena at {self.arena.path} was removed: restart its replicas")
        if (now := self._clock()) >= self._check_owner_at:
            if not owns(self.arena, self._core_pid):
                raise NotAttachedError(f"EngineCore {self._core_pid} has lost the arena at {self.arena.path}")
            self._check_owner_at = now + OWNER_CHECK_S
        if self._position is not None and (changes := self.arena.changes(self._position)) is not None:
            self._position = changes.position
            return self._copies.take(changes.items)
        snapshot = self.arena.snapshot()
        self._position = snapshot.position
        return self._copies.reset(snapshot.extras)

    def start_over(self) -> None:
        """The next `read` tells all there is, as if nothing had been told before."""
        self._position, self._copies = None, Copies()

    def close(self) -> None:
        self.arena.close()


def find(folder: Path, core_pid: int) -> ArenaTail | None:
    """The arena that this EngineCore owns; None when it owns none of those that could be looked into.

    Pids are compared within one PID namespace: a replica's and that of the EngineCore it started. Should an
    EngineCore of another one have the same pid and own another arena here, neither is taken.

    Raises ArenaBusy when none was found and not all could be looked into: try again.
    """
    found: list[ArenaTail] = []
    busy: ArenaBusy | None = None
    for path in sorted(folder.glob("*.arena")):
        try:
            tail = _open(path, core_pid)
        except ArenaBusy as error:
            busy = error
        except (ArenaError, OSError):  # half made, just removed, or of another version: not our engine's
            continue
        else:
            found += [tail] if tail is not None else []
    if len(found) == 1:
        return found[0]
    for tail in found:
        tail.close()
    if not found and busy is not None:
        raise busy
    return None


def owns(arena: Arena, core_pid: int) -> bool:
    """Whether a living EngineCore of this pid is among the owners. Frees what dead ones held, as they would
    be taken for it when their pid is used again. Raises ArenaBusy."""
    arena.reap()
    return any(owner.kind is OwnerKind.ENGINE and owner.pid == core_pid for owner in arena.usage().owners)


def _open(path: Path, core_pid: int) -> ArenaTail | None:
    """None when the engine is no owner of it."""
    before = identity_of(path)
    arena = Arena.open(path, timing=TIMING)
    try:
        ours = owns(arena, core_pid)
    except BaseException:
        arena.close()
        raise
    if ours and before is not None and before == identity_of(path):
        return ArenaTail(arena, core_pid, before)
    arena.close()
    return None


def _kernel() -> str:
    """Eight hex digits of the running kernel, drawn when it started: containers on one host say the same."""
    try:
        return _BOOT_ID.read_text().replace("-", "")[:8]
    except OSError:  # a sandbox without it has a host name of its own
        return os.uname().nodename
