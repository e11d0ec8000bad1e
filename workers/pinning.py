"""CPU affinity: shards compute on cores of their own, everything else stays off them where it can."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_POOL_WORK = 1 << 22
"""Elements of a sum that is large enough for torch to start all of its OpenMP threads."""


def pin_compute(cores: tuple[int, ...]) -> frozenset[int]:
    """Pin the calling thread, and the OpenMP pool it computes with, to `cores`; returns their thread ids.

    `cores` are indices into the CPUs this process may use. Unpinned ranks whose threads spin on each
    other's cores run a hundred times slower. Call it before the model is loaded, in the thread that
    will compute: GNU OpenMP keeps one pool per thread.
    """
    here = threading.get_native_id()
    if not cores:
        return frozenset({here})
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[index % len(allowed)] for index in cores})
    import torch  # noqa: PLC0415 - the router and the controller pin themselves without it

    before = _threads()
    torch.ones(_POOL_WORK).sum()  # the pool inherits this thread's affinity
    return frozenset({here} | (_threads() - before))


def release_others(compute: frozenset[int], cpus: set[int]) -> None:
    """Let every other thread of this process run on any of `cpus`.

    I/O threads that inherited the pin would wait for the computing thread to leave its core, and
    delay each step's result by milliseconds.
    """
    for thread in _threads() - compute:
        _set_affinity(thread, cpus)


def pin_process(cores: tuple[int, ...]) -> None:
    """Keep every thread of this process, and its future children, on these CPUs; () changes nothing."""
    wanted = cpus_of(cores)
    for thread in _threads() if wanted else ():
        _set_affinity(thread, wanted)


def settle_thread(cores: tuple[int, ...]) -> None:
    """Keep the calling thread on these CPUs of those that this process has; (): on any of them.

    A thread is born with its maker's affinity, which may be a pinned one's: what the process has is what its
    threads have together.
    """
    allowed = sorted({cpu for thread in _threads() for cpu in _affinity(thread)})
    _set_affinity(
        threading.get_native_id(), {allowed[index % len(allowed)] for index in cores} or set(allowed)
    )


def cpus_of(cores: tuple[int, ...]) -> set[int]:
    """The CPUs that these indices stand for in this process; call it before `pin_process`."""
    allowed = sorted(os.sched_getaffinity(0))
    return {allowed[index % len(allowed)] for index in cores}


def widen(process: int, cpus: set[int]) -> None:
    """Let every thread of another process run on any of `cpus`; one that has ended is fine."""
    try:
        threads = _threads(process)
    except FileNotFoundError:
        return
    for thread in threads:
        _set_affinity(thread, cpus)


def _threads(process: int | None = None) -> set[int]:
    return {int(task.name) for task in Path(f"/proc/{process or 'self'}/task").iterdir()}


def _affinity(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:  # it has just ended
        return set()


def _set_affinity(thread: int, cpus: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cpus)
    except ProcessLookupError:  # it has just ended
        return
