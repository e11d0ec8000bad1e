"""Lookaside: the router decides, the client streams from the replica, and leases end in every way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from fakes_cluster import GENERATE, FakeReplica, Script
from fakes_router import SpanRecorder, Stack, assert_nothing_leaked, collected, eventually, running_stack

from protos import common_pb2, inference_pb2, inference_pb2_grpc, replica_pb2, tickets
from protos.channels import open_channel
from protos.errors import KvorumError, from_rpc_error
from protos.tickets import TICKET_KEY
from router.client import KvorumClient
from telemetry import spans

TOKEN = "cluster-secret"
TIMES = common_pb2.EngineTimes(queue=0.001, prefill=0.002, decode=0.0)


def request(*ids: int, **options: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=ids or (1, 2, 3)),
        sampling=common_pb2.SamplingParams(max_tokens=2),
        options=inference_pb2.RequestOptions(**options),
    )


@asynccontextmanager
async def routed(stack: Stack) -> AsyncIterator[tuple[inference_pb2.RouteResponse, Any, Any]]:
    """One routed request, its router's stub, and a channel to its replica."""
    async with open_channel(stack.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        response = await stub.Route(request(), timeout=5)
        async with open_channel(response.address) as direct:
            yield response, stub, direct


async def call(direct: Any, raw: bytes, *metadata: tuple[str, str]) -> list[common_pb2.GenerateResponse]:
    generate = direct.unary_stream(GENERATE, response_deserializer=common_pb2.GenerateResponse.FromString)
    return [message async for message in generate(raw, timeout=5, metadata=metadata)]


async def refusal(direct: Any, raw: bytes, *metadata: tuple[str, str]) -> KvorumError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(direct, raw, *metadata)
    return from_rpc_error(caught.value)


async def test_lookaside_stream_is_the_proxied_one_and_passes_no_router() -> None:
    async with (
        running_stack(token=TOKEN, script=Script(times=TIMES, cached_tokens=1)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        direct = await collected(client, "tell me more", max_tokens=3, request_id="mine")
        proxied = await collected(stack.client, "tell me more", max_tokens=3, request_id="mine")
        assert direct == proxied
        by_ticket, by_token = stack.replicas[0].seen
        assert TICKET_KEY in by_ticket.metadata
        assert "authorization" not in by_ticket.metadata
        assert TICKET_KEY not in by_token.metadata
        await assert_nothing_leaked(stack.server)


async def test_lookaside_lease_is_held_while_the_stream_runs_and_ends_with_the_report() -> None:
    gate = asyncio.Event()
    async with (
        running_stack(token=TOKEN, script=Script(gate=gate)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        running = asyncio.ensure_future(collected(client, [1, 2, 3], max_tokens=2))
        await eventually(lambda: bool(stack.replicas[0].seen))
        assert stack.server.members.leased()[stack.key("r0")].prefill_tokens == 3
        assert stack.server.in_flight == 1
        gate.set()
        await running
        await assert_nothing_leaked(stack.server)


async def test_outcome_of_a_lookaside_stream_is_learned_from() -> None:
    async with (
        running_stack(token=TOKEN, script=Script(times=TIMES)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        await collected(client, [1, 2, 3], max_tokens=2)
        await eventually(lambda: stack.group.fleet.speeds.errors("r0").outcomes == 1)


async def test_closed_lookaside_stream_cancels_the_replica_and_ends_the_lease() -> None:
    async with (
        running_stack(token=TOKEN, script=Script(hang_after=1)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        stream = client.generate([1], max_tokens=9)
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: stack.replicas[0].seen[0].cancelled)
        await assert_nothing_leaked(stack.server)


async def test_lease_of_a_client_that_vanished_ends_with_its_ticket() -> None:
    async with running_stack(token=TOKEN, ticket_s=0.15) as stack, routed(stack):
        assert stack.server.members.leased()
        await assert_nothing_leaked(stack.server)


async def test_leases_of_routed_streams_end_when_the_router_stops() -> None:
    async with running_stack(token=TOKEN) as stack, routed(stack):
        assert stack.server.in_flight == 1
        await stack.server.stop(0.1)
        assert stack.server.members.leased() == {}
        assert stack.server.in_flight == 0


async def test_ticket_is_good_once_for_the_very_request_it_was_made_for() -> None:
    async with running_stack(token=TOKEN) as stack, routed(stack) as (response, _, direct):
        ticket, raw = response.ticket, response.replica_request
        other = replica_pb2.ReplicaGenerateRequest.FromString(raw)
        other.prompt_token_ids.append(7)
        refused = [
            await refusal(direct, raw),
            await refusal(direct, raw, (TICKET_KEY, "forged.ticket")),
            await refusal(direct, raw, (TICKET_KEY, ticket[:-2] + "AA")),
            await refusal(direct, other.SerializeToString(), (TICKET_KEY, ticket)),
        ]
        assert stack.replicas[0].seen == []
        messages = await call(direct, raw, (TICKET_KEY, ticket))
        refused.append(await refusal(direct, raw, (TICKET_KEY, ticket)))
        assert len(messages) == 2
        assert len(stack.replicas[0].seen) == 1
    assert {error.code for error in refused} == {grpc.StatusCode.UNAUTHENTICATED}
    assert "used before" in refused[-1].message


async def test_expired_ticket_is_refused_with_the_reason() -> None:
    async with running_stack(token=TOKEN) as stack, routed(stack) as (response, _, direct):
        served = response.served
        expired = tickets.sign(
            TOKEN,
            response.replica_request,
            replica=served.replica,
            epoch=served.epoch,
            attempt_id=response.attempt_id,
            expires_at=time.time() - 60,
        )
        error = await refusal(direct, response.replica_request, (TICKET_KEY, expired))
    assert error.reason == common_pb2.TICKET_INVALID
    assert "expired" in error.message


async def test_replica_lost_before_the_first_token_is_replaced_by_a_second_route() -> None:
    lost = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the engine died")
    async with (
        running_stack(replicas=2, token=TOKEN, policy="round-robin") as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        stack.replicas[0].script = Script(error_at_start=lost)
        stack.replicas[0].speaking.clear()  # nothing it says clears the doubt
        for _ in range(3):
            messages = await collected(client, [1, 2, 3], max_tokens=2)
            assert messages[0].served.replica == "r1"
        assert len(stack.replicas[0].seen) <= 1
        await assert_nothing_leaked(stack.server)


async def test_replica_that_restarted_after_the_route_is_routed_to_anew() -> None:
    async with (
        running_stack(token=TOKEN) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        (replica,) = stack.replicas
        stack.server._lookaside._secret = "another"  # the replica refuses this router's ticket ...
        route, refused = client._direct._route, []  # type: ignore[union-attr]

        async def first_refused(*args: Any) -> Any:
            refused.append(await route(*args))
            stack.server._lookaside._secret = TOKEN  # ... and only the first
            return refused[-1]

        client._direct._route = first_refused  # type: ignore[union-attr]
        messages = await collected(client, [1, 2, 3], max_tokens=2)
        assert len(refused) == 2
        assert messages[0].served.epoch == replica.epoch
        await assert_nothing_leaked(stack.server)


async def test_lookaside_stream_that_breaks_after_its_first_token_is_an_error() -> None:
    async with (
        running_stack(token=TOKEN, script=Script(end_early_after=1)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        with pytest.raises(KvorumError) as caught:
            await collected(client, [1, 2, 3], max_tokens=3)
        await assert_nothing_leaked(stack.server)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == common_pb2.REPLICA_LOST


async def test_router_without_a_cluster_token_says_that_it_cannot_route() -> None:
    async with running_stack() as stack, KvorumClient(stack.address, lookaside=True) as client:
        with pytest.raises(KvorumError) as caught:
            await collected(client, [1])
        assert stack.replicas[0].seen == []
        await assert_nothing_leaked(stack.server)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.reason == common_pb2.FEATURE_NOT_ENABLED


async def test_lookaside_goes_on_when_one_of_two_routers_is_down() -> None:
    async with (
        running_stack(token=TOKEN, routers=2) as stack,
        KvorumClient(*stack.addresses, lookaside=True) as client,
    ):
        await collected(client, [1], max_tokens=1)
        await stack.servers[0].stop(0)
        for _ in range(2):
            await collected(client, [1], max_tokens=1)
        assert len(stack.replicas[0].seen) == 3
        await assert_nothing_leaked(stack.servers[1])


async def test_stream_outlives_the_router_that_routed_it() -> None:
    gate = asyncio.Event()
    async with (
        running_stack(token=TOKEN, script=Script(gate=gate)) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        running = asyncio.ensure_future(collected(client, [1], max_tokens=3))
        await eventually(lambda: bool(stack.replicas[0].seen))
        await stack.server.stop(0)
        gate.set()
        assert len(await running) == 3


@pytest.mark.parametrize(
    "end",
    [
        {"ttft_s": float("nan"), "times": TIMES},
        {"ttft_s": -1.0, "times": TIMES},
        {"ttft_s": float("inf"), "times": TIMES},
        {"ttft_s": 0.1, "times": TIMES, "usage": common_pb2.Usage(cached_tokens=-5)},
        {"ttft_s": 0.1, "times": TIMES, "usage": common_pb2.Usage(cached_tokens=2**31 - 1)},
        {"ttft_s": 0.1, "times": common_pb2.EngineTimes(queue=float("nan"), prefill=-1)},
    ],
)
async def test_absurd_report_ends_the_lease_and_teaches_nothing(end: dict[str, Any]) -> None:
    async with running_stack(token=TOKEN) as stack, routed(stack) as (response, stub, _):
        message = inference_pb2.ReportEndRequest(attempt_id=response.attempt_id, **end)
        await stub.ReportEnd(message, timeout=5)
        assert stack.group.fleet.speeds.errors("r0").outcomes == 0
        await assert_nothing_leaked(stack.server)


async def test_report_of_an_attempt_that_nobody_knows_is_ignored() -> None:
    async with running_stack(token=TOKEN) as stack, routed(stack) as (response, stub, _):
        await stub.ReportEnd(inference_pb2.ReportEndRequest(attempt_id="guess", lost=True), timeout=5)
        assert stack.view("r0").standing == "ready"
        for _ in range(2):
            await stub.ReportEnd(inference_pb2.ReportEndRequest(attempt_id=response.attempt_id), timeout=5)
        await assert_nothing_leaked(stack.server)


async def test_failed_signature_leaves_no_lease_behind_and_its_spans_say_why() -> None:
    unsignable, record = FakeReplica("r" * 3000, token=TOKEN), SpanRecorder()
    async with (
        running_stack(token=TOKEN, replicas=0, extra=[unsignable], observer=record.observer) as stack,
        open_channel(stack.address) as channel,
    ):
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Route(request(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        await assert_nothing_leaked(stack.server)
    for name in (spans.ROUTER_REQUEST, spans.ROUTER_FORWARD):
        assert record.attributes(name)[spans.ERROR_TYPE] == "INTERNAL"


async def test_routed_streams_beyond_the_bound_are_refused_as_overloaded() -> None:
    async with running_stack(token=TOKEN, max_streams=2) as stack, open_channel(stack.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Route(request(), timeout=5) for _ in range(5)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [from_rpc_error(a) for a in answers if isinstance(a, grpc.aio.AioRpcError)]
        assert len(refused) == 3
        assert {error.reason for error in refused} == {common_pb2.OVERLOADED}
        assert all(error.retry_after_s for error in refused)
        assert stack.server.in_flight == 2
