"""The cache of prepared checkpoints: folders that appear whole or not at all.

A folder is filled under a hidden name, gets its manifest last and is then renamed, under a file
lock that dies with its holder. What a killed process leaves behind therefore never counts as
prepared, and the next builder of the same folder removes it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import filelock
import platformdirs

CACHE_DIR_VARIABLE = "KVORUM_CACHE_DIR"
MANIFEST = "kvorum.json"
LOCK_TIMEOUT_S = 1800.0
"""How long to wait for another process that prepares the same thing."""

Progress = Callable[[str, float], None]
"""Called with (stage, fraction of that stage in 0..1)."""


class CheckpointError(Exception):
    """One line: what was attempted, with which values, and what to do."""


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder is; written last, so its presence with matching sizes means 'whole'."""

    name: str
    source: str
    revision: str
    padded_heads: int | None = None
    padded_kv_heads: int | None = None
    files: dict[str, int] = field(default_factory=dict)
    """File name to size in bytes, the manifest itself left out."""

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


def cache_root(cache_dir: Path | None = None) -> Path:
    """The cache directory, made if absent: the argument, else KVORUM_CACHE_DIR, else the user's cache.

    Raises:
        CheckpointError: it cannot be made or written to.
    """
    variable = os.environ.get(CACHE_DIR_VARIABLE)
    root = cache_dir or (Path(variable) if variable else platformdirs.user_cache_path("kvorum"))
    root = root.expanduser().absolute()
    with _explained(f"use {root} as the cache of prepared models"):
        for part in ("models", "bundles", "digests", "locks"):
            (root / part).mkdir(parents=True, exist_ok=True)
    return root


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a prepared folder; None when it is absent or any of its files is not whole."""
    try:
        fields = json.loads((folder / MANIFEST).read_text())
        manifest = Manifest(**fields)
        whole = all((folder / name).stat().st_size == size for name, size in manifest.files.items())
    except (OSError, ValueError, TypeError):
        return None
    return manifest if whole else None


def build_folder(
    root: Path, folder: Path, described: Manifest, fill: Callable[[Path], None], progress: Progress
) -> Manifest:
    """The manifest of `folder`, which `fill(partial folder)` makes unless it is already whole.

    Processes that want the same folder at the same time build it once.

    Raises:
        CheckpointError: from `fill`, or the cache is full, read-only or locked for too long.
    """
    if manifest := read_manifest(folder):
        return manifest
    with _locked(root, folder.name, progress), _explained(f"prepare {described.name} in {folder}"):
        if manifest := read_manifest(folder):
            return manifest
        _remove_leftovers(folder)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_partial_prefix(folder)))
        try:
            fill(partial)
            manifest = _publish(partial, folder, described)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return manifest


def build_file(root: Path, path: Path, fill: Callable[[Path], None], progress: Progress) -> None:
    """Let `fill(partial file)` make `path` unless it exists; readers never see half of it."""
    if path.exists():
        return
    with _locked(root, path.name, progress), _explained(f"write {path}"):
        if path.exists():
            return
        _remove_leftovers(path)
        partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=_partial_prefix(path)))
        try:
            fill(partial / path.name)
            (partial / path.name).replace(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path, described: Manifest) -> Manifest:
    files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
    fields: dict[str, Any] = asdict(described) | {"files": files}
    (partial / MANIFEST).write_text(json.dumps(fields, indent=1))
    partial.chmod(0o755)
    if folder.exists():  # not whole, or read_manifest would have found it
        shutil.rmtree(folder)
    partial.rename(folder)
    return Manifest(**fields)


def _partial_prefix(target: Path) -> str:
    return f".partial-{target.name}-"


def _remove_leftovers(target: Path) -> None:
    for leftover in target.parent.glob(f"{_partial_prefix(target)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(root: Path, name: str, progress: Progress) -> Iterator[None]:
    path = root / "locks" / f"{name}.lock"
    lock = filelock.FileLock(path)
    with _explained(f"lock {path}"):
        try:
            with suppress(filelock.Timeout):
                lock.acquire(timeout=0)
            if not lock.is_locked:
                progress("waiting for another process that prepares the same model", 0.0)
                lock.acquire(timeout=LOCK_TIMEOUT_S)
        except filelock.Timeout:
            raise CheckpointError(
                f"waited {LOCK_TIMEOUT_S:.0f} s for another process that holds {path}: "
                "let it finish or end it, then try again"
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _explained(attempt: str) -> Iterator[None]:
    """Turn a full disk, missing rights and their kin into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot {attempt}: {error.strerror or error}; free or allow the space, "
            f"or point {CACHE_DIR_VARIABLE} at another directory"
        ) from error
