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


class Prefetcher:
    """Asks the agent of this host to pull blocks. Whatever goes wrong, the request is merely computed.
    To be made on the event loop.

    An agent that fails is left alone for 1, 2, 4 … 60 s.

    Args:
        agent: host:port of this host's agent.
        token: the cluster's.
        longest_s: no request waits longer for its blocks.
    """

    def __init__(
        self, agent: str, token: str, longest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._agent = agent
        self._credential = bearer(token)
        self._longest_s = longest_s
        self._clock = clock
        self._channel = open_channel(agent)
        self._stub: kvpool_pb2_grpc.KvAgentAsyncStub = kvpool_pb2_grpc.KvAgentStub(self._channel)
        self._pulling = 0
        self._failures = 0
        self._resume_at = 0.0

    async def fetch(
        self, namespace: str, source: str, router_keys: Sequence[int], time_left_s: float | None = None
    ) -> KvFetch:
        """What asking for these blocks brought, within half of the time that is left to the request.

        Raises CancelledError alone.

        Args:
            namespace: of this host's arena.
            source: host:port of the agent that has the blocks.
            router_keys: of the blocks that are lacking here, in the prompt's order.
            time_left_s: until the request's deadline; None: it has none.
        """
        limit_s = self._longest_s if time_left_s is None else min(self._longest_s, time_left_s / 2)
        began = self._clock()
        told = KvFetch(agent=source, failed=self._why_not(limit_s, began))
        if told.failed:
            return told
        request = kvpool_pb2.PullRequest(
            namespace=namespace,
            source=source,
            router_keys=np.array(router_keys, "<u8").tobytes(),
            timeout_s=limit_s,
        )
        self._pulling += 1
        try:
            answer = await self._pull(request, limit_s + GRACE_S)
        except Exception as error:
            told.failed = self._failed(error)
        else:
            self._failures = 0
            told.blocks = min(max(0, answer.blocks), len(router_keys))
            told.bytes, told.failed = max(0, answer.bytes), answer.failed
        finally:
            self._pulling -= 1
        told.seconds = self._clock() - began
        return told

    async def close(self) -> None:
        await self._channel.close()

    async def _pull(self, request: kvpool_pb2.PullRequest, timeout_s: float) -> kvpool_pb2.PullResponse:
        async with asyncio.timeout(timeout_s):  # gRPC's own deadline does not count its connecting
            return await self._stub.Pull(request, timeout=timeout_s, metadata=self._credential)

    def _why_not(self, limit_s: float, now: float) -> str:
        """Empty when the agent is to be asked."""
        if now < self._resume_at:
            return f"this host's agent, {self._agent}, failed a moment ago"
        if self._pulling >= PULLS_AT_ONCE:
            return f"this replica waits for {self._pulling} pulls already"
        return "" if limit_s >= LEAST_S else "the request has no time left to wait for blocks"

    def _failed(self, error: Exception) -> str:
        """The agent is left alone for a while; why, in a line."""
        why = f"this host's agent, {self._agent}, failed: {_text(error)}"
        if (now := self._clock()) >= self._resume_at:  # of pulls that fail together, the first
            pause_s = min(LONGEST_PAUSE_S, 2.0**self._failures)
            self._failures = min(self._failures + 1, 6)
            self._resume_at = now + pause_s
            log.warning("%s; it is not asked for %.0f s", why, pause_s)
        return why


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return "no answer in time" if isinstance(error, TimeoutError) else repr(error)
