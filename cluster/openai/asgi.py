"""Types and small helpers of the ASGI interface. https://asgi.readthedocs.io/en/latest/specs/www.html"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]


def first_values(headers: Headers, wanted: frozenset[bytes]) -> dict[bytes, str]:
    """The first value of each wanted header (lower-case names) that is there."""
    found: dict[bytes, str] = {}
    for name, value in headers:
        if name in wanted and name not in found:
            found[name] = value.decode("latin-1")
    return found


async def answer_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """A whole response."""
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
