"""Processes in namespaces of their own, and commands in the namespaces of such a process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARKER = "KVORUM_LAB_ID"
"""Environment variable that every process of a lab carries."""
FOLDER = Path(__file__).resolve().parent
PYTHON = (sys.executable, "-I", "-S")
"""For the files here that need the standard library alone: a start of 15 ms."""

_START_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0


class LabError(RuntimeError):
    """A host could not be made, or a command that prepares one failed."""


class Keeper:
    """A `keeper.py` in namespaces of its own; `pid` is process 1 there, as this process sees it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environ), start_new_session=True
        )
        late = threading.Timer(_START_TIMEOUT_S, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        late.cancel()
        if said != b"ready\n":
            self.stop()
            raise LabError(f"{' '.join(command)!r} said {said!r} within {_START_TIMEOUT_S:.0f} s")
        self.pid: int = psutil.Process(self._process.pid).children(recursive=True)[-1].pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it and with it, by the kernel's hand, every process in its PID namespace. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)


def unshared(*kinds: str) -> list[str]:
    return ["unshare", *(f"--{kind}" for kind in kinds), "--fork", "--kill-child", "--mount-proc"]


def entered(pid: int, cores: Sequence[int], command: Sequence[str]) -> list[str]:
    return [*PYTHON, str(FOLDER / "enter.py"), str(pid), ",".join(map(str, cores)), *command]


def in_network(pid: int, *command: str) -> None:
    try:
        done = subprocess.run(
            ["nsenter", f"--target={pid}", "--net", *command],
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(command)!r} took more than {_COMMAND_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise LabError(f"{' '.join(command)!r} failed: {done.stderr.strip()}")


def processes_in(kind: str, pid: int) -> list[psutil.Process]:
    """Processes that share this namespace with process `pid`."""
    wanted = _namespace(kind, pid)
    return [p for p in psutil.process_iter() if wanted is not None and _namespace(kind, p.pid) == wanted]


def _namespace(kind: str, pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/{kind}").readlink()
    except OSError:  # it has ended
        return None


def marked(lab_id: str) -> list[psutil.Process]:
    """Processes of the machine that carry this lab's id: after its end there are none."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == lab_id:
                found.append(process)
        except psutil.Error:
            continue
    return found
