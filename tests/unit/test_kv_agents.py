"""The controller's agents: one for each node with a pool, whatever becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from helpers_kvagent import eventually
from helpers_supervisor import surroundings
from ray.exceptions import RayError

from cluster import supervisor as supervisors
from cluster.kv_agents import KvAgents
from cluster.supervisor import ReplicaRecord, ReplicaSupervisor, to_status
from protos import admin_pb2, common_pb2, kvpool_pb2
from telemetry.config import TelemetryConfig
from workers.kvpool.agent_actor import AgentInfo, AgentSpec
from workers.placement import ReplicaPlacement, ShardSlot


class Method:
    """As Ray's handles have them."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class FakeAgent:
    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        self.address = f"{spec.host}:4000"
        self.error: Exception | None = None
        self.stopped = False
        self.killed = False
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.ready, self.report, self.stop = Method(self._ready), Method(self._report), Method(self._stop)

    async def _ready(self) -> AgentInfo:
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return AgentInfo(self.address, 7, self.spec.node_id, self.spec.host)

    async def _report(self) -> bytes:
        return kvpool_pb2.AgentReport(blocks_sent=5).SerializeToString()

    async def _stop(self) -> None:
        if self.error is not None:
            raise self.error
        self.stopped = True


class FakeActors:
    def __init__(self) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.made = 0
        self.lost: set[str] = set()
        self.error: Exception | None = None

    def create(self, spec: AgentSpec) -> Any:
        if self.error is not None:
            raise self.error
        self.made += spec.node_id not in self.agents
        return self.agents.setdefault(spec.node_id, FakeAgent(spec))

    def found(self) -> Mapping[str, Any]:
        return dict(self.agents)

    def kill(self, agent: Any) -> None:
        agent.killed = True

    def lost_nodes(self) -> set[str]:
        return self.lost


def spec(node_id: str, host: str) -> AgentSpec:
    return AgentSpec(
        node_id, host, "blue", "/dev/shm/kvorum-blue", (), TelemetryConfig(enabled=False), "token"
    )


@pytest.fixture
def actors() -> FakeActors:
    return FakeActors()


@pytest.fixture
def agents(actors: FakeActors) -> KvAgents:
    return KvAgents(spec, actors)


def placed(*nodes: str) -> tuple[ShardSlot, ...]:
    return tuple(ShardSlot(rank, rank, node, f"10.0.0.{node}") for rank, node in enumerate(nodes))


async def test_replicas_of_one_node_share_an_agent(agents: KvAgents, actors: FakeActors) -> None:
    found = await asyncio.gather(*(agents.address(placed(node, node)) for node in "1121"))
    assert found == ["10.0.0.1:4000", "10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.1:4000"]
    assert actors.made == 2
    assert actors.agents["1"].asked == 1
    assert [(pool.node, pool.agent, pool.silence) for pool in agents.status()] == [
        ("10.0.0.1", "10.0.0.1:4000", ""),
        ("10.0.0.2", "10.0.0.2:4000", ""),
    ]


@pytest.mark.parametrize("error", [RayError("no such node"), ValueError("name taken")])
async def test_a_replica_serves_without_an_agent_that_cannot_be_made(
    agents: KvAgents, actors: FakeActors, error: Exception
) -> None:
    actors.error = error
    assert await agents.address(placed("1")) == ""
    await agents.refresh()
    ((pool),) = agents.status()
    assert (pool.node, pool.agent, pool.silence) == ("10.0.0.1", "", str(error))
    actors.error = None
    assert await agents.address(placed("1")) == "10.0.0.1:4000"
    assert agents.status()[0].silence == ""
    await agents.stop()


async def test_an_agent_that_is_away_keeps_its_address(agents: KvAgents, actors: FakeActors) -> None:
    await agents.address(placed("1"))
    await agents.refresh()
    actors.agents["1"].error = RayError("died\nof a signal")
    assert await agents.address(placed("1")) == "10.0.0.1:4000"
    await agents.refresh()
    (pool,) = agents.status()
    assert (pool.agent, pool.silence, pool.report.blocks_sent) == ("10.0.0.1:4000", "of a signal", 5)
    actors.agents["1"].error = None
    await agents.refresh()
    assert agents.status()[0].silence == ""


async def test_an_agent_is_forgotten_with_its_node(agents: KvAgents, actors: FakeActors) -> None:
    await agents.address(placed("1"))
    await agents.address(placed("2"))
    gone = actors.agents["1"]
    gone.error = RayError("the node doesn't exist any more")
    await agents.refresh()
    assert [pool.node for pool in agents.status()] == ["10.0.0.1", "10.0.0.2"]
    actors.lost = {"1", "one that had no agent"}
    await agents.refresh()
    assert [(pool.node, pool.silence) for pool in agents.status()] == [("10.0.0.2", "")]
    assert (gone.killed, actors.agents["2"].killed) == (True, False)


async def test_a_restarted_controller_finds_the_agents_again(actors: FakeActors) -> None:
    await KvAgents(spec, actors).address(placed("1"))
    later = KvAgents(spec, actors)
    await later.adopt()
    (pool,) = later.status()
    assert (pool.node, pool.agent, pool.report.blocks_sent) == ("10.0.0.1", "10.0.0.1:4000", 5)
    assert actors.made == 1


async def test_a_starting_replica_that_is_given_up_does_not_end_the_agents_start(
    agents: KvAgents, actors: FakeActors
) -> None:
    actors.agents["1"] = FakeAgent(spec("1", "10.0.0.1"))
    actors.agents["1"].gate.clear()
    first, second = (asyncio.create_task(agents.address(placed("1"))) for _ in range(2))
    await eventually(lambda: actors.agents["1"].asked > 0)
    first.cancel()
    actors.agents["1"].gate.set()
    assert await second == "10.0.0.1:4000"


async def test_all_are_stopped_and_killed_even_those_that_do_not_answer(
    agents: KvAgents, actors: FakeActors
) -> None:
    await asyncio.gather(*(agents.address(placed(node)) for node in "12"))
    actors.agents["2"].error = RayError("dead")
    await agents.stop()
    assert [agent.stopped for agent in actors.agents.values()] == [True, False]
    assert [agent.killed for agent in actors.agents.values()] == [True, True]
    assert agents.status() == []


def supervised(monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], *nodes: str) -> ReplicaSupervisor:
    monkeypatch.setattr(supervisors.ray, "get_actor", lambda *_: None)
    made = ReplicaSupervisor("replica-0", surroundings(engine))
    made.record.slots = placed(*nodes)
    return made


@pytest.mark.parametrize(
    ("engine", "nodes", "wanted", "why"),
    [
        ({}, "1", False, ""),
        ({"kv_pool_gib": 1.0}, "1", True, ""),
        ({"kv_pool_gib": 1.0}, "12", False, "the shards are on 2 hosts"),
        ({"kv_pool_gib": 1.0, "pipeline_parallel_size": 2}, "1", False, "pipeline_parallel_size"),
    ],
)
def test_an_agent_is_for_replicas_that_can_have_a_pool(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], nodes: str, wanted: bool, why: str
) -> None:
    supervisor = supervised(monkeypatch, engine, *nodes)
    assert supervisor._look_for_pool() is wanted
    assert why in supervisor.record.no_pool
    assert bool(supervisor.record.no_pool) is bool(why)


def test_the_status_says_why_a_replica_shares_nothing() -> None:
    def told(load: common_pb2.ReplicaLoad | None, **fields: Any) -> str:
        return to_status(ReplicaRecord("r", state=admin_pb2.READY, **fields), load).no_pool

    with_pool, without = common_pb2.ReplicaLoad(pool_slots=8), common_pb2.ReplicaLoad()
    assert told(without) == ""
    assert told(with_pool, pool_wanted=True) == ""
    assert told(None, pool_wanted=True) == ""
    assert "its log says why" in told(without, pool_wanted=True)
    assert told(without, pool_wanted=True, no_pool="two hosts") == "two hosts"


def test_the_agents_address_travels_to_the_replica() -> None:
    placement = ReplicaPlacement("r0", "e0", "ns", "", "cpu", "none", placed("1"), kv_agent="10.0.0.1:4000")
    assert ReplicaPlacement.from_config(placement.to_config()) == placement
