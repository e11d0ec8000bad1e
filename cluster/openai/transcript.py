"""What a request's body asks, as messages: for spans, where their owner wants prompts recorded."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from cluster.openai.asgi import Message as Event
from telemetry.messages import Message

_MOST_BYTES = 1 << 20
"""Of a body that is read a second time here; what a larger one asks is not recorded."""

_PROMPTS = ("prompt", "input")


class Overheard:
    """A request's body, as the app receives it."""

    def __init__(self, receive: Callable[[], Awaitable[Event]]) -> None:
        self._receive = receive
        self._parts: list[bytes] = []
        self._size = 0

    async def receive(self) -> Event:
        """The next part, for the app."""
        event = await self._receive()
        body = event.get("body", b"")
        self._size += len(body)
        if self._size <= _MOST_BYTES:
            self._parts.append(body)
        return event

    def messages(self) -> list[Message]:
        """None of a body that is too large, or is not what an OpenAI or Anthropic client would send."""
        if self._size > _MOST_BYTES:
            return []
        try:
            body = json.loads(b"".join(self._parts))
        except (ValueError, RecursionError):
            return []
        return list(_asked(body)) if isinstance(body, dict) else []


def _asked(body: dict[str, Any]) -> Iterator[Message]:
    for name in ("system", "instructions"):
        if text := _text(body.get(name)):
            yield "system", text
    for name in ("messages", *_PROMPTS):
        given = body.get(name)
        listed = given if isinstance(given, list) else [given]
        for item in listed:
            if isinstance(item, dict):
                yield str(item.get("role", "user")), _text(item.get("content"))
            elif isinstance(item, str):
                yield "user", item


def _text(content: Any) -> str:
    """Of a string, or of the parts of a list that have a text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)
