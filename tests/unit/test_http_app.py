"""Whole requests through vLLM's own server: honest statuses and ends in each of its APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fakes_cluster import Script, model_info
from fakes_http import FakeConnection, asked
from fakes_router import assert_nothing_leaked, eventually
from helpers_http_app import CONTEXT, Face, running_face, settings, write_model
from vllm.config.multimodal import MultiModalConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.processing.context import BaseProcessingInfo
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker

from cluster.openai import front_args, vllm_app
from cluster.openai.failures import IngressError
from protos import admin_pb2, common_pb2
from protos.errors import KvorumError, invalid

BUSY = KvorumError(
    grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED, "the queue is full", retry_after_s=2.5
)
LOST = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the engine died")
HEADERS = {"Content-Type": "application/json"}

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
COMPLETION = ("/v1/completions", {"prompt": "hi", "max_tokens": 4})
RESPONSES = ("/v1/responses", {"input": "hi", "max_output_tokens": 4})
MESSAGES = (
    "/v1/messages",
    {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
)
APIS = pytest.mark.parametrize(
    ("path", "request_body"),
    [CHAT, COMPLETION, RESPONSES, MESSAGES],
    ids=["chat", "completion", "responses", "messages"],
)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_model(made)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(folder: Path) -> AsyncIterator[Face]:
    async with running_face(folder) as face:
        yield face


@pytest_asyncio.fixture(loop_scope="module")
async def face(shared: Face) -> AsyncIterator[Face]:
    """With a replica that has seen nothing and does what it does by default; leaves nothing behind."""
    shared.replica.script = Script()
    shared.replica.seen.clear()
    yield shared
    await assert_nothing_leaked(shared.stack.server)


def connection(path: str, body: dict[str, Any], **more: Any) -> FakeConnection:
    return FakeConnection(path, headers=HEADERS, body=json.dumps({**body, **more}).encode())


async def post(face: Face, path: str, body: dict[str, Any], **more: Any) -> FakeConnection:
    return await connection(path, body, **more).start(face.edge).done()


def message_of(answer: FakeConnection) -> str:
    found: str = answer.json["error"]["message"]
    return found


@APIS
async def test_a_whole_answer(face: Face, path: str, request_body: dict[str, Any]) -> None:
    answer = await post(face, path, request_body)
    assert answer.status == 200
    assert "t1 t2 t3 t4" in answer.body.decode()
    assert answer.complete


@APIS
async def test_a_streamed_answer(face: Face, path: str, request_body: dict[str, Any]) -> None:
    answer = await post(face, path, request_body, stream=True)
    assert answer.status == 200
    text = answer.body.decode()
    assert all(f" t{k}" in text for k in (1, 2, 3, 4))
    assert any(end in text for end in ("[DONE]", "response.completed", "message_stop"))
    assert "error" not in answer.pieces[-1].decode()


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_status_and_says_when_to_come_back(
    face: Face, path: str, request_body: dict[str, Any], stream: bool
) -> None:
    face.replica.script = Script(error_at_start=BUSY)
    answer = await post(face, path, request_body, stream=stream)
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    assert answer.headers["content-type"] == "application/json"
    assert message_of(answer) == "the queue is full"


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_finds_wrong_is_400(
    face: Face, path: str, request_body: dict[str, Any], stream: bool
) -> None:
    wrong = invalid("sampling.top_p", "must be in (0, 1]")
    face.replica.script = Script(error_at_start=wrong)
    answer = await post(face, path, request_body, stream=stream)
    assert answer.status == 400
    assert "top_p" in message_of(answer)


@APIS
async def test_a_broken_stream_ends_with_its_error_and_as_unfinished(
    face: Face, path: str, request_body: dict[str, Any]
) -> None:
    face.replica.script = Script(error_after=(2, LOST))
    answer = await post(face, path, request_body, stream=True)
    assert answer.status == 200
    text = answer.body.decode()
    assert " t2" in text
    assert "was lost after 2 tokens" in answer.pieces[-1].decode()
    assert not any(end in text for end in ("[DONE]", "response.completed", "message_stop"))
    assert answer.complete


@APIS
async def test_an_answer_that_breaks_is_502(face: Face, path: str, request_body: dict[str, Any]) -> None:
    face.replica.script = Script(error_after=(2, LOST))
    answer = await post(face, path, request_body)
    assert answer.status == 502
    assert "was lost after 2 tokens" in message_of(answer)


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_the_prefill_frees_the_replica(
    face: Face, path: str, request_body: dict[str, Any], stream: bool
) -> None:
    face.replica.script = Script(gate=asyncio.Event())
    client = connection(path, request_body, stream=stream).start(face.edge)
    await eventually(lambda: face.replica.running() == 1)
    client.disconnect()
    await client.done()
    await eventually(lambda: face.replica.running() == 0)
    assert face.replica.seen[0].cancelled


@APIS
async def test_a_client_that_leaves_a_stream_frees_the_replica(
    face: Face, path: str, request_body: dict[str, Any]
) -> None:
    face.replica.script = Script(pace_s=0.02)
    long = {name: 100 if name.startswith("max_") else value for name, value in request_body.items()}
    client = connection(path, long, stream=True).start(face.edge)
    await client.events(3)
    client.disconnect()
    await client.done()
    await eventually(lambda: face.replica.running() == 0)
    assert face.replica.seen[0].cancelled


@APIS
async def test_without_a_router_it_is_503(folder: Path, path: str, request_body: dict[str, Any]) -> None:
    async with running_face(folder) as face:
        await face.stack.server.stop(grace_s=0)
        answers = [await post(face, path, request_body, stream=stream) for stream in (False, True)]
    assert [answer.status for answer in answers] == [503, 503]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)


async def test_an_unknown_model_is_404(face: Face) -> None:
    answer = await post(face, *CHAT, model="other")
    assert answer.status == 404
    assert "other" in message_of(answer)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", b"{not json", 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b'{"prompt": {"a": 1}}', 400),
        ("POST", "/v1/nowhere", b"{}", 404),
        ("GET", "/v1/chat/completions", b"", 405),
        ("PUT", "/v1/models", b"", 405),
    ],
)
async def test_requests_that_make_no_sense_are_refused_in_openais_shape(
    face: Face, method: str, path: str, body: bytes, status: int
) -> None:
    answer = await asked(face.edge, path, method=method, headers=HEADERS, body=body)
    assert (answer.status, answer.json["error"]["code"]) == (status, status)
    assert b"Traceback" not in answer.body
    assert b'File "' not in answer.body


async def test_prompts_of_one_request_run_side_by_side(face: Face) -> None:
    answer = await post(face, "/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2})
    ids = {seen.request.request_id for seen in face.replica.seen}
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
    assert len(ids) == 2


async def test_beam_search_finds_the_likeliest_texts(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = face.replica._message

    def likely(request: Any, k: int, count: int, n: int) -> common_pb2.GenerateResponse:
        message = plain(request, k, count, n)
        (choice,) = message.choices
        assert request.sampling.logprobs == 4
        choice.token_ids[:] = [65]
        # A is likelier at first, and B after it.
        after_a = request.prompt_token_ids[-1] == 65
        logprobs = {66: -0.1, 65: -2.5} if after_a else {65: -0.5, 66: -0.6}
        position = choice.logprobs.add()
        for rank, (token, logprob) in enumerate(logprobs.items(), start=1):
            position.tokens.add(token_id=token, logprob=logprob, rank=rank)
        return message

    monkeypatch.setattr(face.replica, "_message", likely)
    body = {"prompt": "hi", "max_tokens": 2, "n": 2, "use_beam_search": True, "logprobs": 1}
    answer = await post(face, "/v1/completions", {**body, "return_token_ids": True})
    assert answer.status == 200, answer.body
    first, second = answer.json["choices"]
    assert (first["token_ids"], second["token_ids"]) == ([65, 66], [66, 65])
    assert first["logprobs"]["token_logprobs"] == pytest.approx([-0.5, -0.1])
    assert len(face.replica.seen) == 3


async def test_models_name_the_loaded_adapters_and_serve_them(face: Face) -> None:
    listed = await asked(face.edge, "/v1/models", method="GET")
    answer = await post(face, *CHAT, model="poet")
    assert face.replica.seen[0].request.lora == "poet"
    assert [model["id"] for model in listed.json["data"]] == ["fake", "poet"]
    assert listed.json["data"][0]["root"] == "fake"
    assert answer.status == 200


async def test_the_context_is_that_of_the_engines(face: Face) -> None:
    vllm_app.adopt(face.app, model_info(max_model_len=32, vocab_size=257))
    (model, _) = (await asked(face.edge, "/v1/models", method="GET")).json["data"]
    answer = await post(face, "/v1/completions", {"prompt": "x" * 40, "max_tokens": 1})
    vllm_app.adopt(face.app, face.replica.model)
    assert model["max_model_len"] == 32 < CONTEXT
    assert answer.status == 400
    assert "32" in message_of(answer)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--no-such-flag",), "no-such-flag"),
        (("--tool-call-parser", "nope", "--enable-auto-tool-choice"), "nope"),
        (("--enable-auto-tool-choice",), "tool-call-parser"),
        (("--max-model-len", "12"), "engine.engine_args.max_model_len"),
        (("--reasoning-parser", "qwen3"), "engine.engine_args.reasoning_parser"),
        (("--port", "80"), "http.port"),
        (("--uds", "x"), "--uds"),
        (("some-model",), "engine.model"),
        (("--help",), "--help"),
    ],
)
async def test_arguments_that_cannot_be_followed_are_refused_with_a_reason(
    folder: Path, arguments: tuple[str, ...], says: str
) -> None:
    client: Any = None
    with pytest.raises(IngressError, match=says):
        await vllm_app.build(
            settings(arguments=arguments), folder, admin_pb2.ModelFiles(model="fake"), client, client
        )


async def test_images_are_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    files = admin_pb2.ModelFiles(model="fake", engine_args_json={"language_model_only": "false"})
    args = vllm_app._engine_args(tmp_path, files)
    config = MultiModalConfig(language_model_only=args.language_model_only)

    class FakeInfo(BaseProcessingInfo):  # type: ignore[misc]
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

    context: Any = SimpleNamespace(get_mm_config=lambda: config)
    model: Any = SimpleNamespace(multimodal_config=config, hf_config=SimpleNamespace())
    tracker = AsyncMultiModalItemTracker(model)
    vars(tracker)["mm_processor"] = SimpleNamespace(info=FakeInfo(context))
    with pytest.raises(VLLMValidationError, match=r"At most 0 image\(s\)"):
        tracker.create_parser().parse_image("http://127.0.0.1:1/x.png")
    assert tracker._items_by_modality["image"] == []


async def test_a_key_of_vllms_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(IngressError, match=r"set router\.api_keys_file instead of VLLM_API_KEY") as caught:
        front_args.parse([])
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("VLLM_API_KEY", "")
    front_args.parse([])


async def test_arguments_of_vllms_front_end_are_followed() -> None:
    args = front_args.parse(
        ["--tool-call-parser", "hermes", "--enable_auto_tool_choice", "--response-role", "bot"]
    )
    assert (args.tool_call_parser, args.enable_auto_tool_choice, args.response_role) == (
        "hermes",
        True,
        "bot",
    )
    assert args.enable_prompt_tokens_details
    assert not front_args.parse(["--no-enable-prompt-tokens-details"]).enable_prompt_tokens_details


async def test_files_that_are_no_model_are_refused_with_a_reason(tmp_path: Path) -> None:
    client: Any = None
    with pytest.raises(IngressError, match="fake"):
        await vllm_app.build(settings(), tmp_path, admin_pb2.ModelFiles(model="fake"), client, client)
