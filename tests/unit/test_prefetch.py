"""Blocks of another host are asked for in time or not at all, and no trouble with that is the request's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from protos import kvpool_pb2, kvpool_pb2_grpc
from protos.channels import bind, create_server
from protos.common_pb2 import KvFetch
from workers.kvpool import prefetch
from workers.kvpool.prefetch import LEAST_S, Prefetcher

NAMESPACE, SOURCE, TOKEN = "n" * 32, "far:9", "secret"
KEYS = [3, 2**64 - 1, 7]

Pull = Callable[[kvpool_pb2.PullRequest], Awaitable[kvpool_pb2.PullResponse]]


class FakeAgent(kvpool_pb2_grpc.KvAgentServicer):
    """Answers as a test says."""

    def __init__(self) -> None:
        self.asked: list[kvpool_pb2.PullRequest] = []
        self.running = 0
        self.answer: Pull = self._all

    async def Pull(  # noqa: N802
        self, request: kvpool_pb2.PullRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kvpool_pb2.PullResponse:
        self.asked.append(request)
        self.running += 1
        try:
            return await self.answer(request)
        finally:
            self.running -= 1

    async def _all(self, request: kvpool_pb2.PullRequest) -> kvpool_pb2.PullResponse:
        blocks = len(request.router_keys) // 8
        return kvpool_pb2.PullResponse(blocks=blocks, bytes=100 * blocks, seconds=0.1)


async def never(request: kvpool_pb2.PullRequest) -> kvpool_pb2.PullResponse:
    await asyncio.sleep(1000)
    raise AssertionError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Here:
    """A replica's prefetcher, and the agent of its host."""

    def __init__(self, agent: FakeAgent, address: str, server: grpc.aio.Server) -> None:
        self.agent, self.address, self.server = agent, address, server
        self.clock = Clock()
        self.prefetcher = Prefetcher(TOKEN, 5.0, self.clock)

    async def fetch(self, time_left_s: float | None = None) -> KvFetch:
        asking = self.prefetcher.fetch(self.address, NAMESPACE, SOURCE, KEYS, time_left_s)
        return await asyncio.wait_for(asking, 20)

    async def until_asked(self, times: int) -> None:
        for _ in range(2000):
            if len(self.agent.asked) == times:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"asked {len(self.agent.asked)} times, not {times}")


@asynccontextmanager
async def serving(agent: FakeAgent, port: int = 0) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    server = create_server(tokens=[TOKEN])
    kvpool_pb2_grpc.add_KvAgentServicer_to_server(agent, server)
    bound = bind(server, "127.0.0.1", port)
    await server.start()
    yield f"127.0.0.1:{bound}", server
    await server.stop(None)


@pytest.fixture
async def here() -> AsyncIterator[Here]:
    agent = FakeAgent()
    async with serving(agent) as (address, server):
        made = Here(agent, address, server)
        yield made
        await made.prefetcher.close()


async def test_what_is_lacking_is_asked_for_in_the_prompts_order(here: Here) -> None:
    told = await here.fetch()
    (asked,) = here.agent.asked
    assert (asked.namespace, asked.source) == (NAMESPACE, SOURCE)
    assert np.frombuffer(asked.router_keys, "<u8").tolist() == KEYS
    assert asked.timeout_s == 5.0
    assert told == KvFetch(agent=SOURCE, blocks=3, bytes=300)


@pytest.mark.parametrize(("left", "asked_for"), [(None, 5.0), (60.0, 5.0), (4.0, 2.0)])
async def test_half_of_the_time_that_is_left_is_for_waiting(
    here: Here, left: float | None, asked_for: float
) -> None:
    await here.fetch(left)
    assert here.agent.asked[0].timeout_s == asked_for


async def test_a_request_without_time_asks_for_nothing(here: Here) -> None:
    told = await here.fetch(LEAST_S)
    assert "no time left" in told.failed
    assert not here.agent.asked


async def test_what_comes_late_or_not_is_told_and_the_agent_asked_again(here: Here) -> None:
    async def some(request: kvpool_pb2.PullRequest) -> kvpool_pb2.PullResponse:
        return kvpool_pb2.PullResponse(blocks=1, bytes=100, failed="far:9 stalled")

    here.agent.answer = some
    for _ in range(2):
        told = await here.fetch()
        assert (told.blocks, told.bytes, told.failed) == (1, 100, "far:9 stalled")


async def test_numbers_that_cannot_be_are_not_passed_on(here: Here) -> None:
    async def boast(request: kvpool_pb2.PullRequest) -> kvpool_pb2.PullResponse:
        return kvpool_pb2.PullResponse(blocks=99, bytes=-5)

    here.agent.answer = boast
    told = await here.fetch()
    assert (told.blocks, told.bytes) == (3, 0)


async def test_an_agent_that_never_answers_costs_its_deadline_and_is_then_left_alone(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "GRACE_S", 0.05)
    here.agent.answer = never
    told = await here.fetch(0.2)
    assert "failed" in told.failed
    assert here.address in told.failed
    again = await here.fetch()
    assert "a moment ago" in again.failed
    assert len(here.agent.asked) == 1


async def test_an_agent_that_is_gone_is_asked_less_and_less_often_until_it_is_back() -> None:
    async with serving(FakeAgent()) as (address, _):
        pass
    clock = Clock()
    prefetcher = Prefetcher(TOKEN, 5.0, clock)
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        assert "UNAVAILABLE" in (await prefetcher.fetch(address, NAMESPACE, SOURCE, KEYS)).failed
        clock.now += pause - 0.01
        assert "a moment ago" in (await prefetcher.fetch(address, NAMESPACE, SOURCE, KEYS)).failed
        clock.now += 0.02
    agent = FakeAgent()
    async with serving(agent, port=int(address.rpartition(":")[2])):
        for _ in range(200):  # gRPC takes its own time to connect again
            if not (told := await prefetcher.fetch(address, NAMESPACE, SOURCE, KEYS)).failed:
                break
            clock.now += 61
            await asyncio.sleep(0.05)
        assert told.blocks == 3
    assert "UNAVAILABLE" in (await prefetcher.fetch(address, NAMESPACE, SOURCE, KEYS)).failed
    clock.now += 1.01  # from the beginning again
    assert "UNAVAILABLE" in (await prefetcher.fetch(address, NAMESPACE, SOURCE, KEYS)).failed
    await prefetcher.close()


async def test_pulls_that_fail_together_count_once(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "GRACE_S", 0.05)
    here.agent.answer = never
    await asyncio.gather(*(here.fetch(0.2) for _ in range(5)))
    here.clock.now += 1.01
    here.agent.answer = here.agent._all
    assert not (await here.fetch()).failed


async def test_so_many_wait_for_blocks_and_no_more(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PULLS_AT_ONCE", 2)
    gate = asyncio.Event()

    async def slow(request: kvpool_pb2.PullRequest) -> kvpool_pb2.PullResponse:
        await gate.wait()
        return await here.agent._all(request)

    here.agent.answer = slow
    waiting = [asyncio.create_task(here.fetch()) for _ in range(2)]
    await here.until_asked(2)
    assert "2 pulls already" in (await here.fetch()).failed
    gate.set()
    assert [(await task).blocks for task in waiting] == [3, 3]
    assert not (await here.fetch()).failed


async def test_a_request_that_is_cancelled_ends_its_pull(here: Here) -> None:
    here.agent.answer = never
    waiting = asyncio.create_task(here.fetch())
    await here.until_asked(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(2000):
        if not here.agent.running:
            break
        await asyncio.sleep(0.005)
    assert not here.agent.running
    here.agent.answer = here.agent._all
    assert not (await here.fetch()).failed  # nobody is to blame, and no place is taken


async def test_a_wrong_token_is_a_failure_like_any_other(here: Here) -> None:
    stranger = Prefetcher("wrong", 5.0)
    told = await stranger.fetch(here.address, NAMESPACE, SOURCE, KEYS)
    assert "UNAUTHENTICATED" in told.failed
    await stranger.close()


async def test_an_agent_at_another_address_is_asked_at_once_though_the_one_before_it_failed(
    here: Here,
) -> None:
    async with serving(FakeAgent()) as (gone, _):
        pass
    prefetcher = Prefetcher(TOKEN, 5.0, Clock())
    for failed in ("UNAVAILABLE", "a moment ago"):
        assert failed in (await prefetcher.fetch(gone, NAMESPACE, SOURCE, KEYS)).failed
    assert (await prefetcher.fetch(here.address, NAMESPACE, SOURCE, KEYS)).blocks == 3
    assert len(here.agent.asked) == 1
    await prefetcher.close()


async def test_what_an_agent_brings_when_another_is_asked_already_is_had(here: Here) -> None:
    gate = asyncio.Event()

    async def slow(request: kvpool_pb2.PullRequest) -> kvpool_pb2.PullResponse:
        await gate.wait()
        return await here.agent._all(request)

    here.agent.answer = slow
    waiting = asyncio.create_task(here.fetch())
    await here.until_asked(1)
    async with serving(FakeAgent()) as (moved, _):
        prefetcher = here.prefetcher
        assert (await prefetcher.fetch(moved, NAMESPACE, SOURCE, KEYS)).blocks == 3
        (former,) = prefetcher._former
        gate.set()
        assert (await waiting).blocks == 3
        assert not prefetcher._former
        with pytest.raises(grpc.aio.UsageError):  # nothing is left open there
            await former.stub.Pull(kvpool_pb2.PullRequest())
        assert (await prefetcher.fetch(moved, NAMESPACE, SOURCE, KEYS)).blocks == 3
