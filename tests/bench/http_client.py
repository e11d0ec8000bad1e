"""A lean streaming client of an OpenAI-compatible server: the client costs the same on every side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

_COMMON = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head
"""
_WORDS = _COMMON.split()
"""Each is one token after a space, in the tokenizers we know."""

TIMEOUT_S = 300.0


def prompt_of(ids: Sequence[int]) -> str:
    """A text of one common word for each number."""
    return " ".join(_WORDS[number % len(_WORDS)] for number in ids)


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """What follows `data: ` in each event of the stream, `[DONE]` among them."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()


async def stream_text(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int], output_tokens: int
) -> AsyncIterator[int]:
    """A `workload.Stream` over /v1/completions: yields 0 with each piece, the token count at the end.

    Raises:
        AssertionError: the server refused, or ended the stream early.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_of(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens, done = 0, False
    async with asyncio.timeout(TIMEOUT_S), session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for event in events(answer):
            if event == "[DONE]":
                done = True
                continue
            piece = json.loads(event)
            assert "error" not in piece, piece
            if piece["choices"]:
                yield 0
            if usage := piece.get("usage"):
                tokens = usage["completion_tokens"]
    assert done, "the stream ended without [DONE]"
    yield tokens
