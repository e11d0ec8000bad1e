"""The KV pool's agents, as the controller keeps them: one for each node that has replicas with a pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.rayerrors import last_line
from protos import admin_pb2, kvpool_pb2
from workers.kvpool.agent_actor import AGENT_PREFIX, AgentInfo, AgentSpec, KvAgentActor
from workers.placement import ShardSlot

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_AGAIN_TIMEOUT_S = 2.0
"""One that has listened before listens there again soon."""
_ANSWER_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 10.0


class Actors(Protocol):
    """Where agents come from: Ray, or a test. All may block."""

    def create(self, spec: AgentSpec) -> Any:
        """The agent of the node, made unless there is one."""
        ...

    def found(self) -> Mapping[str, Any]:
        """Those there are, by node id."""
        ...

    def kill(self, agent: Any) -> None:
        """For good; one that is gone is fine."""
        ...

    def lost_nodes(self) -> set[str]:
        """Ids of the nodes that were there and are not. One that comes back has another id."""
        ...


@dataclass
class _Agent:
    actor: Any
    """None: it could not be made."""
    host: str
    """Its node's address; the node's id until it has said."""
    info: AgentInfo | None = None
    report: kvpool_pb2.AgentReport = field(default_factory=kvpool_pb2.AgentReport)
    silence: str = ""
    """Why it did not answer when it was last asked."""


class KvAgents:
    """A replica that cannot have an agent serves without one: it then shares blocks on its own host only.

    Args:
        spec: of the agent of a node, by the node's id and address.
        actors: where they come from.
    """

    def __init__(self, spec: Callable[[str, str], AgentSpec], actors: Actors) -> None:
        self._spec = spec
        self._actors = actors
        self._agents: dict[str, _Agent] = {}
        self._starting: dict[str, asyncio.Task[str]] = {}

    async def adopt(self) -> None:
        """Take over those that a controller before this one started."""
        for node_id, actor in (await asyncio.to_thread(self._actors.found)).items():
            self._agents[node_id] = _Agent(actor, host=node_id)
        await self.refresh()

    async def address(self, slots: Sequence[ShardSlot]) -> str:
        """host:port of the agent on the node of a replica that has all its shards there, started if need be.

        Empty, and the status says why, when there is none.
        """
        slot = slots[0]
        starting = self._starting.get(slot.node_id)
        if starting is None:  # replicas of one node start at once, and share it
            starting = asyncio.create_task(self._started(slot.node_id, slot.node_ip))
            self._starting[slot.node_id] = starting
            starting.add_done_callback(lambda _: self._starting.pop(slot.node_id, None))
        return await asyncio.shield(starting)

    async def refresh(self) -> None:
        """Ask each what it has and does."""
        await asyncio.gather(*(self._ask(agent) for agent in list(self._agents.values())))
        if any(agent.silence for agent in self._agents.values()):
            await self._forget_lost()

    def status(self) -> list[admin_pb2.KvPoolStatus]:
        """As the admin API shows them, by host."""
        return [
            admin_pb2.KvPoolStatus(
                node=agent.host,
                agent=agent.info.address if agent.info else "",
                pid=agent.info.pid if agent.info else 0,
                silence=agent.silence,
                report=agent.report,
            )
            for agent in sorted(self._agents.values(), key=lambda agent: agent.host)
        ]

    async def stop(self) -> None:
        """End them, each after it has removed its host's arenas. Replicas have ended before."""
        for starting in list(self._starting.values()):
            starting.cancel()
        agents, self._agents = list(self._agents.values()), {}
        await asyncio.gather(*(self._end(agent) for agent in agents))

    async def _started(self, node_id: str, host: str) -> str:
        agent = self._agents.setdefault(node_id, _Agent(None, host))
        try:
            if agent.actor is None:
                agent.actor = await asyncio.to_thread(self._actors.create, self._spec(node_id, host))
            async with asyncio.timeout(_AGAIN_TIMEOUT_S if agent.info else _START_TIMEOUT_S):
                agent.info = await agent.actor.ready.remote()
            agent.silence = ""
        except (RayError, ValueError, OSError) as error:  # a TimeoutError is an OSError
            agent.silence = _said(error)
            log.error("the KV pool agent of node %s is not up: %s", host, agent.silence)
        return agent.info.address if agent.info else ""

    async def _ask(self, agent: _Agent) -> None:
        if agent.actor is None:
            return
        known = agent.info
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                agent.info = info = await agent.actor.ready.remote()
                agent.report.ParseFromString(await agent.actor.report.remote())
            agent.silence = ""
        except (RayError, ValueError, OSError) as error:
            agent.silence = _said(error)
            return
        agent.host = info.host
        if known is not None and known.address != info.address:
            log.warning(
                "the KV pool agent of node %s moved from %s to %s: replicas there learn it from its file, "
                "routers from them",
                agent.host,
                known.address,
                info.address,
            )

    async def _forget_lost(self) -> None:
        """Of agents whose nodes are gone nothing is left to show or to start again."""
        try:
            lost = await asyncio.to_thread(self._actors.lost_nodes)
        except RayError as error:
            log.warning("cannot tell which nodes are gone: %s", _said(error))
            return
        for node_id in lost & (self._agents.keys() - self._starting.keys()):
            agent = self._agents.pop(node_id, None)  # None: stopped meanwhile
            if agent is None:
                continue
            log.warning("the KV pool of %s is gone with its node", agent.host)
            if agent.actor is not None:
                await asyncio.to_thread(self._actors.kill, agent.actor)

    async def _end(self, agent: _Agent) -> None:
        if agent.actor is None:
            return
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await agent.actor.stop.remote()
        except (RayError, ValueError, OSError) as error:
            log.error("the KV pool of node %s may be left there: %s", agent.host, _said(error))
        await asyncio.to_thread(self._actors.kill, agent.actor)


def _said(error: Exception) -> str:
    return "no answer" if isinstance(error, TimeoutError) else last_line(error)


class RayActors:
    """In the connected Ray, in its namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def create(self, spec: AgentSpec) -> Any:
        """See `Actors`. Raises RayError, ValueError."""
        options: dict[str, Any] = {
            "name": f"{AGENT_PREFIX}{spec.node_id}",
            "namespace": self._namespace,
            "get_if_exists": True,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": 16,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(spec.node_id, soft=False),
        }
        return ray.remote(KvAgentActor).options(**options).remote(spec)

    def found(self) -> Mapping[str, Any]:
        """See `Actors`."""
        names = [name for name in ray.util.list_named_actors() if name.startswith(AGENT_PREFIX)]
        found: dict[str, Any] = {}
        for name in names:
            with contextlib.suppress(ValueError, RayError):  # gone since
                found[name.removeprefix(AGENT_PREFIX)] = ray.get_actor(name, self._namespace)
        return found

    def kill(self, agent: Any) -> None:
        """See `Actors`."""
        with contextlib.suppress(RayError, ValueError):
            ray.kill(agent, no_restart=True)

    def lost_nodes(self) -> set[str]:
        """See `Actors`. Raises RayError."""
        return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
