"""Process 1 of an emulated host: it reaps orphans, and its end is the end of every process there.

It ends when its standard input closes, which the kernel does when the owner of the lab dies, however it dies.
Run as a file, with nothing imported beyond the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Say `ready` and keep the host until end of file."""
    signal.signal(signal.SIGCHLD, _reap)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while os.read(0, 1):
        pass


def _reap(_signal: int, _frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
