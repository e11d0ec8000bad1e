"""The router as a server: health, keys, draining, and its client's failover."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from fakes_cluster import DIGEST, FakeController, FakeReplica, Script
from fakes_router import eventually, running_stack
from fakes_tokenizer import FakeTokenizer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import common_pb2
from protos.channels import open_channel
from protos.errors import KvorumError, to_status
from router.client import KvorumClient, SyncClient
from router.config import RouterConfig
from router.server import RouterServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ROOT = Path(__file__).resolve().parents[2]


async def health(address: str, service: str = "") -> Any:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


async def test_health_is_serving_only_while_a_replica_is_ready() -> None:
    async with running_stack() as stack:
        services = ("", "kvorum.v1.Inference", "model/fake")
        for service in services:
            assert await health(stack.address, service) == SERVING
        await stack.replicas[0].die()
        await eventually(lambda: not stack.server.members.servable("fake"))
        await asyncio.sleep(0.05)
        for service in services:
            assert await health(stack.address, service) == NOT_SERVING


async def test_router_without_a_controller_answers_and_is_not_serving() -> None:
    server = RouterServer(RouterConfig(port=0), "127.0.0.1:1", make_tokenizer=FakeTokenizer)
    address = await server.start()
    try:
        assert await health(address) == NOT_SERVING
        async with KvorumClient(address) as client:
            assert await client.list_models() == []
            with pytest.raises(KvorumError) as caught:
                await anext(client.generate("hi"))
    finally:
        await server.stop(0)
    assert caught.value.reason == common_pb2.NO_REPLICA_READY
    assert "127.0.0.1:1 has not answered" in caught.value.message


async def test_health_watch_sees_the_loss_and_the_return_of_a_replica() -> None:
    async with running_stack() as stack, open_channel(stack.address) as channel:
        request = health_pb2.HealthCheckRequest(service="model/fake")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=10)
        statuses = [(await watch.read()).status]
        await stack.replicas[0].die()
        statuses.append((await watch.read()).status)
        await stack.replicas[0].start()
        statuses.append((await watch.read()).status)
        watch.cancel()
    assert statuses == [SERVING, NOT_SERVING, SERVING]


async def test_draining_router_is_unhealthy_refuses_new_requests_and_finishes_old_ones() -> None:
    async with running_stack(script=Script(pace_s=0.05)) as stack:
        running = stack.client.generate([1], max_tokens=10)
        await anext(running)
        stopping = asyncio.ensure_future(stack.server.stop(grace_s=10))
        await asyncio.sleep(0.05)
        assert await health(stack.address) == NOT_SERVING
        with pytest.raises(KvorumError) as caught:
            await anext(stack.client.generate([1]))
        rest = [message async for message in running]
        await stopping
    assert caught.value.reason == common_pb2.ROUTER_DRAINING
    assert len(rest) == 9


async def test_stream_that_outlives_the_grace_is_told_why_it_ends() -> None:
    async with running_stack(script=Script(hang_after=1)) as stack:
        running = stack.client.generate([1], max_tokens=10)
        await anext(running)
        stopping = asyncio.ensure_future(stack.server.stop(grace_s=0.1))
        with pytest.raises(KvorumError) as caught:
            await anext(running)
        await stopping
        assert stack.server.members.leased() == {}
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == common_pb2.ROUTER_DRAINING


async def test_health_watcher_does_not_hold_up_the_stop() -> None:
    async with running_stack() as stack, open_channel(stack.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        await watch.read()
        await asyncio.wait_for(stack.server.stop(grace_s=30), 5)


async def test_port_in_use_is_an_error_at_start() -> None:
    async with running_stack() as stack:
        port = int(stack.address.rpartition(":")[2])
        second = RouterServer(RouterConfig(port=port), stack.controller.address)
        with pytest.raises(OSError, match="in use"):
            await second.start()
        await second.stop(0)


async def test_keys_are_asked_for_when_there_is_a_file_of_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nalpha\n\n  beta  \n")
    async with running_stack(token="cluster", api_keys_file=keys) as stack:
        for key in ("alpha", "beta", "cluster"):
            async with KvorumClient(stack.address, api_key=key) as client:
                assert len([m async for m in client.generate([1], max_tokens=2)]) == 2
        for bad in (None, "gamma", "# ours"):
            async with KvorumClient(stack.address, api_key=bad) as client:
                with pytest.raises(KvorumError) as caught:
                    await anext(client.generate([1]))
                assert caught.value.reason == common_pb2.UNAUTHENTICATED


async def test_empty_key_file_does_not_open_the_router_to_everyone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# none yet\n")
    server = RouterServer(RouterConfig(port=0, api_keys_file=keys), "127.0.0.1:1")
    with pytest.raises(ValueError, match="holds no API key"):
        await server.start()


async def test_reflection_lists_the_services() -> None:
    async with running_stack() as stack, open_channel(stack.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=5)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
    names = {service.name for service in answer.list_services_response.service}
    assert {"kvorum.v1.Inference", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("arguments", "field", "reason"),
    [
        ({"prompt": ""}, "text", common_pb2.PROMPT_EMPTY),
        ({"prompt": []}, "tokens.ids", common_pb2.PROMPT_EMPTY),
        ({"messages": []}, "chat.messages", common_pb2.PROMPT_EMPTY),
        ({"prompt": [1000]}, "tokens.ids", common_pb2.INVALID_REQUEST),
        ({"prompt": "w " * 512}, "text", common_pb2.PROMPT_TOO_LONG),
        ({"prompt": [1], "temperature": -1}, "sampling.temperature", common_pb2.INVALID_REQUEST),
        ({"prompt": [1], "max_tokens": 512}, "sampling.max_tokens", common_pb2.INVALID_REQUEST),
        ({"prompt": [1], "n": 17}, "sampling.n", common_pb2.INVALID_REQUEST),
        ({"prompt": [1], "request_id": "\n"}, "options.request_id", common_pb2.INVALID_REQUEST),
        (
            {"messages": [{"role": "alien", "content": "x"}]},
            "chat.messages",
            common_pb2.INVALID_REQUEST,
        ),
    ],
)
async def test_bad_request_names_its_field_and_reaches_no_replica(
    arguments: dict[str, Any], field: str, reason: common_pb2.Reason.ValueType
) -> None:
    async with running_stack() as stack:
        with pytest.raises(KvorumError) as caught:
            await anext(stack.client.generate(**arguments))
        assert stack.replicas[0].seen == []
        assert stack.server.in_flight == 0
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.reason == reason
    assert [v.field for v in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"model": "ghost"}, common_pb2.MODEL_NOT_FOUND), ({"lora": "ghost"}, common_pb2.LORA_NOT_FOUND)],
)
async def test_unknown_model_or_adapter_is_not_found(
    arguments: dict[str, Any], reason: common_pb2.Reason.ValueType
) -> None:
    async with running_stack() as stack:
        with pytest.raises(KvorumError) as caught:
            await anext(stack.client.generate([1], **arguments))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, reason)


async def test_client_goes_on_to_the_next_router_when_one_is_gone() -> None:
    async with running_stack() as stack, KvorumClient("127.0.0.1:1", stack.address) as client:
        for _ in range(2):
            assert len([m async for m in client.generate([1], max_tokens=3)]) == 3
        assert [model.info.name for model in await client.list_models()] == ["fake"]
        assert list((await client.tokenize("ab")).ids) == [1, 2]


async def test_client_reports_the_last_router_when_all_are_gone() -> None:
    async with KvorumClient("127.0.0.1:1", "127.0.0.1:2") as client:
        with pytest.raises(KvorumError) as caught:
            await anext(client.generate([1], timeout=5))
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_client_does_not_try_another_router_with_a_bad_request() -> None:
    async with running_stack() as stack, KvorumClient(stack.address, "127.0.0.1:1") as client:
        with pytest.raises(KvorumError) as caught:
            await anext(client.generate([1], top_p=7.0))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


class FakeRefusingRouter:
    """Has no room: as a router says it, or as gRPC itself does of a message that is too large."""

    def __init__(self, *, of_ours: bool) -> None:
        self._of_ours, self.asked = of_ours, 0
        self.server = grpc.aio.server()
        methods: dict[str, Any] = {
            "Generate": grpc.unary_stream_rpc_method_handler(self._refuse),
            "ListModels": grpc.unary_unary_rpc_method_handler(self._refuse),
        }
        handler = grpc.method_handlers_generic_handler("kvorum.v1.Inference", methods)
        self.server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def _refuse(self, _request: bytes, context: Any) -> None:
        self.asked += 1
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        if self._of_ours:
            await context.abort_with_status(to_status(KvorumError(code, common_pb2.OVERLOADED, "full")))
        await context.abort(code, "Received message larger than max")


@pytest.mark.parametrize("of_ours", [False, True])
async def test_client_tries_another_router_for_its_load_but_not_for_what_grpc_refuses(of_ours: bool) -> None:
    routers = [FakeRefusingRouter(of_ours=of_ours) for _ in range(2)]
    for router in routers:
        await router.server.start()
    async with KvorumClient(*(router.address for router in routers)) as client:
        with pytest.raises(KvorumError):
            await anext(client.generate([1]))
        with pytest.raises(KvorumError):
            await client.list_models()
    for router in routers:
        await router.server.stop(None)
    assert [router.asked for router in routers] == ([2, 2] if of_ours else [2, 0])


async def test_client_refuses_what_it_cannot_send() -> None:
    async with KvorumClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="unknown field temprature"):
            await anext(client.generate([1], temprature=1.0))
        with pytest.raises(ValueError, match="either a prompt or messages"):
            await anext(client.generate())
        with pytest.raises(ValueError, match=r"messages\[0\]"):
            await anext(client.generate(messages=[{"rol": "user"}]))


async def test_sync_client_streams_and_lists() -> None:
    def use(address: str) -> tuple[list[str], list[str], list[int]]:
        with SyncClient(address) as client:
            texts = [c.text for m in client.generate([1], max_tokens=2) for c in m.choices]
            names = [model.info.name for model in client.list_models()]
            return texts, names, list(client.tokenize("abc").ids)

    async with running_stack() as stack:
        answer = await asyncio.to_thread(use, stack.address)
    assert answer == ([" t1", " t2"], ["fake"], [1, 3])


def test_router_imports_neither_engine_nor_ray() -> None:
    """Its start time and memory depend on it."""
    program = (
        "import sys, router.main, router.server, router.client, router.tokenizer;"
        "heavy = {'torch', 'vllm', 'transformers', 'ray', 'numba'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def test_router_process_drains_on_sigterm() -> None:
    controller = await FakeController().start()
    replica = await FakeReplica("r0", script=Script(pace_s=0.05)).start()
    words = json.dumps(
        {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    )
    controller.bundles[DIGEST].tokenizer_json = words.encode()
    await controller.announce(replica.member())
    program = (
        "import sys; from router.main import serve; from router.config import RouterConfig;"
        "from telemetry.config import TelemetryConfig;"
        "serve(RouterConfig(port=0, heartbeat_s=0.1), sys.argv[1],"
        " telemetry=TelemetryConfig(enabled=False), on_ready=lambda a: print(a, flush=True))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, controller.address,
        stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
        async with KvorumClient(address) as client:
            async with open_channel(address) as channel:
                request = health_pb2.HealthCheckRequest(service="kvorum.v1.Inference")
                watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=10)
                while (await watch.read()).status != SERVING:
                    pass
                watch.cancel()
            stream = client.generate([1], max_tokens=10)
            await anext(stream)
            process.terminate()
            assert len([message async for message in stream]) == 9
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await replica.die()
        await controller.stop()
