"""CPU affinity of whole processes."""

from __future__ import annotations

import os
from pathlib import Path


def pin(cores: tuple[int, ...], *, absolute: bool = False) -> tuple[int, ...]:
    """Pin every thread of this process; returns the OS CPU numbers.

    `cores` are indices into the CPUs this process may use, or CPU numbers when `absolute`.
    """
    allowed = sorted(os.sched_getaffinity(0))
    wanted = cores if absolute else tuple(allowed[index % len(allowed)] for index in cores)
    if not wanted:
        return ()
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), wanted)
        except ProcessLookupError:  # that thread has just ended
            continue
    return wanted
