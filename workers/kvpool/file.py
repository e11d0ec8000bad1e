"""The arena's file: made whole or not at all, opened only if it is the one wanted."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Final

from workers.kvpool.errors import (
    ArenaAccessError,
    ArenaMismatchError,
    ArenaMissingError,
    ArenaSpaceError,
)
from workers.kvpool.header import HEADER_BYTES, Header
from workers.kvpool.layout import OWNERS
from workers.kvpool.locks import ByteLocks, Mutex

MUTEX_BYTE: Final = 0
CREATE_BYTE: Final = 1 + OWNERS

_CHUNK_BYTES: Final = 256 << 20  # allocated at a time, so that a signal's retry does not begin anew

Identity = tuple[int, int]
"""Device and inode: another file at the same path has another one."""


def identity_of(path: Path) -> Identity | None:
    """None when nothing is there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def owner_byte(owner: int) -> int:
    """The byte that the owner of an entry has locked for as long as it lives."""
    return 1 + owner


class ArenaFile:
    """A segment's bytes, mapped, and locks on them. `create` and `open` make one.

    The mapping ends with the last reference to it. It must not be closed: NumPy's arrays do not forbid that,
    and would show memory that is gone.
    """

    def __init__(self, path: Path, header: Header, mapping: mmap, locks: ByteLocks) -> None:
        self.path = path
        self.header = header
        self.mapping = mapping
        self.locks = locks

    @classmethod
    def create(cls, path: Path, wanted: Header, wait_s: float) -> ArenaFile:
        """Open the arena at `path`, made first if there is none.

        All of its memory is allocated at once: what the file system does not have is missing now, not as a
        SIGBUS later. Whoever comes while another process makes it waits, `wait_s` at most (ArenaBusy). One
        that died while making it has left nothing to heed. Errors: those of `open`, and ArenaSpaceError.
        """
        while True:
            with _reachable(path):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = _open(path, os.O_CREAT)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                locks = ByteLocks(f"/proc/self/fd/{file.fileno()}")
                try:
                    with Mutex(locks, CREATE_BYTE, str(path)).held(wait_s):
                        if os.fstat(file.fileno()).st_nlink == 0:  # its maker found no space for it
                            continue
                        if not _finished(file.fileno()):
                            _make(path, file.fileno(), wanted)
                        return cls._mapped(path, file.fileno(), wanted)
                finally:
                    locks.close()

    @classmethod
    def open(cls, path: Path, wanted: Header | None = None) -> ArenaFile:
        """Open the arena at `path`, which must be equal to `wanted`, if given.

        Raises ArenaMissingError, ArenaMismatchError, or ArenaAccessError (no permission, another user's, a
        symbolic link, no regular file).
        """
        with _reachable(path):
            descriptor = _open(path)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            if not _finished(file.fileno()):
                raise ArenaMissingError(
                    f"the arena at {path} is not finished: try again when its maker is done"
                )
            return cls._mapped(path, file.fileno(), wanted)

    @classmethod
    def _mapped(cls, path: Path, descriptor: int, wanted: Header | None) -> ArenaFile:
        header = Header.decode(os.pread(descriptor, HEADER_BYTES, 0), str(path))
        if wanted is not None:
            header.require(wanted, str(path))
        size, needed = os.fstat(descriptor).st_size, header.geometry.total_bytes
        if size < needed:
            raise ArenaMismatchError(f"{path} was cut to {size} of {needed} bytes: remove it")
        return cls(path, header, mmap(descriptor, needed), ByteLocks(f"/proc/self/fd/{descriptor}"))


@contextmanager
def _reachable(path: Path) -> Iterator[None]:
    """Turns OSErrors into what they mean for the arena at `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise ArenaMissingError(
            f"no arena at {path}: start a replica with a KV pool on this host first"
        ) from error
    except OSError as error:
        raise ArenaAccessError(
            f"cannot open an arena at {path}: {error.strerror}; name a folder in memory (in /dev/shm) "
            f"that user {os.geteuid()} may write to"
        ) from error


def _open(path: Path, flags: int = 0) -> int:
    """A descriptor of this user's regular file. Raises OSError, ArenaAccessError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise ArenaAccessError(
        f"{path} is no regular file of user {os.geteuid()}: remove it, or name another folder"
    )


def _finished(descriptor: int) -> bool:
    """Whether it has the magic, or anything else that its maker, who writes that last, has not left there."""
    return any(os.pread(descriptor, 8, 0))


def _make(path: Path, descriptor: int, header: Header) -> None:
    """Give an empty or half-made file its memory, then its header. Removes it when that fails.

    Raises ArenaSpaceError.
    """
    needed = header.geometry.total_bytes
    try:
        os.ftruncate(descriptor, 0)
        _require_space(descriptor, needed)
        for offset in range(0, needed, _CHUNK_BYTES):
            os.posix_fallocate(descriptor, offset, min(_CHUNK_BYTES, needed - offset))
    except BaseException as error:
        os.ftruncate(descriptor, 0)
        path.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise  # interrupted
        free = _free_bytes(descriptor)
        raise ArenaSpaceError(
            f"an arena of {needed} bytes does not fit at {path} ({error.strerror}; "
            f"{'unlimited' if free is None else free} bytes are free there): make the KV pool smaller, free "
            "memory, enlarge the file system (mount -o remount,size=…) or raise the limit on file sizes"
        ) from error
    data = header.encode(multiplier=secrets.randbits(64) | 1)
    os.pwrite(descriptor, data[8:], 8)
    os.pwrite(descriptor, data[:8], 0)  # the magic


def _require_space(descriptor: int, needed: int) -> None:
    """Early, as filling a tmpfs to the brim first would starve others. Raises OSError."""
    free = _free_bytes(descriptor)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _free_bytes(descriptor: int) -> int | None:
    """None on a file system without a limit of its own."""
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize if found.f_blocks else None
