"""A replica whose shards sit on two hosts, started, asked and ended as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lab.lab import Host, Lab, LabError
from tests.lab.ray_nodes import RayNodes, start_ray

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(600)]

_KVORUM = [sys.executable, "-m", "cluster.cli"]
_STATE = {"KVORUM_STATE_DIR": "/tmp/state"}
_UP_TIMEOUT_S = 400
_HASTY = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "500"}
_ASKED = ("The capital of France is", "--max-tokens", "8", "--temperature", "0")
_LONG_PROMPT = " ".join(f"word{number}" for number in range(450))
"""1,690 tokens: 7 steps of 256, each mostly AllReduce at 1 Gbit/s."""
_SEE_A_SPLIT_STEP = """
import time
from cluster import state
from cluster.adminclient import AdminClient
found = state.find(None)
with AdminClient(found.admin_address, found.token) as admin:
    def split():
        [replica] = admin.overlap().replicas
        return max(shard.overlapped.steps for shard in replica.shards)
    before = split()
    print(before, flush=True)
    while split() <= before:
        time.sleep(0.05)
"""
"""Ends when a shard has split one step more: in one process, as every `kvorum status` takes a second."""
_PLACES = (
    "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='error');"
    "print('\\nplaces:', *(group['state'] for group in ray.util.placement_group_table().values()))"
)
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
    kvorum(nodes.lab.hosts[0], "up", "--no-http", *joining, *_TWO_SHARDS, *flags, timeout_s=_UP_TIMEOUT_S)


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

    assert "Paris" in kvorum(head, "generate", *_ASKED)

    assert "nothing is left running" in kvorum(head, "down", "--grace", "2", timeout_s=120)
    assert eventually_nothing_but(before, lab) == []
    assert nodes.alive() == 2


def test_a_node_that_ray_gave_up_joins_again_when_it_is_restarted() -> None:
    with Lab(2) as lab:
        nodes = start_ray(lab, _HASTY)
        lab.partition(1)
        wait_until(lambda: nodes.alive() == 1, 60)
        lab.heal(1)
        nodes.restart(1)
        assert nodes.alive() == 2
        nodes.stop()
        assert lab.processes() == []


def test_a_rank_killed_amid_an_all_reduce_fails_the_replica_and_a_fresh_one_serves(nodes: RayNodes) -> None:
    head, other = nodes.lab.hosts
    up(nodes, "--overlap", "4", "--max-num-batched-tokens", "256", "--max-attempts", "1")
    try:
        lost = epoch(head)
        [shard] = [p for p in other.processes() if p.name().startswith("ray::Shard")]
        seeing = head.popen([sys.executable, "-c", _SEE_A_SPLIT_STEP], _STATE, stdout=-1, text=True)
        assert seeing.stdout is not None
        # The warm-up's prompts were split too: without them, nothing here would be.
        assert int(seeing.stdout.readline()) > 0
        asking = generating(head, _LONG_PROMPT, "--max-tokens", "64", "--ignore-eos")
        assert seeing.wait(60) == 0
        assert asking.poll() is None
        shard.kill()
        _, said = asking.communicate(timeout=60)
        assert asking.returncode == 1
        assert "was lost" in said or "gave up after" in said
        wait_until(lambda: epoch(head) not in {None, lost}, 240)
        assert "Paris" in kvorum(head, "generate", *_ASKED)
    finally:
        kvorum(head, "down", "--grace", "2", timeout_s=120)


def test_a_partition_amid_a_stream_ends_it_and_a_fresh_replica_serves_once_the_node_is_back() -> None:
    with Lab(2, "1gbit") as lab:
        nodes, head = start_ray(lab, _HASTY), lab.hosts[0]
        up(nodes, "--max-attempts", "1")
        lost = epoch(head)
        asking = generating(head, "Once upon a time", "--max-tokens", "2000", "--ignore-eos")
        assert asking.stdout is not None
        assert asking.stdout.read(1)
        lab.partition(1)
        assert asking.poll() is None
        _, said = asking.communicate(timeout=60)
        assert asking.returncode == 1
        assert "the stream is incomplete" in said
        wait_until(lambda: nodes.alive() == 1, 60)
        # Ray would else try to place the replica again without a pause, with a core for each try.
        wait_until(lambda: places(nodes) == ["PENDING"], 60)
        lab.heal(1)
        nodes.restart(1)
        wait_until(lambda: epoch(head) not in {None, lost}, 240)
        assert "Paris" in kvorum(head, "generate", *_ASKED)


def generating(host: Host, *arguments: str) -> subprocess.Popen[str]:
    """`kvorum generate` at work; its text comes as it is made."""
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    command = [*_KVORUM, "generate", *arguments]
    return host.popen(command, _STATE | unbuffered, stdout=-1, stderr=-1, text=True)


def epoch(host: Host) -> str | None:
    """Which start of the only replica is READY; None while none is, or the controller is too busy to say."""
    try:
        [replica] = json.loads(kvorum(host, "status", "--json"))["replicas"]
    except LabError:
        return None
    return str(replica["epoch"]) if replica["state"] == "READY" else None


def places(nodes: RayNodes) -> list[str]:
    """The states of the placement groups that are not removed."""
    asked = nodes.lab.hosts[0].run([sys.executable, "-c", _PLACES, nodes.address])
    # Ray writes there too, of a node that it gave up.
    [said] = [line for line in asked.stdout.splitlines() if line.startswith("places:")]
    return [state for state in said.split()[1:] if state != "REMOVED"]


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(0.3)
