"""The agent in its actor, without Ray: it listens at once, and takes the pool along at the end."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers_kvagent import TOKEN, arena_in, eventually, read
from helpers_kvpool import RANKS
from test_telemetry_metrics import FakeViewer

from protos import kvpool_pb2
from telemetry.config import TelemetryConfig, ViewerTarget
from workers.kvpool import agent, agent_actor
from workers.kvpool.agent_actor import AgentSpec, KvAgentActor
from workers.kvpool.agent_port import AgentAddress
from workers.placement import ReplicaPlacement, ShardSlot


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    interval = sys.getswitchinterval()
    monkeypatch.setattr(agent_actor.os, "nice", lambda _increment: 0)
    monkeypatch.setattr(agent_actor, "configure_logging", lambda *_, **__: None)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    yield
    sys.setswitchinterval(interval)


def spec(folder: Path, viewer: ViewerTarget | None = None) -> AgentSpec:
    telemetry = TelemetryConfig(store="off", viewer=viewer)
    return AgentSpec("node", "127.0.0.1", "blue", str(folder), (), telemetry, TOKEN)


async def test_it_serves_from_its_creation_on_and_ends_with_the_pool(tmp_path: Path) -> None:
    folder = tmp_path / "kvorum-blue"
    with arena_in(folder, blocks=range(3)):
        actor = KvAgentActor(spec(folder))
        info = await actor.ready()
        assert (info.pid, info.node_id, info.host) == (os.getpid(), "node", "127.0.0.1")
        assert len(await read(info.address, range(3))) == 3 * RANKS
        report = kvpool_pb2.AgentReport.FromString(await actor.report())
        assert (report.blocks_sent, report.arenas[0].ready) == (3, 3)
        await actor.stop()
    assert not folder.exists()


async def test_the_one_that_ray_makes_after_it_listens_at_the_same_port(tmp_path: Path) -> None:
    folder = tmp_path / "kvorum-blue"
    first = KvAgentActor(spec(folder))
    address = (await first.ready()).address
    await first._agent.stop()  # as if it had been killed: the folder is left
    second = KvAgentActor(spec(folder))
    assert (await second.ready()).address == address
    await second.stop()


async def test_it_says_why_it_cannot_start_and_leaves_the_rest_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_actor, "_LAST_WORDS_S", 0.0)
    ended: list[int] = []
    monkeypatch.setattr(agent_actor.os, "_exit", ended.append)
    (tmp_path / "file").touch()
    actor = KvAgentActor(spec(tmp_path / "file" / "kvorum-blue"))
    with pytest.raises(OSError, match="Not a directory"):
        await actor.ready()
    await eventually(lambda: ended == [1])


async def test_its_metrics_go_where_those_of_replicas_go(tmp_path: Path) -> None:
    viewer, folder = FakeViewer(), tmp_path / "kvorum-blue"
    with arena_in(folder, blocks=range(3)):
        actor = KvAgentActor(spec(folder, ViewerTarget(address=viewer.address, token=TOKEN)))
        await read((await actor.ready()).address, range(3))
        actor._telemetry.meters.flush(10)
        await actor.stop()
    viewer.stop()
    assert {
        "kvorum.kv_agent.blocks",
        "kvorum.kv_agent.streams",
        "kvorum.kv_agent.peers.avoided",
        "kvorum.kv_agent.arena.ready",
        "kvorum.kv_agent.arena.corrupt",
    } <= viewer.names()
    resource = viewer.requests[0].resource_metrics[0].resource
    told = {item.key: item.value.string_value for item in resource.attributes}
    assert (told["service.name"], told["service.instance.id"]) == ("kvorum.kv-agent", "127.0.0.1/node")


async def test_a_replica_of_its_host_learns_the_port_of_the_one_that_ray_makes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kvorum-blue"
    first = KvAgentActor(spec(folder))
    told = (await first.ready()).address
    placed = ShardSlot(0, 0, "node", "127.0.0.1")
    placement = ReplicaPlacement("r0", "e0", "ns", "", "cpu", "none", (placed,), kv_agent=told)
    replicas = AgentAddress.of(placement, folder)
    assert replicas.now() == told
    await first._agent.stop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(told.rpartition(":")[2])))
        taken.listen()
        monkeypatch.setattr(agent, "AgentSettings", partial(agent.AgentSettings, port_wait_s=0.1))
        second = KvAgentActor(spec(folder))
        moved = (await second.ready()).address
    assert replicas.now() == moved != told
    await second.stop()
