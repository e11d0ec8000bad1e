"""CPU affinity of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.pinning import cpus_of, widen

THREADED = """
import threading, sys
waiting = threading.Event()
for _ in range(3):
    threading.Thread(target=waiting.wait, daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[int]:
    """A process of four threads, pinned to one CPU."""
    first = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{first}}}); exec({THREADED!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process.pid
    process.communicate(timeout=10)


def test_every_thread_of_another_process_may_leave_its_cpu(other: int) -> None:
    threads = [int(task.name) for task in Path(f"/proc/{other}/task").iterdir()]
    allowed = os.sched_getaffinity(0)
    assert len(threads) == 4
    assert {len(os.sched_getaffinity(thread)) for thread in threads} == {1}
    widen(other, allowed)
    assert all(os.sched_getaffinity(thread) == allowed for thread in threads)


def test_process_that_has_ended_is_let_be() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=30)
    widen(ended.pid, os.sched_getaffinity(0))


def test_cores_are_indices_into_what_this_process_may_use() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert cpus_of((0,)) == {allowed[0]}
    assert cpus_of((len(allowed),)) == {allowed[0]}
    assert cpus_of(tuple(range(len(allowed)))) == set(allowed)
    assert cpus_of(()) == set()
