"""The router's spans: one tree per request, closed on every way out, and carried to the replica."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fakes_cluster import Script
from fakes_router import SpanRecorder, eventually, running_stack
from opentelemetry.sdk.trace import ReadableSpan

from protos import common_pb2
from protos.errors import KvorumError
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
