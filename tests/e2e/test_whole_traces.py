"""Every request leaves one whole trace: through HTTP at TP=2, and whatever is killed in its midst."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest

from cluster.processes import leftovers
from telemetry import spans
from telemetry.record import StoredSpan
from telemetry.store import SpanStore
from tests.e2e.conftest import ClusterSlot, RunningCluster
from tests.e2e.span_tree import PARENTS as ROUTER_PARENTS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PARENTS = {spans.ROUTER_REQUEST: spans.HTTP_REQUEST, **ROUTER_PARENTS}
STREAMS = 4
LONG = 1500
_SLACK_NS = 2_000_000
"""Clocks of one host, read by several processes; the engine reads another clock of it than we do."""
_ARRIVE_S = 20.0


@pytest.fixture
def served(slot: ClusterSlot) -> RunningCluster:
    """One replica of two shards behind the HTTP face, which records each step of a prefill."""
    shape = ["--replicas", "1", "--tensor-parallel-size", "2", "--max-model-len", "2048"]
    return slot.get(*shape, "--http-port", "0", "--step-ratio", "1")


def stored(cluster: RunningCluster, trace_id: str) -> list[StoredSpan]:
    assert cluster.state.span_store is not None
    return SpanStore(cluster.state.span_store).trace(trace_id)


async def whole(cluster: RunningCluster, trace_id: str, names: Sequence[str]) -> list[StoredSpan]:
    """Its spans, once one of each of these names is there."""
    deadline = time.monotonic() + _ARRIVE_S
    while True:
        found = stored(cluster, trace_id)
        if set(names) <= {span.name for span in found}:
            return found
        assert time.monotonic() < deadline, f"{trace_id} has only {sorted(span.name for span in found)}"
        await asyncio.sleep(0.2)


def completion(max_tokens: int, *, stream: bool) -> tuple[str, dict[str, Any]]:
    """The trace id it brings, and what to send."""
    trace_id = secrets.token_hex(16)
    body = {
        "model": "smollm2", "prompt": "Once upon a time there was " * 20, "max_tokens": max_tokens,
        "temperature": 0, "ignore_eos": True, "stream": stream,
    }  # fmt: skip
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    return trace_id, {"url": "/v1/completions", "json": body, "headers": headers}


@asynccontextmanager
async def streaming(cluster: RunningCluster) -> AsyncIterator[list[str]]:
    """Trace ids of streams that are all decoding; each goes on until it is broken or done."""
    decoding = [asyncio.Event() for _ in range(STREAMS)]
    asked = [completion(LONG, stream=True) for _ in range(STREAMS)]

    async def follow(client: httpx.AsyncClient, request: dict[str, Any], at: asyncio.Event) -> None:
        with contextlib.suppress(httpx.HTTPError):  # what comes of it is what the trace is to tell
            async with client.stream("POST", **request) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        at.set()

    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=60) as client:
        following = [
            asyncio.create_task(follow(client, request, at))
            for (_, request), at in zip(asked, decoding, strict=True)
        ]
        await asyncio.wait_for(asyncio.gather(*(at.wait() for at in decoding)), 60)
        yield [trace_id for trace_id, _ in asked]
        await asyncio.wait_for(asyncio.gather(*following), 60)


async def test_a_request_over_http_is_one_whole_trace(served: RunningCluster) -> None:
    trace_id, request = completion(24, stream=False)
    caller = request["headers"]["traceparent"].split("-")[2]
    async with httpx.AsyncClient(base_url=served.http_url, timeout=60) as client:
        await client.request("POST", **completion(2, stream=False)[1])  # the first one warms paths up
        answer = await client.request("POST", **request)
    assert answer.status_code == 200
    assert answer.headers["x-trace-id"] == trace_id
    found = await whole(served, trace_id, [spans.HTTP_REQUEST, *PARENTS])
    by_name = {span.name: span for span in found}
    assert sorted(span.name for span in found) == sorted([spans.HTTP_REQUEST, *PARENTS])
    assert by_name[spans.HTTP_REQUEST].parent_id == caller
    for child, parent in PARENTS.items():
        assert by_name[child].parent_id == by_name[parent].span_id, child
        assert by_name[parent].start_ns - _SLACK_NS <= by_name[child].start_ns, child
        assert by_name[child].end_ns <= by_name[parent].end_ns + _SLACK_NS, child
    request_span = by_name[spans.ROUTER_REQUEST]
    children = [by_name[name] for name, parent in PARENTS.items() if parent == spans.ROUTER_REQUEST]
    assert covered_ns(children) >= 0.95 * (request_span.end_ns - request_span.start_ns)
    phases = [by_name[name] for name, parent in PARENTS.items() if parent == spans.REPLICA_GENERATE]
    generate = by_name[spans.REPLICA_GENERATE]
    assert covered_ns(phases) >= 0.95 * (generate.end_ns - generate.start_ns)
    await steps_of_both_ranks(served, trace_id)


def covered_ns(parts: Sequence[StoredSpan]) -> int:
    """Of any of them; where two overlap the time counts once."""
    covered, upto = 0, 0
    for part in sorted(parts, key=lambda span: span.start_ns):
        covered += max(part.end_ns - max(part.start_ns, upto), 0)
        upto = max(upto, part.end_ns)
    return covered


async def steps_of_both_ranks(cluster: RunningCluster, trace_id: str) -> None:
    """A prefill's step is recorded by each shard in a trace of its own that links to the request's."""
    deadline = time.monotonic() + _ARRIVE_S
    async with httpx.AsyncClient(base_url=cluster.state.viewer_url, timeout=20) as viewer:
        while True:
            shown = (await viewer.get(f"/api/requests/{trace_id}")).json()
            ranks = {step["attributes"].get(spans.RANK) for step in shown["steps"]}
            if ranks == {0, 1}:
                return
            assert time.monotonic() < deadline, json.dumps(shown["steps"])
            await asyncio.sleep(0.5)


async def test_a_replica_killed_amid_decode_leaves_no_open_request(served: RunningCluster) -> None:
    shown = served.wait(lambda s: s["replicas"][0]["state"] == "READY", "ready replica")
    async with streaming(served) as trace_ids:
        psutil.Process(shown["replicas"][0]["pid"]).send_signal(signal.SIGKILL)
    for trace_id in trace_ids:
        found = await whole(
            served, trace_id, [spans.HTTP_REQUEST, spans.ROUTER_REQUEST, spans.ROUTER_FORWARD]
        )
        assert {
            span.attributes[spans.ERROR_TYPE]
            for span in found
            if span.name in (spans.ROUTER_REQUEST, spans.ROUTER_FORWARD)
        } == {"REPLICA_LOST"}
    served.wait(lambda s: s["replicas"][0]["state"] == "READY", "replica that came back")


async def test_the_end_of_every_process_leaves_no_open_request(
    served: RunningCluster, slot: ClusterSlot
) -> None:
    served.wait(lambda s: s["replicas"][0]["state"] == "READY", "ready replica")
    async with streaming(served) as trace_ids:
        for process in leftovers(served.state.id):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(slot.clear)  # nothing is left of it but its traces
    for trace_id in trace_ids:
        await asyncio.to_thread(served.cli, "trace", trace_id)  # who looks closes what nobody could
        found = await whole(served, trace_id, [spans.HTTP_REQUEST, spans.ROUTER_REQUEST])
        assert all(
            span.attributes.get(spans.ERROR_TYPE) for span in found if span.name == spans.ROUTER_REQUEST
        )
