"""Many HTTP clients at once, some of whom leave at a random moment; what became of each."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.bench.http_client import events, prompt_of

HONEST = frozenset({200, 429, 503})
LIMIT_S = 240.0
"""A client that has neither an answer nor left by then is stuck."""


@dataclass
class Storm:
    """What came of it; every client is in `statuses`, `left` or `broken`."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    broken: list[str] = field(default_factory=list)
    """What no client should see: other statuses, refusals that do not say when to return, cut streams."""


async def storm(url: str, model: str, connections: int, seed: int, leave_within_s: float) -> Storm:
    """`connections` clients at once, each on a connection of its own; every second one means to leave.

    Args:
        leave_within_s: a client that means to leave does so at a random moment up to then, if it is not
            answered before.
    """
    result = Storm()
    chance = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

        async def one(number: int) -> None:
            path, body = _request(chance, model)
            patience_s = chance.uniform(0, leave_within_s) if number % 2 else None
            try:
                async with asyncio.timeout(patience_s):
                    await _ask(session, path, body, result)
            except TimeoutError:
                if patience_s is None:
                    result.broken.append(f"{path}: no end within {LIMIT_S:.0f} s")
                else:
                    result.left += 1
            except (aiohttp.ClientError, ValueError) as error:
                result.broken.append(f"{path}: {type(error).__name__}: {error}")

        await asyncio.gather(*(one(number) for number in range(connections)))
    return result


def _request(chance: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    text = prompt_of([chance.randrange(10_000) for _ in range(chance.choice((8, 40, 200)))])
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": chance.choice((4, 16, 32)),
        "stream": chance.random() < 0.75,
        "ignore_eos": True,
        "n": chance.choice((1, 1, 1, 2)),
    }
    if chance.random() < 0.5:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": text}


async def _ask(session: aiohttp.ClientSession, path: str, body: dict[str, Any], result: Storm) -> None:
    async with session.post(path, json=body) as answer:
        wrong = ""
        if answer.status != 200:
            error = (await answer.json())["error"]
            if answer.status not in HONEST or "Retry-After" not in answer.headers:
                wrong = f"Retry-After {answer.headers.get('Retry-After')}, {error}"
        elif body["stream"]:
            said = [event async for event in events(answer)]
            if said[-1] != "[DONE]" or any("error" in json.loads(event) for event in said[:-1]):
                wrong = f"a stream that ended with {said[-1]}"
        elif len((await answer.json())["choices"]) != body["n"]:
            wrong = "choices are missing"
    if wrong:
        result.broken.append(f"{path}: {answer.status}: {wrong}")
    else:
        result.statuses[answer.status] += 1
