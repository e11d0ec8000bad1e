"""What is recorded of an HTTP request around vLLM's app."""

from __future__ import annotations

import asyncio
import time

import pytest
from fakes_http import FakeServer, answers, asked
from fakes_metrics import FakeCollector
from fakes_router import SpanRecorder
from helpers_http_edge import CHAT, an_edge
from opentelemetry.trace import StatusCode

from cluster.openai import call_scope
from cluster.openai.asgi import Receive, Scope, Send
from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.setup import Telemetry


async def test_the_span_of_a_generating_request_says_what_was_generated() -> None:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        call = call_scope.current()
        assert call is not None
        done = call.generated
        done.model, done.prompt_tokens, done.generated_tokens, done.cached_tokens = "m", 9, 5, 4
        done.finish_reasons.append("stop")
        done.first_at = time.time()
        await answers(200, {})(scope, receive, send)

    for path, operation in ((CHAT, "chat"), ("/v1/completions", "text_completion")):
        recorder = SpanRecorder()
        await asked(
            an_edge(FakeServer(serve), telemetry=recorder.telemetry), path, headers={"X-Tenant-Id": "acme"}
        )
        attributes = recorder.attributes(spans.HTTP_REQUEST)
        assert attributes[spans.GEN_AI_OPERATION_NAME] == operation
        assert attributes[spans.GEN_AI_PROVIDER_NAME] == "kvorum"
        assert attributes[spans.GEN_AI_REQUEST_MODEL] == "m"
        assert attributes[spans.GEN_AI_USAGE_INPUT_TOKENS] == 9
        assert attributes[spans.GEN_AI_USAGE_OUTPUT_TOKENS] == 5
        assert attributes[spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 4
        assert attributes[spans.GEN_AI_RESPONSE_FINISH_REASONS] == ("stop",)
        assert 0 <= attributes[spans.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] < 5
        assert attributes[spans.TENANT] == "acme"
        assert spans.ERROR_TYPE not in attributes


@pytest.mark.parametrize(("status", "failed"), [(400, False), (404, False), (429, False), (503, True)])
async def test_every_refusal_has_an_error_type_and_only_ours_fail_the_span(status: int, failed: bool) -> None:
    recorder = SpanRecorder()
    await asked(an_edge(FakeServer(answers(status, {})), telemetry=recorder.telemetry), CHAT)
    (span,) = recorder.named(spans.HTTP_REQUEST)
    assert span.attributes is not None
    assert span.attributes[spans.ERROR_TYPE] == str(status)
    assert (span.status.status_code is StatusCode.ERROR) is failed


async def test_requests_are_measured_by_route_and_status() -> None:
    collector = FakeCollector()
    face = an_edge(
        FakeServer(answers(200, {})), telemetry=Telemetry(TelemetryConfig(), None, {}, collector.meters)
    )
    await asked(face, CHAT)
    await asked(face, CHAT, headers={"X-Service-Class": "urgent"})
    await asked(face, CHAT, method="BREW")
    seen = {
        (p.attributes[spans.HTTP_METHOD], p.attributes[spans.HTTP_STATUS], p.attributes.get(spans.ERROR_TYPE))
        for p in collector.points("http.server.request.duration")
    }
    assert seen == {("POST", 200, None), ("POST", 400, "400"), ("_OTHER", 200, None)}


async def test_prompts_are_recorded_only_when_asked_for() -> None:
    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        call = call_scope.current()
        assert call is not None
        if call.answers is not None:
            call.answers.add(0, "fine")
        await answers(200, {})(scope, receive, send)

    for wanted in (False, True):
        recorder = SpanRecorder(record_prompts=wanted)
        await asked(
            an_edge(FakeServer(read), telemetry=recorder.telemetry),
            CHAT,
            body=b'{"messages": [{"role": "user", "content": "how are you"}]}',
        )
        attributes = recorder.attributes(spans.HTTP_REQUEST)
        assert ("how are you" in str(attributes.get(spans.GEN_AI_INPUT_MESSAGES))) is wanted
        assert ("fine" in str(attributes.get(spans.GEN_AI_OUTPUT_MESSAGES))) is wanted


async def test_requests_that_outlive_the_process_end_with_it() -> None:
    recorder, began = SpanRecorder(), asyncio.Event()

    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        began.set()
        await asyncio.sleep(60)

    running = asyncio.ensure_future(asked(an_edge(FakeServer(hang), telemetry=recorder.telemetry), CHAT))
    await began.wait()
    recorder.telemetry.shutdown()
    (span,) = recorder.named(spans.HTTP_REQUEST)
    assert span.status.status_code is StatusCode.ERROR
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(recorder.named(spans.HTTP_REQUEST)) == 1
