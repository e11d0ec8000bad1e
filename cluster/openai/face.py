"""The HTTP face of a cluster: answers from its first moment, serves once a model can answer.

It starts in four phases: the model's small files come from the controller, vLLM's server is loaded (in a
thread: seconds of imports), a router is waited for behind which a replica is ready, and then it serves. This
module imports no vLLM.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.openai import model_files
from cluster.openai.asgi import Receive, Scope, Send
from cluster.openai.edge import Edge
from cluster.openai.failures import IngressError
from cluster.openai.keys import Keys
from cluster.openai.probes import Standing
from cluster.openai.router_health import RouterHealth
from cluster.openai.settings import IngressSettings
from protos import common_pb2
from protos.channels import ClientTls
from protos.errors import KvorumError
from router.client import KvorumClient
from router.tasks import TaskGroup
from telemetry.setup import Telemetry, configure

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

FETCHING = "fetching the model's files"
LOADING = "loading vLLM's server"
WAITING = "waiting for a replica"
READY = "ready"

_ASK_AGAIN_S = 0.5
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the engines have decided
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_TARGET_DEVICE": "cpu",  # what a CUDA build needs where there is no GPU
}


class HttpFace:
    """The ASGI app that everything sits behind. `start` and `stop` once each, on the loop that serves."""

    def __init__(self, settings: IngressSettings) -> None:
        self._settings = settings
        self._telemetry: Telemetry = configure(
            "kvorum.http", f"{settings.cluster}-{os.getpid()}", settings.telemetry
        )
        tls = ClientTls(settings.tls_ca, server_name=settings.tls_server_name) if settings.tls_ca else None
        self._health = RouterHealth(settings.routers, tls=tls)
        self._client = KvorumClient(
            *settings.routers,
            api_key=settings.token,
            tls=tls,
            lookaside=settings.lookaside,
            usable=self._health.serves,
        )
        self._app: FastAPI | None = None
        self._known = False  # a router has told what the model's engines allow
        self._loading = FETCHING
        self._failed = ""
        self._began = time.monotonic()
        self._tasks = TaskGroup()
        self._stopping = asyncio.Event()
        self._edge = Edge(
            Keys(settings.api_keys),
            self._telemetry,
            lambda: self._app,
            lambda: self.standing,
            request_timeout_s=settings.request_timeout_s,
            max_ongoing=settings.max_ongoing_requests,
        )

    @property
    def phase(self) -> str:
        """What it is doing; "ready" when a request could be answered; "failed: ..." is final."""
        return self.standing.phase

    @property
    def standing(self) -> Standing:
        """The same with what probes ask for."""
        ready = self._known and self._health.serving
        phase = self._loading
        failed = self._failed or self._health.lost  # Serve puts another in the place of one that failed
        if failed:
            phase = f"failed: {failed}"
        elif self._app is not None:
            phase = READY if ready else WAITING
        return Standing(
            phase=phase,
            elapsed_s=time.monotonic() - self._began,
            started=self._app is not None,
            ready=ready,
            failed=bool(failed),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Lifespan events start and stop it too."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._edge(scope, receive, send)

    async def start(self) -> None:
        """Begin the start, and return at once."""
        self._began = time.monotonic()
        self._health.start()
        self._tasks.spawn("start of the HTTP face", self._run())

    async def stop(self) -> None:
        """End everything; requests that still run lose their routers."""
        self._stopping.set()
        await self._tasks.cancel()
        await self._health.stop()
        await self._client.close()
        await asyncio.to_thread(self._telemetry.shutdown)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _run(self) -> None:
        """Start, then keep what was started until `stop`."""
        async with AsyncExitStack() as kept:
            try:
                scratch = tempfile.TemporaryDirectory(prefix="kvorum-http-", dir=self._settings.scratch)
                folder = Path(kept.enter_context(scratch))
                await self._start(folder, kept)
            except Exception as error:
                expected = isinstance(error, IngressError | model_files.ModelFilesError | OSError)
                log.error("the HTTP face cannot start: %s", error, exc_info=None if expected else error)
                self._failed = " ".join(str(error).split()) or type(error).__name__
            await self._stopping.wait()

    async def _start(self, folder: Path, kept: AsyncExitStack) -> None:
        # While the controller is asked, for a cluster that starts beside us may not answer yet.
        importing = asyncio.ensure_future(asyncio.to_thread(_import_server))
        try:
            files = await model_files.fetch(self._settings, folder)
        except BaseException:
            importing.add_done_callback(_forget)
            raise
        self._loading = LOADING
        server: Any = await importing
        app: FastAPI = await server.build(self._settings, folder, files, self._client, self._health)
        await kept.enter_async_context(app.router.lifespan_context(app))
        self._app = app
        log.info("the HTTP face of model %r stands after %.1f s", files.model, self.standing.elapsed_s)
        server.adopt(app, await self._served(files.model))
        self._known = True
        log.info("the HTTP face is ready after %.1f s", self.standing.elapsed_s)

    async def _served(self, model: str) -> common_pb2.ModelInfo:
        """What the routers say of the model once a replica of it is ready."""
        while True:
            await self._health.wait_serving()
            try:
                for served in await self._client.list_models():
                    if served.info.name == model and served.ready_replicas:
                        return served.info
            except KvorumError as error:
                log.info("no router tells what it serves: %s", error)
            await asyncio.sleep(_ASK_AGAIN_S)


def _import_server() -> Any:
    """The module that imports vLLM, which computes nothing here and is to fetch nothing."""
    os.environ.update(_ENVIRONMENT)
    return importlib.import_module("cluster.openai.vllm_app")


def _forget(importing: asyncio.Future[Any]) -> None:
    if not importing.cancelled():
        importing.exception()
