"""`down` ends a cluster in every state it can be found in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes_launch import fake_controller, fake_state, fake_status

from cluster import state as states
from cluster.processes import MARKER, ProcessMark, leftovers
from cluster.state import ClusterState
from cluster.teardown import keep_logs, tear_down
from protos import admin_pb2

_HEAD = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def state_with_head(work_dir: Path) -> Iterator[ClusterState]:
    """A cluster whose only process is a stand-in for the Ray head."""
    state = fake_state(work_dir)
    head = subprocess.Popen(
        [sys.executable, "-c", _HEAD], env={**os.environ, MARKER: state.id},
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert head.stdout is not None
    head.stdout.readline()
    yield fake_state(work_dir, id=state.id, ray_head=ProcessMark.of(head.pid))
    head.kill()
    head.communicate()


def assert_gone(state: ClusterState) -> None:
    assert leftovers(state.id, state.marks) == []
    assert states.read(state.name) is None
    assert not state.work_dir.exists()


def test_controller_drains_before_anything_is_killed(state_with_head: ClusterState) -> None:
    with fake_controller(lambda _n: fake_status(admin_pb2.READY), "fake-token") as (controller, address):
        state = state_with_head.model_copy(update={"admin_address": address})
        assert tear_down(state, grace_s=7.0, say=lambda _line: None) == []
        assert controller.grace_s == 7.0
    assert_gone(state)


def test_progress_of_the_drain_is_told(work_dir: Path) -> None:
    said: list[str] = []
    with fake_controller(lambda n: fake_status(admin_pb2.READY, running=3), "fake-token") as (
        controller,
        address,
    ):
        controller.may_end.clear()

        def say(line: str) -> None:
            said.append(line)
            controller.may_end.set()

        tear_down(fake_state(work_dir, admin_address=address), grace_s=5.0, say=say)
    assert said[0].startswith("draining: 3 running")


def test_hurry_breaks_a_drain_that_takes_its_time(state_with_head: ClusterState) -> None:
    hurry = threading.Event()
    with fake_controller(lambda n: fake_status(admin_pb2.READY, running=1), "fake-token") as (
        controller,
        address,
    ):
        controller.may_end.clear()
        state = state_with_head.model_copy(update={"admin_address": address})
        assert tear_down(state, grace_s=600.0, say=lambda _line: hurry.set(), hurry=hurry) == []
    assert_gone(state)


def test_dead_controller_does_not_keep_the_rest_alive(state_with_head: ClusterState) -> None:
    said: list[str] = []
    state = state_with_head.model_copy(update={"admin_address": "127.0.0.1:9"})
    assert tear_down(state, grace_s=5.0, say=said.append) == []
    assert "does not answer" in said[0]
    assert_gone(state)


def test_dead_head_with_a_living_orphan_is_cleaned_up(state_with_head: ClusterState) -> None:
    orphan = subprocess.Popen(
        [sys.executable, "-c", _HEAD], env={**os.environ, MARKER: state_with_head.id}, stdout=subprocess.PIPE
    )
    assert orphan.stdout is not None
    orphan.stdout.readline()
    head = state_with_head.marks[0].process()
    assert head is not None
    head.kill()
    assert tear_down(state_with_head, grace_s=0.0, say=lambda _line: None) == []
    orphan.communicate()
    assert_gone(state_with_head)


def test_launch_that_died_before_its_controller_is_cleaned_up(work_dir: Path) -> None:
    state = fake_state(work_dir, phase="starting")
    assert tear_down(state, grace_s=0.0, say=lambda _line: None) == []
    assert_gone(state)


def test_tearing_down_twice_is_fine(work_dir: Path) -> None:
    state = fake_state(work_dir)
    assert tear_down(state, grace_s=0.0, say=lambda _line: None) == []
    assert tear_down(state, grace_s=0.0, say=lambda _line: None) == []
    assert_gone(state)


def test_another_ray_that_is_gone_is_said_to_be(work_dir: Path) -> None:
    said: list[str] = []
    state = fake_state(work_dir, owns_ray=False, ray_address="127.0.0.1:9")
    assert tear_down(state, grace_s=0.0, say=said.append) == []
    assert said == ["the Ray cluster at 127.0.0.1:9 is gone"]


def test_logs_outlive_the_folder_they_were_in(work_dir: Path) -> None:
    logs = work_dir / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (work_dir / "ray-head.log").write_text("head\n")
    (logs / "raylet.out").write_text("raylet\n")
    (logs / "empty.err").touch()
    state = fake_state(work_dir)
    kept = keep_logs(state)
    tear_down(state, grace_s=0.0, say=lambda _line: None)
    assert kept is not None
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        "ray-head.log": "head\n",
        "raylet.out": "raylet\n",
    }


def test_a_launch_without_logs_keeps_none(work_dir: Path) -> None:
    assert keep_logs(fake_state(work_dir)) is None
