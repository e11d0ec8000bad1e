"""The official clients get from our HTTP face what bare vLLM's server would tell them, field by field."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from router.client import KvorumClient
from telemetry import spans
from tests.e2e.bare_server import bare_server
from tests.e2e.conftest import ClusterSlot, RunningCluster, idle, web_of
from tests.e2e.http_answers import differences
from tests.e2e.http_cases import CASES, FRONT_FLAGS, LONG, MODEL, REFUSED, Case, streamed
from tests.e2e.http_clients import Answers, ask, ask_all, ask_all_async, async_clients, clients
from workers.checkpoint import prepare

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CACHED = ("cached_tokens:", "created_cache_tokens:")
STORY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 3000,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def reference(slot: ClusterSlot, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """Bare vLLM's answers by the case's name.

    In bf16 a near-tie may flip with the shape of the batch, with no fault anywhere; in float32 it does not.
    """
    slot.clear()
    log = tmp_path_factory.mktemp("bare") / "server.log"
    model = prepare("smollm2").path
    with bare_server(model, log, "--dtype=float32", *FRONT_FLAGS) as url:
        return ask_all(url, CASES + REFUSED, "bare")


@pytest.fixture(scope="module")
def told(reference: dict[str, Answers], slot: ClusterSlot) -> dict[str, Answers]:
    """Ours, from the synchronous clients; the reference comes first, for both need an engine."""
    return ask_all(web_of(slot).http_url, CASES + REFUSED, "sync")


def _named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=_named)
def test_the_answer_is_bare_vllms_field_by_field(
    reference: dict[str, Answers], told: dict[str, Answers], case: Case
) -> None:
    assert all(answer["status"] == 200 for answer in reference[case.name]), reference[case.name]
    assert differences(told[case.name], reference[case.name]) == []


async def test_it_is_the_same_from_the_async_client_all_at_once(
    reference: dict[str, Answers], web: RunningCluster
) -> None:
    """But for what was cached: under this load either replica may be the quicker one for a known prompt."""
    answers = await ask_all_async(web.http_url, CASES, "async")
    found = [
        f"{name}: {line}" for name, answer in answers.items() for line in differences(answer, reference[name])
    ]
    assert [line for line in found if not line.partition(": ")[2].rpartition(".")[2].startswith(CACHED)] == []


@pytest.mark.parametrize("case", REFUSED, ids=_named)
def test_a_bad_request_is_refused_as_bare_vllm_refuses_it(
    reference: dict[str, Answers], told: dict[str, Answers], case: Case
) -> None:
    """The same status, kind and parameter, which ours also names where vLLM does not; other words."""
    (expected,) = reference[case.name]
    (answer,) = told[case.name]
    assert 400 <= expected["status"] < 500, expected
    for refusal in (answer, expected):
        assert refusal["body"]["error"].pop("message")
    if expected["body"]["error"].get("param", "") is None:
        answer["body"]["error"]["param"] = None
    assert answer == expected


@pytest.mark.parametrize("case", [case for case in REFUSED if case.client != "http"], ids=_named)
def test_a_bad_request_for_a_stream_is_refused_with_a_status_too(
    reference: dict[str, Answers], web: RunningCluster, case: Case
) -> None:
    """Bare vLLM answers some of them with 200 and an error event."""
    with clients(web.http_url) as ours:
        (answer,) = ask(ours, streamed(case), "stream")
    assert answer["status"] == reference[case.name][0]["status"]
    assert answer["body"]["error"]["message"]


def test_what_the_cases_ask_for_did_happen(reference: dict[str, Answers]) -> None:
    """Two servers that are wrong in the same way would agree as well."""

    def body(name: str, time: int = 0) -> Any:
        return reference[name][time]["body"]

    assert "Paris" in body("completion greedy")["choices"][0]["text"]
    assert [choice["index"] for choice in body("chat n=2 with a seed")["choices"]] == [0, 1]
    assert body("chat stop string")["choices"][0]["stop_reason"] == "5"
    assert len(body("chat logprobs")["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    assert json.loads(body("chat JSON schema")["choices"][0]["message"]["content"]).keys() == {
        "city",
        "capital",
    }
    (call, *_more) = body("chat tool choice required")["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"city", "unit"}
    cached = [body("chat cached tokens", time)["usage"]["prompt_tokens_details"] for time in (0, 1)]
    assert [details["cached_tokens"] > 512 for details in cached] == [False, True]
    streamed = reference["chat cached tokens, streamed"][1]["stream"][-1]
    assert streamed["usage"]["prompt_tokens_details"]["cached_tokens"] > 512


def test_a_stream_left_in_the_middle_frees_engine_and_lease(web: RunningCluster) -> None:
    with clients(web.http_url) as ours:
        stream = ours.openai.chat.completions.create(**STORY)
        next(iter(stream))
        web.wait(lambda shown: not idle(shown), "running request", 10)
        stream.close()
        web.wait(idle, "idle engine after the client left", 10)
    assert web.leases() == 0


async def test_a_stream_that_the_async_client_cancels_frees_engine_and_lease(web: RunningCluster) -> None:
    async with async_clients(web.http_url) as ours:

        async def read() -> None:
            async for _piece in await ours.openai.chat.completions.create(**STORY):
                started.set()

        started = asyncio.Event()
        reading = asyncio.create_task(read())
        await asyncio.wait_for(started.wait(), 30)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.to_thread(web.wait, idle, "idle engine after the client left", 10)
    assert web.leases() == 0


async def test_a_client_that_leaves_before_the_first_token_frees_engine_and_lease(
    web: RunningCluster,
) -> None:
    body = {"model": MODEL, "prompt": [(i * 37) % 40_000 + 100 for i in range(3900)], "max_tokens": 8}
    async with async_clients(web.http_url) as ours:
        waiting = asyncio.create_task(ours.openai.completions.create(**body))
        await asyncio.to_thread(web.wait, lambda shown: not idle(shown), "running request", 10)
        assert not waiting.done(), "the prefill was over before the client could leave"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.to_thread(web.wait, idle, "idle engine after the client left", 10)
    assert web.leases() == 0


def test_a_seed_makes_a_long_prompt_repeatable_too(web: RunningCluster) -> None:
    """A prompt of several steps, which bare vLLM does not survive on CPU."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": LONG, "max_tokens": 12, "temperature": 1.5, "seed": 3}
    texts = set()
    with clients(web.http_url) as ours:
        for salt in ("first", "second"):  # neither finds blocks of the other
            answer = ours.openai.completions.create(**asked, extra_body={"cache_salt": salt})
            texts.add(answer.choices[0].text)
    assert len(texts) == 1


async def test_text_through_http_is_the_text_through_grpc(
    web: RunningCluster, client_of_web: KvorumClient
) -> None:
    text = ""
    async for message in client_of_web.generate(LONG, max_tokens=16, temperature=0):
        text += "".join(choice.text for choice in message.choices)
    with clients(web.http_url) as ours:
        answer = ours.openai.completions.create(model=MODEL, prompt=LONG, max_tokens=16, temperature=0)
    assert answer.choices[0].text == text


async def test_a_request_is_one_trace_from_http_to_the_engine(web: RunningCluster) -> None:
    trace = "3af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "X-Request-Id": "my-own-id"}
    with clients(web.http_url) as ours:
        answer = ours.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "The sea is", "max_tokens": 3}, headers=headers
        )
    assert answer.headers["X-Request-Id"] == "my-own-id"
    assert answer.headers["X-Trace-Id"] == trace
    assert answer.json()["id"] == "cmpl-my-own-id"
    found = await web.trace(trace, {"kvorum.http.request", spans.ROUTER_REQUEST, spans.REPLICA_GENERATE})
    assert found["kvorum.http.request"].parent_id == "b7ad6b7169203331"
    assert found[spans.ROUTER_REQUEST].parent_id == found["kvorum.http.request"].span_id


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/pooling", "/score", "/rerank", "/v1/audio/transcriptions"]
)
def test_what_the_model_cannot_do_is_refused_in_openais_shape(web: RunningCluster, path: str) -> None:
    with clients(web.http_url) as ours:
        answer = ours.http.post(path, json={"model": MODEL, "input": "text"})
    assert answer.status_code in (400, 501), answer.text
    assert "generat" in answer.json()["error"]["message"]


def test_the_official_client_names_the_error_of_an_unknown_model(web: RunningCluster) -> None:
    with clients(web.http_url) as ours, pytest.raises(openai.NotFoundError, match="gpt-9"):
        ours.openai.chat.completions.create(model="gpt-9", messages=STORY["messages"])


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/startupz", "/health", "/ping", "/version", "/load", "/metrics"]
)
def test_a_ready_cluster_answers_on_every_path_that_tells_of_it(web: RunningCluster, path: str) -> None:
    with clients(web.http_url) as ours:
        assert ours.http.get(path).status_code == 200


def test_after_all_that_no_request_is_counted_as_running(web: RunningCluster) -> None:
    with clients(web.http_url) as ours:
        assert ours.http.get("/load").json() == {"server_load": 0}


def test_kvorum_bench_serve_runs_vllms_own_client(web: RunningCluster, tmp_path: Path) -> None:
    done = web.cli(
        "bench", "serve", "--name", web.name, "--num-prompts", "4", "--input-len", "32", "--output-len", "4",
        "--temperature", "0",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (4, 16)
