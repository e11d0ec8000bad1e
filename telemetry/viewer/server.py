"""The viewer as a running service: HTTP and OTLP/gRPC, from `start` to `stop`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc.aio
import uvicorn

from telemetry.store import SpanStore, StoreError
from telemetry.viewer.app import Fleet, Scrape, ViewerApp
from telemetry.viewer.metric_table import MetricTable
from telemetry.viewer.otlp_grpc import create_server
from telemetry.viewer.receiver import Receiver
from telemetry.viewer.security import Guard, Keys
from telemetry.viewer.settings import ViewerSettings

log = logging.getLogger(__name__)

_START_S: Final = 10.0
_GRACE_S: Final = 1
_OVER_GRACE_S: Final = 2.0
_MOST_CONNECTIONS: Final = 512
_KEEP_ALIVE_S: Final = 75
_BACKLOG: Final = 256


@dataclass(frozen=True)
class ViewerAddresses:
    """Where it listens: a URL for all that is HTTP, and host:port for OTLP/gRPC."""

    http: str
    otlp: str


class Viewer:
    """Receives OTLP, and shows what it and the store hold.

    Args:
        store: the span store of this host, which other processes write as well; not closed by `stop`.
        fleet: the state of the cluster, as JSON values; asked for while somebody looks at it.
        scrape: the Prometheus text of each replica's engine by the replica's name; asked for with /metrics.

    Neither callable has to be quick or reliable: answers are waited for, kept and shared as the settings say.
    A viewer is started once.
    """

    def __init__(
        self,
        settings: ViewerSettings,
        *,
        store: SpanStore,
        fleet: Fleet | None = None,
        scrape: Scrape | None = None,
    ) -> None:
        self._settings = settings
        self._keys = Keys(settings.key_digests)
        # Handles of its own: who looks at a trace does not keep the spans that come in waiting.
        self._reads, self._writes = store.twin(), store.twin()
        table = MetricTable(max_series=settings.max_series, silence_s=settings.metric_silence_s)
        self._receiver = Receiver(self._writes, table, settings)
        self._app = ViewerApp(settings, self._reads, self._receiver, table, fleet=fleet, scrape=scrape)
        self._grpc: grpc.aio.Server | None = None
        self._http: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> ViewerAddresses:
        """Listen. A store that cannot be written is logged, and no reason not to.

        Raises:
            OSError: a port is taken, or the address is not this host's; nothing listens then.
        """
        try:
            await asyncio.to_thread(self._writes.write, [])
        except StoreError as error:
            log.warning("%s; spans that come in are lost", error)
        try:
            otlp_port = await self._start_grpc()
            http_port = await self._start_http()
        except BaseException:
            await self.stop()
            raise
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        scheme = "http" if self._settings.tls_cert is None else "https"
        return ViewerAddresses(f"{scheme}://{host}:{http_port}", f"{host}:{otlp_port}")

    async def stop(self) -> None:
        """End it, within seconds; idempotent."""
        http, serving, rpc = self._http, self._serving, self._grpc
        self._http = self._serving = self._grpc = None
        if rpc is not None:
            await rpc.stop(_GRACE_S)
        if http is not None and serving is not None:
            http.should_exit = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S + _OVER_GRACE_S):
                    await serving
        await self._app.close()
        self._receiver.close()
        for store in (self._reads, self._writes):
            await asyncio.to_thread(store.close)

    async def _start_grpc(self) -> int:
        host, port = self._settings.host, self._settings.otlp_port
        self._grpc = create_server(self._receiver, self._keys, self._settings)
        try:
            bound = self._grpc.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            reason = "the port is in use or the address is not this host's"
            raise OSError(f"cannot listen for OTLP on {host}:{port}: {reason}") from error
        await self._grpc.start()
        return bound

    async def _start_http(self) -> int:
        bound = _bound(self._settings.host, self._settings.http_port)
        config = uvicorn.Config(
            Guard(self._app.asgi, self._keys, local=self._settings.on_loopback),
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            ws="none",
            backlog=_BACKLOG,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=self._settings.tls_cert,
            ssl_keyfile=self._settings.tls_key,
        )
        try:
            config.load()
        except OSError as error:  # an SSLError is one
            bound.close()
            raise OSError(
                f"the viewer's certificate {self._settings.tls_cert} is of no use: {error}"
            ) from error
        self._http = server = _Server(config)
        self._serving = asyncio.create_task(server.serve(sockets=[bound]), name="viewer-http")
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait({self._serving, up}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            bound.close()
            raise OSError(f"the HTTP server on {self._settings.host} did not start")
        port: int = bound.getsockname()[1]
        return port


class _Server(uvicorn.Server):
    """Without signal handlers of its own: the process has other work."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket for asyncio.

    SO_REUSEADDR: connections of a viewer that just ended must not keep its successor from the port. The
    protocol is named because asyncio sets TCP_NODELAY only where it is; without, small answers wait 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(
            error.errno, f"cannot listen for HTTP on {host}:{port}: {error.strerror or error}"
        ) from None
    return bound
