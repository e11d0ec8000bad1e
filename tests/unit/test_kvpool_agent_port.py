"""Where an agent is: remembered by itself, read by the replicas of its host, never a guess."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from workers.kvpool.agent_port import AgentAddress, AgentPort, port_file
from workers.placement import ReplicaPlacement, ShardSlot

TOLD = "10.0.0.1:4000"


def placement(kv_agent: str, *slots: ShardSlot) -> ReplicaPlacement:
    return ReplicaPlacement("r0", "e0", "ns", "", "cpu", "none", slots, kv_agent=kv_agent)


def slot(node_id: str) -> ShardSlot:
    return ShardSlot(0, 0, node_id, "10.0.0.1")


def test_what_a_replica_was_told_holds_until_the_agent_names_another_port(tmp_path: Path) -> None:
    address = AgentAddress.of(placement(TOLD, slot("node")), tmp_path)
    assert address.now() == TOLD
    for port in (4001, 4002):
        AgentPort(port_file(tmp_path, "node")).remember(port)
        assert address.now() == f"10.0.0.1:{port}"


@pytest.mark.parametrize("text", ["nonsense", "", "0", "70000", "-1"])
def test_a_file_that_is_broken_or_gone_changes_nothing(tmp_path: Path, text: str) -> None:
    address = AgentAddress.of(placement(TOLD, slot("node")), tmp_path)
    file = port_file(tmp_path, "node")
    AgentPort(file).remember(4001)
    assert address.now() == "10.0.0.1:4001"
    file.write_text(text)
    assert address.now() == "10.0.0.1:4001"
    file.unlink()
    assert address.now() == "10.0.0.1:4001"


def test_an_agent_that_came_after_the_replica_is_found(tmp_path: Path) -> None:
    address = AgentAddress.of(placement("", slot("node")), tmp_path)
    assert address.now() == ""
    AgentPort(port_file(tmp_path, "node")).remember(4001)
    assert address.now() == "10.0.0.1:4001"


def test_two_nodes_of_one_host_have_an_agent_each(tmp_path: Path) -> None:
    one, two = (AgentAddress.of(placement(TOLD, slot(node)), tmp_path) for node in ("one", "two"))
    AgentPort(port_file(tmp_path, "two")).remember(4001)
    assert (one.now(), two.now()) == (TOLD, "10.0.0.1:4001")


def test_a_replica_without_shards_goes_by_what_it_was_told(tmp_path: Path) -> None:
    assert AgentAddress.of(placement(TOLD), tmp_path).now() == TOLD


def test_a_port_that_cannot_be_written_leaves_no_wrong_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = port_file(tmp_path, "node")
    AgentPort(file).remember(4001)
    file.with_suffix(".new").mkdir()  # as if there were no room for it
    with caplog.at_level(logging.WARNING):
        AgentPort(file).remember(4002)
    assert "cannot be remembered" in caplog.text
    assert AgentPort(file).remembered() == 0
