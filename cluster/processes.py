"""The processes of one cluster on this machine, found without trusting any one source.

A process belongs when its environment carries the cluster's marker, when it sits in the session of a
process we started, or when it descends from one that belongs. The marker alone is not enough: a process
that renames itself (Ray's do) may overwrite its own environment block.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence

import psutil
from pydantic import BaseModel, ConfigDict

MARKER = "KVORUM_CLUSTER_ID"
"""Environment variable that every process of a cluster inherits."""

_CLOCK_SLACK_S = 1.0


class ProcessMark(BaseModel):
    """A process for good: its start time tells it from a later one with the same pid."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: float
    """Seconds since the epoch, as psutil gives it."""

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        """Raises psutil.NoSuchProcess when there is none."""
        return cls(pid=pid, started=psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """The live process, None when it ended (a zombie has ended) or its pid is another's now."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _CLOCK_SLACK_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


def leftovers(cluster_id: str, marks: Iterable[ProcessMark] = ()) -> list[psutil.Process]:
    """Live processes of the cluster, this process and its ancestors excepted."""
    sessions = {mark.pid: mark.started for mark in marks if _session_is_ours(mark)}
    spared = {os.getpid(), *(parent.pid for parent in _parents(os.getpid()))}
    everything = {process.pid: process for process in psutil.process_iter()}
    found = {
        process.pid: process
        for process in everything.values()
        if process.pid not in spared and _belongs(process, cluster_id, sessions)
    }
    for process in list(found.values()):
        with contextlib.suppress(psutil.Error):
            found |= {
                child.pid: child for child in process.children(recursive=True) if child.pid not in spared
            }
    return [process for process in found.values() if _alive(process)]


def kill_all(
    cluster_id: str, marks: Sequence[ProcessMark] = (), grace_s: float = 5.0
) -> list[psutil.Process]:
    """SIGTERM to every process of the cluster, SIGKILL after the grace; returns what survived even that.

    Looks again after each round: a dying parent may have started another.
    """
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while (living := leftovers(cluster_id, marks)) and time.monotonic() < deadline:
        for process in living:
            if process.pid not in asked:
                asked.add(process.pid)
                with contextlib.suppress(psutil.Error):
                    process.terminate()
        psutil.wait_procs(living, timeout=0.2)
    for _ in range(10):
        living = leftovers(cluster_id, marks)
        if not living:
            return []
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(living, timeout=0.5)
    return leftovers(cluster_id, marks)


def describe(process: psutil.Process) -> str:
    """`pid name`, for messages; the name is empty when the process has just ended."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {process.name()}"
    return str(process.pid)


def _session_is_ours(mark: ProcessMark) -> bool:
    """While a session lives the kernel gives its leader's pid to nobody else; so only a reused pid lies."""
    try:
        return abs(psutil.Process(mark.pid).create_time() - mark.started) < _CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _belongs(process: psutil.Process, cluster_id: str, sessions: dict[int, float]) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        if process.environ().get(MARKER) == cluster_id:
            return True
    with contextlib.suppress(psutil.Error, OSError):
        started = sessions.get(os.getsid(process.pid))
        return started is not None and process.create_time() >= started - _CLOCK_SLACK_S
    return False


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _parents(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).parents()
    return []
