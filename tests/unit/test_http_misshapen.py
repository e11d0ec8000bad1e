"""Bodies that vLLM's server takes for a failure of its own are refused as the client's mistake."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fakes_cluster import Script
from fakes_http import FakeConnection
from helpers_http_app import Face, running_face, write_model

from protos import common_pb2
from protos.errors import KvorumError

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"prompt": "hi", "max_tokens": 4}
ERROR = KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, "the engine stumbled")
NO_CONTENT = {"role": "assistant", "id": "m", "content": [], "status": "completed", "type": "message"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def face(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Face]:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder)
    async with running_face(folder) as running:
        yield running


async def post(face: Face, path: str, body: dict[str, Any]) -> FakeConnection:
    asked = FakeConnection(path, headers={"Content-Type": "application/json"}, body=json.dumps(body).encode())
    return await asked.start(face.edge).done()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "structured_outputs": 1}),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": [{}]}),
        ("/v1/completions", {**COMPLETION, "structured_outputs": "required"}),
        ("/v1/responses", {"input": [NO_CONTENT, {"type": "message", **USER}]}),
    ],
    ids=["a number", "a list", "a string", "a message without content"],
)
async def test_a_misshapen_body_is_400_and_says_so(
    face: Face, path: str, body: dict[str, Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await post(face, path, {**body, "stream": stream})
    assert answer.status == 400
    error = answer.json["error"]
    assert "misshapen" in error["message"]
    assert error["code"] == 400
    [record] = [record for record in caplog.records if "taken for misshapen" in record.message]
    assert record.message.partition(": ")[2] in error["message"]  # whose fault it was can be looked up


@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_behind_a_sound_body_stays_the_servers_failure(face: Face, stream: bool) -> None:
    face.replica.script = Script(error_at_start=ERROR)
    try:
        answer = await post(face, "/v1/completions", {**COMPLETION, "stream": stream})
    finally:
        face.replica.script = Script()
    assert answer.status == 500
