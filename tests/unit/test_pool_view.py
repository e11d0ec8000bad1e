"""What operators read of the KV pool: a line a host, and why a replica has no part in it."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from cluster.display import status_json, status_view, to_plain
from cluster.pool_view import pool_lines
from protos import admin_pb2


def a_replica(**fields: Any) -> admin_pb2.ReplicaStatus:
    return admin_pb2.ReplicaStatus(**({"replica": "replica-0", "state": admin_pb2.READY} | fields))


def a_status(*replicas: admin_pb2.ReplicaStatus) -> admin_pb2.ClusterStatus:
    return admin_pb2.ClusterStatus(name="kvorum", tensor_parallel_size=1, replicas=replicas)


def a_pool(**fields: Any) -> admin_pb2.KvPoolStatus:
    pool = admin_pb2.KvPoolStatus(**({"node": "10.0.0.1", "agent": "10.0.0.1:4000"} | fields))
    pool.report.blocks_sent, pool.report.blocks_received = 20, 35
    return pool


def with_arena(pool: admin_pb2.KvPoolStatus, **fields: int) -> admin_pb2.KvPoolStatus:
    pool.report.arenas.add(
        **({"slots": 2048, "ready": 1024, "slot_bytes": 1 << 20, "hits": 30, "misses": 10} | fields)
    )
    return pool


def lines(*pools: admin_pb2.KvPoolStatus, replicas: tuple[admin_pb2.ReplicaStatus, ...] = ()) -> list[str]:
    status = a_status(*replicas)
    status.kv_pools.extend(pools)
    return [line.plain for line in pool_lines(status)]


def test_a_cluster_without_a_pool_shows_no_line() -> None:
    assert lines() == []


def test_a_host_is_a_line() -> None:
    assert lines(with_arena(a_pool())) == [
        "KV pool on 10.0.0.1: 1024/2048 blocks, 1.00 of 2.00 GiB; hits 75% (30/40); "
        "agent 10.0.0.1:4000, 20 blocks sent, 35 received"
    ]


def test_several_arenas_of_a_host_are_added_up() -> None:
    (line,) = lines(with_arena(with_arena(a_pool()), hits=0, misses=0, corrupt=2))
    assert "2048/4096 blocks in 2 arenas, 2.00 of 4.00 GiB; hits 75% (30/40); 2 damaged blocks freed" in line


def test_trouble_with_agents_and_peers_is_told() -> None:
    pool = with_arena(a_pool(), hits=0, misses=0)
    pool.report.blocks_refused = 3
    pool.report.peers.add(agent="10.0.0.2:4000", avoided="nothing came for 2.0 s", avoided_for_s=3.4)
    pool.report.peers.add(agent="10.0.0.3:4000", blocks=7)
    (line,) = lines(pool)
    assert "no hits yet" in line
    assert line.endswith("35 received, 3 refused; does not ask 10.0.0.2:4000 for 3 s: nothing came for 2.0 s")
    assert lines(with_arena(a_pool(silence="no answer")))[0].endswith(
        "; agent 10.0.0.1:4000 does not answer: no answer"
    )
    assert lines(with_arena(a_pool(agent="", silence="no such node")))[0].endswith("; no agent: no such node")
    assert lines(a_pool(agent="")) == ["KV pool on 10.0.0.1: no arena yet; no agent yet"]


def test_what_the_agent_does_not_say_a_replica_of_its_host_does() -> None:
    replica = a_replica(node="10.0.0.1")
    replica.load.pool_slots, replica.load.pool_ready_blocks = 64, 5
    (line,) = lines(a_pool(silence="dead"), replicas=(replica,))
    assert line.startswith("KV pool on 10.0.0.1: 5/64 blocks; agent 10.0.0.1:4000 does not answer: dead")


def test_replicas_without_a_pool_are_named_with_the_reason() -> None:
    replicas = tuple(
        a_replica(replica=f"replica-{index}", no_pool=why)
        for index, why in enumerate(["two hosts", "", "two hosts", "no room"])
    )
    assert lines(replicas=replicas) == [
        "replica-0, replica-2 share no KV blocks: two hosts",
        "replica-3 shares no KV blocks: no room",
    ]


def test_page_and_json_have_it() -> None:
    status = a_status(a_replica(no_pool="two hosts"))
    status.kv_pools.append(with_arena(a_pool()))
    page = io.StringIO()
    Console(file=page, width=200).print(status_view(status))
    assert "KV pool on 10.0.0.1: 1024/2048 blocks" in page.getvalue()
    assert '"slots": 2048' in status_json(status)
    assert to_plain(status)["replicas"][0]["no_pool"] == "two hosts"
