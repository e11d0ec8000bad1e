"""The running viewer: what it takes in, what it shows, what it survives."""

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.rpc.status_pb2 import Status
from helpers_viewer import PROTOBUF, a_gauge, a_request, an_export, metrics, running
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from telemetry.store import SpanStore
from telemetry.viewer import server
from telemetry.viewer.server import Viewer
from telemetry.viewer.settings import ViewerSettings

JSON = {"content-type": "application/json"}
MIB = 1024 * 1024


# ---- what it takes in


async def test_spans_over_http_and_grpc_end_in_the_store_beside_those_of_other_processes(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as it, grpc.aio.insecure_channel(it.otlp) as channel:
        it.store.write(a_request(7))
        await TraceServiceStub(channel).Export(an_export(span_id=b"grpc-one"))
        plain = an_export(span_id=b"http-one").SerializeToString()
        zipped = gzip.compress(an_export(span_id=b"http-two").SerializeToString())
        assert (await it.http.post("/v1/traces", content=plain, headers=PROTOBUF)).content == b""
        packed = {**PROTOBUF, "content-encoding": "gzip"}
        assert (await it.http.post("/v1/traces", content=zipped, headers=packed)).status_code == 200
        ids = {bytes.fromhex(span.span_id) for span in it.store.trace("01" * 16)}
        assert ids == {b"grpc-one", b"http-one", b"http-two"}
        found = (await it.http.get("/api/requests")).json()["requests"]
        assert {int(one["trace_id"], 16) for one in found} == {7, int("01" * 16, 16)}
        assert await it.received("accepted") == 3


async def test_what_cannot_be_kept_is_said_in_the_encoding_of_the_export(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        bad = an_export(trace_id=b"short")
        answer = await it.http.post("/v1/traces", content=bad.SerializeToString(), headers=PROTOBUF)
        said = ExportTraceServiceResponse.FromString(answer.content)
        assert (answer.status_code, said.partial_success.rejected_spans) == (200, 1)
        assert "trace_id" in said.partial_success.error_message
        answer = await it.http.post("/v1/traces", content=b"{]", headers=JSON)
        assert (answer.status_code, answer.json()["code"]) == (400, 3)
        answer = await it.http.post("/v1/traces", content=b"\xff\xff\xff", headers=PROTOBUF)
        assert (answer.status_code, Status.FromString(answer.content).code) == (400, 3)
        assert (await it.received("rejected"), await it.received("malformed")) == (1, 2)


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data"}, {**PROTOBUF, "content-encoding": "br"},
    ],
)  # fmt: skip
async def test_content_that_a_foreign_page_could_send_is_refused(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with running(tmp_path) as it:
        body = an_export().SerializeToString()
        assert (await it.http.post("/v1/traces", content=body, headers=headers)).status_code == 415
        assert it.store.services() == []
        assert await it.received("malformed") == 1


async def test_bodies_beyond_the_limit_are_refused_however_they_come(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield bytes(MIB // 16)

    packed = {**PROTOBUF, "content-encoding": "gzip"}
    async with running(tmp_path, max_body_mib=1) as it:
        for content, headers in (
            (bytes(MIB + 1), PROTOBUF), (chunks(), PROTOBUF), (gzip.compress(bytes(64 * MIB), 1), packed),
        ):  # fmt: skip
            answer = await it.http.post("/v1/traces", content=content, headers=headers)
            assert answer.status_code == 413
            assert "1 MiB" in Status.FromString(answer.content).message
        for broken in (b"no gzip", gzip.compress(b"x" * 100)[:-9]):
            assert (await it.http.post("/v1/traces", content=broken, headers=packed)).status_code == 400
        assert (await it.received("too_large"), await it.received("malformed")) == (3, 2)
        async with grpc.aio.insecure_channel(it.otlp) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await TraceServiceStub(channel).Export(an_export(name="x" * 2 * MIB))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_garbage_over_grpc_is_refused_and_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as it, grpc.aio.insecure_channel(it.otlp) as channel:
        for service in ("trace.v1.TraceService", "metrics.v1.MetricsService"):
            call = channel.unary_unary(f"/opentelemetry.proto.collector.{service}/Export")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"\xff\xfe garbage")
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await it.received("malformed", "metrics") == 1


async def test_a_body_that_never_ends_is_given_up_and_its_slot_with_it(tmp_path: Path) -> None:
    async with running(tmp_path, body_timeout_s=0.2, max_exports=1) as it:
        host, port = it.http.base_url.host, it.http.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        head = "POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\nabc".encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        body = an_export().SerializeToString()
        busy = await it.http.post("/v1/traces", content=body, headers=PROTOBUF)
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        assert b"408" in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert (await it.http.post("/v1/traces", content=body, headers=PROTOBUF)).status_code == 200
        assert await it.received("busy") == 1


async def test_exporters_readers_and_other_processes_work_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    async with running(tmp_path, max_exports=100) as it, grpc.aio.insecure_channel(it.otlp) as channel:
        export = TraceServiceStub(channel).Export

        def write_directly() -> None:
            other = SpanStore(it.store.path)
            for trace in range(1000, 1020):
                other.write(a_request(trace))

        async def over_http(number: int) -> None:
            body = an_export(span_id=number.to_bytes(8)).SerializeToString()
            answer = await it.http.post("/v1/traces", content=body, headers=PROTOBUF)
            assert answer.status_code == 200
            assert (await it.http.get("/api/requests")).status_code == 200

        async def over_grpc(number: int) -> None:
            await export(an_export(span_id=(1 << 32 | number).to_bytes(8)))

        numbers = range(1, 31)
        await asyncio.gather(
            asyncio.to_thread(write_directly), *map(over_http, numbers), *map(over_grpc, numbers)
        )
        assert it.store.size("01" * 16) == 60
        assert all(it.store.size(f"{trace:032x}") == 6 for trace in range(1000, 1020))


async def test_a_store_that_breaks_costs_spans_and_pages_and_not_the_viewer(tmp_path: Path) -> None:
    (tmp_path / "traces.db").write_bytes(b"no database " * 1000)
    async with running(tmp_path) as it:
        answer = await it.http.post("/v1/traces", content=an_export().SerializeToString(), headers=PROTOBUF)
        said = ExportTraceServiceResponse.FromString(answer.content).partial_success
        assert (answer.status_code, said.rejected_spans) == (200, 1)
        shown = await it.http.get("/api/requests")
        assert (shown.status_code, "not a database" in shown.json()["error"]) == (503, True)
        assert await it.received("failed") == 1
        assert (await it.http.get("/healthz")).status_code == 200


# ---- what it shows


async def test_metrics_of_processes_and_engines_are_one_text(tmp_path: Path) -> None:
    async def scrape() -> Mapping[str, str]:
        return {
            "replica-0": '# TYPE vllm:running gauge\nvllm:running{engine="0"} 3.0\n',
            "replica-1": "\x00 garbage",
        }

    async with running(tmp_path, scrape=scrape) as it, grpc.aio.insecure_channel(it.otlp) as channel:
        pushed = metrics(
            {"service.name": "kvorum.router", "service.instance.id": "r"}, a_gauge("kvorum.x", {"a": 5})
        )
        await MetricsServiceStub(channel).Export(pushed)
        answer = await it.http.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'kvorum_x{service="kvorum.router",instance="r",k="a"} 5.0\n' in answer.text
        assert 'vllm:running{replica="replica-0",engine="0"} 3.0\n' in answer.text
        assert await it.metric("kvorum_viewer_processes") == 1
        assert await it.metric("kvorum_viewer_lines_refused") == 1


def slow_then(answer: Any, calls: list[float], first_s: float) -> Callable[[], Awaitable[Any]]:
    async def ask() -> Any:
        calls.append(time.monotonic())
        await asyncio.sleep(first_s if len(calls) == 1 else 0)
        return answer

    return ask


async def test_engines_that_do_not_answer_leave_the_other_metrics(tmp_path: Path) -> None:
    calls: list[float] = []
    scrape = slow_then({"r": "x 1\n"}, calls, 3600)
    async with running(tmp_path, scrape=scrape, scrape_timeout_s=0.1, cache_s=0) as it:
        assert await it.metric("x{") == 0
        assert await it.metric("kvorum_viewer_scrape_failures_total") == 1
        assert await it.metric("x{") == 1


async def test_many_who_look_at_the_fleet_cost_it_one_question(tmp_path: Path) -> None:
    calls: list[float] = []
    fleet = slow_then({"replicas": [{"shards": [{"cores": [0, 1]}], "age": float("nan")}]}, calls, 0.1)
    async with running(tmp_path, fleet=fleet, cache_s=60) as it:
        answers = await asyncio.gather(*(it.http.get("/api/fleet") for _ in range(10)))
        assert {answer.text for answer in answers} == {
            '{"replicas":[{"shards":[{"cores":[0,1]}],"age":"nan"}]}'
        }
        assert len(calls) == 1


async def test_a_fleet_that_cannot_be_had_is_said_so(tmp_path: Path) -> None:
    async def fleet() -> dict[str, Any]:
        raise ConnectionError("<script>the controller is away</script>")

    async with running(tmp_path, fleet=fleet) as it:
        answer = await it.http.get("/api/fleet")
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
        assert "the controller is away" in answer.json()["error"]
    async with running(tmp_path) as it:
        assert (await it.http.get("/api/fleet")).status_code == 503


async def test_the_api_shows_a_request_and_jaegers_clients_the_same_trace(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        it.store.write(a_request(0xAB, skew_ms=300))
        (listed,) = (await it.http.get("/api/requests?tenant=acme&slow_ms=100")).json()["requests"]
        assert (listed["ttft_ms"], listed["replica"], listed["status"]) == (60.0, "replica-0", "ok")
        assert (await it.http.get("/api/requests?error=1")).json() == {"requests": [], "next": None}
        shown = (await it.http.get(f"/api/requests/{listed['trace_id']}")).json()
        assert [span["depth"] for span in shown["spans"]] == [0, 1, 2, 2, 3, 4]
        assert [row["replica"] for row in shown["candidates"]] == ["replica-0", "replica-9"]
        for base in ("/api", "/jaeger/api"):
            assert (await it.http.get(f"{base}/services")).json()["data"][-1] == "kvorum.router"
            operations = (await it.http.get(f"{base}/services/kvorum.http/operations")).json()["data"]
            assert operations == ["kvorum.http.request"]
            kinds = (await it.http.get(f"{base}/operations?service=kvorum.http&spanKind=server")).json()[
                "data"
            ]
            assert kinds == [{"name": "kvorum.http.request", "spanKind": "server"}]
            found = (await it.http.get(f"{base}/traces?service=kvorum.router&limit=5&lookback=1h")).json()[
                "data"
            ]
            assert len(found[0]["spans"]) == 6
            assert (await it.http.get(f"{base}/traces/ab")).json()["data"] == found
            assert (await it.http.get(f"{base}/dependencies")).json()["data"] == []
            missing = await it.http.get(f"{base}/traces/ac")
            assert (missing.status_code, missing.json()["errors"][0]["code"]) == (404, 404)


HOSTILE = (
    "/api/requests/%00", "/api/requests/%2e%2e%2fetc", "/api/requests/<script>", "/api/requests?limit=%ff",
    "/api/requests?before=1e999", "/api/traces?service=%ED%A0%80", "/api/traces", "/api/traces/zz",
    "/api/operations?service=%00", "/api/services/%2e%2e/%ff/operations", "/%2e%2e/server.py",
    "/..%2fserver.py", "/page/../settings.py", "/index.html/x", "/api/requests?tenant=%F0%9F%92%A9%00'\"<",
    "/api/requests?" + "&".join(f"a{at}=1" for at in range(2000)),
)  # fmt: skip


async def test_hostile_addresses_get_an_honest_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        for path in HOSTILE:
            answer = await it.http.get(path)
            assert answer.status_code in {200, 400, 404}, path
            assert "Traceback" not in answer.text
            json.loads(answer.text)
        assert (await it.http.delete("/api/requests")).status_code == 405
        assert (await it.http.get("/v1/traces")).status_code == 405


# ---- start and stop


async def test_a_taken_port_is_an_error_and_leaves_nothing_listening(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        store = SpanStore(tmp_path / "traces.db")
        for ports in ({"http_port": port}, {"http_port": 0, "otlp_port": port}):
            before = threading.active_count()
            with pytest.raises(OSError, match=f"cannot listen for .* on 127.0.0.1:{port}"):
                await Viewer(ViewerSettings(**ports), store=store).start()
            assert threading.active_count() <= before + 1


async def test_stopping_is_quick_with_a_scrape_under_way_and_may_be_repeated(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def fleet() -> dict[str, Any]:
        begun.set()
        await asyncio.sleep(3600)
        return {}

    store = SpanStore(tmp_path / "traces.db")
    viewer = Viewer(ViewerSettings(http_port=0, scrape_timeout_s=3600), store=store, fleet=fleet)
    addresses = await viewer.start()
    async with httpx.AsyncClient(verify=False) as http:
        asked = asyncio.create_task(http.get(f"{addresses.http}/api/fleet", timeout=60))
        await asyncio.wait_for(begun.wait(), 10)
        async with asyncio.timeout(10):
            await viewer.stop()
            await viewer.stop()
        with pytest.raises(httpx.HTTPError):
            (await asked).raise_for_status()
    again = Viewer(ViewerSettings(http_port=int(addresses.http.rpartition(":")[2])), store=store)
    assert (await again.start()).http == addresses.http, "the port is free again"
    await again.stop()


async def test_a_settled_export_is_in_the_store_before_it_is_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        for number in range(1, 6):
            request: ExportTraceServiceRequest = an_export(span_id=number.to_bytes(8))
            await it.http.post("/v1/traces", content=request.SerializeToString(), headers=PROTOBUF)
            assert it.store.size("01" * 16) == number


def test_small_answers_are_not_held_back() -> None:
    with server._bound("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP, "else asyncio leaves TCP_NODELAY off"
