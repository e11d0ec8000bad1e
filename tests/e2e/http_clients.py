"""The official clients, sync and async, pointed at one server; their answers as plain values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai

from tests.e2e.http_answers import whole
from tests.e2e.http_cases import Case

TIMEOUT_S = 120.0
THREADS = 4

Answers = list[dict[str, Any]]


@dataclass(frozen=True)
class Clients:
    """By the names that `Case.client` uses."""

    openai: Any
    anthropic: Any
    http: Any

    def of(self, case: Case) -> Any:
        return getattr(self, case.client)


@contextmanager
def clients(url: str) -> Iterator[Clients]:
    """Synchronous ones, for the server at this base URL (without /v1)."""
    settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
    with (
        openai.OpenAI(base_url=f"{url}/v1", **settings) as first,
        anthropic.Anthropic(base_url=url, **settings) as second,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as third,
    ):
        yield Clients(first, second, third)


@asynccontextmanager
async def async_clients(url: str) -> AsyncIterator[Clients]:
    """The same, asynchronous."""
    settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", **settings) as first,
        anthropic.AsyncAnthropic(base_url=url, **settings) as second,
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as third,
    ):
        yield Clients(first, second, third)


def ask(with_clients: Clients, case: Case, run: str) -> Answers:
    """What came of sending the case, as often as it asks for; a refusal is an answer, too."""
    answers = []
    for _ in range(case.times):
        try:
            answer = case.send(with_clients.of(case), case.isolation(run))
            if isinstance(answer, openai.Stream | anthropic.Stream):
                answers.append({"status": 200, "stream": whole(_plain(piece) for piece in answer)})
            else:
                answers.append(_told(answer))
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            answers.append(_refusal(error))
    return answers


def ask_all(url: str, cases: Sequence[Case], run: str) -> dict[str, Answers]:
    """The answers by case, from the synchronous clients, in several threads where that does no harm."""
    by_themselves = [case for case in cases if case.alone or case.seeded]
    together = [case for case in cases if case not in by_themselves]
    with clients(url) as opened, ThreadPoolExecutor(THREADS) as pool:
        answers = [*pool.map(lambda case: ask(opened, case, run), together)]
        answers += [ask(opened, case, run) for case in by_themselves]
    names = [case.name for case in together + by_themselves]
    return dict(zip(names, answers, strict=True))


async def ask_all_async(url: str, cases: Sequence[Case], run: str) -> dict[str, Answers]:
    """The answers by case, from the asynchronous clients, all at once where that does no harm."""
    together = [case for case in cases if not case.alone]
    async with async_clients(url) as opened:
        found = await asyncio.gather(*(ask_async(opened, case, run) for case in together))
        answers = dict(zip([case.name for case in together], found, strict=True))
        for case in cases:
            if case.alone:
                answers[case.name] = await ask_async(opened, case, run)
    return answers


async def ask_async(with_clients: Clients, case: Case, run: str) -> Answers:
    """As `ask`, with the asynchronous clients."""
    answers = []
    for _ in range(case.times):
        try:
            answer = await case.send(with_clients.of(case), case.isolation(run))
            if isinstance(answer, openai.AsyncStream | anthropic.AsyncStream):
                answers.append({"status": 200, "stream": whole([_plain(piece) async for piece in answer])})
            else:
                answers.append(_told(answer))
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            answers.append(_refusal(error))
    return answers


def _told(answer: Any) -> dict[str, Any]:
    if isinstance(answer, httpx.Response):
        return {"status": answer.status_code, "body": answer.json()}
    if hasattr(answer, "data") and isinstance(answer.data, list):  # a page of a list
        return {"status": 200, "body": [_plain(item) for item in answer.data]}
    return {"status": 200, "body": _plain(answer)}


def _plain(answer: Any) -> dict[str, Any]:
    plain: dict[str, Any] = answer.to_dict(mode="json")
    return plain


def _refusal(error: openai.APIStatusError | anthropic.APIStatusError) -> dict[str, Any]:
    return {"status": error.status_code, "body": json.loads(error.response.text)}
