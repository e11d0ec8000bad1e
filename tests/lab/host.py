"""One emulated host, and what can be done on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.lab.namespaces import Keeper, LabError, entered, processes_in

NETDEV = "eth0"


@dataclass
class Host:
    """One emulated host. `environ` is what its processes see on top of the owner's environment."""

    index: int
    name: str
    ip: str
    cores: tuple[int, ...]
    environ: dict[str, str]
    netdev: str = NETDEV
    _keeper: Keeper = field(repr=False, kw_only=True)

    @property
    def pid(self) -> int:
        """Process 1 of the host, as the machine sees it."""
        return self._keeper.pid

    @property
    def alive(self) -> bool:
        """Whether it was not powered off."""
        return self._keeper.alive

    def popen(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on this host; signals and exit status are the command's own.

        Args:
            env: added to the owner's environment and to `environ`.
            options: for `subprocess.Popen`.

        Raises:
            LabError: the host was powered off.
        """
        if not self.alive:
            raise LabError(f"{self.name} was powered off: it can run nothing")
        words = entered(self.pid, self.cores, [str(word) for word in command])
        return subprocess.Popen(words, env=os.environ | self.environ | dict(env or {}), **options)

    def run(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 60.0,
        check: bool = True,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, with its output as text.

        Raises:
            LabError: it failed, with what it printed (only when `check`). subprocess.TimeoutExpired.
        """
        process = self.popen(
            command,
            env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        done = subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, err)
        if check and done.returncode:
            raise LabError(f"{self.name}: {done.args} ended with {done.returncode}:\n{out}\n{err}")
        return done

    def path(self, path: str | Path) -> Path:
        """A file of this host, its private `/tmp` among them, as this process can open it."""
        return Path(f"/proc/{self.pid}/root") / Path(path).relative_to("/")

    def processes(self) -> list[psutil.Process]:
        """Its processes besides process 1, by the machine's ids."""
        return [p for p in processes_in("pid", self.pid) if p.pid != self.pid]

    def power_off(self) -> None:
        """Kill every process of the host at once; it does not come back."""
        self._keeper.stop()
