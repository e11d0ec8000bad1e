"""Which cluster a face belongs to: who finds one at an address must not take another's for it."""

from __future__ import annotations

from cluster.openai import probes
from cluster.openai.asgi import App, Message, Receive, Scope, Send
from cluster.openai.settings import digest

HEADER = "X-Kvorum-Instance"
_CHARS = 16


def instance_of(token: str) -> str:
    """A name that only a cluster with that token has, and that does not give the token away."""
    return digest(f"instance {token}")[:_CHARS]


class Instance:
    """Puts the name into the answers to probes."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._header = (HEADER.lower().encode(), instance_of(token).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] not in probes.PATHS:
            await self._app(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], self._header]
            await send(message)

        await self._app(scope, receive, send_named)
