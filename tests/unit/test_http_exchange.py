"""Streams between vLLM's app and the client: honest statuses, honest ends."""

from __future__ import annotations

import asyncio

import pytest
from fakes_http import EVENTS, FakeConnection, FakeServer, answers, asked, streams

from cluster.openai import call_scope, exchange
from cluster.openai.asgi import App, Receive, Scope, Send
from cluster.openai.edge import Edge
from cluster.openai.failures import HttpFailure
from cluster.openai.keys import Keys
from cluster.openai.probes import Standing
from telemetry.setup import Telemetry

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CHUNK = b'data: {"choices": [{"delta": {"content": "data: {\\"error\\""}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "busy", "type": "Too Many Requests", "param": null, "code": 429}}\n\n'
GARBLED = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"invalid"}}\n\n'
CREATED = b'event: response.created\ndata: {"sequence_number":0}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"sequence_number":1}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"hi","sequence_number":2}\n\n'


def edge(app: App) -> Edge:
    ready = Standing("ready", 1.0, started=True, ready=True)
    return Edge(
        Keys(()), Telemetry.silent(), lambda: app, lambda: ready, request_timeout_s=10.0, max_ongoing=10
    )


def refusing(failure: HttpFailure, app: App, *, retry_after_s: float | None = None) -> App:
    """As the engine client does when a router refuses, before vLLM tells."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        current = call_scope.current()
        assert current is not None
        current.failure, current.retry_after_s = failure, retry_after_s
        await app(scope, receive, send)

    return refuse


async def test_a_stream_passes_unchanged() -> None:
    answer = await asked(edge(FakeServer(streams(CHUNK, CHUNK, DONE))), CHAT)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.pieces == [CHUNK, CHUNK, DONE]
    assert answer.complete


async def test_nothing_is_sent_before_the_first_event() -> None:
    gate = asyncio.Event()

    async def behave(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await gate.wait()
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    connection = FakeConnection(CHAT).start(edge(FakeServer(behave)))
    await asyncio.sleep(0.01)
    assert connection.sent == []
    gate.set()
    await connection.done()
    assert connection.pieces == [CHUNK]


async def test_an_error_that_comes_first_gets_its_own_status() -> None:
    failure = HttpFailure(429, "busy", "Too Many Requests")
    answer = await asked(edge(refusing(failure, FakeServer(streams(ERROR, DONE)), retry_after_s=2.2)), CHAT)
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "error": {"message": "busy", "type": "Too Many Requests", "param": None, "code": 429}
    }


async def test_an_error_of_vllm_itself_gets_its_status_from_the_event() -> None:
    answer = await asked(edge(FakeServer(streams(ERROR, DONE))), CHAT)
    assert (answer.status, answer.json["error"]["message"]) == (429, "busy")
    assert answer.headers["retry-after"] == "1"


async def test_anthropics_first_error_is_the_one_behind_it() -> None:
    failure = HttpFailure(503, "no router has a replica", "Service Unavailable")
    answer = await asked(edge(refusing(failure, FakeServer(streams(GARBLED)))), MESSAGES)
    assert answer.status == 503
    assert answer.json == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no router has a replica"},
    }


async def test_a_stream_that_breaks_ends_with_its_error_and_without_done() -> None:
    answer = await asked(edge(FakeServer(streams(CHUNK, ERROR, DONE))), CHAT)
    assert answer.status == 200
    assert answer.pieces == [CHUNK, ERROR]
    assert answer.complete


async def test_anthropics_later_error_is_the_one_behind_it() -> None:
    start = b"event: message_start\ndata: {}\n\n"
    failure = HttpFailure(502, "replica lost")
    answer = await asked(edge(refusing(failure, FakeServer(streams(start, GARBLED)))), MESSAGES)
    assert answer.pieces[0] == start
    assert answer.pieces[1].startswith(b"event: error\n")
    assert b"replica lost" in answer.pieces[1]
    assert b"invalid" not in answer.body


async def test_responses_that_no_engine_takes_are_refused_with_their_status() -> None:
    failure = HttpFailure(429, "busy")
    app = FakeServer(streams(CREATED, IN_PROGRESS, then=RuntimeError("response already started")))
    answer = await asked(edge(refusing(failure, app)), RESPONSES)
    assert (answer.status, answer.json["error"]["message"]) == (429, "busy")


async def test_the_preamble_of_responses_comes_with_the_first_delta() -> None:
    answer = await asked(edge(FakeServer(streams(CREATED, IN_PROGRESS, DELTA))), RESPONSES)
    assert answer.status == 200
    assert answer.pieces == [CREATED, IN_PROGRESS, DELTA]
    assert answer.complete


async def test_responses_that_break_end_with_an_error_event() -> None:
    failure = HttpFailure(502, "replica lost")
    app = FakeServer(streams(CREATED, DELTA, then=RuntimeError("secret")))
    answer = await asked(edge(refusing(failure, app)), RESPONSES)
    assert answer.pieces[:2] == [CREATED, DELTA]
    assert answer.pieces[2] == (
        b'event: error\ndata: {"type": "error", "code": "502", "message": "replica lost", "param": null, '
        b'"sequence_number": 3}\n\n'
    )
    assert answer.complete


async def test_an_exception_in_a_stream_ends_it_with_an_error_without_its_text() -> None:
    answer = await asked(edge(FakeServer(streams(CHUNK, then=RuntimeError("secret")))), CHAT)
    assert answer.pieces[0] == CHUNK
    assert answer.pieces[1].startswith(b'data: {"error"')
    assert b"secret" not in answer.body
    assert answer.complete


async def test_a_comment_that_keeps_the_connection_alive_begins_the_stream() -> None:
    answer = await asked(edge(FakeServer(streams(b": keep-alive\n\n", ERROR, DONE))), CHAT)
    assert answer.status == 200
    assert answer.pieces == [b": keep-alive\n\n", ERROR]


async def test_an_empty_stream_is_passed_on() -> None:
    answer = await asked(edge(FakeServer(streams())), CHAT)
    assert (answer.status, answer.pieces, answer.complete) == (200, [], True)


@pytest.mark.parametrize("status", [429, 503])
async def test_ordinary_refusals_say_when_to_come_back(status: int) -> None:
    app = refusing(HttpFailure(status, "busy"), FakeServer(answers(status, {})), retry_after_s=0.2)
    answer = await asked(edge(app), CHAT)
    assert (answer.status, answer.headers["retry-after"]) == (status, "1")


async def test_other_answers_pass_in_pieces() -> None:
    async def behave(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b'data: {"error"', "more_body": True})
        await send({"type": "http.response.body"})

    answer = await asked(edge(FakeServer(behave)), "/metrics", method="GET")
    assert answer.pieces == [b"a", b'data: {"error"']


async def test_a_body_that_stops_coming_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PART_TIMEOUT_S", 0.05)

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        await answers(400, {"error": "cannot parse"})(scope, receive, send)

    connection = FakeConnection(MESSAGES, body=[b"{", b"}"])
    await connection._receive()
    first = {"type": "http.request", "body": b"{", "more_body": True}
    await connection._receive()
    connection._incoming.put_nowait(first)
    answer = await connection.start(edge(FakeServer(read))).done()
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert answer.json["type"] == "error"


async def test_a_client_that_has_sent_all_may_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PART_TIMEOUT_S", 0.05)

    async def listen(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait([leaving], timeout=0.2)
        assert not leaving.done()
        leaving.cancel()
        await answers(200, {})(scope, receive, send)

    assert (await asked(edge(FakeServer(listen)), CHAT)).status == 200
