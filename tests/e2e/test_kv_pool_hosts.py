"""The KV pool in the life of a cluster: an agent for each host, a line in the status, nothing left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ClusterSlot, RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

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


def test_a_cluster_that_ends_leaves_no_arena(pooled: RunningCluster, slot: ClusterSlot) -> None:
    folder = Path(f"/dev/shm/kvorum-{pooled.state.id}")
    assert pooled.state.kv_pool_folder == folder
    assert list(folder.glob("*.arena"))
    slot.clear()
    assert not folder.exists()
