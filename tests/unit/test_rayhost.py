"""A private Ray head: joined only with its token, stopped by handle, nothing left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from cluster import rayhost
from cluster.failures import RunFailed
from cluster.processes import MARKER, leftovers
from cluster.rayhost import RayHead

_JOIN = """
import os, ray
ray.init(namespace="kvorum-test", log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
class Echo:
    def marker(self):
        return os.environ.get("KVORUM_CLUSTER_ID")

print(ray.get(Echo.remote().marker.remote()), ray.cluster_resources()["CPU"])
"""


@pytest.fixture
def work_dir() -> Iterator[Path]:
    folder = rayhost.make_work_dir(secrets.token_hex(4))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def head(work_dir: Path) -> Iterator[RayHead]:
    head = rayhost.start(work_dir.name.removeprefix("kv-"), work_dir, cores=3, object_store_mib=100)
    yield head
    head.stop()


def join(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", _JOIN], env=clean | environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def answer_to(address: str, token: str | None) -> grpc.StatusCode:
    """How Ray's control store answers a bare call; `ray.init` would retry for 20 s before it gives up."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        method: Any = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        call = method.future(b"", timeout=10, metadata=metadata)
        code: grpc.StatusCode = call.code()  # waits for the end of the call
        return code


def listening_hosts(head: RayHead) -> set[str]:
    hosts: set[str] = set()
    for process in leftovers(head.cluster_id, [head.mark]):
        hosts |= {
            connection.laddr.ip
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr
        }
    return hosts


@pytest.mark.cluster
def test_head_is_joined_by_token_listens_on_loopback_and_ends_whole(head: RayHead) -> None:
    address = head.wait_ready(90)
    assert address.startswith("127.0.0.1:")
    assert {host.removeprefix("::ffff:") for host in listening_hosts(head)} == {"127.0.0.1"}

    joined = join(head.environment)
    assert joined.stdout.split() == [head.cluster_id, "3.0"], joined.stderr

    token = Path(head.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    assert answer_to(address, token) is grpc.StatusCode.OK
    assert answer_to(address, "wrong") is grpc.StatusCode.UNAUTHENTICATED
    assert answer_to(address, None) is grpc.StatusCode.UNAUTHENTICATED

    assert head.stop() == []
    assert leftovers(head.cluster_id, [head.mark]) == []
    assert head.stop() == []


@pytest.mark.cluster
def test_nothing_outlives_a_head_that_was_killed(head: RayHead) -> None:
    head.wait_ready(90)
    head.process.kill()
    assert head.stop() == []
    assert leftovers(head.cluster_id, [head.mark]) == []


@pytest.mark.cluster
def test_head_that_cannot_start_says_so_with_its_log(work_dir: Path) -> None:
    (work_dir / "sitecustomize.py").write_text("raise SystemExit('no room here')")
    environ = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(work_dir)
    try:
        head = rayhost.start("dead", work_dir, cores=1, object_store_mib=100)
    finally:
        os.environ.pop("PYTHONPATH")
        if environ is not None:
            os.environ["PYTHONPATH"] = environ
    with pytest.raises(RunFailed, match=r"ended with code 1 .*no room here \(log: .*ray-head\.log\)"):
        head.wait_ready(60)


def test_work_dir_is_private_and_short_enough_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / ("long" * 20)))
    folder = rayhost.make_work_dir(secrets.token_hex(4))
    try:
        assert len(str(folder)) < 30
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        folder.rmdir()


def test_settings_of_another_ray_do_not_leak_in(tmp_path: Path) -> None:
    environ = {"RAY_ADDRESS": "elsewhere:1", "RAY_AUTH_TOKEN": "theirs", "HOME": "/root"}
    rayhost.enter(tmp_path, "127.0.0.1:7", environ)
    assert environ["RAY_ADDRESS"] == "127.0.0.1:7"
    assert "RAY_AUTH_TOKEN" not in environ
    assert environ["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ray-token")
    assert environ["HOME"] == "/root"
    assert MARKER not in environ
