"""The folder in which a host keeps a cluster's arenas, and its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from workers.config import EngineConfig

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of mode 0700 is made in it
_PREFIX: Final = "kvorum-"


def folder_of_cluster(config: EngineConfig, cluster_id: str) -> Path:
    """Where this cluster's arenas are on each host: in the engine's setting, or in shared memory.

    A folder of the cluster's own in either case, so that its end takes nothing of anybody else's along.
    """
    base = Path(config.kv_pool_folder) if config.kv_pool_folder else _SHARED_MEMORY
    return base / f"{_PREFIX}{cluster_id}"


def remove_folder(folder: Path, cluster_id: str) -> None:
    """End a cluster's pool on this host. Processes that still have an arena open keep its memory until they
    end. A folder that is not this cluster's by its name, or not this user's, is left; none is fine.

    Raises OSError when something in it cannot be removed.
    """
    if not cluster_id or folder.name != f"{_PREFIX}{cluster_id}":
        return
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if folder.is_symlink() or found.st_uid != os.geteuid():
        return
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:  # another Ray node of this host was at it, too
        shutil.rmtree(folder, ignore_errors=True)
