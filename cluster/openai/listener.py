"""A listening HTTP server inside a process that has other work: uvicorn without its signal handling."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, Field

log = logging.getLogger(__name__)

_START_S = 10.0
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep idle connections, so that it is they who close them."""
_OVER_GRACE_S = 2.0


class Listen(BaseModel):
    """Where to listen; with a certificate, for HTTPS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    port: int = Field(ge=0, le=65535)
    tls_cert: Path | None = None
    tls_key: Path | None = None


class Listener:
    """Serves one ASGI app from `open` to `close`, in the event loop of both."""

    def __init__(self, server: uvicorn.Server, serving: asyncio.Task[None], port: int) -> None:
        self._server = server
        self._serving = serving
        self.port = port

    @classmethod
    async def open(cls, app: Any, listen: Listen, *, grace_s: float) -> Listener:
        """Listen, and return once connections are accepted.

        Args:
            app: the ASGI app; it gets no lifespan events.
            grace_s: how long `close` lets running requests finish.

        Raises:
            OSError: the port is taken, the address is not this host's, or the TLS files do not fit.
        """
        bound = _bind(listen)
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(grace_s)),
            ssl_certfile=listen.tls_cert,
            ssl_keyfile=listen.tls_key,
        )
        try:
            config.load()  # reads the certificate
        except BaseException:
            bound.close()
            raise
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[bound]), name="http-listener")
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait({serving, up}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            for task in (up, serving):
                task.cancel()
            bound.close()
            raise OSError(f"the HTTP server on {listen.host}:{listen.port} did not start")
        return cls(server, serving, bound.getsockname()[1])

    @property
    def alive(self) -> bool:
        """False once it ended, whoever ended it."""
        return not self._serving.done()

    async def close(self) -> None:
        """Accept nothing more, let running requests finish for the grace, end the rest."""
        self._server.should_exit = True
        grace_s = float(self._server.config.timeout_graceful_shutdown or 0)
        try:
            async with asyncio.timeout(grace_s + _OVER_GRACE_S):
                await self._serving
        except TimeoutError:
            log.warning("the HTTP server did not end within %.0f s and was cancelled", grace_s)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


def _bind(listen: Listen) -> socket.socket:
    """Connections of a server that just ended must not keep its successor from the port: SO_REUSEADDR."""
    bound = socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listen.host, listen.port))
    except OSError as error:
        bound.close()
        raise OSError(
            error.errno, f"cannot listen for HTTP on {listen.host}:{listen.port}: {error.strerror or error}"
        ) from None
    return bound
