"""A whole router over replicas that share memory: hints go out, outcomes come back, nobody sees an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from fakes_cluster import FakeReplica, Script
from fakes_router import SpanRecorder, Stack, assert_nothing_leaked, collected, eventually, running_stack
from test_lookaside import TIMES, TOKEN, routed
from test_router_metrics import Reader

from protos import common_pb2, inference_pb2, replica_pb2
from protos.errors import KvorumError
from router.blockhash import prompt_keys
from router.client import KvorumClient
from router.fetch_speeds import Pulled
from router.pool import Share
from telemetry import spans

PROMPT = list(range(100, 300))  # 12 full blocks
BLOCK_BYTES = 1 << 20
FETCHED = common_pb2.KvFetch(agent="b:1", blocks=12, bytes=12 * BLOCK_BYTES, seconds=0.001)


def sharing(name: str, host: str, script: Script | None = None, token: str | None = None) -> FakeReplica:
    replica = FakeReplica(name, script=script, token=token)
    replica.pool = replica_pb2.KvPool(arena=host, namespace="n", agent=f"{host}:1", block_bytes=BLOCK_BYTES)
    return replica


def pooled(replica: FakeReplica, blocks: int = 12) -> None:
    """The arena of its host holds the prompt."""
    keys = prompt_keys(np.array(PROMPT, np.int32), replica.block_size, replica.model.revision)
    replica.host_blocks = set(keys.tolist()[:blocks])
    replica.push()


@asynccontextmanager
async def two_hosts(
    script: Script | None = None, *, token: str | None = None, busy: str = "b", **options: Any
) -> AsyncIterator[Stack]:
    """Replica a on host a, b on host b; b's arena holds the prompt, and the replica `busy` is."""
    replicas = {name: sharing(name, name, script, token) for name in "ab"}
    for replica in replicas.values():
        replica.load.prefill_ms_per_token = 10.0
        replica.load.pool_load_ms_per_block = 0.5
        replica.load.decode_step_ms = 1.0
    replicas[busy].load.prefill_backlog_tokens = 150
    pooled(replicas["b"])
    async with running_stack(replicas=0, extra=list(replicas.values()), token=token, **options) as stack:
        await eventually(lambda: stack.view("b").blocks == 12)
        for source, target in ("ab", "ba"):
            for mib in (1, 8, 32):
                learned = Pulled(mib << 20, 1.0 + mib * 0.1)
                stack.group.fleet.pools.speeds.learn(f"{source}/n", f"{target}/n", learned, 0.0)
        stack.group.fleet.pools.relax()
        yield stack


def seen(stack: Stack, replica: str) -> list[replica_pb2.ReplicaGenerateRequest]:
    return [each.request for each in next(r for r in stack.replicas if r.name == replica).seen]


async def test_replica_is_told_whom_to_ask_and_how_much_that_holds() -> None:
    async with two_hosts() as stack:
        await collected(stack.client, PROMPT, max_tokens=1)
        await assert_nothing_leaked(stack.server)
    (request,) = seen(stack, "a")
    assert (request.kv_source.agent, request.kv_source.blocks) == ("b:1", 12)
    assert request.expected_cached_tokens == 192


async def test_replica_whose_own_host_has_it_is_told_of_nobody() -> None:
    async with two_hosts(busy="a") as stack:
        await collected(stack.client, PROMPT, max_tokens=1)
    (request,) = seen(stack, "b")
    assert not request.HasField("kv_source")
    assert request.expected_cached_tokens == 192


async def test_lease_of_a_pulling_request_has_its_computed_tokens_alone() -> None:
    async with two_hosts(Script(hang_after=0)) as stack:
        stream = stack.client.generate(PROMPT, max_tokens=3)
        waiting = asyncio.ensure_future(anext(stream))
        await eventually(lambda: bool(seen(stack, "a")))
        assert stack.server.members.leased()[stack.key("a")].prefill_tokens == 8
        waiting.cancel()
        await assert_nothing_leaked(stack.server)


async def test_what_a_pull_took_is_learned_for_its_pair() -> None:
    async with two_hosts(Script(kv_fetch=FETCHED)) as stack:
        speeds = stack.group.fleet.pools.speeds
        before = speeds.of("b/n", "a/n", stack.group.clock())
        messages = await collected(stack.client, PROMPT, max_tokens=2)
        after = speeds.of("b/n", "a/n", stack.group.clock())
    assert after != before
    assert messages[0].kv_fetch == FETCHED
    assert not messages[-1].HasField("kv_fetch")


async def test_source_that_brought_nothing_is_not_named_again_at_once() -> None:
    failed = common_pb2.KvFetch(agent="b:1", seconds=0.001, failed="no answer within 5 s")
    async with two_hosts(Script(kv_fetch=failed)) as stack:
        await collected(stack.client, PROMPT, max_tokens=1)
        await collected(stack.client, PROMPT, max_tokens=1)
    first, *later = [*seen(stack, "a"), *seen(stack, "b")]
    assert first.HasField("kv_source")
    assert len(later) == 1
    assert not later[0].HasField("kv_source")


async def test_next_attempt_is_told_anew() -> None:
    """Its replica has another host, and lacks other blocks."""
    lost = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "gone")
    async with two_hosts() as stack:
        next(r for r in stack.replicas if r.name == "a").script = Script(error_at_start=lost)
        messages = await collected(stack.client, PROMPT, max_tokens=1)
        await assert_nothing_leaked(stack.server)
    assert messages[0].served.replica == "b"
    assert seen(stack, "a")[0].HasField("kv_source")
    assert not seen(stack, "b")[0].HasField("kv_source")


async def test_lookaside_client_carries_the_hint_in_its_ticketed_request_and_reports_what_came() -> None:
    async with (
        two_hosts(Script(kv_fetch=FETCHED, times=TIMES), token=TOKEN) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        speeds = stack.group.fleet.pools.speeds
        before = speeds.of("b/n", "a/n", stack.group.clock())
        await collected(client, PROMPT, max_tokens=2)
        await assert_nothing_leaked(stack.server)
        after = speeds.of("b/n", "a/n", stack.group.clock())
    (request,) = seen(stack, "a")
    assert (request.kv_source.agent, request.kv_source.blocks) == ("b:1", 12)
    assert after != before


@pytest.mark.parametrize(
    "fetch",
    [
        common_pb2.KvFetch(blocks=12, bytes=12 << 20, seconds=-1.0),
        common_pb2.KvFetch(blocks=12, bytes=12 << 20, seconds=float("nan")),
        common_pb2.KvFetch(blocks=12, bytes=12 << 20, seconds=99.0),  # longer than its first token took
        common_pb2.KvFetch(blocks=-1, bytes=12 << 20, seconds=0.01),
        common_pb2.KvFetch(blocks=12, bytes=-5, seconds=0.01, failed="x"),
    ],
)
async def test_absurd_word_of_a_lookaside_client_teaches_nothing(fetch: common_pb2.KvFetch) -> None:
    async with two_hosts(token=TOKEN) as stack, routed(stack) as (response, stub, _):
        pools = stack.group.fleet.pools
        known = len(pools.speeds), pools.speeds.guess
        end = inference_pb2.ReportEndRequest(
            attempt_id=response.attempt_id, ttft_s=0.5, times=TIMES, finished=True, kv_fetch=fetch
        )
        await stub.ReportEnd(end, timeout=5)
        await assert_nothing_leaked(stack.server)
        assert (len(pools.speeds), pools.speeds.guess) == known


async def test_explain_shows_pooled_tokens_the_time_they_take_and_where_from() -> None:
    async with two_hosts() as stack:
        found = {c.replica: c for c in (await stack.client.explain(PROMPT)).candidates}
    assert (found["a"].pooled_tokens, found["a"].source) == (192, "b:1")
    assert (found["b"].pooled_tokens, found["b"].source) == (192, "")
    assert found["a"].fetch_ms > found["b"].fetch_ms > 0
    for c in found.values():
        assert c.cached_tokens + c.pending_tokens + c.pooled_tokens + c.uncached_tokens == 200


async def test_spans_say_what_was_expected_of_a_pull_and_what_came() -> None:
    recorder = SpanRecorder()
    script = Script(kv_fetch=FETCHED, cached_tokens=192, pooled_tokens=192)
    async with two_hosts(script, observer=recorder.observer) as stack:
        await collected(stack.client, PROMPT, max_tokens=1)
        await eventually(lambda: bool(recorder.named(spans.ROUTER_REQUEST)))
    forward = recorder.attributes(spans.ROUTER_FORWARD)
    assert forward[spans.KV_FETCH_SOURCE] == "b:1"
    assert forward[spans.PREDICTED_POOLED_TOKENS] == 192
    assert forward[spans.PREDICTED_FETCH_S] > 0
    assert forward[spans.POOLED_TOKENS] == 192
    assert (forward[spans.KV_FETCH_BLOCKS], forward[spans.KV_FETCH_BYTES]) == (12, 12 * BLOCK_BYTES)
    assert spans.KV_FETCH_FAILED not in forward
    listed = {line.split("@")[0]: line for line in recorder.attributes(spans.ROUTER_ROUTE)[spans.CANDIDATES]}
    assert "pooled=192" in listed["a"]
    assert " source=b:1" in listed["a"]
    assert "source=" not in listed["b"]


async def test_metrics_count_pooled_tokens_pulls_and_their_error() -> None:
    reader = Reader()
    script = Script(kv_fetch=FETCHED, cached_tokens=192, pooled_tokens=192)
    async with two_hosts(script, metrics=reader.router) as stack:
        await collected(stack.client, PROMPT, max_tokens=1)
    assert reader.value("kvorum.router.prompt.cached", replica="a", tier="pooled") == 192
    assert reader.value("kvorum.router.kv_fetch", replica="a", outcome="ok") == 1
    assert reader.value("kvorum.router.kv_fetch.error", replica="a").count == 1
    assert reader.value("kvorum.router.cached.error", replica="a").sum == 0


@pytest.mark.parametrize(
    "pool",
    [
        replica_pb2.KvPool(arena="a", namespace="n", agent="a:1"),
        replica_pb2.KvPool(namespace="n", agent="a:1", block_bytes=1),
        replica_pb2.KvPool(arena="a", agent="a:1", block_bytes=1),
        replica_pb2.KvPool(arena="a" * 300, namespace="n", block_bytes=1),
        replica_pb2.KvPool(arena="a", namespace="n", block_bytes=-1),
    ],
)
async def test_pool_that_cannot_be_is_none(pool: replica_pb2.KvPool) -> None:
    replica = FakeReplica("r0")
    replica.pool = pool
    async with running_stack(replicas=0, extra=[replica]) as stack:
        pooled(replica)
        await eventually(lambda: stack.view("r0").blocks == 12)
        assert not stack.group.fleet.pools.shared
        (candidate,) = (await stack.client.explain(PROMPT)).candidates
    assert candidate.pooled_tokens == 0


async def test_restarted_replica_leaves_its_arena_and_joins_it_anew() -> None:
    replica = sharing("a", "a")
    async with running_stack(replicas=0, extra=[replica]) as stack:
        pools = stack.group.fleet.pools
        assert pools.shared
        replica.pool = replica_pb2.KvPool(arena="z", namespace="n", block_bytes=5)
        await replica.restart()
        await stack.announce()

        def share() -> Share | None:
            row = stack.group.fleet.row(stack.key("a"))
            return None if row is None else pools.share_of(row)

        await eventually(lambda: share() == Share("z", "n", "", 5))
