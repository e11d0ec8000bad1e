"""Which routers serve, and which one a client tries first."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from fakes_cluster import FakeReplica, Script
from fakes_router import collected, eventually, running_stack
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.openai import router_health
from cluster.openai.router_health import RouterHealth
from protos import common_pb2, inference_pb2
from protos.channels import bind, create_server
from protos.errors import KvorumError
from router.client import KvorumClient


@asynccontextmanager
async def watching(*addresses: str) -> AsyncIterator[RouterHealth]:
    health = RouterHealth(addresses)
    health.start()
    try:
        yield health
    finally:
        await health.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_health, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(router_health, "_EAGER_S", 0.02)
    monkeypatch.setattr(router_health, "_ANSWER_S", 0.1)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_a_router_serves_while_a_replica_behind_it_can() -> None:
    async with running_stack() as stack, watching(stack.address) as health:
        await asyncio.wait_for(health.wait_serving(), 5)
        assert health.serves(stack.address)
        stack.replicas[0].draining = True
        stack.replicas[0].push()
        await eventually(lambda: not health.serving)
        stack.replicas[0].draining = False
        stack.replicas[0].push()
        await eventually(lambda: health.serving)


async def test_a_router_that_is_gone_does_not_serve_and_another_one_still_does() -> None:
    async with running_stack(routers=2) as stack, watching(*stack.addresses) as health:
        await eventually(lambda: all(map(health.serves, stack.addresses)))
        await stack.servers[0].stop(grace_s=0)
        await eventually(lambda: not health.serves(stack.addresses[0]))
        assert health.serving
        assert health.serves(stack.addresses[1])


class FakeSlowHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers SERVING, or not at all."""

    def __init__(self) -> None:
        self.silent = False
        self.asked = 0

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        self.asked += 1
        if self.silent:
            await asyncio.sleep(5)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


async def test_one_late_answer_is_forgiven_and_lasting_silence_is_not() -> None:
    server: grpc.aio.Server = create_server()
    slow = FakeSlowHealth()
    health_pb2_grpc.add_HealthServicer_to_server(slow, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    try:
        async with watching(address) as health:
            await eventually(lambda: health.serving)
            slow.silent = True
            asked = slow.asked
            await eventually(lambda: slow.asked >= asked + 2)
            assert health.serving
            await eventually(lambda: not health.serving)
    finally:
        await server.stop(None)


async def test_a_client_tries_routers_last_that_do_not_serve() -> None:
    async with running_stack(routers=2) as stack:
        usable = {stack.addresses[0]: False, stack.addresses[1]: True}
        async with KvorumClient(*stack.addresses, usable=usable.__getitem__) as client:
            await collected(client, [1], max_tokens=1)
            assert client._preferred == 1
            usable.update({stack.addresses[0]: True, stack.addresses[1]: False})
            await collected(client, [1], max_tokens=1)
            assert client._preferred == 0


async def test_a_client_uses_an_unusable_router_rather_than_none() -> None:
    async with (
        running_stack() as stack,
        KvorumClient(free_address(), stack.address, usable=lambda _: False) as client,
    ):
        assert await collected(client, [1], max_tokens=1)


async def test_what_a_router_says_counts_more_than_that_another_one_is_gone() -> None:
    full = Script(gate=asyncio.Event())
    replica = FakeReplica("r0", script=full)
    replica.load.max_sequences = 1
    async with running_stack(replicas=0, extra=[replica], max_queue=1) as stack:
        waiting = [asyncio.ensure_future(collected(stack.client, [1], max_tokens=1)) for _ in range(2)]
        await eventually(lambda: len(stack.group.turnstile) == 1)
        async with KvorumClient(stack.address, free_address()) as client:
            with pytest.raises(KvorumError) as caught:
                await collected(client, [1], max_tokens=1)
        assert full.gate is not None
        full.gate.set()
        await asyncio.gather(*waiting)
    assert caught.value.reason == common_pb2.OVERLOADED
    assert caught.value.retry_after_s is not None


async def test_a_stream_can_be_cancelled_from_another_task() -> None:
    async with running_stack(script=Script(tokens=50, pace_s=0.01)) as stack:
        calls: list[Any] = []
        request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1]))
        stream = stack.client.stream(request, timeout=5, opened=calls.append)
        await anext(stream)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            async for _ in stream:
                pass
        await eventually(lambda: stack.replicas[0].running() == 0)


async def test_a_watch_that_dies_is_told_and_its_router_serves_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(_stub: object) -> bool | None:
        raise ZeroDivisionError("a bug")

    async with running_stack() as stack:
        health = RouterHealth([stack.address])
        health.start()
        await eventually(lambda: health.serving)
        assert health.lost == ""
        monkeypatch.setattr(router_health, "_ask", breaks)
        await eventually(lambda: bool(health.lost))
        assert not health.serving
        assert health.lost == f"router {stack.address} is watched no more: a bug"
        await health.stop()
