"""The router's spans: one tree per request, closed on every way out, and carried to the replica."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from fakes_cluster import Script
from fakes_router import (
    SpanRecorder,
    assert_nothing_leaked,
    collected,
    eventually,
    running_stack,
    small,
    started,
)  # fmt: skip
from opentelemetry.sdk.trace import ReadableSpan
from test_lookaside import TOKEN

from protos import common_pb2
from protos.errors import KvorumError
from router.client import KvorumClient
from telemetry import spans

LOST = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the engine died")


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


async def test_request_span_has_the_children_of_a_request_in_one_trace() -> None:
    record = SpanRecorder()
    async with running_stack(observer=record.observer) as stack:
        messages = [m async for m in stack.client.generate("a bc", max_tokens=3, temperature=0.5)]
        replica_metadata = stack.replicas[0].seen[0].metadata
    request = record.request()
    assert request.context is not None
    assert messages[0].served.trace_id == f"{request.context.trace_id:032x}"
    for name in (spans.ROUTER_TOKENIZE, spans.ROUTER_ROUTE, spans.ROUTER_FORWARD):
        (child,) = record.named(name)
        assert parent_of(child) == request.context.span_id
    (forward,) = record.named(spans.ROUTER_FORWARD)
    assert forward.context is not None
    traceparent = f"00-{request.context.trace_id:032x}-{forward.context.span_id:016x}-"
    assert replica_metadata["traceparent"].startswith(traceparent)
    assert forward.attributes is not None
    assert forward.attributes[spans.REPLICA] == "r0"
    assert [event.name for event in forward.events] == [spans.FIRST_TOKEN]
    assert request.attributes is not None
    assert request.attributes[spans.OUTCOME] == "ok"
    assert request.attributes[spans.GEN_AI_USAGE_INPUT_TOKENS] == 3
    assert request.attributes[spans.GEN_AI_USAGE_OUTPUT_TOKENS] == 3


async def test_request_continues_the_trace_of_its_caller() -> None:
    record = SpanRecorder()
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with running_stack(observer=record.observer) as stack:
        stream = stack.client.generate([1], max_tokens=1, metadata=(("traceparent", caller),))
        served = (await anext(stream)).served
        _ = [message async for message in stream]
    assert served.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert parent_of(record.request()) == int("b7ad6b7169203331", 16)


async def test_each_attempt_is_a_span_and_the_lost_one_has_its_error() -> None:
    record = SpanRecorder()
    async with running_stack(replicas=2, observer=record.observer, policy="round-robin") as stack:
        stack.replicas[0].script = Script(error_at_start=LOST)
        for _ in range(2):
            _ = [message async for message in stack.client.generate([1], max_tokens=1)]
    failed = [s for s in record.named(spans.ROUTER_FORWARD) if spans.ERROR_TYPE in (s.attributes or {})]
    assert failed
    for span in failed:
        assert span.attributes is not None
        assert span.attributes[spans.ERROR_TYPE] == "REPLICA_LOST"
        assert span.attributes[spans.REPLICA] == "r0"
    assert all((s.attributes or {})[spans.OUTCOME] == "ok" for s in record.named(spans.ROUTER_REQUEST))


async def test_cancelled_request_closes_its_spans() -> None:
    record = SpanRecorder()
    async with running_stack(observer=record.observer, script=Script(hang_after=1)) as stack:
        stream = stack.client.generate([1], max_tokens=5)
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: stack.server.in_flight == 0)
        for name in (spans.ROUTER_REQUEST, spans.ROUTER_FORWARD):
            (span,) = record.named(name)
            assert span.attributes is not None
            assert span.attributes[spans.ERROR_TYPE] == "cancelled"


@pytest.mark.parametrize(
    ("script", "arguments", "error"),
    [
        (Script(), {"prompt": [1], "top_p": 9.0}, "INVALID_REQUEST"),
        (Script(crash_after=0), {"prompt": [1]}, "INTERNAL"),
        (Script(error_at_start=LOST), {"prompt": [1]}, "REPLICA_LOST"),
        (Script(error_after=(1, LOST)), {"prompt": [1]}, "REPLICA_LOST"),
    ],
)
async def test_failed_request_closes_its_span_with_the_reason(
    script: Script, arguments: dict[str, object], error: str
) -> None:
    record = SpanRecorder()
    async with running_stack(observer=record.observer, script=script) as stack:
        with pytest.raises(KvorumError):
            _ = [m async for m in stack.client.generate(**arguments)]  # type: ignore[arg-type]
    request = record.request()
    assert request.attributes is not None
    assert request.attributes[spans.ERROR_TYPE] == error


async def test_request_that_outlives_its_deadline_closes_its_span() -> None:
    record = SpanRecorder()
    async with running_stack(observer=record.observer, script=Script(hang_after=1)) as stack:
        with pytest.raises(KvorumError):
            _ = [m async for m in stack.client.generate([1], max_tokens=5, timeout=0.2)]
        await eventually(lambda: stack.server.in_flight == 0)
        await asyncio.sleep(0)
    request = record.request()
    assert request.attributes is not None
    assert request.attributes[spans.ERROR_TYPE] == "DEADLINE_EXCEEDED"


def uncovered(record: SpanRecorder) -> float:
    """Share of the request's span in which none of its children lasted."""
    request = record.request()
    assert request.context is not None
    assert request.start_time is not None
    assert request.end_time is not None
    children = [
        (span.start_time, span.end_time)
        for span in record.exporter.get_finished_spans()
        if span.parent is not None and span.parent.span_id == request.context.span_id
    ]
    covered, reached = 0, request.start_time
    for start, end in sorted(children):  # type: ignore[type-var]
        assert request.start_time <= start <= end <= request.end_time  # type: ignore[operator]
        covered += max(end - max(start, reached), 0)  # type: ignore[operator]
        reached = max(reached, end)  # type: ignore[type-var]
    return 1 - covered / (request.end_time - request.start_time)


async def test_children_cover_the_request_and_lie_within_it() -> None:
    record = SpanRecorder()
    gate = asyncio.Event()
    async with running_stack(observer=record.observer, script=Script(gate=gate)) as stack:
        running = asyncio.ensure_future(collected(stack.client, "word " * 400, max_tokens=3))
        await eventually(lambda: bool(stack.replicas[0].seen))
        await asyncio.sleep(0.1)
        gate.set()
        await running
    assert uncovered(record) < 0.05


async def test_forward_span_of_a_routed_stream_lasts_until_the_clients_report() -> None:
    record = SpanRecorder()
    gate = asyncio.Event()
    async with (
        running_stack(token=TOKEN, observer=record.observer, script=Script(gate=gate)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        running = asyncio.ensure_future(collected(client, [1, 2, 3], max_tokens=2))
        await eventually(lambda: bool(stack.replicas[0].seen))
        await asyncio.sleep(0.1)
        assert record.named(spans.ROUTER_REQUEST) == []
        gate.set()
        await running
        await eventually(lambda: len(record.named(spans.ROUTER_REQUEST)) == 1)
    assert uncovered(record) < 0.05
    (forward,) = record.named(spans.ROUTER_FORWARD)
    assert forward.attributes is not None
    assert forward.attributes[spans.OUTCOME] == "ok"
    (event,) = forward.events
    assert event.name == spans.FIRST_TOKEN
    assert forward.start_time is not None
    assert event.timestamp - forward.start_time > 90_000_000, "the client's own measure"


async def test_request_refused_in_the_queue_has_its_wait_and_the_reason() -> None:
    record = SpanRecorder()
    only = small("r0", 1, Script(hang_after=0))
    async with running_stack(replicas=0, extra=[only], observer=record.observer) as stack:
        first = started(stack.client, [1])
        await eventually(lambda: bool(stack.replicas[0].seen))
        with pytest.raises(KvorumError):
            await collected(stack.client, [2], timeout=0.3)
        first.cancel()
        await assert_nothing_leaked(stack.server)
    outcomes = [(s.attributes or {})[spans.OUTCOME] for s in record.named(spans.ROUTER_REQUEST)]
    assert sorted(outcomes) == ["cancelled", "refused"]  # type: ignore[type-var]
    (admit,) = record.named(spans.ROUTER_ADMIT)
    assert admit.attributes is not None
    assert admit.attributes[spans.ERROR_TYPE] == "OVERLOADED"


async def test_request_cancelled_in_the_queue_closes_its_span() -> None:
    record = SpanRecorder()
    only = small("r0", 1, Script(hang_after=0))
    async with running_stack(replicas=0, extra=[only], observer=record.observer) as stack:
        running = [started(stack.client, [1])]
        await eventually(lambda: bool(stack.replicas[0].seen))
        running.append(started(stack.client, [2]))
        await eventually(lambda: len(stack.group.turnstile) == 1)
        for task in reversed(running):
            task.cancel()
        await assert_nothing_leaked(stack.server)
    assert [(s.attributes or {})[spans.OUTCOME] for s in record.named(spans.ROUTER_REQUEST)] == [
        "cancelled"
    ] * 2
    (admit,) = record.named(spans.ROUTER_ADMIT)
    assert admit.attributes is not None
    assert admit.attributes[spans.ERROR_TYPE] == "cancelled"


async def test_streams_that_outlive_their_router_end_with_it() -> None:
    record = SpanRecorder()
    async with running_stack(observer=record.observer, script=Script(hang_after=1)) as stack:
        stream = stack.client.generate([1], max_tokens=5)
        await anext(stream)
        await asyncio.to_thread(record.telemetry.shutdown)
        for name in (spans.ROUTER_REQUEST, spans.ROUTER_FORWARD):
            assert record.attributes(name)[spans.ERROR_TYPE] == "ROUTER_DRAINING"
        await stream.aclose()
        await assert_nothing_leaked(stack.server)
    assert len(record.named(spans.ROUTER_REQUEST)) == 1, "it ends once"


async def test_prompts_and_answers_are_recorded_only_when_asked_for() -> None:
    for wanted in (False, True):
        record = SpanRecorder(record_prompts=wanted, max_attribute_chars=120)
        async with running_stack(observer=record.observer) as stack:
            messages = await collected(stack.client, "tell me " * 30, max_tokens=3)
        answer = "".join(choice.text for message in messages for choice in message.choices)
        attributes = record.attributes(spans.ROUTER_REQUEST)
        assert (spans.GEN_AI_INPUT_MESSAGES in attributes) is wanted
        if wanted:
            asked = attributes[spans.GEN_AI_INPUT_MESSAGES]
            assert len(asked) <= 120
            assert json.loads(asked)[0]["parts"][0]["content"].startswith("tell me tell me")
            told = json.loads(attributes[spans.GEN_AI_OUTPUT_MESSAGES])
            assert told == [{"role": "assistant", "parts": [{"type": "text", "content": answer}]}]
        else:
            everything = " ".join(str(s.attributes) for s in record.exporter.get_finished_spans())
            assert "tell me" not in everything


async def test_time_to_first_token_of_a_request_counts_its_wait() -> None:
    record = SpanRecorder()
    gate = asyncio.Event()
    async with running_stack(
        replicas=0, extra=[small("r0", 1, Script(gate=gate))], observer=record.observer
    ) as stack:
        running = [started(stack.client, [1], max_tokens=1) for _ in range(2)]
        await eventually(lambda: len(stack.group.turnstile) == 1)
        await asyncio.sleep(0.15)
        gate.set()
        await asyncio.gather(*running)
    for request in record.named(spans.ROUTER_REQUEST):
        assert request.attributes is not None
        assert request.attributes[spans.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] > 0.15  # type: ignore[operator]
    assert len(record.named(spans.ROUTER_ADMIT)) == 1
