"""The face from its first moment to its end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes_http import FakeConnection, asked
from fakes_router import eventually, running_stack
from fastapi import FastAPI

from cluster.openai import face as face_module
from cluster.openai import model_files, router_health
from cluster.openai.asgi import App
from cluster.openai.face import FETCHING, LOADING, READY, WAITING, HttpFace
from cluster.openai.failures import IngressError
from cluster.openai.settings import IngressSettings
from protos import admin_pb2, common_pb2
from telemetry.config import TelemetryConfig


class FakeServerModule:
    """Stands for cluster.openai.vllm_app."""

    def __init__(self) -> None:
        self.importing = threading.Event()
        self.building = asyncio.Event()
        self.error: Exception | None = None
        self.adopted: list[common_pb2.ModelInfo] = []
        self.folder: Path | None = None

    def load(self) -> FakeServerModule:
        self.importing.wait(5)
        return self

    async def build(self, settings: Any, folder: Path, files: Any, client: Any, health: Any) -> FastAPI:
        await self.building.wait()
        self.folder = folder
        if self.error is not None:
            raise self.error
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, str]:
            return {"model": files.model}

        return app

    def adopt(self, app: FastAPI, info: common_pb2.ModelInfo) -> None:
        self.adopted.append(info)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServerModule:
    module = FakeServerModule()
    monkeypatch.setattr(face_module, "_import_server", module.load)
    return module


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    may = asyncio.Event()

    async def fetch(settings: IngressSettings, into: Path) -> admin_pb2.ModelFiles:
        await may.wait()
        return admin_pb2.ModelFiles(model="fake")

    monkeypatch.setattr(model_files, "fetch", fetch)
    return may


@asynccontextmanager
async def started(*routers: str) -> AsyncIterator[HttpFace]:
    settings = IngressSettings(
        cluster="c",
        routers=routers,
        admin_address="127.0.0.1:1",
        token="t",
        telemetry=TelemetryConfig(enabled=False),
    )
    face = HttpFace(settings)
    await face.start()
    try:
        yield face
    finally:
        await face.stop()


async def probed(face: App, path: str = "/readyz") -> tuple[int, str]:
    answer = await asked(face, path, method="GET")
    return answer.status, answer.json["phase"]


async def test_it_answers_in_every_phase_and_serves_in_the_last(
    server: FakeServerModule, fetched: asyncio.Event
) -> None:
    async with running_stack(replicas=0) as stack, started(stack.address) as face:
        assert await probed(face) == (503, FETCHING)
        assert await probed(face, "/livez") == (200, FETCHING)
        fetched.set()
        await eventually(lambda: face.phase == LOADING)
        assert (await asked(face, "/v1/chat/completions")).status == 503
        server.importing.set()
        server.building.set()
        await eventually(lambda: face.phase == WAITING)
        assert await probed(face, "/startupz") == (200, WAITING)
        assert (await asked(face, "/v1/models", method="GET")).status == 503
    async with running_stack() as stack, started(stack.address) as face:
        await eventually(lambda: face.phase == READY)
        assert await probed(face) == (200, READY)
        answer = await asked(face, "/v1/models", method="GET", body=b"")
        assert answer.json == {"model": "fake"}
        (info,) = server.adopted
        assert (info.name, info.max_model_len) == ("fake", 512)


async def test_it_is_not_ready_any_more_when_no_replica_is(
    server: FakeServerModule, fetched: asyncio.Event
) -> None:
    fetched.set()
    server.importing.set()
    server.building.set()
    async with running_stack() as stack, started(stack.address) as face:
        await eventually(lambda: face.phase == READY)
        stack.replicas[0].draining = True
        stack.replicas[0].push()
        await eventually(lambda: face.phase == WAITING)
        assert (await probed(face))[0] == 503
        assert (await probed(face, "/livez"))[0] == 200


async def test_a_start_that_fails_says_why_for_good(server: FakeServerModule, fetched: asyncio.Event) -> None:
    fetched.set()
    server.importing.set()
    server.building.set()
    server.error = IngressError("vLLM refuses the HTTP arguments: invalid choice: 'nope'")
    async with started("127.0.0.1:1") as face:
        await eventually(lambda: face.phase.startswith("failed"))
        assert await probed(face, "/livez") == (
            503,
            "failed: vLLM refuses the HTTP arguments: invalid choice: 'nope'",
        )


async def test_a_face_that_watches_a_router_no_more_asks_to_be_replaced(
    server: FakeServerModule, fetched: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(_stub: object) -> bool | None:
        raise ZeroDivisionError("a bug")

    fetched.set()
    server.importing.set()
    server.building.set()
    async with running_stack() as stack, started(stack.address) as face:
        await eventually(lambda: face.phase == READY)
        monkeypatch.setattr(router_health, "_ask", breaks)
        await eventually(lambda: face.phase.startswith("failed: router"))
        assert (await probed(face, "/livez"))[0] == 503


async def test_its_folder_is_there_while_it_serves_and_gone_afterwards(
    server: FakeServerModule, fetched: asyncio.Event
) -> None:
    fetched.set()
    server.importing.set()
    server.building.set()
    async with started("127.0.0.1:1") as face:
        await eventually(lambda: face.phase == WAITING)
        assert server.folder is not None
        assert server.folder.is_dir()
    assert not server.folder.exists()


async def test_it_can_be_stopped_in_the_middle_of_its_start(
    server: FakeServerModule, fetched: asyncio.Event
) -> None:
    async with started("127.0.0.1:1") as face:
        assert face.phase == FETCHING
    server.importing.set()


async def test_lifespan_events_start_and_stop_it(server: FakeServerModule, fetched: asyncio.Event) -> None:
    server.importing.set()
    settings = IngressSettings(
        cluster="c",
        routers=("127.0.0.1:1",),
        admin_address="127.0.0.1:1",
        token="t",
        telemetry=TelemetryConfig(enabled=False),
    )
    connection = FakeConnection("")
    connection.scope["type"] = "lifespan"
    connection._incoming = asyncio.Queue()
    connection._incoming.put_nowait({"type": "lifespan.startup"})
    connection.start(HttpFace(settings))
    await eventually(lambda: len(connection.sent) == 1)
    connection._incoming.put_nowait({"type": "lifespan.shutdown"})
    await connection.done()
    assert [m["type"] for m in connection.sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_the_face_imports_no_vllm() -> None:
    code = "import sys, cluster.openai.face; print('vllm' in sys.modules or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
