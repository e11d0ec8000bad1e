"""An HTTP client and a server's app without sockets: ASGI messages in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.openai.asgi import App, Message, Receive, Scope, Send

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


class FakeConnection:
    """One request of one client; `disconnect` is the client leaving."""

    def __init__(
        self,
        path: str,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        body: bytes | Iterable[bytes] = b"{}",
        spec_version: str = "2.4",
    ) -> None:
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()],
        }
        self.sent: list[Message] = []
        self._changed = asyncio.Event()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        chunks = [body] if isinstance(body, bytes) else list(body)
        for number, chunk in enumerate(chunks, start=1):
            self._incoming.put_nowait(
                {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}
            )
        self.task: asyncio.Task[None] | None = None

    def start(self, app: App) -> FakeConnection:
        async def run() -> None:
            await app(self.scope, self._receive, self._send)

        self.task = asyncio.ensure_future(run())
        return self

    async def done(self) -> FakeConnection:
        """Wait until the app has returned."""
        assert self.task is not None
        async with asyncio.timeout(5):
            await self.task
        return self

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def events(self, count: int) -> list[bytes]:
        """Wait for so many non-empty pieces of the body."""
        async with asyncio.timeout(5):
            while len(self.pieces) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.pieces

    @property
    def status(self) -> int:
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), 0)

    @property
    def headers(self) -> dict[str, str]:
        start = next(m for m in self.sent if m["type"] == "http.response.start")
        return {name.decode(): value.decode() for name, value in start["headers"]}

    @property
    def pieces(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body" and m.get("body")]

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def complete(self) -> bool:
        return self.sent[-1]["type"] == "http.response.body" and not self.sent[-1].get("more_body", False)

    async def _receive(self) -> Message:
        return await self._incoming.get()

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._changed.set()
        await asyncio.sleep(0)


async def asked(app: App, path: str, **request: Any) -> FakeConnection:
    """One whole exchange."""
    return await FakeConnection(path, **request).start(app).done()


Behaviour = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass
class FakeServer:
    """What vLLM's app would be: remembers what it saw, does as told."""

    behaviour: Behaviour
    seen: list[Scope] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope)
        await self.behaviour(scope, receive, send)


def streams(*events: bytes, then: Exception | None = None) -> Behaviour:
    """An event stream as Starlette sends it; `then` is raised where the stream would end."""

    async def behave(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        if then is not None:
            raise then
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return behave


def answers(status: int, document: Any) -> Behaviour:
    """A JSON document."""

    async def behave(scope: Scope, _receive: Receive, send: Send) -> None:
        scope["route"] = _Route(scope["path"])
        await send({"type": "http.response.start", "status": status, "headers": JSON})
        await send({"type": "http.response.body", "body": json.dumps(document).encode()})

    return behave


@dataclass
class _Route:
    path: str
