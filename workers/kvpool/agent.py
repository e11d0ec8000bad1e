"""One host's agent: sends blocks of its arenas to other hosts, and brings theirs when a replica here asks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import common_pb2, kvpool_pb2, kvpool_pb2_grpc
from protos.channels import bind, create_server
from protos.errors import KvorumError, invalid, to_status
from workers.kvpool.agent_observer import AgentCounts, AgentObserver, SilentObserver
from workers.kvpool.agent_port import AgentPort
from workers.kvpool.agent_report import arena_reports, peer_reports
from workers.kvpool.errors import ArenaBusy, ArenaError
from workers.kvpool.host_arenas import ArenaFigures, HostArenas
from workers.kvpool.peers import Peers
from workers.kvpool.pull import Puller, PullLimits
from workers.kvpool.transport import STALL_S, GrpcTransport, Transport, unpack_names
from workers.kvpool.wire import messages
from workers.kvpool.work_threads import WorkThreads

log = logging.getLogger(__name__)

SERVICE: Final = kvpool_pb2.DESCRIPTOR.services_by_name["KvAgent"].full_name
MOST_NAMES: Final = 1 << 17
"""In one call: a prompt of two million tokens in blocks of 16."""

_MOST_CALLS: Final = 256
_BIND_AGAIN_S: Final = 0.25
_STOP_GRACE_S: Final = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class AgentSettings:
    """What one agent works with."""

    folder: Path
    """Of the cluster's arenas on this host."""
    host: str
    """Address to listen at, which other hosts reach."""
    port_file: Path | None = None
    """Remembers the port, for the agent that comes after this one."""
    limits: PullLimits = field(default_factory=PullLimits)
    reads: int = 16
    """Other agents' calls served at once; further ones are refused."""
    read_batch_bytes: int = 2 << 20
    """Copied out of an arena together, and a block at least."""
    stall_s: float = STALL_S
    port_wait_s: float = 5.0
    """For which the port of the agent before this one is tried, before another is taken."""
    threads: int = 4
    follow_s: float = 1.0
    """How often the arenas' changes are followed while nobody asks."""


class KvAgentServicer(kvpool_pb2_grpc.KvAgentServicer):
    """The calls; what they need is made, and closed, by `KvAgent`."""

    def __init__(
        self,
        settings: AgentSettings,
        arenas: HostArenas,
        puller: Puller,
        peers: Peers,
        threads: WorkThreads,
        *,
        observer: AgentObserver,
    ) -> None:
        self._settings = settings
        self._arenas = arenas
        self._puller = puller
        self._peers = peers
        self._threads = threads
        self._observer = observer
        self._reads = 0
        self._reads_refused = 0
        self._sent = 0
        self._sent_bytes = 0

    async def Pull(  # noqa: N802
        self, request: kvpool_pb2.PullRequest, context: _Context
    ) -> kvpool_pb2.PullResponse:
        try:
            names = _names(request.router_keys)
            if not request.source or not request.timeout_s > 0:
                raise invalid("source, timeout_s", "a pull needs an agent to ask and seconds to do it in")
            pulled = await self._puller.pull(request.source, request.namespace, names, request.timeout_s)
        except (KvorumError, ValueError) as error:
            await _refuse(context, error)
        except asyncio.CancelledError:
            self._observer.pulled(None)
            raise
        self._observer.pulled(pulled)
        return kvpool_pb2.PullResponse(
            blocks=pulled.blocks, bytes=pulled.size, seconds=pulled.seconds, failed=pulled.failed
        )

    async def Read(  # noqa: N802
        self, request: kvpool_pb2.ReadRequest, context: _Context
    ) -> AsyncIterator[kvpool_pb2.BlockChunk]:
        try:
            names = _names(request.router_keys)
            self._admit_read(context)
        except (KvorumError, ValueError) as error:
            await _refuse(context, error)
        self._reads += 1
        try:
            arena = await self._threads.run(self._arenas.get, request.namespace)
            keys = await self._threads.run(arena.prefix, names)
            step = max(1, self._settings.read_batch_bytes // arena.geometry.slot_bytes)
            for first in range(0, len(keys), step):
                wanted = keys[first : first + step]
                blocks = await self._threads.run(arena.read, wanted, first)
                for block in blocks:
                    for message in messages(block):
                        yield message
                    self._sent += 1
                    self._sent_bytes += arena.geometry.slot_bytes
                if len(blocks) < len(wanted):
                    return
        except (ArenaError, ValueError) as error:
            await _refuse(context, error)
        finally:
            self._reads -= 1

    async def DescribeAgent(  # noqa: N802
        self, request: kvpool_pb2.DescribeAgentRequest, context: _Context
    ) -> kvpool_pb2.AgentReport:
        return await self.report()

    async def report(self) -> kvpool_pb2.AgentReport:
        """What operators are shown."""
        return kvpool_pb2.AgentReport(
            arenas=await self._threads.run(arena_reports, self._arenas),
            peers=peer_reports(self._peers),
            blocks_sent=self._sent,
            blocks_received=self._puller.received,
            blocks_refused=self._puller.refused,
            pulls=self._puller.running,
        )

    def counts(self) -> AgentCounts:
        """See `KvAgent`."""
        return AgentCounts(
            blocks_sent=self._sent,
            bytes_sent=self._sent_bytes,
            blocks_received=self._puller.received,
            bytes_received=self._puller.received_bytes,
            blocks_refused=self._puller.refused,
            streams_refused=self._reads_refused,
            streams=self._reads,
            peers_avoided=sum(avoided_s > 0 for _, _, avoided_s in self._peers.known()),
        )

    def _admit_read(self, context: _Context) -> None:
        """Raises KvorumError."""
        if context.time_remaining() is None:
            raise invalid("deadline", "a read needs one: a caller that stops would hold its place for ever")
        if self._reads >= self._settings.reads:
            self._reads_refused += 1
            raise KvorumError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                common_pb2.OVERLOADED,
                f"this agent serves {self._reads} reads already: ask another, or later",
            )


class KvAgent:
    """The server and all that it needs. `start`, then `stop`.

    Args:
        settings: see there.
        token: the cluster's: asked of callers, and shown to peers.
        transport: to other hosts' agents; closed by `stop`. gRPC by default.
        clock: seconds, monotonic; for how long peers are avoided.
        observer: hears of pulls.
    """

    def __init__(
        self,
        settings: AgentSettings,
        token: str,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: AgentObserver | None = None,
    ) -> None:
        self._settings = settings
        self._token = token
        self._observer = observer or SilentObserver()
        self._transport = transport or GrpcTransport(token, settings.stall_s)
        self._clock = clock
        self._threads = WorkThreads(settings.threads, "kv-agent")
        self._arenas = HostArenas(settings.folder)
        self._port = AgentPort(settings.port_file)
        self.address = ""
        """host:port, once it listens."""

    async def start(self) -> str:
        """Listen, at the port of the agent before this one if there was one; returns the address.

        Raises OSError when there is no port to be had, or the folder cannot be made.
        """
        settings = self._settings
        await asyncio.to_thread(settings.folder.mkdir, mode=0o700, parents=True, exist_ok=True)
        peers = Peers(self._clock)
        self._puller = Puller(
            self._arenas, self._transport, peers, self._threads, limits=settings.limits, clock=self._clock
        )
        self._servicer = KvAgentServicer(
            settings, self._arenas, self._puller, peers, self._threads, observer=self._observer
        )
        self._server = create_server(tokens=[self._token], max_concurrent_rpcs=_MOST_CALLS)
        kvpool_pb2_grpc.add_KvAgentServicer_to_server(self._servicer, self._server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        port = await self._bound()
        await self._server.start()
        await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await asyncio.to_thread(self._port.remember, port)
        self.address = f"{settings.host}:{port}"
        self.following = asyncio.create_task(self._follow(), name="follows the arenas")
        return self.address

    async def report(self) -> kvpool_pb2.AgentReport:
        """See `KvAgentServicer`."""
        return await self._servicer.report()

    def counts(self) -> AgentCounts:
        """Once it has started; for any thread."""
        return self._servicer.counts()

    def arenas(self) -> list[ArenaFigures]:
        """Of its host; for any thread but the event loop's, as it may open them."""
        return self._arenas.figures()

    async def stop(self) -> None:
        """End what is going on, and free all that was held. The folder stays."""
        if not self.address:
            return
        self.following.cancel()
        await self._server.stop(_STOP_GRACE_S)
        await self._puller.close()
        await self._transport.close()
        await self._threads.close()  # before the arenas that they work in
        await asyncio.to_thread(self._arenas.close)

    async def _follow(self) -> None:
        """Keep up with the arenas, so that a call finds little to catch up with."""
        while True:
            await asyncio.sleep(self._settings.follow_s)
            await self._threads.run(self._arenas.follow)

    async def _bound(self) -> int:
        """Raises OSError."""
        host, wanted = self._settings.host, await asyncio.to_thread(self._port.remembered)
        until = asyncio.get_running_loop().time() + self._settings.port_wait_s
        while wanted and asyncio.get_running_loop().time() < until:
            try:
                return bind(self._server, host, wanted)
            except OSError:
                await asyncio.sleep(_BIND_AGAIN_S)
        if wanted:
            log.warning("port %d of the agent before this one is taken: others learn the new one", wanted)
        return bind(self._server, host, 0)


def _names(packed: bytes) -> list[int]:
    """Raises ValueError."""
    if not 0 < len(packed) <= 8 * MOST_NAMES:
        raise ValueError(
            f"router_keys names {len(packed) // 8} blocks, and 1 to {MOST_NAMES} can be asked for"
        )
    return unpack_names(packed)


async def _refuse(context: _Context, error: Exception) -> NoReturn:
    """Ends the call, by raising."""
    if isinstance(error, ArenaBusy):
        error = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.OVERLOADED, str(error))
    elif isinstance(error, ArenaError):
        error = KvorumError(grpc.StatusCode.NOT_FOUND, common_pb2.NOT_FOUND, str(error))
    elif not isinstance(error, KvorumError):
        error = invalid("request", str(error))
    await context.abort_with_status(to_status(error))
    raise error
