"""A replica whose shards sit on two hosts, started, asked and ended as a user would."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lab.lab import Host, Lab
from tests.lab.ray_nodes import RayNodes, start_ray

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(600)]

_KVORUM = [sys.executable, "-m", "cluster.cli"]
_STATE = {"KVORUM_STATE_DIR": "/tmp/state"}
_UP_TIMEOUT_S = 400
_TWO_SHARDS = ("--replicas", "1", "--tensor-parallel-size", "2", "--placement", "spread")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with Lab(2, "1gbit") as lab:
        yield start_ray(lab)


def kvorum(host: Host, *arguments: str, timeout_s: float = 60.0) -> str:
    """What the command prints; LabError if it fails."""
    return host.run([*_KVORUM, *arguments], _STATE, timeout_s=timeout_s).stdout


def eventually_nothing_but(before: set[int], lab: Lab, timeout_s: float = 15.0) -> list[str]:
    """Names of the processes that came since and stay; Ray ends its spare workers when it likes."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [process for process in lab.processes() if process.pid not in before]
        if not left or time.monotonic() > deadline:
            return [process.name() for process in left]
        time.sleep(0.2)


def up(nodes: RayNodes, *flags: str) -> None:
    """Start a cluster from host 0 on the Ray that runs there, with this model's shards on both hosts."""
    joining = ("--ray-address", nodes.address, "--port", "0", "--detach", "--max-model-len", "2048")
    kvorum(nodes.lab.hosts[0], "up", *joining, *_TWO_SHARDS, *flags, timeout_s=_UP_TIMEOUT_S)


def test_a_replica_spread_over_two_hosts_answers_and_leaves_nothing(nodes: RayNodes) -> None:
    lab, head = nodes.lab, nodes.lab.hosts[0]
    assert nodes.alive() == 2
    before = {process.pid for process in lab.processes()}
    up(nodes)
    status: dict[str, Any] = json.loads(kvorum(head, "status", "--json"))
    [replica] = status["replicas"]
    assert replica["state"] == "READY"
    assert {shard["node"] for shard in replica["shards"]} == {host.ip for host in lab.hosts}
    assert {shard["collective"] for shard in replica["shards"]} == {"gloo"}
    cores = {host.ip: list(host.cores) for host in lab.hosts}
    assert all(shard["cores"] == cores[shard["node"]] for shard in replica["shards"])

    asked = ("The capital of France is", "--max-tokens", "8", "--temperature", "0")
    assert "Paris" in kvorum(head, "generate", *asked)

    assert "nothing is left running" in kvorum(head, "down", "--grace", "2", timeout_s=120)
    assert eventually_nothing_but(before, lab) == []
    assert nodes.alive() == 2


def test_a_node_that_ray_gave_up_joins_again_when_it_is_restarted() -> None:
    hasty = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "500"}
    with Lab(2) as lab:
        nodes = start_ray(lab, hasty)
        lab.partition(1)
        deadline = time.monotonic() + 60
        while nodes.alive() == 2:
            assert time.monotonic() < deadline
        lab.heal(1)
        nodes.restart(1)
        assert nodes.alive() == 2
        nodes.stop()
        assert lab.processes() == []


def test_a_rank_killed_amid_an_all_reduce_fails_the_replica_and_a_fresh_one_serves(nodes: RayNodes) -> None:
    head, other = nodes.lab.hosts
    up(nodes, "--overlap", "4", "--max-num-batched-tokens", "2048")
    try:
        long = " ".join(f"word{number}" for number in range(450))  # seconds of prefill, mostly AllReduce here
        asking = head.popen([*_KVORUM, "generate", long, "--max-tokens", "64"], _STATE, stderr=-1, text=True)
        [replica] = json.loads(kvorum(head, "status", "--json"))["replicas"]
        wait_until(lambda: overlapped_steps(head) > 0 or asking.poll() is not None, 30)
        [shard] = [p for p in other.processes() if p.name().startswith("ray::Shard")]
        shard.kill()
        _, said = asking.communicate(timeout=60)
        assert asking.returncode == 1
        assert "was lost" in said

        def fresh() -> bool:
            [now] = json.loads(kvorum(head, "status", "--json"))["replicas"]
            return bool(now["state"] == "READY" and now["epoch"] != replica["epoch"])

        wait_until(fresh, 240)
        asked = ("The capital of France is", "--max-tokens", "8", "--temperature", "0")
        assert "Paris" in kvorum(head, "generate", *asked)
    finally:
        kvorum(head, "down", "--grace", "2", timeout_s=120)


def overlapped_steps(host: Host) -> int:
    """Steps that the first shard has split since its engine's start."""
    [replica] = json.loads(kvorum(host, "status", "--overlap", "--json"))["replicas"]
    return int(replica["shards"][0]["overlapped"]["steps"])


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(0.3)
