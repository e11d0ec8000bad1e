"""A Ray cluster over the hosts of a lab, each node held by a handle; never `ray stop`."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.lab import Host, Lab, LabError

_TOKEN = Path("/tmp/ray-token")
_LOG = Path("/tmp/ray-node.log")
_PORT = 6379
_OBJECT_STORE_MIB = 128
_UNDISTURBED = {"RAY_worker_niceness": "0"}
"""Ray's workers give way to all other processes (nice 15), which on a real host would not be there."""
_NODE_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 20.0
_POLL_S = 0.2
_COUNT_ALIVE = (
    "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='error');"
    "print('\\nalive:', sum(node['Alive'] for node in ray.nodes()))"
)


@dataclass
class RayNodes:
    """One node per host, host 0 the head. `address` is for processes on these hosts."""

    lab: Lab
    address: str
    environ: dict[str, str]
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    def alive(self) -> int:
        """Nodes that the head believes to be alive, asked on host 0. Takes seconds."""
        asked = self.lab.hosts[0].run([sys.executable, "-c", _COUNT_ALIVE, self.address])
        # Ray writes there too, of a node that it gave up.
        [said] = [line for line in asked.stdout.splitlines() if line.startswith("alive:")]
        return int(said.removeprefix("alive:"))

    def log(self, index: int) -> str:
        """What the node on this host printed."""
        return self.lab.hosts[index].path(_LOG).read_text(errors="replace")

    def restart(self, index: int) -> None:
        """Start the node of this host again, as its operator would: Ray takes back no node that it gave up.

        Raises:
            LabError: it did not come up.
        """
        if index == 0:
            raise ValueError("the head of a Ray cluster cannot be restarted: it is the cluster")
        _end(self.processes[index])
        before = self.alive()
        self.processes[index] = _start_node(self.lab.hosts[index], self)
        _wait_for(before + 1, self)

    def stop(self) -> None:
        """End the nodes in order, workers first; what they started ends with them."""
        for process in reversed(self.processes):
            _end(process)


def start_ray(lab: Lab, environ: Mapping[str, str] | None = None) -> RayNodes:
    """Start a node on each host and wait until the head knows them all; the lab's end ends them too.

    A token guards it, as Ray wants beyond loopback. The hosts' `environ` gets what a process needs to join:
    `kvorum up --ray-address ADDRESS` works as it is in `lab.hosts[0].run`.

    Args:
        environ: for the nodes and all actors on them, besides each host's own.

    Raises:
        LabError: a node did not come up, with its last words.
    """
    token = secrets.token_hex(32)
    head = lab.hosts[0]
    nodes = RayNodes(lab, f"{head.ip}:{_PORT}", dict(environ or {}))
    for host in lab.hosts:
        host.path(_TOKEN).touch(mode=0o600)
        host.path(_TOKEN).write_text(token)
        host.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(_TOKEN),
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
        }
    for host in lab.hosts:
        nodes.processes.append(_start_node(host, nodes))
        if host is head:
            _wait_for_head(nodes)
    _wait_for(len(lab.hosts), nodes)
    return nodes


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start_node(host: Host, nodes: RayNodes) -> subprocess.Popen[Any]:
    is_head = host.index == 0
    where = ["--head", f"--port={_PORT}"] if is_head else [f"--address={nodes.address}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where]
    command += [f"--node-ip-address={host.ip}", f"--num-cpus={len(host.cores)}"]
    command += [f"--object-store-memory={_OBJECT_STORE_MIB * 2**20}", "--include-log-monitor=false"]
    command += ["--disable-usage-stats", "--log-color=false"]
    if is_head:
        command += ["--include-dashboard=false", "--no-monitor"]
    with host.path(_LOG).open("wb") as log:
        return host.popen(
            command,
            {"RAY_START_HOOK": "cluster.rayhost.trim_head", **_UNDISTURBED, **nodes.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_for_head(nodes: RayNodes) -> None:
    """Until its port answers: a node that comes earlier gives up."""
    host, port = nodes.address.split(":")
    probe = f"import socket; socket.create_connection(({host!r}, {port}), 1).close()"
    deadline = time.monotonic() + _NODE_TIMEOUT_S
    while nodes.lab.hosts[0].run([sys.executable, "-I", "-S", "-c", probe], check=False).returncode:
        _insist(nodes, deadline)
        time.sleep(_POLL_S)


def _wait_for(count: int, nodes: RayNodes) -> None:
    deadline = time.monotonic() + _NODE_TIMEOUT_S
    while nodes.alive() < count:
        _insist(nodes, deadline)
        time.sleep(_POLL_S)


def _insist(nodes: RayNodes, deadline: float) -> None:
    for index, process in enumerate(nodes.processes):
        if process.poll() is not None:
            words = nodes.log(index)[-2000:]
            raise LabError(f"the Ray node on host {index} ended with {process.returncode}: {words}")
    if time.monotonic() > deadline:
        raise LabError(
            f"Ray was not up after {_NODE_TIMEOUT_S:.0f} s: {nodes.log(len(nodes.processes) - 1)[-2000:]}"
        )
