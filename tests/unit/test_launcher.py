"""What `up` refuses before it starts anything, and what it watches once it runs."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes_launch import fake_controller, fake_state, fake_status
from rich.console import Console

from cluster import state as states
from cluster.config import ClusterConfig, load
from cluster.display import Steps
from cluster.failures import BadInput, RunFailed
from cluster.interrupts import Interrupted, Interrupts
from cluster.launcher import Launch, launch
from cluster.preflight import check_files, check_fits_here, check_ports, own_cores
from cluster.processes import ProcessMark
from cluster.state import ClusterState
from protos import admin_pb2


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))


@pytest.fixture
def steps() -> Steps:
    return Steps(Console(file=io.StringIO(), width=200, highlight=False))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def said(steps: Steps) -> str:
    assert isinstance(steps.console.file, io.StringIO)
    return steps.console.file.getvalue()


def configured(**overrides: Any) -> ClusterConfig:
    return load(None, {"router": {"port": 0}, **overrides})


def started_launch(state: ClusterState, steps: Steps) -> Launch:
    return Launch(configured(), state, steps, Interrupts())


def test_taken_router_port_is_named_with_what_to_do(taken_port: int) -> None:
    with pytest.raises(BadInput, match=rf"port {taken_port} on 127\.0\.0\.1 is in use.*--port"):
        check_ports(configured(router={"port": taken_port}))


def test_taken_admin_port_is_named_with_its_own_flag(taken_port: int) -> None:
    with pytest.raises(BadInput, match=rf"port {taken_port} .*--admin-port"):
        check_ports(configured(admin_port=taken_port))


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(BadInput, match=r"cannot listen on 192\.0\.2\.77:0"):
        check_ports(configured(router={"port": 0, "host": "192.0.2.77"}))


def test_more_shards_than_cores_are_refused_with_what_to_do() -> None:
    with pytest.raises(BadInput, match="--tensor-parallel-size"):
        check_fits_here(configured(engine={"device": "cpu", "tensor_parallel_size": own_cores() + 1}))


def test_every_missing_file_is_named(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    with pytest.raises(BadInput) as caught:
        check_files(
            configured(router={"api_keys_file": keys}, engine={"lora_modules": {"a": str(tmp_path / "l")}})
        )
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "router.api_keys_file",
        "engine.lora_modules.a",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        {"engine": {"device": "cpu", "tensor_parallel_size": 512}},
        {"router": {"host": "192.0.2.77"}},
        {"engine": {"model": "/no/such/folder"}},
    ],
)
def test_refused_launch_leaves_no_state_behind(overrides: dict[str, Any], steps: Steps) -> None:
    with pytest.raises(BadInput), Interrupts() as interrupts:
        launch(load(None, {"router": {"port": 0}} | overrides), steps, interrupts)
    assert states.names() == []


def test_second_cluster_of_a_name_is_refused_while_the_first_lives(steps: Steps, tmp_path: Path) -> None:
    here = ProcessMark.of(os.getpid())
    fake_state(tmp_path / "work", ray_head=here, router_addresses=("127.0.0.1:7",), model="smollm2")
    with pytest.raises(BadInput, match=r"'kvorum' is up already \(smollm2 at 127\.0\.0\.1:7\)"):
        launch(configured(), steps, Interrupts())
    assert states.names() == ["kvorum"]


def test_state_of_a_dead_cluster_is_cleaned_up_first(steps: Steps, tmp_path: Path) -> None:
    dead = ProcessMark(pid=os.getpid(), started=1.0)
    (tmp_path / "work").mkdir()
    fake_state(tmp_path / "work", ray_head=dead)
    with pytest.raises(BadInput, match="/no/such/folder"):
        launch(configured(engine={"model": "/no/such/folder"}), steps, Interrupts())
    assert "cleaning up after a cluster 'kvorum' that died" in said(steps)
    assert states.names() == []
    assert not (tmp_path / "work").exists()


def test_watch_tells_of_a_replica_that_fails_and_returns(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.launcher._WATCH_S", 0.01)
    failed = fake_status(admin_pb2.FAILED)
    failed.replicas[0].last_error = "shard 0 was killed"

    def script(n: int) -> admin_pb2.ClusterStatus:
        if n >= 3:
            states.remove("kvorum")
        return failed if n == 1 else fake_status(admin_pb2.READY)

    with fake_controller(script, "fake-token") as (_controller, address):
        started_launch(fake_state(tmp_path, admin_address=address), steps).watch()
    lines = said(steps).splitlines()
    assert [line.split(" ", 1)[1] for line in lines[:2]] == [
        "replica-0 failed: shard 0 was killed",
        "replica-0 ready",
    ]
    assert lines[-1] == "stopped by `kvorum down`"


def test_watch_ends_when_another_cluster_took_the_name(steps: Steps, tmp_path: Path) -> None:
    ours = fake_state(tmp_path)
    fake_state(tmp_path)
    started_launch(ours, steps).watch()
    assert "stopped by `kvorum down`" in said(steps)


def test_watch_fails_when_the_head_dies(steps: Steps, tmp_path: Path) -> None:
    state = fake_state(tmp_path, ray_head=ProcessMark(pid=os.getpid(), started=1.0))
    with pytest.raises(RunFailed, match="private Ray ended unexpectedly"):
        started_launch(state, steps).watch()


def test_stop_reports_what_would_not_die(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.teardown.tear_down", lambda *_args, **_options: ["4711 stuck"])
    with pytest.raises(RunFailed, match="these processes would not end: 4711 stuck"):
        started_launch(fake_state(tmp_path), steps).stop()


def test_first_signal_raises_and_the_second_hurries() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.exit_code == 143
        assert not interrupts.hurry.is_set()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.hurry.is_set()


def test_signals_during_a_clean_up_do_not_break_it() -> None:
    with Interrupts() as interrupts:
        interrupts.defer()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.hurry.is_set()


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_down_ends_a_launch_that_was_killed(tmp_path: Path) -> None:
    """`kvorum up` under SIGKILL leaves a state file; `down` finds it and ends cleanly."""
    work = tmp_path / "work"
    work.mkdir()
    fake_state(work, phase="starting", launcher=ProcessMark(pid=os.getpid(), started=1.0))
    command = [sys.executable, "-m", "cluster.cli", "down"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing is left running" in done.stdout
    assert states.names() == []
