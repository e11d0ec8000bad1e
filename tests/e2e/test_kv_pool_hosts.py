"""The KV pool in the life of a cluster: an agent for each host, a line in the status, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import replica_pb2, replica_pb2_grpc
from protos.channels import bearer
from tests.e2e.conftest import ClusterSlot, RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_FLAGS = (
    "--no-http",
    "--replicas",
    "2",
    "--dtype",
    "float32",
    "--max-model-len",
    "4096",
    "--kv-pool-gib",
    "0.25",
)


@pytest.fixture
def pooled(slot: ClusterSlot) -> RunningCluster:
    cluster = slot.get(*_FLAGS)
    cluster.wait(_answers, "KV pool agent that answers")
    return cluster


def _pools(shown: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shown["kv_pools"]
    return found


def _answers(shown: dict[str, Any]) -> bool:
    pools = _pools(shown)
    return len(pools) == 1 and not pools[0]["silence"] and len(pools[0]["report"]["arenas"]) == 1


def test_both_replicas_of_a_host_share_one_arena_and_one_agent(pooled: RunningCluster) -> None:
    shown = pooled.status()
    (pool,) = _pools(shown)
    (arena,) = pool["report"]["arenas"]
    assert arena["slots"] > 0
    assert [replica["no_pool"] for replica in shown["replicas"]] == ["", ""]
    page = pooled.cli("status", "--name", pooled.name).stdout
    assert f"KV pool on {pool['node']}: " in page
    assert f"agent {pool['agent']}" in page


def test_a_killed_agent_comes_back_at_its_address(pooled: RunningCluster) -> None:
    (before,) = _pools(pooled.status())
    os.kill(before["pid"], signal.SIGKILL)
    after = pooled.wait(
        lambda shown: _answers(shown) and _pools(shown)[0]["pid"] != before["pid"],
        "agent after the killed one",
    )
    assert _pools(after)[0]["agent"] == before["agent"]
    assert [replica["restarts"] for replica in after["replicas"]] == [0, 0]


def test_the_agents_figures_are_among_the_clusters_metrics(pooled: RunningCluster) -> None:
    wanted = {"kvorum_kv_agent_streams", "kvorum_kv_agent_arena_slots", "kvorum_kv_agent_arena_corrupt_total"}
    for _ in range(60):  # sent every 5 s
        with urllib.request.urlopen(pooled.state.viewer_url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = {line.split("{")[0] for line in lines if 'service="kvorum.kv-agent"' in line}
        if wanted <= found:
            return
        time.sleep(0.5)
    raise AssertionError(f"of the agent's metrics there are {sorted(found)}")


def _told_of_agent(cluster: RunningCluster, replica: str) -> str:
    """Where routers are told that the agent of this replica's host is."""
    with grpc.insecure_channel(replica) as channel:
        stub: Any = replica_pb2_grpc.ReplicaStub(channel)
        updates = stub.WatchReplica(
            replica_pb2.WatchReplicaRequest(), metadata=bearer(cluster.state.token), timeout=20
        )
        address: str = next(iter(updates)).snapshot.pool.agent
        updates.cancel()
        return address


def test_an_agent_whose_port_was_taken_is_found_at_another_by_replicas_that_run(
    pooled: RunningCluster,
) -> None:
    shown = pooled.status()
    (before,) = _pools(shown)
    host, _, port = before["agent"].rpartition(":")
    replicas = [replica["address"] for replica in shown["replicas"]]
    assert {_told_of_agent(pooled, replica) for replica in replicas} == {before["agent"]}
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(before["pid"], signal.SIGKILL)
        for _ in range(100):
            try:
                squatter.bind((host, int(port)))
                break
            except OSError:  # it is not quite dead
                time.sleep(0.02)
        squatter.listen()
        after = pooled.wait(
            lambda shown: _answers(shown) and _pools(shown)[0]["pid"] != before["pid"],
            "agent after the killed one",
        )
    moved = _pools(after)[0]["agent"]
    assert moved != before["agent"]
    told: set[str] = set()
    for _ in range(40):
        told = {_told_of_agent(pooled, replica) for replica in replicas}
        if told == {moved}:
            break
        time.sleep(0.25)
    assert told == {moved}
    assert [replica["restarts"] for replica in after["replicas"]] == [0, 0]


def test_a_cluster_that_ends_leaves_no_arena(pooled: RunningCluster, slot: ClusterSlot) -> None:
    folder = Path(f"/dev/shm/kvorum-{pooled.state.id}")
    assert pooled.state.kv_pool_folder == folder
    assert list(folder.glob("*.arena"))
    slot.clear()
    assert not folder.exists()
