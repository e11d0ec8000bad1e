"""A private Ray head, run by handle; never `ray stop`, which kills every Ray it sees.

It listens on loopback only, on free ports, asks for a token, and runs neither dashboard API nor autoscaler
nor Ray-client server. A process that joins it needs `RayHead.environment` in place before it imports ray.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.failures import RunFailed
from cluster.processes import MARKER, ProcessMark, kill_all

_START_HOOK = "RAY_START_HOOK"

_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray replaces 127.0.0.1 by the machine's address and listens there, unless it thinks it cannot have several
nodes; this variable says so on Linux too. Every process of the cluster must agree."""

_FOREIGN = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_TOKEN", "RAY_TMPDIR", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Settings of some other Ray that must not leak into ours."""

_SOCKET_ROOM = 30
"""AF_UNIX paths end at 107 bytes and Ray appends about 75 to its folder."""


@dataclass
class RayHead:
    """A head process. `address` is empty until `wait_ready` returned."""

    cluster_id: str
    work_dir: Path
    process: subprocess.Popen[bytes]
    mark: ProcessMark
    address: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs, before it imports ray, to join this head."""
        return environment(self.work_dir, self.address)

    @property
    def log(self) -> Path:
        """What the head printed; Ray's own logs are under `ray/session_latest/logs`."""
        return self.work_dir / "ray-head.log"

    def wait_ready(self, timeout_s: float) -> str:
        """Block until the head answers at the returned address.

        Raises:
            RunFailed: it ended, or the time is over; the message has its last words.
        """
        deadline = time.monotonic() + timeout_s
        address_file = self.work_dir / "ray" / "ray_current_cluster"
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise RunFailed(
                    f"the private Ray ended with code {code} while starting: {self._last_words()}"
                )
            if address_file.exists() and (address := address_file.read_text().strip()):
                self.address = address
                return address
            time.sleep(0.05)
        raise RunFailed(
            f"the private Ray was not up after {timeout_s:.0f} s: {self._last_words()}; "
            "if the machine is only slow, raise --ray-timeout-s"
        )

    def stop(self, grace_s: float = 5.0) -> list[psutil.Process]:
        """End the head and all that carries the cluster's marker; returns what would not die. Idempotent."""
        stop_head(self.mark, grace_s)
        survivors = kill_all(self.cluster_id, [self.mark], grace_s=2.0)
        self.process.poll()
        return survivors

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1] if lines else 'it printed nothing'} (log: {self.log})"


def start(cluster_id: str, work_dir: Path, *, cores: int, object_store_mib: int) -> RayHead:
    """Spawn a head in a session of its own and return at once; `wait_ready` waits for it.

    `work_dir` is from `make_work_dir`: it holds the token, Ray's sockets and all logs.
    """
    token = work_dir / "ray-token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    (work_dir / "ray").mkdir()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += ["--node-ip-address=127.0.0.1", f"--num-cpus={cores}", f"--temp-dir={work_dir / 'ray'}"]
    command += [f"--object-store-memory={object_store_mib * 2**20}", "--include-dashboard=false"]
    command += ["--dashboard-agent-listen-port=0", "--no-monitor", "--include-log-monitor=false"]
    command += ["--disable-usage-stats", "--log-color=false"]
    with (work_dir / "ray-head.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            command,
            env=_head_environment(cluster_id, work_dir),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RayHead(cluster_id, work_dir, process, ProcessMark.of(process.pid))


def environment(work_dir: Path, address: str) -> dict[str, str]:
    """What a process needs, before it imports ray, to join the head that `work_dir` belongs to."""
    return {
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(work_dir / "ray-token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        **_LOOPBACK_ONLY,
    }


def enter(work_dir: Path, address: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Prepare this process for `ray.init`; call it before anything imports ray."""
    for name in _FOREIGN:
        environ.pop(name, None)
    joining = environment(work_dir, address)
    if not address:  # known only once the head is up
        del joining["RAY_ADDRESS"]
    environ.update(joining)


def stop_head(mark: ProcessMark, grace_s: float = 5.0) -> None:
    """SIGTERM, by which Ray ends its processes in order; SIGKILL after the grace."""
    process = mark.process()
    if process is None:
        return
    try:
        process.terminate()
        process.wait(grace_s)
    except psutil.TimeoutExpired:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def make_work_dir(cluster_id: str) -> Path:
    """A new private folder with a path short enough for Ray's sockets."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base / f"kv-{cluster_id}" / "ray")) > _SOCKET_ROOM:
        base = Path("/tmp")  # noqa: S108 - the folder in it is new, private and unguessable
    work_dir = base / f"kv-{cluster_id}"
    work_dir.mkdir(mode=0o700)
    return work_dir


def trim_head(ray_params: Any, head: bool) -> None:
    """Called inside the head by `ray start`: leaves out the Ray-client server and the dashboard's API server.

    `ray start` has no flag for either; the second costs 1.3 s of start and 120 MB, and nothing here asks it.
    """
    os.environ.pop(_START_HOOK, None)
    if not head:
        return
    from ray._private.node import Node  # noqa: PLC0415 - inside the head ray is loaded already

    ray_params.ray_client_server_port = None
    Node.start_api_server = lambda _node, **_options: None


def _head_environment(cluster_id: str, work_dir: Path) -> dict[str, str]:
    env = dict(os.environ)
    enter(work_dir, "", env)
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    # Ray runs its workers at nice 15, where anything else on the host goes before the tokens.
    env.setdefault("RAY_worker_niceness", "0")
    return env | {
        MARKER: cluster_id,
        "VLLM_RPC_BASE_PATH": str(work_dir),  # its sockets outlive a killed engine; the folder goes with us
        _START_HOOK: f"{__name__}.{trim_head.__name__}",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }
