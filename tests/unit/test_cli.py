"""The command line as a person meets it: help, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click import Context
from fakes_launch import fake_controller, fake_state, fake_status

from cluster import state as states
from cluster.cli import COMMANDS, cli, main
from protos import admin_pb2


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and the lines of stderr."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err.splitlines()


def test_help_imports_no_command() -> None:
    heavy = "import sys, cluster.cli; cluster.cli.main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    for module in ("ray", "grpc", "pydantic", "rich", "vllm", "torch"):
        assert f"'{module}'" not in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [[name]]
    command = cli.get_command(Context(cli), name)
    if children := getattr(command, "commands", None):
        commands = [[name, child] for child in children]
    for path in commands:
        code, out, errors = ended(capsys, *path, "--help")
        assert (code, errors) == (0, [])
        assert "Example" in out
        assert f"kvorum {' '.join(path)}" in out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(capsys, "--version")
    assert (code, out.split()[0]) == (0, "kvorum,")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["satus"], "error: no command 'satus'; did you mean status?"),
        (["up", "--replicas", "0"], "error: replicas: input should be greater than or equal to 1 (got 0)"),
        (["up", "--port", "99999999"], "error: router.port: "),
        (["up", "-c", "/no/such.yaml"], "error: cannot read the configuration /no/such.yaml: No such file"),
        (["up", "--tensor-parallel-size", "512", "--device", "cpu", "--port", "0"], "error: "),
        (["up", "/no/such/folder", "--port", "0"], "error: "),
        (["up", "a", "--model", "b"], "error: two models: 'a' as the argument and 'b' as --model"),
        (["status"], "error: no cluster named 'kvorum' is up on this machine"),
        (["status", "--address", "127.0.0.1:9"], "error: --address needs the cluster's token"),
        (["generate", "hi"], "error: no cluster named 'kvorum' is up on this machine"),
        (["generate", "hi", "--regex", "a", "--choice", "b"], "error: --regex and --choice exclude"),
        (["generate", "hi", "--temperature", "hot"], "error: Invalid value for '--temperature'"),
        (["chat", "--api-key-file", "/no/key"], "error: cannot read the API key from /no/key"),
        (["trace", "4bf9"], "error: no recent traces begin with '4bf9'"),
        (["trace"], "error: no traces in "),
        (["router", "--controller", "nowhere"], "error: --controller 'nowhere' is not HOST:PORT"),
        (["config", "check", "--tls-cert", "/a", "--tls-key", "/b"], "error: router.tls_cert: no such file"),
        (["model", "prepare", "/no/such/folder"], "error: "),
    ],
)  # fmt: skip
def test_wrong_requests_are_one_line_each_and_exit_two(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("KVORUM_CLUSTER_TOKEN", "KVORUM_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    code, _, errors = ended(capsys, *arguments)
    assert code == 2
    assert errors[0].startswith(expected)
    assert all(line.startswith("error: ") for line in errors)
    assert states.names() == []


def test_internal_error_is_one_line_and_a_traceback_only_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_name: str | None) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(states, "find", broken)
    assert ended(capsys, "status")[2] == [
        "error: unexpected ZeroDivisionError: by zero; KVORUM_DEBUG=1 shows where"
    ]
    monkeypatch.setenv("KVORUM_DEBUG", "1")
    assert main(["status"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_name: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(states, "find", interrupted)
    assert main(["status"]) == 130


def test_down_without_a_cluster_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, "down") == (0, "nothing is running\n", [])
    assert ended(capsys, "down", "--name", "x") == (0, "nothing named 'x' is running\n", [])


def test_status_shows_the_cluster_that_is_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake_controller(lambda _n: fake_status(admin_pb2.READY, admin_pb2.LOADING)) as (
        _controller,
        address,
    ):
        fake_state(tmp_path, admin_address=address)
        code, out, _ = ended(capsys, "status")
    assert code == 0
    assert "1/2 replicas ready" in out


def test_status_elsewhere_takes_the_token_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVORUM_CLUSTER_TOKEN", "fake-token")
    with fake_controller(lambda _n: fake_status(admin_pb2.READY)) as (_controller, address):
        code, out, _ = ended(capsys, "status", "--address", address, "--json")
    assert code == 0
    assert '"state": "READY"' in out


def test_status_of_overlap_is_asked_of_the_controller(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with fake_controller(lambda _n: fake_status(admin_pb2.READY)) as (controller, address):
        fake_state(tmp_path, admin_address=address)
        replica = controller.overlap.replicas.add(replica="replica-0", state=admin_pb2.READY)
        replica.shards.add(rank=0, path="stock", reason="the only shard of its replica", mode="auto")
        _, out, _ = ended(capsys, "status", "--overlap")
        _, plain, _ = ended(capsys, "status", "--overlap", "--json")
    assert "replica-0: stock path: the only shard of its replica" in out
    assert json.loads(plain)["replicas"][0]["shards"][0]["mode"] == "auto"


def test_status_of_a_dead_controller_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_state(tmp_path, admin_address="127.0.0.1:9")
    for asked in (("status",), ("status", "--overlap")):
        code, _, errors = ended(capsys, *asked)
        assert code == 1
        assert "127.0.0.1:9 does not answer" in errors[0]
        assert "kvorum down" in errors[0]


def test_status_of_a_starting_cluster_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake_state(tmp_path, phase="starting")
    code, _, errors = ended(capsys, "status")
    assert (code, errors) == (
        1,
        ["error: cluster 'kvorum' is still starting: ask again when its controller is up"],
    )


def test_shown_config_is_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, shown, _ = ended(capsys, "config", "show", "--replicas", "3", "--engine-arg", "seed=7")
    path = tmp_path / "cluster.yaml"
    path.write_text(shown)
    assert ended(capsys, "config", "show", "-c", str(path))[1] == shown
    assert ended(capsys, "config", "check", "-c", str(path))[0] == 0


def test_watch_ends_with_ctrl_c(tmp_path: Path) -> None:
    with fake_controller(lambda _n: fake_status(admin_pb2.READY)) as (_controller, address):
        fake_state(tmp_path, admin_address=address)
        watching = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "status", "--watch"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        )  # fmt: skip
        assert watching.stdout is not None
        assert "kvorum:" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=20)
    assert (watching.returncode, errors.strip()) == (130, "")
