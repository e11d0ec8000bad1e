"""What Ray Serve's proxy must not see or add, as an ASGI middleware outside of all of Serve's own."""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware

from cluster.openai.asgi import App, Message, Receive, Scope, Send

_REQUEST_ID = b"x-request-id"
_LONGEST_ID = 128
_SWITCHES = {
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"serve_multiplexed_model_id",
    b"serve-multiplexed-model-id",
}
"""By these a client would overrule how the proxy watches its request; a leak of leases among other things."""


class ProxyHeaders:
    """Serve decodes some headers strictly (500 on a stray byte) and answers with a second X-Request-Id."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope["headers"] = [_decodable(header) for header in scope["headers"] if not _is_refused(*header)]

        async def send_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _first_id_only(list(message.get("headers", ())))
            await send(message)

        await self._app(scope, receive, send_one_id)


def middlewares() -> list[Any]:
    """For `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    return [Middleware(ProxyHeaders)]


def _is_refused(name: bytes, value: bytes) -> bool:
    if name == _REQUEST_ID:  # without it a fresh one is made
        return len(value) > _LONGEST_ID or not value.isascii() or not value.decode().isprintable()
    return name in _SWITCHES


def _decodable(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    name, value = header
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return name, value.decode("latin-1").encode("utf-8")
    return header


def _first_id_only(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept, seen = [], False
    for name, value in headers:
        is_id = name.lower() == _REQUEST_ID
        if not (is_id and seen):
            kept.append((name, value))
        seen = seen or is_id
    return kept
