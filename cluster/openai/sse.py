"""The few things that the edge must see in vLLM's server-sent events. Pure.

Each event arrives as one ASGI body message. A streamed chunk costs one `startswith`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from cluster.openai.failures import HttpFailure

MEDIA_TYPE: Final = b"text/event-stream"

ERROR_STARTS: Final = (b'data: {"error"', b"event: error\n")
"""How an error event begins: of chat and completions, and of Anthropic's and the Responses API."""

PREAMBLE_STARTS: Final = (b"event: response.created\n", b"event: response.in_progress\n")
"""Events of the Responses API that vLLM sends before it has asked an engine."""

DONE: Final = b"data: [DONE]\n\n"

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s*(\d+)')


def read_error(event: bytes) -> HttpFailure:
    """The failure that an error event tells of; 500 when it does not say which."""
    error: Any = None
    for line in event.splitlines():
        if line.startswith(b"data: "):
            try:
                error = json.loads(line[6:])
            except ValueError:
                break
    inner = error.get("error", error) if isinstance(error, dict) else None
    if not isinstance(inner, dict):
        return HttpFailure(500, "the server failed on this request")
    code, message, kind, param = (inner.get(name) for name in ("code", "message", "type", "param"))
    known = isinstance(code, int) and 400 <= code <= 599
    return HttpFailure(
        code if known and isinstance(code, int) else 500,
        message if isinstance(message, str) else "the server failed on this request",
        kind if isinstance(kind, str) else "",
        param if isinstance(param, str) else None,
    )


def next_number(event: bytes) -> int:
    """The sequence number after that of an event of the Responses API."""
    found = _SEQUENCE_NUMBER.findall(event)
    return int(found[-1]) + 1 if found else 0
