"""vLLM's engine client over real routers and fake replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from fakes_cluster import Script
from fakes_router import Stack, assert_nothing_leaked, eventually, running_stack
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.openai import engine_client
from cluster.openai.call_scope import CallScope, entered
from cluster.openai.engine_client import RouterEngineClient
from cluster.openai.refusals import Refused
from protos import common_pb2, inference_pb2
from protos.errors import KvorumError
from telemetry import spans
from telemetry.messages import Answers

LOST = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the engine died")
BUSY = KvorumError(
    grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED, "the queue is full", retry_after_s=2.5
)


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "renderer_from_config", lambda config: SimpleNamespace())
    monkeypatch.setattr(engine_client, "InputProcessor", lambda config, renderer: SimpleNamespace())


class FakeHealth:
    serving = True


def an_engine(stack: Stack, health: Any) -> RouterEngineClient:
    config: Any = SimpleNamespace(model_config=SimpleNamespace())
    return RouterEngineClient(config, stack.client, health, model="fake", timeout_s=10)


@asynccontextmanager
async def serving(
    script: Script | None = None, **config: Any
) -> AsyncIterator[tuple[Stack, RouterEngineClient]]:
    async with running_stack(script=script, **config) as stack:
        yield stack, an_engine(stack, FakeHealth())
        await assert_nothing_leaked(stack.server)


def params(kind: RequestOutputKind = RequestOutputKind.DELTA, **fields: Any) -> SamplingParams:
    return SamplingParams(output_kind=kind, **{"max_tokens": 3, **fields})


async def generated(engine: RouterEngineClient, prompt: Any = None, **arguments: Any) -> list[RequestOutput]:
    sampling = arguments.pop("sampling", None) or params()
    prompt = prompt or tokens_input([5, 6])
    return [output async for output in engine.generate(prompt, sampling, "chatcmpl-1", **arguments)]


async def test_deltas_come_as_vllms_outputs() -> None:
    async with serving() as (_, engine):
        outputs = await generated(engine, tokens_input([5, 6], prompt="a b"))
    assert [output.outputs[0].text for output in outputs] == [" t1", " t2", " t3"]
    assert [output.finished for output in outputs] == [False, False, True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert (outputs[0].request_id, outputs[0].prompt, outputs[0].prompt_token_ids) == (
        "chatcmpl-1",
        "a b",
        [5, 6],
    )


async def test_a_whole_answer_comes_once() -> None:
    async with serving() as (_, engine):
        (output,) = await generated(engine, sampling=params(RequestOutputKind.FINAL_ONLY))
    assert (output.outputs[0].text, output.finished) == (" t1 t2 t3", True)


async def test_all_that_is_known_of_the_request_reaches_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[inference_pb2.GenerateRequest, Any]] = []
    async with serving() as (stack, engine):
        stream = stack.client.stream

        def spy(request: inference_pb2.GenerateRequest, **named: Any) -> Any:
            sent.append((request, named))
            return stream(request, **named)

        monkeypatch.setattr(stack.client, "stream", spy)
        carried = spans.extract([("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")])
        scope = CallScope("q", "acme", "from-header", inference_pb2.BATCH, carried)
        with entered(scope):
            await generated(
                engine,
                tokens_input([7], cache_salt="pepper"),
                lora_request=LoRARequest(lora_name="poet", lora_int_id=1, lora_path="poet"),
                priority=0,
                session_id="from-body",
                reasoning_ended=True,
                reasoning_parser_kwargs={"chat_template_kwargs": {"thinking": True}},
            )
        seen = stack.replicas[0].seen[0].request
    request, named = sent[0]
    options = request.options
    assert (request.model, list(request.tokens.ids)) == ("fake", [7])
    assert (options.request_id, options.tenant, options.session) == ("chatcmpl-1", "acme", "from-body")
    assert (options.service_class, options.cache_salt, options.lora) == (
        inference_pb2.BATCH,
        "pepper",
        "poet",
    )
    assert request.sampling.reasoning_ended
    assert seen.sampling.reasoning_parser_kwargs_json == '{"chat_template_kwargs":{"thinking":true}}'
    assert dict(named["metadata"])["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert (seen.lora, seen.cache_salt) == ("poet", "pepper")


async def test_a_long_request_id_keeps_what_tells_it_apart() -> None:
    async with serving() as (stack, engine):
        async for _ in engine.generate(tokens_input([1]), params(), "cmpl-" + "x" * 128 + "-1"):
            pass
        seen = stack.replicas[0].seen[0].request.request_id
    assert len(seen) == 128
    assert seen.endswith("x-1")


async def test_a_refusal_is_raised_with_its_status_and_told_to_the_edge() -> None:
    async with serving(Script(error_at_start=BUSY)) as (_, engine):
        with entered(CallScope("q")) as scope, pytest.raises(Refused) as caught:
            await generated(engine)
    assert (int(caught.value.http_status), caught.value.retry_after_s) == (429, 2.5)
    assert scope.retry_after_s == 2.5
    assert scope.failure is not None
    assert (scope.failure.status, scope.failure.message) == (429, "the queue is full")


async def test_a_bad_field_is_a_validation_error_with_its_openai_name() -> None:
    async with serving() as (_, engine):
        with entered(CallScope("q")) as scope, pytest.raises(VLLMValidationError) as caught:
            await generated(engine, sampling=params(stop_token_ids=[5000]))
    assert caught.value.parameter == "stop_token_ids"
    assert scope.failure is not None
    assert (scope.failure.status, scope.failure.param) == (400, "stop_token_ids")


async def test_an_unknown_adapter_is_not_found() -> None:
    async with serving() as (_, engine):
        lora = LoRARequest(lora_name="nobody", lora_int_id=1, lora_path="nobody")
        with pytest.raises(VLLMNotFoundError):
            await generated(engine, lora_request=lora)


async def test_a_stream_that_breaks_raises_after_what_came() -> None:
    async with serving(Script(error_after=(2, LOST))) as (_, engine):
        with entered(CallScope("q")) as scope:
            stream = engine.generate(tokens_input([1]), params(), "q")
            got = [(await anext(stream)).outputs[0].text for _ in range(2)]
            with pytest.raises(Refused) as caught:
                await anext(stream)
    assert got == [" t1", " t2"]
    assert int(caught.value.http_status) == 502
    assert scope.failure is not None


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_a_stream_that_ends_well_but_too_soon_is_no_whole_answer(
    kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(*_: Any, **__: Any) -> AsyncIterator[common_pb2.GenerateResponse]:
        message = common_pb2.GenerateResponse()
        message.choices.add(index=0, text=" t1", token_ids=[1], finish_reason=common_pb2.STOP)
        message.choices.add(index=1, text=" t1", token_ids=[1])
        yield message

    async with serving() as (stack, engine):
        monkeypatch.setattr(stack.client, "stream", cut)
        with entered(CallScope("q")) as scope, pytest.raises(Refused, match="ended this stream early"):
            await generated(engine, sampling=params(kind, n=2, temperature=1.0))
        assert engine._running == {}
    assert scope.failure is not None
    assert scope.failure.status == 502


@pytest.mark.parametrize(
    "prompt",
    [
        "a text",
        {"type": "embeds", "prompt_embeds": None},
        {"type": "multimodal", "prompt_token_ids": [1]},
        {"prompt_token_ids": [1], "multi_modal_data": {"image": object()}},
    ],
)
async def test_only_tokens_can_be_sent(prompt: Any) -> None:
    async with serving() as (stack, engine):
        with pytest.raises(VLLMValidationError):
            await generated(engine, prompt)
        assert stack.replicas[0].seen == []


async def test_closing_the_iterator_cancels_the_replicas_work() -> None:
    async with serving(Script(tokens=200, pace_s=0.01)) as (stack, engine):
        stream = engine.generate(tokens_input([1]), params(max_tokens=200), "q")
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: stack.replicas[0].running() == 0)
        assert stack.replicas[0].seen[0].cancelled
        assert engine._running == {}


async def test_cancelling_the_task_cancels_the_replicas_work_during_the_prefill() -> None:
    async with serving(Script(gate=asyncio.Event())) as (stack, engine):
        task = asyncio.ensure_future(generated(engine))
        await stack.replicas[0].arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: stack.replicas[0].running() == 0)


async def test_an_aborted_request_finishes_with_that_reason() -> None:
    async with serving(Script(pace_s=0.01)) as (stack, engine):
        sampling = params(n=2, max_tokens=200, temperature=1.0)
        outputs = []
        async for output in engine.generate(tokens_input([1]), sampling, "q"):
            outputs.append(output)
            if len(outputs) == 2:
                await engine.abort("q")
        await eventually(lambda: stack.replicas[0].running() == 0)
    assert outputs[-1].finished
    assert [choice.finish_reason for choice in outputs[-1].outputs] == ["abort", "abort"]


async def test_aborting_what_does_not_run_does_nothing() -> None:
    async with serving() as (_, engine):
        await engine.abort(["nothing", "at-all"])


async def test_health_and_admission_tell_whether_a_router_serves() -> None:
    health = FakeHealth()
    async with running_stack() as stack:
        engine = an_engine(stack, health)
        engine.check_admission()
        await engine.check_health()
        health.serving = False
        with entered(CallScope("q")) as scope, pytest.raises(Refused) as caught:
            engine.check_admission(2)
        assert int(caught.value.http_status) == 503
        assert scope.retry_after_s is not None
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        assert not engine.errored


async def test_without_any_router_a_request_is_503() -> None:
    async with serving() as (stack, engine):
        await stack.server.stop(grace_s=0)
        with entered(CallScope("q")) as scope, pytest.raises(Refused) as caught:
            await generated(engine)
    assert int(caught.value.http_status) == 503
    assert scope.failure is not None
    assert scope.failure.status == 503


async def test_what_is_the_clusters_business_is_not_done_here() -> None:
    async with running_stack() as stack:
        engine = an_engine(stack, FakeHealth())
        with pytest.raises(NotImplementedError):
            engine.encode({}, None, "q")
        with pytest.raises(NotImplementedError):
            await engine.sleep()


async def test_the_http_request_is_told_what_was_generated_for_it() -> None:
    times = common_pb2.EngineTimes(queue=0.001, prefill=0.002)
    async with serving(Script(cached_tokens=1, times=times)) as (_, engine):
        with entered(CallScope("id", answers=Answers(100))) as scope:
            began = time.time()
            await generated(engine)
            await generated(engine, sampling=params(n=2))
        done, answers = scope.generated, scope.answers
    assert (done.model, done.sequences) == ("fake", 3)
    assert (done.prompt_tokens, done.cached_tokens, done.generated_tokens) == (4, 2, 9)
    assert done.finish_reasons == ["length"] * 3
    assert began <= done.first_at <= time.time()
    assert answers is not None
    assert len(answers.messages()) == 3, "each sequence of each prompt is a message"
