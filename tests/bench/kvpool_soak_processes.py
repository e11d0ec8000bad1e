"""Processes of an emulated host, stopped and killed from outside, by the ids that the host knows them by."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.host import Host

_STOPPED_S = 10.0
_DUMP_S = 10.0
_HURRY = -10
"""Niceness."""


def outer_pid(host: Host, pid: int) -> int | None:
    """As this machine knows the process; None when it has ended."""
    for process in host.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/status").read_text().split("NSpid:", 1)[1].splitlines()[0]
            if int(words.split()[-1]) == pid:
                return process.pid
    return None


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """All threads of a process stand still, until the end. One that was killed in between is fine.

    Raises ProcessLookupError, and TimeoutError when it does not stop.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        until = time.monotonic() + _STOPPED_S
        while not _all_stopped(pid):
            if time.monotonic() > until:
                raise TimeoutError(f"process {pid} did not stop within {_STOPPED_S:.0f} s")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def hurried() -> Iterator[None]:
    """This thread, which is to stop others at the right moment, goes before them; so does what it starts."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, _HURRY)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stack(pid: int, thread: str) -> str:
    """The functions that a thread of a stopped Python process is in, the innermost first; empty: unknown."""
    spy = Path(sys.executable).parent / "py-spy"
    try:
        dump = subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_DUMP_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    for part in dump.split("\nThread "):
        head, *frames = part.splitlines()
        if thread in head:
            return " < ".join(frame.split("(")[0].strip() for frame in frames)
    return ""


def _all_stopped(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if task.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] not in "TtZX":
                return False
    return True
