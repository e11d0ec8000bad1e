"""The ingress's own server, and what it hides from Serve's proxy."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from cluster.http_probe import ask_readiness
from cluster.openai.asgi import Message, Receive, Scope, Send, answer_json
from cluster.openai.instance import Instance
from cluster.openai.listener import Listen, Listener
from cluster.openai.proxy_headers import ProxyHeaders

TOKEN = "fake-token"
LOOPBACK = Listen(host="127.0.0.1", port=0)


class FakeApp:
    """Answers once `may_answer` is set; /readyz tells a phase."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.arrived = asyncio.Event()
        self.scope: Scope = {}
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.arrived.set()
        if scope["path"] == "/readyz":
            await answer_json(send, self.status, b'{"phase": "loading", "elapsed_s": 1.5}')
            return
        await self.may_answer.wait()
        given = [header for header in scope["headers"] if header[0] == b"x-request-id"]
        await answer_json(send, 200, b"{}", given)


async def opened(app: Any, listen: Listen = LOOPBACK, grace_s: float = 1.0) -> Listener:
    return await Listener.open(app, listen, grace_s=grace_s)


def client_of(listener: Listener) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.port}", trust_env=False)


async def test_taken_port_is_an_error_that_names_it() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen for HTTP on 127\.0\.0\.1:{port}: Address already"):
            await opened(FakeApp(), Listen(host="127.0.0.1", port=port))


async def test_connections_of_the_last_server_do_not_keep_the_next_from_the_port() -> None:
    app = FakeApp()
    app.may_answer.set()
    first = await opened(app)
    async with client_of(first) as client:
        await client.get("/v1/models")
        await first.close()  # closes its side first: the connection stays in TIME_WAIT here
    second = await opened(app, Listen(host="127.0.0.1", port=first.port))
    async with client_of(second) as client:
        assert (await client.get("/v1/models")).status_code == 200
    await second.close()


async def test_closing_lets_a_running_request_finish() -> None:
    app = FakeApp()
    listener = await opened(app, grace_s=10)
    async with client_of(listener) as client:
        running = asyncio.create_task(client.get("/v1/models"))
        await app.arrived.wait()
        closing = asyncio.create_task(listener.close())
        await asyncio.sleep(0.05)
        app.may_answer.set()
        assert (await running).status_code == 200
        await closing
    assert not listener.alive


async def test_closing_does_not_wait_for_ever() -> None:
    app = FakeApp()
    listener = await opened(app, grace_s=1)
    async with client_of(listener) as client:
        running = asyncio.create_task(client.get("/v1/models"))
        await app.arrived.wait()
        async with asyncio.timeout(10):
            await listener.close()
        assert (await running).is_server_error
    assert not listener.alive


async def test_readiness_is_asked_of_a_running_face() -> None:
    app = FakeApp()
    listener = await opened(Instance(app, TOKEN))
    address = f"http://127.0.0.1:{listener.port}"
    app.status = 503
    waiting = await asyncio.to_thread(ask_readiness, address, TOKEN)
    assert (waiting.ready, waiting.phase, waiting.answered, waiting.failed) == (False, "loading", True, False)
    assert (await asyncio.to_thread(ask_readiness, address, "another")).foreign
    app.status = 200
    assert (await asyncio.to_thread(ask_readiness, address, TOKEN)).ready
    await listener.close()
    gone = await asyncio.to_thread(ask_readiness, address, TOKEN)
    assert (gone.ready, gone.answered) == (False, False)


async def through_proxy_headers(*headers: tuple[bytes, bytes]) -> tuple[dict[bytes, bytes], list[Any]]:
    """The headers that Serve's proxy sees, and those of a response to which it added an id of its own."""
    seen: dict[bytes, bytes] = {}
    sent: list[Message] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope["headers"])
        ids = [(b"x-request-id", b"of-the-face"), (b"x-request-id", b"of-the-proxy")]
        await send({"type": "http.response.start", "status": 200, "headers": ids})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    await ProxyHeaders(proxy)({"type": "http", "headers": list(headers)}, receive, send)
    return seen, sent[0]["headers"]


async def test_client_cannot_tell_the_proxy_not_to_watch_it() -> None:
    seen, _ = await through_proxy_headers(
        (b"x-request-disconnect-disabled", b"?1"), (b"x-request-timeout-seconds", b"0"), (b"accept", b"*/*")
    )
    assert seen == {b"accept": b"*/*"}


async def test_proxy_sees_only_headers_that_it_can_decode() -> None:
    seen, _ = await through_proxy_headers((b"x-session-id", b"caf\xe9"), (b"x-request-id", b"a\xff"))
    assert seen == {b"x-session-id": "café".encode()}


async def test_response_has_one_request_id_which_is_the_face_s() -> None:
    _, answered = await through_proxy_headers()
    assert answered == [(b"x-request-id", b"of-the-face")]
