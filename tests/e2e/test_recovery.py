"""Kill -9 of any process: the status shows it, it comes back as a fresh epoch, nothing is orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import grpc
import psutil
import pytest

from cluster import processes
from protos import admin_pb2, admin_pb2_grpc, common_pb2
from protos.channels import bearer, open_channel
from protos.errors import KvorumError
from tests.e2e.conftest import RunningCluster, collect

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def _replica(shown: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in shown["replicas"] if r["replica"] == name)
    return found


def _victim(replica: dict[str, Any], kind: str) -> int:
    return int(
        {"shard": replica["shards"][0]["pid"], "core": replica["engine_core_pid"], "replica": replica["pid"]}[
            kind
        ]
    )


@pytest.mark.parametrize("kind", ["shard", "core", "replica"])
async def test_a_killed_part_of_a_replica_comes_back_under_traffic(pair: RunningCluster, kind: str) -> None:
    before = pair.wait(_all_ready, "ready cluster")
    victim = _replica(before, "replica-0")
    old = [victim["pid"], victim["engine_core_pid"], *(shard["pid"] for shard in victim["shards"])]
    assert all(psutil.pid_exists(pid) for pid in old)

    stop = asyncio.Event()
    traffic = asyncio.create_task(_traffic(pair, stop))
    await asyncio.sleep(1.0)
    os.kill(_victim(victim, kind), signal.SIGKILL)
    noticed = await asyncio.to_thread(
        pair.wait,
        lambda s: _replica(s, "replica-0").get("epoch") != victim["epoch"] or not _all_ready(s),
        "notice",
        20,
    )
    assert _replica(noticed, "replica-0")["last_error"] or _replica(noticed, "replica-0")["restarts"]
    after = await asyncio.to_thread(pair.wait, _all_ready, "recovered replica")
    stop.set()
    completed, broken = await traffic

    fresh = _replica(after, "replica-0")
    assert fresh["epoch"] != victim["epoch"]
    assert fresh["restarts"] == victim.get("restarts", 0) + 1
    assert not [pid for pid in old if psutil.pid_exists(pid)], "processes of the dead epoch are still there"
    assert completed > 0
    # Streams under way at the dead replica end with a reason, never as if they had finished.
    assert all(error.reason in (common_pb2.REPLICA_LOST, common_pb2.NO_REPLICA_READY) for error in broken)
    await _both_serve(pair)


async def test_a_restart_asked_for_drains_first_and_is_no_failure(pair: RunningCluster) -> None:
    before = _replica(pair.wait(_all_ready, "ready cluster"), "replica-1")
    key = bearer(pair.state.token)
    async with (
        open_channel(pair.state.admin_address) as channel,
        pair.client() as client,
    ):
        running = asyncio.create_task(collect(client, "Tell me", max_tokens=64, ignore_eos=True))
        await asyncio.sleep(0.3)
        request = admin_pb2.RestartReplicaRequest(replica="replica-1", grace_s=30)
        await admin_pb2_grpc.AdminStub(channel).RestartReplica(request, timeout=60, metadata=key)
        assert len((await running).tokens[0]) == 64
        unknown = admin_pb2.RestartReplicaRequest(replica="replica-9")
        with pytest.raises(grpc.aio.AioRpcError, match="kvorum status"):
            await admin_pb2_grpc.AdminStub(channel).RestartReplica(unknown, timeout=10, metadata=key)
    after = await asyncio.to_thread(pair.wait, _all_ready, "restarted replica")
    assert _replica(after, "replica-1")["epoch"] != before["epoch"]
    assert _replica(after, "replica-1").get("restarts", 0) == before.get("restarts", 0)


async def test_a_killed_router_comes_back_at_its_address(pair: RunningCluster) -> None:
    before = pair.wait(_all_ready, "ready cluster")
    (router,) = before["routers"]
    os.kill(router["pid"], signal.SIGKILL)
    after = await asyncio.to_thread(
        pair.wait,
        lambda s: s["routers"][0].get("alive") and s["routers"][0]["pid"] != router["pid"],
        "new router",
        60,
    )
    assert after["routers"][0]["address"] == router["address"]
    async with pair.client() as client:
        refusals: list[KvorumError] = []
        for _ in range(50):
            try:
                answer = await collect(client, "Hello", max_tokens=2, timeout=20)
                break
            except KvorumError as error:
                refusals.append(error)
                await asyncio.sleep(0.2)
        assert answer.tokens[0]
        known = {common_pb2.NO_REPLICA_READY, common_pb2.REPLICA_LOST}
        assert {error.reason for error in refusals} <= known


async def test_a_killed_controller_adopts_what_runs(pair: RunningCluster) -> None:
    before = pair.wait(_all_ready, "ready cluster")
    os.kill(before["controller_pid"], signal.SIGKILL)
    async with pair.client() as client:  # the data plane does not notice
        assert (await collect(client, "Hello", max_tokens=2, timeout=20)).tokens[0]
    after = await asyncio.to_thread(
        pair.wait,
        lambda s: s["controller_pid"] != before["controller_pid"] and _all_ready(s),
        "new controller",
    )
    assert [r["epoch"] for r in after["replicas"]] == [r["epoch"] for r in before["replicas"]]
    assert after["routers"][0]["pid"] == before["routers"][0]["pid"]
    assert {p.pid for p in processes.leftovers(pair.state.id)} >= {r["pid"] for r in after["replicas"]}


async def _both_serve(pair: RunningCluster) -> None:
    """One whose first answers were slow, as its own start took the cores, is tried again within minutes."""
    served: set[str] = set()
    deadline = time.monotonic() + 200
    async with pair.client() as client:
        while served != {"replica-0", "replica-1"}:
            again = [collect(client, f"Again {i}", max_tokens=8, ignore_eos=True) for i in range(16)]
            served |= {answer.served.replica for answer in await asyncio.gather(*again)}
            assert time.monotonic() < deadline, f"only {served} serve: {await client.explain('Again')}"


async def _traffic(pair: RunningCluster, stop: asyncio.Event) -> tuple[int, list[KvorumError]]:
    completed, broken = 0, []

    async def stream(lane: int) -> None:
        nonlocal completed
        while not stop.is_set():
            try:
                answer = await collect(client, f"Lane {lane}", max_tokens=24, ignore_eos=True, timeout=60)
                assert len(answer.tokens[0]) == 24
                completed += 1
            except KvorumError as error:
                broken.append(error)
                await asyncio.sleep(0.2)

    async with pair.client() as client:
        await asyncio.gather(*(stream(lane) for lane in range(4)))
    return completed, broken


def _all_ready(shown: dict[str, Any]) -> bool:
    return all(
        r["state"] == "READY" and all(s.get("alive") for s in r["shards"]) and r["shards"]
        for r in shown["replicas"]
    )
