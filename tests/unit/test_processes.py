"""Processes of a cluster are found and ended, and nobody else's are touched."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from cluster.processes import MARKER, ProcessMark, kill_all, leftovers

_SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + _SLEEP
_PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_SLEEP!r}], env={{}}).wait()"
_LEAVES_CHILD = (
    f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {_SLEEP!r}], env={{}});"
    "print(p.pid, flush=True); sys.stdin.read()"
)

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def cluster_id() -> str:
    return secrets.token_hex(4)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, marker: str | None = None, *, session: bool = False) -> subprocess.Popen[str]:
        env = {**os.environ, **({MARKER: marker} if marker else {})}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=env, start_new_session=session,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def await_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def has_ended(pid: int) -> bool:
    """A zombie has: whether somebody has read its exit code is not our business."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_marked_process_is_found_and_ended(spawn: Spawn, cluster_id: str) -> None:
    process = spawn(_SLEEP, cluster_id)
    await_line(process)
    assert [found.pid for found in leftovers(cluster_id)] == [process.pid]
    assert kill_all(cluster_id) == []
    assert has_ended(process.pid)


def test_process_that_ignores_sigterm_is_killed(spawn: Spawn, cluster_id: str) -> None:
    process = spawn(_STUBBORN, cluster_id)
    await_line(process)
    assert kill_all(cluster_id, grace_s=0.3) == []
    assert has_ended(process.pid)


def test_process_of_another_cluster_is_left_alone(spawn: Spawn, cluster_id: str) -> None:
    other = spawn(_SLEEP, "someone-else")
    await_line(other)
    assert leftovers(cluster_id) == []
    assert kill_all(cluster_id) == []
    assert other.poll() is None


def test_child_that_lost_the_marker_is_found_through_its_parent(spawn: Spawn, cluster_id: str) -> None:
    parent = spawn(_PARENT, cluster_id)
    await_line(parent)  # printed by the child, on the inherited pipe
    child = psutil.Process(parent.pid).children()[0]
    assert {found.pid for found in leftovers(cluster_id)} == {parent.pid, child.pid}
    assert kill_all(cluster_id) == []
    assert has_ended(child.pid)


def test_orphan_that_lost_the_marker_is_found_through_its_session(spawn: Spawn, cluster_id: str) -> None:
    head = spawn(_LEAVES_CHILD, session=True)
    mark = ProcessMark.of(head.pid)
    orphan = psutil.Process(int(await_line(head)))
    head.kill()
    head.wait()
    assert [found.pid for found in leftovers(cluster_id, [mark])] == [orphan.pid]
    assert kill_all(cluster_id, [mark]) == []
    assert has_ended(orphan.pid)


def test_session_of_a_reused_pid_is_not_ours(spawn: Spawn, cluster_id: str) -> None:
    stranger = spawn(_SLEEP, session=True)
    await_line(stranger)
    earlier = ProcessMark(pid=stranger.pid, started=ProcessMark.of(stranger.pid).started - 3600)
    assert earlier.process() is None
    assert leftovers(cluster_id, [earlier]) == []


def test_this_process_is_never_a_leftover(cluster_id: str) -> None:
    mark = ProcessMark.of(os.getpid())
    assert os.getpid() not in {process.pid for process in leftovers(cluster_id, [mark])}


def test_mark_of_an_ended_process_has_none(spawn: Spawn) -> None:
    process = spawn(_SLEEP)
    mark = ProcessMark.of(process.pid)
    assert mark.process() is not None
    process.kill()
    process.wait()
    assert mark.process() is None
