"""Hosts an agent in a Ray actor: named, detached, one for each node, restarted by Ray, on a port that
stays while nobody else takes it.

The controller imports this module for the actor's class; what serves is imported inside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telemetry.config import TelemetryConfig
from telemetry.logs import configure_logging
from telemetry.setup import configure
from workers.kvpool.agent_port import port_file
from workers.kvpool.folder import remove_folder
from workers.pinning import pin_process

log = logging.getLogger(__name__)

AGENT_PREFIX = "kv-agent-"
"""Of the actors' names in the cluster's Ray namespace; the node's id follows."""

SERVICE = "kvorum.kv-agent"

_NICENESS = 5
"""Whoever computes goes first."""
_SWITCH_S = 0.0005
"""Between threads: one that holds an arena's mutex must not wait 5 ms for one that serves."""
_LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class AgentSpec:
    """All that an agent is made from; Ray hands it to a restarted one again."""

    node_id: str
    host: str
    """The node's address."""
    cluster_id: str
    folder: str
    """Of the cluster's arenas."""
    front_cores: tuple[int, ...]
    telemetry: TelemetryConfig
    token: str = field(repr=False)


@dataclass(frozen=True)
class AgentInfo:
    """Where an agent listens."""

    address: str
    pid: int
    node_id: str
    host: str


class KvAgentActor:
    """Serves from its creation on."""

    def __init__(self, spec: AgentSpec) -> None:
        configure_logging(SERVICE, format=spec.telemetry.log_format)
        pin_process(spec.front_cores)
        os.nice(_NICENESS)
        sys.setswitchinterval(_SWITCH_S)
        self._spec = spec
        # Ray nodes of one host are told apart; the agent that Ray restarts goes on as the same one.
        self._telemetry = configure(SERVICE, f"{spec.host}/{spec.node_id[:8]}", spec.telemetry)
        self._agent: Any = None
        self._serving = asyncio.ensure_future(self._serve())
        self._serving.add_done_callback(_exit_if_failed)

    async def ready(self) -> AgentInfo:
        """Once it listens. Raises OSError when there is no port to be had, or no folder."""
        address = await asyncio.shield(self._serving)
        return AgentInfo(address, os.getpid(), self._spec.node_id, self._spec.host)

    async def report(self) -> bytes:
        """A serialized kvorum.v1.AgentReport."""
        await asyncio.shield(self._serving)
        report: bytes = (await self._agent.report()).SerializeToString()
        return report

    async def stop(self) -> None:
        """Close the port, and remove the cluster's arenas from this host: its replicas have ended. The
        caller then kills this actor."""
        self._serving.remove_done_callback(_exit_if_failed)
        self._serving.cancel()
        if self._agent is not None:
            self._agent.following.remove_done_callback(_exit_if_failed)
            await self._agent.stop()
        await asyncio.to_thread(remove_folder, Path(self._spec.folder), self._spec.cluster_id)
        await asyncio.to_thread(self._telemetry.shutdown)  # last: it may take seconds, and matters least

    async def _serve(self) -> str:
        from workers.kvpool.agent import AgentSettings, KvAgent  # noqa: PLC0415
        from workers.kvpool.agent_metrics import AgentMetrics  # noqa: PLC0415

        spec = self._spec
        folder = Path(spec.folder)
        settings = AgentSettings(folder, spec.host, port_file=port_file(folder, spec.node_id))
        metrics = AgentMetrics(self._telemetry.meters)
        agent = KvAgent(settings, spec.token, observer=metrics)
        address = await agent.start()
        metrics.watch(agent)
        agent.following.add_done_callback(_exit_if_failed)
        self._agent = agent
        log.info("KV pool agent of node %s at %s", spec.node_id, address)
        return address


def _exit_if_failed(work: asyncio.Future[Any]) -> None:
    """Leave an agent that broke to Ray, which restarts it; first let `ready` say why."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.critical("the KV pool's agent ended", exc_info=error)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, 1)
