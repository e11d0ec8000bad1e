"""What a lookaside client tells its router while a stream runs, and how another task ends the stream."""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import Any

import grpc
import grpc.aio
import pytest
from fakes_cluster import Script
from fakes_router import SpanRecorder, Stack, assert_nothing_leaked, collected, eventually, running_stack
from test_lookaside import TIMES, TOKEN, request, routed

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.channels import open_channel
from protos.errors import KvorumError
from protos.tickets import ATTEMPT_KEY
from router.client import KvorumClient
from router.client_request import generate_request
from telemetry import spans

Progress = inference_pb2.ReportProgressRequest


def leased(stack: Stack) -> Any:
    return stack.server.members.leased()[stack.key("r0")]


async def test_first_token_frees_the_prefill_of_the_lease_while_the_stream_runs() -> None:
    async with (
        running_stack(token=TOKEN, script=Script(hang_after=1)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        stream = client.generate([1, 2, 3], max_tokens=9)
        await anext(stream)
        await eventually(lambda: leased(stack).prefill_tokens == 0)
        assert leased(stack).requests == 1
        await stream.aclose()
        await assert_nothing_leaked(stack.server)


@pytest.mark.parametrize("hang_after", [0, 1], ids=["in-prefill", "in-decode"])
async def test_lease_lasts_as_long_as_its_stream_beyond_the_ticket(hang_after: int) -> None:
    gate = asyncio.Event()
    script = Script(hang_after=hang_after) if hang_after else Script(gate=gate)
    async with (
        running_stack(token=TOKEN, ticket_s=1.0, script=script) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        running = asyncio.ensure_future(collected(client, [1, 2, 3], max_tokens=9))
        await eventually(lambda: bool(stack.replicas[0].seen))
        await asyncio.sleep(2.5)
        assert leased(stack).requests == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await assert_nothing_leaked(stack.server)


async def test_progress_counts_each_token_once_and_absurd_figures_do_no_harm() -> None:
    async with running_stack(token=TOKEN) as stack, routed(stack) as (response, stub, _):
        before = leased(stack).decode_tokens
        assert before > 0
        for generated in (1, 1, -7, 0):
            await stub.ReportProgress(Progress(attempt_id=response.attempt_id, generated_tokens=generated))
        assert leased(stack).decode_tokens == before - 1
        await stub.ReportProgress(Progress(attempt_id=response.attempt_id, generated_tokens=2**31 - 1))
        assert leased(stack).decode_tokens == 0
        await stub.ReportProgress(Progress(attempt_id="guess", generated_tokens=5))
        await stub.ReportEnd(inference_pb2.ReportEndRequest(attempt_id=response.attempt_id))
        await stub.ReportProgress(Progress(attempt_id=response.attempt_id, generated_tokens=5))
        await assert_nothing_leaked(stack.server)


async def test_progress_keeps_no_lease_beyond_the_deadline_of_its_request() -> None:
    async with (
        running_stack(token=TOKEN, ticket_s=0.2) as stack,
        open_channel(stack.address) as channel,
    ):
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        response = await stub.Route(request(), timeout=0.5)
        for _ in range(12):
            await stub.ReportProgress(Progress(attempt_id=response.attempt_id), timeout=5)
            await asyncio.sleep(0.1)
        assert stack.server.members.leased() == {}
        await assert_nothing_leaked(stack.server)


async def test_stream_that_another_task_cancels_in_decode_ends_at_the_replica() -> None:
    calls: list[Any] = []
    async with (
        running_stack(token=TOKEN, script=Script(hang_after=1)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        stream = client.stream(generate_request([1], max_tokens=9), opened=calls.append)
        await anext(stream)
        calls[-1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await anext(stream)
        await eventually(lambda: stack.replicas[0].seen[0].cancelled)
        await assert_nothing_leaked(stack.server)


async def test_request_that_another_task_cancels_in_the_queue_leaves_it() -> None:
    calls: list[Any] = []
    async with (
        running_stack(token=TOKEN, max_wait_ms=10_000) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        stream = client.stream(generate_request([1], max_tokens=9), opened=calls.append)
        waiting = asyncio.ensure_future(anext(stream))
        await eventually(lambda: stack.server.in_flight == 1)
        calls[-1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await assert_nothing_leaked(stack.server)
        assert stack.replicas[0].seen == []


async def test_client_that_left_before_the_answer_came_gives_the_lease_back() -> None:
    """The router decided, and its answer was not read: the lease must not wait for the ticket."""
    async with (
        running_stack(token=TOKEN, ticket_s=60) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        assert client._direct is not None
        route = client._direct._route

        async def unread(*arguments: Any) -> Any:
            await route(*arguments)
            raise asyncio.CancelledError

        client._direct._route = unread
        with pytest.raises(asyncio.CancelledError):
            await collected(client, [1, 2, 3], max_tokens=2)
        assert stack.replicas[0].seen == []
        await assert_nothing_leaked(stack.server)


@pytest.mark.parametrize("wish", ["", "short", "g" * 32, "A" * 32, "0" * 33])
async def test_unfit_attempt_ids_are_not_taken(wish: str) -> None:
    async with running_stack(token=TOKEN) as stack, open_channel(stack.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        response = await stub.Route(request(), timeout=5, metadata=((ATTEMPT_KEY, wish),))
        assert response.attempt_id != wish
        assert len(response.attempt_id) == 32


async def test_attempt_id_that_is_in_use_is_not_given_twice() -> None:
    wish = uuid.uuid4().hex
    async with running_stack(token=TOKEN) as stack, open_channel(stack.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        first, second = [
            await stub.Route(request(), timeout=5, metadata=((ATTEMPT_KEY, wish),)) for _ in range(2)
        ]
        assert first.attempt_id == wish != second.attempt_id
        for response in (first, second):
            await stub.ReportEnd(inference_pb2.ReportEndRequest(attempt_id=response.attempt_id))
        await assert_nothing_leaked(stack.server)


REFUSAL = KvorumError(grpc.StatusCode.INVALID_ARGUMENT, common_pb2.INVALID_REQUEST, "no such thing")


@pytest.mark.parametrize(
    ("script", "told", "kind", "spoken"),
    [
        (
            Script(error_at_start=REFUSAL),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            "no such thing",
        ),
        (Script(crash_after=0), grpc.StatusCode.INTERNAL, "INTERNAL", "replica r0 failed on request mine"),
    ],
    ids=["refused", "crashed"],
)
async def test_what_ends_a_stream_is_told_to_the_client_and_to_the_spans(
    script: Script, told: grpc.StatusCode, kind: str, spoken: str
) -> None:
    record = SpanRecorder()
    async with (
        running_stack(token=TOKEN, script=script, observer=record.observer) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        with pytest.raises(KvorumError) as caught:
            await collected(client, [1, 2, 3], max_tokens=2, request_id="mine")
        await assert_nothing_leaked(stack.server)
    assert caught.value.code is told
    assert spoken in caught.value.message
    assert record.attributes(spans.ROUTER_REQUEST)[spans.ERROR_TYPE] == kind


@pytest.mark.parametrize("code", [-1, 17, 2**31 - 1])
async def test_code_that_is_none_counts_as_cancelled(code: int) -> None:
    record = SpanRecorder()
    async with (
        running_stack(token=TOKEN, observer=record.observer) as stack,
        routed(stack) as (response, stub, _),
    ):
        end = inference_pb2.ReportEndRequest(attempt_id=response.attempt_id, code=code, ttft_s=math.nan)
        await stub.ReportEnd(end, timeout=5)
        await assert_nothing_leaked(stack.server)
    assert record.attributes(spans.ROUTER_REQUEST)[spans.ERROR_TYPE] == "cancelled"


async def test_what_was_generated_is_learned_of_finished_streams() -> None:
    async with (
        running_stack(token=TOKEN, script=Script(times=TIMES)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        before = stack.group.fleet.answer_tokens
        await collected(client, [1, 2, 3], max_tokens=2)
        await eventually(lambda: stack.group.fleet.answer_tokens < before)
