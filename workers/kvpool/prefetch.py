"""Brings a prompt's blocks from another host into this host's arena, for the engine to find them there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import grpc
import grpc.aio
import numpy as np

from protos import kvpool_pb2, kvpool_pb2_grpc
from protos.channels import bearer, open_channel
from protos.common_pb2 import KvFetch

log = logging.getLogger(__name__)

PULLS_AT_ONCE: Final = 8
"""Of one replica; further requests compute instead of waiting for a turn."""
LEAST_S: Final = 0.05
"""A pull that has less time is not worth asking for."""
GRACE_S: Final = 0.5
"""Beyond the pull's own deadline, for the agent to say what has come until then."""
LONGEST_PAUSE_S: Final = 60.0


class _Agent:
    """One address of this host's agent."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.stub: kvpool_pb2_grpc.KvAgentAsyncStub = kvpool_pb2_grpc.KvAgentStub(channel)
        self.pulling = 0
        self.failures = 0
        self.resume_at = 0.0


class Prefetcher:
    """Asks the agent of this host to pull blocks. Whatever goes wrong, the request is merely computed.
    Use it within one event loop.

    An agent that fails is left alone for 1, 2, 4 … 60 s; one at another address is another one.

    Args:
        token: the cluster's.
        longest_s: no request waits longer for its blocks.
    """

    def __init__(self, token: str, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._credential = bearer(token)
        self._longest_s = longest_s
        self._clock = clock
        self._agent: _Agent | None = None
        self._former: list[_Agent] = []  # that still serve pulls, or did a moment ago
        self._pulling = 0

    async def fetch(
        self,
        agent: str,
        namespace: str,
        source: str,
        router_keys: Sequence[int],
        time_left_s: float | None = None,
    ) -> KvFetch:
        """What asking for these blocks brought, within half of the time that is left to the request.

        Raises CancelledError alone.

        Args:
            agent: host:port of this host's agent, as it is known now.
            namespace: of this host's arena.
            source: host:port of the agent that has the blocks.
            router_keys: of the blocks that are lacking here, in the prompt's order.
            time_left_s: until the request's deadline; None: it has none.
        """
        limit_s = self._longest_s if time_left_s is None else min(self._longest_s, time_left_s / 2)
        began = self._clock()
        asked = self._at(agent)
        told = KvFetch(agent=source, failed=self._why_not(asked, limit_s, began))
        if told.failed:
            return told
        request = kvpool_pb2.PullRequest(
            namespace=namespace,
            source=source,
            router_keys=np.array(router_keys, "<u8").tobytes(),
            timeout_s=limit_s,
        )
        self._pulling += 1
        asked.pulling += 1
        try:
            answer = await self._pull(asked, request, limit_s + GRACE_S)
        except Exception as error:
            told.failed = self._failed(asked, error)
        else:
            asked.failures = 0
            told.blocks = min(max(0, answer.blocks), len(router_keys))
            told.bytes, told.failed = max(0, answer.bytes), answer.failed
        finally:
            self._pulling -= 1
            asked.pulling -= 1
            await self._close_former()
        told.seconds = self._clock() - began
        return told

    async def close(self) -> None:
        agents, self._agent, self._former = [*self._former, self._agent], None, []
        for agent in agents:
            if agent is not None:
                await agent.channel.close()

    def _at(self, address: str) -> _Agent:
        """The agent to ask. Pulls that the one before it serves go on there."""
        if self._agent is not None and self._agent.address == address:
            return self._agent
        if self._agent is not None:
            self._former.append(self._agent)
        self._agent = _Agent(address, open_channel(address))
        return self._agent

    async def _close_former(self) -> None:
        over = [agent for agent in self._former if not agent.pulling]
        self._former = [agent for agent in self._former if agent.pulling]
        for agent in over:
            await agent.channel.close()

    async def _pull(
        self, agent: _Agent, request: kvpool_pb2.PullRequest, timeout_s: float
    ) -> kvpool_pb2.PullResponse:
        async with asyncio.timeout(timeout_s):  # gRPC's own deadline does not count its connecting
            return await agent.stub.Pull(request, timeout=timeout_s, metadata=self._credential)

    def _why_not(self, agent: _Agent, limit_s: float, now: float) -> str:
        """Empty when the agent is to be asked."""
        if now < agent.resume_at:
            return f"this host's agent, {agent.address}, failed a moment ago"
        if self._pulling >= PULLS_AT_ONCE:
            return f"this replica waits for {self._pulling} pulls already"
        return "" if limit_s >= LEAST_S else "the request has no time left to wait for blocks"

    def _failed(self, agent: _Agent, error: Exception) -> str:
        """The agent is left alone for a while; why, in a line."""
        why = f"this host's agent, {agent.address}, failed: {_text(error)}"
        if (now := self._clock()) >= agent.resume_at:  # of pulls that fail together, the first
            pause_s = min(LONGEST_PAUSE_S, 2.0**agent.failures)
            agent.failures = min(agent.failures + 1, 6)
            agent.resume_at = now + pause_s
            log.warning("%s; it is not asked for %.0f s", why, pause_s)
        return why


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return "no answer in time" if isinstance(error, TimeoutError) else repr(error)
