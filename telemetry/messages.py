"""Prompts and answers as span attributes, where their owner has asked for that (`record_prompts`).

The form is that of OpenTelemetry's generative-AI conventions: gen_ai.input.messages and
gen_ai.output.messages, each a JSON list of messages with text parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

Message = tuple[str, str]
"""Role and text."""


def to_json(messages: Sequence[Message], limit: int) -> str:
    """At most `limit` characters of JSON. What does not fit is left out, from the end."""
    room = limit
    while room > 0:
        text = _dump(_cut(messages, room))
        if len(text) <= limit:
            return text
        room = room * limit // len(text) - 1  # escapes and keys take more than the texts have
    return "[]"


def _cut(messages: Iterable[Message], room: int) -> list[Message]:
    kept = []
    for role, text in messages:
        if room <= 0:
            break
        kept.append((role, text[:room]))
        room -= len(text) + len(role)
    return kept


def _dump(messages: Sequence[Message]) -> str:
    document = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in messages]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


class Answers:
    """Collects what is generated, by sequence, up to a limit over all."""

    def __init__(self, limit: int) -> None:
        self._room = limit
        self._parts: dict[int, list[str]] = {}

    def add(self, sequence: int, text: str) -> None:
        """What one step added."""
        if text and self._room > 0:
            self._parts.setdefault(sequence, []).append(text[: self._room])
            self._room -= len(text)

    def messages(self) -> list[Message]:
        """One for each sequence that has said something."""
        return [("assistant", "".join(parts)) for _, parts in sorted(self._parts.items())]
