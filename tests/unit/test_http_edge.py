"""What an HTTP request meets around vLLM's app."""

from __future__ import annotations

import asyncio

import pytest
from fakes_http import EVENTS, FakeConnection, FakeServer, answers, asked, streams
from fakes_router import SpanRecorder
from helpers_http_edge import CHAT, LOADING, READY, TRACEPARENT, WAITING, an_edge
from opentelemetry.trace import StatusCode
from prometheus_client import REGISTRY

from cluster.openai import call_scope, edge
from cluster.openai.asgi import Message, Receive, Scope, Send
from cluster.openai.exchange import MAX_BODY_BYTES
from cluster.openai.failures import Api, HttpFailure
from cluster.openai.probes import Standing
from protos import inference_pb2
from telemetry import spans


def counted(route: str, code: int) -> float:
    return REGISTRY.get_sample_value("kvorum_http_requests_total", {"route": route, "code": str(code)}) or 0.0


def remembering(found: list[call_scope.CallScope]) -> FakeServer:
    async def behave(scope: Scope, receive: Receive, send: Send) -> None:
        current = call_scope.current()
        assert current is not None
        found.append(current)
        await answers(200, {})(scope, receive, send)

    return FakeServer(behave)


async def test_a_given_request_id_is_seen_by_the_app_and_echoed() -> None:
    server = FakeServer(answers(200, {"ok": True}))
    answer = await asked(an_edge(server), CHAT, headers={"X-Request-Id": "mine-1"})
    assert (answer.status, answer.json) == (200, {"ok": True})
    assert answer.headers["x-request-id"] == "mine-1"
    assert [v for k, v in server.seen[0]["headers"] if k == b"x-request-id"] == [b"mine-1"]


@pytest.mark.parametrize("given", ["", "x" * 129, "line\tbreak", "Ünicode"])
async def test_an_unfit_request_id_is_replaced(given: str) -> None:
    server = FakeServer(answers(200, {}))
    answer = await asked(an_edge(server), CHAT, headers={"X-Request-Id": given})
    made = answer.headers["x-request-id"]
    assert len(made) == 32
    assert [v for k, v in server.seen[0]["headers"] if k == b"x-request-id"] == [made.encode()]


async def test_an_error_of_the_edge_carries_the_request_id_too() -> None:
    answer = await asked(an_edge(None, standing=LOADING), CHAT, headers={"X-Request-Id": "mine-2"})
    assert (answer.status, answer.headers["x-request-id"]) == (503, "mine-2")


async def test_tenant_session_and_class_reach_whatever_serves_the_request() -> None:
    found: list[call_scope.CallScope] = []
    headers = {"X-Tenant-Id": "acme", "X-Session-Id": "s1", "X-Service-Class": "Batch"}
    await asked(an_edge(remembering(found)), CHAT, headers=headers)
    assert (found[0].tenant, found[0].session) == ("acme", "s1")
    assert found[0].service_class == inference_pb2.BATCH
    assert call_scope.current() is None


@pytest.mark.parametrize(
    "headers", [{"X-Service-Class": "urgent"}, {"X-Tenant-Id": "t" * 257}, {"X-Session-Id": "a\tb"}]
)
async def test_unfit_headers_are_refused_with_400(headers: dict[str, str]) -> None:
    server = FakeServer(answers(200, {}))
    answer = await asked(an_edge(server), CHAT, headers=headers)
    assert (answer.status, answer.json["error"]["code"], server.seen) == (400, 400, [])


async def test_the_span_lies_below_the_callers_and_its_trace_id_is_told() -> None:
    recorder, found = SpanRecorder(), list[call_scope.CallScope]()
    answer = await asked(
        an_edge(remembering(found), telemetry=recorder.telemetry), CHAT, headers={"traceparent": TRACEPARENT}
    )
    (span,) = recorder.named(spans.HTTP_REQUEST)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert answer.headers["x-trace-id"] == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes is not None
    assert span.attributes[spans.HTTP_STATUS] == 200
    assert span.attributes[spans.HTTP_ROUTE] == CHAT
    (parent,) = (value for key, value in spans.inject(found[0].context) if key == "traceparent")
    assert span.context is not None
    assert f"{span.context.span_id:016x}" in parent


async def test_without_keys_nobody_is_asked_for_one() -> None:
    assert (await asked(an_edge(FakeServer(answers(200, {}))), CHAT)).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic k-2"}, 401),
        ({"Authorization": "Bearer k-2"}, 200),
        ({"Authorization": "bearer  k-1"}, 200),
        ({"x-api-key": "k-1"}, 200),
        ({"Authorization": "Bearer kéy"}, 401),
    ],
)
async def test_with_keys_a_request_needs_one_of_them(headers: dict[str, str], status: int) -> None:
    server = FakeServer(answers(200, {}))
    answer = await asked(an_edge(server, keys=("k-1", "k-2")), "/v1/models", method="GET", headers=headers)
    assert answer.status == status
    assert bool(server.seen) == (status == 200)
    if status == 401:
        assert answer.json["error"]["code"] == 401


async def test_probes_and_preflights_need_no_key() -> None:
    guarded = an_edge(FakeServer(answers(200, {})), keys=("k",))
    assert (await asked(guarded, "/readyz", method="GET")).status == 200
    assert (await asked(guarded, CHAT, method="OPTIONS")).status == 200
    assert (await asked(guarded, "/metrics", method="GET")).status == 401


@pytest.mark.parametrize(
    ("standing", "live", "started", "ready"),
    [
        (LOADING, 200, 503, 503),
        (WAITING, 200, 200, 503),
        (READY, 200, 200, 200),
        (Standing("failed: no", 1.0, started=False, ready=False, failed=True), 503, 503, 503),
    ],
)
async def test_probes_tell_the_phase_and_the_truth(
    standing: Standing, live: int, started: int, ready: int
) -> None:
    face = an_edge(None, standing=standing)
    wanted = {"/livez": live, "/startupz": started, "/readyz": ready, "/health": ready, "/ping": ready}
    for path, status in wanted.items():
        answer = await asked(face, path, method="GET")
        assert (path, answer.status) == (path, status)
        assert answer.json == {"phase": standing.phase, "elapsed_s": standing.elapsed_s}


async def test_a_probe_takes_no_other_method() -> None:
    answer = await asked(an_edge(None), "/livez", method="DELETE")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


async def test_before_it_is_ready_it_says_what_it_is_doing() -> None:
    answer = await asked(an_edge(None, standing=LOADING), CHAT)
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "loading vLLM's server" in answer.json["error"]["message"]


async def test_models_are_listed_only_when_one_can_answer() -> None:
    server = FakeServer(answers(200, {"data": []}))
    assert (await asked(an_edge(server, standing=WAITING), "/v1/models", method="GET")).status == 503
    assert (await asked(an_edge(server, standing=WAITING), "/tokenize")).status == 200
    assert (await asked(an_edge(server), "/v1/models", method="GET")).status == 200


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/score", "/v1/audio/transcriptions", "/scale_elastic_ep"]
)
async def test_what_a_generative_model_cannot_do_is_501(path: str) -> None:
    answer = await asked(an_edge(FakeServer(answers(200, {}))), path)
    assert (answer.status, answer.json["error"]["type"]) == (501, "Not Implemented")


async def test_a_failure_of_the_app_is_500_without_its_text() -> None:
    async def fail(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise RuntimeError("secret")

    answer = await asked(an_edge(FakeServer(fail)), CHAT, headers={"X-Request-Id": "q"})
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert "request q" in answer.json["error"]["message"]


async def test_a_body_that_says_it_is_too_large_is_413() -> None:
    server = FakeServer(answers(200, {}))
    headers = {"Content-Length": str(MAX_BODY_BYTES + 1)}
    answer = await asked(an_edge(server), CHAT, headers=headers)
    assert (answer.status, server.seen) == (413, [])


async def test_a_body_that_grows_too_large_is_413_in_the_apis_shape() -> None:
    async def read(_scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        await answers(400, {"error": "cannot parse"})(_scope, receive, send)

    half = b"x" * (MAX_BODY_BYTES // 2 + 1)
    answer = await asked(an_edge(FakeServer(read)), "/v1/messages", body=[half, half, b""])
    assert answer.status == 413
    assert answer.json["error"]["type"] == "request_too_large"


async def test_load_counts_the_requests_that_generate_and_forgets_each() -> None:
    gate = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        raise RuntimeError

    face = an_edge(FakeServer(wait))
    running = [FakeConnection(path).start(face) for path in (CHAT, "/v1/messages", "/tokenize")]
    await asyncio.sleep(0)
    assert (await asked(face, "/load", method="GET")).json == {"server_load": 2}
    gate.set()
    for connection in running:
        await connection.done()
    assert (await asked(face, "/load", method="GET")).json == {"server_load": 0}


async def test_requests_are_counted_by_route_and_status() -> None:
    before = counted(CHAT, 200), counted("other", 501)
    face = an_edge(FakeServer(answers(200, {})))
    await asked(face, CHAT)
    await asked(face, "/pooling")
    assert (counted(CHAT, 200), counted("other", 501)) == (before[0] + 1, before[1] + 1)


async def test_a_client_that_leaves_ends_the_work_and_counts_as_499() -> None:
    recorder, ended = SpanRecorder(), asyncio.Event()

    async def generate(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = type("Route", (), {"path": CHAT})()
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        ended.set()
        await answers(200, None)(scope, receive, send)  # as FastAPI does for a handler that was cancelled

    before = counted(CHAT, edge.CLIENT_CLOSED)
    connection = FakeConnection(CHAT).start(an_edge(FakeServer(generate), telemetry=recorder.telemetry))
    connection.disconnect()
    await connection.done()
    assert ended.is_set()
    assert counted(CHAT, edge.CLIENT_CLOSED) == before + 1
    (span,) = recorder.named(spans.HTTP_REQUEST)
    assert span.attributes is not None
    assert (span.attributes[spans.HTTP_STATUS], span.attributes[spans.ERROR_TYPE]) == (499, "cancelled")


async def test_what_the_app_forgets_to_end_is_ended_when_the_client_has_left() -> None:
    class FakeStream:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    stream = FakeStream()

    async def drop(_scope: Scope, receive: Receive, _send: Send) -> None:
        current = call_scope.current()
        assert current is not None
        current.running.add(stream)
        await receive()
        await receive()

    connection = FakeConnection(CHAT).start(an_edge(FakeServer(drop)))
    connection.disconnect()
    await connection.done()
    assert stream.cancelled


async def test_a_client_that_leaves_after_the_answer_has_had_it() -> None:
    async def answer_then_listen(scope: Scope, receive: Receive, send: Send) -> None:
        await answers(200, {})(scope, receive, send)
        await receive()
        assert (await receive())["type"] == "http.disconnect"

    before = counted(CHAT, 200)
    connection = FakeConnection(CHAT).start(an_edge(FakeServer(answer_then_listen)))
    connection.disconnect()
    await connection.done()
    assert counted(CHAT, 200) == before + 1


async def test_the_app_is_told_to_listen_for_clients_that_leave() -> None:
    server = FakeServer(answers(200, {}))
    await asked(an_edge(server), CHAT)
    assert server.seen[0]["asgi"]["spec_version"] == "2.3"


async def test_a_broken_stream_marks_its_span_and_its_count() -> None:
    recorder = SpanRecorder()
    error = b'data: {"error": {"message": "lost", "type": "x", "param": null, "code": 502}}\n\n'
    server = FakeServer(streams(b"data: {}\n\n", error, b"data: [DONE]\n\n"))
    label = {"route": "other"}
    before = REGISTRY.get_sample_value("kvorum_http_streams_broken_total", label) or 0.0
    await asked(an_edge(server, telemetry=recorder.telemetry), CHAT)
    assert REGISTRY.get_sample_value("kvorum_http_streams_broken_total", label) == before + 1
    (span,) = recorder.named(spans.HTTP_REQUEST)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert (span.attributes[spans.ERROR_TYPE], span.attributes[spans.HTTP_STATUS]) == ("502", 200)


async def test_more_requests_than_the_limit_are_refused_counted_and_traced() -> None:
    recorder, gate = SpanRecorder(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == CHAT:
            await gate.wait()
        await answers(200, {})(scope, receive, send)

    face = an_edge(FakeServer(wait), keys=("k",), telemetry=recorder.telemetry, max_ongoing=1)
    key = {"x-api-key": "k"}
    running = FakeConnection(CHAT, headers=key).start(face)
    await asyncio.sleep(0)
    before = counted("other", 503)
    refused = await asked(face, CHAT, headers={**key, "X-Request-Id": "mine"})
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert refused.headers["x-request-id"] == "mine"
    assert refused.json["error"]["code"] == 503
    assert counted("other", 503) == before + 1
    assert len(recorder.named(spans.HTTP_REQUEST)) == 1
    always = {"/metrics": 200, "/load": 200, "/readyz": 200}
    for path, status in always.items():
        assert (await asked(face, path, method="GET", headers=key)).status == status
    assert (await asked(face, CHAT)).status == 401
    gate.set()
    await running.done()
    assert running.status == 200
    assert (await asked(face, CHAT, headers=key)).status == 200


async def test_a_client_that_leaves_or_a_failure_makes_room() -> None:
    async def fail(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()
        await receive()
        raise RuntimeError

    face = an_edge(FakeServer(fail), max_ongoing=1)
    for _ in range(2):
        connection = FakeConnection(CHAT).start(face)
        connection.disconnect()
        await connection.done()
    assert (await asked(face, CHAT, body=[b"", b""])).status == 500


async def test_a_request_that_takes_too_long_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_GRACE_S", 0.0)
    stopped = asyncio.Event()

    async def hang(_scope: Scope, _receive: Receive, _send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    answer = await asked(an_edge(FakeServer(hang), timeout_s=0.05), CHAT)
    assert stopped.is_set()
    assert (answer.status, answer.json["error"]["code"]) == (408, 408)
    assert answer.headers["connection"] == "close"


async def test_a_stream_that_takes_too_long_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_GRACE_S", 0.0)

    async def hang(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        await asyncio.Event().wait()

    answer = await asked(an_edge(FakeServer(hang), timeout_s=0.05), CHAT)
    assert (answer.status, answer.pieces[0], answer.complete) == (200, b"data: {}\n\n", True)
    assert b'"code": 408' in answer.pieces[1]


async def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_GRACE_S", 0.0)
    monkeypatch.setattr(edge, "_CLOSE_S", 0.05)

    class FakeStream:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    stream = FakeStream()

    async def behave(scope: Scope, receive: Receive, send: Send) -> None:
        current = call_scope.current()
        assert current is not None
        current.running.add(stream)
        await streams(b"data: {}\n\n")(scope, receive, send)

    async def never(_message: Message) -> None:
        await asyncio.Event().wait()

    before = counted("other", edge.CLIENT_CLOSED)
    connection = FakeConnection(CHAT)
    async with asyncio.timeout(5):
        await an_edge(FakeServer(behave), timeout_s=0.05)(connection.scope, connection._receive, never)
    assert stream.cancelled
    assert counted("other", edge.CLIENT_CLOSED) == before + 1


async def test_web_sockets_are_closed() -> None:
    connection = FakeConnection("/v1/realtime")
    connection.scope["type"] = "websocket"
    await connection.start(an_edge(None)).done()
    assert connection.sent[0]["type"] == "websocket.close"


def test_a_failure_has_the_shape_of_its_api() -> None:
    failure = HttpFailure(429, "busy", "Too Many Requests")
    assert b'"code": 429' in failure.body(Api.of(CHAT))
    assert b'"type": "rate_limit_error"' in failure.body(Api.of("/v1/messages/count_tokens"))
    event = failure.event(Api.of("/v1/responses"), 7)
    assert event.startswith(b"event: error\ndata: ")
    assert b'"sequence_number": 7' in event
