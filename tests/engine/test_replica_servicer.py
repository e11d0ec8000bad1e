"""The replica's gRPC face over a fake engine: what is refused, what is held, what is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from fakes_replica import FakeObserver
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from protos import common_pb2, replica_pb2, replica_pb2_grpc
from protos.channels import bind, create_server
from protos.errors import from_rpc_error
from workers.journal import Journal
from workers.kv_messages import BlockStored
from workers.kvpool.pool_keys import Transitions
from workers.load import LoadRecorder
from workers.pooled_tokens import PooledTokens
from workers.resident import ResidentBlocks
from workers.servicer import ReplicaServicer

pytestmark = pytest.mark.engine


class FakeEngine:
    """Yields one output per permit, then ends or breaks."""

    def __init__(self) -> None:
        self._observers: list[Callable[[], None]] = []
        self.journal = Journal()
        self.resident = ResidentBlocks("revision", self.journal)
        self.load = LoadRecorder(self.resident, lambda: None)
        self.kv_pool: replica_pb2.KvPool | None = None
        self.pooled_tokens = PooledTokens()
        self.loads_tokens = 0
        self.permits = asyncio.Semaphore(0)
        self.breaks_with: Exception | None = None

    def on_change(self, observer: Callable[[], None]) -> None:
        self._observers.append(observer)

    async def generate(self, request: replica_pb2.ReplicaGenerateRequest) -> AsyncIterator[RequestOutput]:
        self.pooled_tokens._tokens[request.request_id] = self.loads_tokens
        times = RequestStateStats(queued_ts=10.0, scheduled_ts=10.5, first_token_ts=12.5, last_token_ts=12.5)
        for token in (1, 2):
            await self.permits.acquire()
            if self.breaks_with is not None:
                raise self.breaks_with
            end = "length" if token == 2 else None
            choice = CompletionOutput(0, f"t{token}", [token], None, None, finish_reason=end)
            times.last_token_ts = 12.5 + (token - 1) * 3
            yield RequestOutput(
                "r", None, [1], None, [choice], finished=bool(end), metrics=times,
                num_cached_tokens=16, num_cache_creation_tokens=32,
            )  # fmt: skip


class FakePrefetcher:
    """Brings blocks once it is let."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, list[int], bool]] = []
        self.gate = asyncio.Event()
        self.brings = common_pb2.KvFetch(agent="far:9", blocks=2, bytes=200, seconds=0.5)
        self.ended = asyncio.Event()

    async def fetch(
        self,
        agent: str,
        namespace: str,
        source: str,
        router_keys: Sequence[int],
        time_left_s: float | None,
    ) -> common_pb2.KvFetch:
        self.asked.append((agent, namespace, source, list(router_keys), time_left_s is not None))
        try:
            await self.gate.wait()
        finally:
            self.ended.set()
        return self.brings


class Served:
    def __init__(
        self,
        engine: FakeEngine,
        stub: replica_pb2_grpc.ReplicaAsyncStub,
        servicer: ReplicaServicer,
        prefetcher: FakePrefetcher,
    ) -> None:
        self.engine, self.stub, self.servicer, self.prefetcher = engine, stub, servicer, prefetcher

    def send(self, prompt: Sequence[int] = (1, 2, 3), blocks: int = 0, **sampling: Any) -> Any:
        """`blocks`: of the prompt, which another host has."""
        request = replica_pb2.ReplicaGenerateRequest(
            request_id="r", prompt_token_ids=prompt, sampling=common_pb2.SamplingParams(**sampling)
        )
        if blocks:
            request.kv_source.agent, request.kv_source.blocks = "far:9", blocks
        return self.stub.Generate(request, timeout=10)

    async def until_load(self, sequences: int, backlog: int) -> None:
        """As a watcher hears it."""
        async for update in self.stub.WatchReplica(replica_pb2.WatchReplicaRequest(), timeout=10):
            if (update.load.sequences, update.load.prefill_backlog_tokens) == (sequences, backlog):
                return


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    engine = FakeEngine()
    snapshot = replica_pb2.ReplicaSnapshot(replica="r0", model=common_pb2.ModelInfo(vocab_size=100))
    prefetcher = FakePrefetcher()
    fakes: Any = (FakeObserver(), prefetcher)
    servicer = ReplicaServicer(engine, snapshot, "epoch", *fakes)  # type: ignore[arg-type]
    server = create_server(tokens=[])
    replica_pb2_grpc.add_ReplicaServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(engine, replica_pb2_grpc.ReplicaStub(channel), servicer, prefetcher)
    await server.stop(None)


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return from_rpc_error(refused.value)


async def test_load_is_held_from_acceptance_to_the_first_token_and_to_the_end(served: Served) -> None:
    call = served.send(n=3)
    await served.until_load(3, 3)
    served.engine.permits.release()
    first = await call.read()
    await served.until_load(3, 0)
    served.engine.permits.release()
    last = await call.read()
    await served.until_load(0, 0)
    assert (first.times.queue, first.times.prefill, first.times.decode) == (0.5, 2.0, 0.0)
    assert (last.times.queue, last.times.prefill, last.times.decode) == (0.5, 2.0, 3.0)


async def test_usage_comes_first_and_last_with_what_the_cache_gave_and_took(served: Served) -> None:
    for _ in range(2):
        served.engine.permits.release()
    first, last = [message async for message in served.send()]
    for message, completion_tokens in ((first, 1), (last, 2)):
        usage = message.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, completion_tokens)
        assert (usage.cached_tokens, usage.cache_creation_tokens) == (16, 32)


async def test_a_cancelled_request_releases_its_load_in_mid_prefill(served: Served) -> None:
    call = served.send()
    await served.until_load(1, 3)
    call.cancel()
    await served.until_load(0, 0)


async def test_a_request_that_fails_releases_its_load(served: Served) -> None:
    served.engine.breaks_with = RuntimeError("a secret")
    served.engine.permits.release()
    await refusal(served.send())
    await served.until_load(0, 0)


@pytest.mark.parametrize("prompt", [(), (1, 100), (-1,)])
async def test_what_cannot_run_is_refused_and_holds_nothing(served: Served, prompt: tuple[int, ...]) -> None:
    error = await refusal(served.send(prompt))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.violations[0].field == "prompt_token_ids"
    assert served.engine.load.accepted.sequences == 0


async def test_a_draining_replica_finishes_what_it_has_and_refuses_the_rest(served: Served) -> None:
    running = served.send()
    await served.until_load(1, 3)
    draining = asyncio.create_task(served.servicer.drain(5.0))
    async for update in served.stub.WatchReplica(replica_pb2.WatchReplicaRequest(), timeout=10):
        if update.draining:
            break
    assert (await refusal(served.send())).reason == common_pb2.REPLICA_DRAINING
    for _ in range(2):
        served.engine.permits.release()
    assert [len(message.choices) async for message in running] == [1, 1]
    assert await draining == 0


async def test_vllms_own_metrics_are_told_as_prometheus_text(served: Served) -> None:
    shown = Gauge("vllm:test_servicer", "about", ["engine"])
    try:
        shown.labels("0").set(7)
        answer = await served.stub.GetMetrics(replica_pb2.GetMetricsRequest(), timeout=10)
    finally:
        REGISTRY.unregister(shown)
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert "vllm:test_servicer" in families
    assert all(name.startswith("vllm:") for name in families)


PROMPT = list(range(1, 22))
"""Of five blocks of four tokens, and one more token."""

BLOCK = BlockStored(
    block_hashes=[b"first"],
    parent_block_hash=None,
    token_ids=PROMPT[:4],
    block_size=4,
    medium="GPU",
    extra_keys=[None],
)


@pytest.fixture
async def pooled(served: Served) -> Served:
    """The engine has the first block, its host's pool the second and the fourth."""
    served.engine.kv_pool = replica_pb2.KvPool(arena="a", namespace="ns", agent="near:9")
    served.engine.resident.apply([BLOCK])
    keys = keys_of(served)
    served.engine.resident.pool.apply(Transitions([keys[1], keys[3]], []))
    for _ in range(2):
        served.engine.permits.release()
    return served


def keys_of(served: Served) -> list[int]:
    return served.engine.resident.prompt_keys(np.array(PROMPT))


async def test_blocks_that_are_lacking_are_fetched_before_the_engine_has_the_request(pooled: Served) -> None:
    call, keys = pooled.send(PROMPT, blocks=5), keys_of(pooled)
    await pooled.until_load(1, 21 - 8)  # it counts while it waits
    assert pooled.prefetcher.asked == [("near:9", "ns", "far:9", [keys[2], keys[4]], True)]
    pooled.engine.loads_tokens = 12
    pooled.prefetcher.gate.set()
    first, last = [message async for message in call]
    assert first.kv_fetch == pooled.prefetcher.brings
    assert not last.HasField("kv_fetch")
    assert [message.usage.pooled_tokens for message in (first, last)] == [12, 12]


async def test_only_what_the_source_has_is_asked_for(pooled: Served) -> None:
    pooled.prefetcher.gate.set()
    _ = [message async for message in pooled.send(PROMPT, blocks=3)]
    assert pooled.prefetcher.asked == [("near:9", "ns", "far:9", [keys_of(pooled)[2]], True)]


@pytest.mark.parametrize(
    "why", ["no hint", "nothing is lacking", "the pool is gone", "no agent", "the view is degraded"]
)
async def test_nothing_is_fetched_without_need(pooled: Served, why: str) -> None:
    blocks = 0 if why == "no hint" else 2 if why == "nothing is lacking" else 5
    if why == "the pool is gone":
        pooled.engine.kv_pool = None
    elif why == "no agent":
        pooled.engine.kv_pool = replica_pb2.KvPool(arena="a", namespace="ns")
    elif why == "the view is degraded":
        pooled.engine.resident.lost_events("some")
    messages = [message async for message in pooled.send(PROMPT, blocks=blocks)]
    assert pooled.prefetcher.asked == []
    assert not any(message.HasField("kv_fetch") for message in messages)


async def test_a_fetch_that_fails_is_told_and_the_request_served(pooled: Served) -> None:
    pooled.prefetcher.brings = common_pb2.KvFetch(agent="far:9", failed="far:9 is gone")
    pooled.prefetcher.gate.set()
    first, last = [message async for message in pooled.send(PROMPT, blocks=5)]
    assert first.kv_fetch.failed == "far:9 is gone"
    assert last.choices[0].finish_reason == common_pb2.LENGTH


async def test_a_request_that_is_cancelled_ends_its_fetch_and_releases_its_load(pooled: Served) -> None:
    call = pooled.send(PROMPT, blocks=5)
    await pooled.until_load(1, 21 - 8)
    call.cancel()
    await pooled.until_load(0, 0)
    await asyncio.wait_for(pooled.prefetcher.ended.wait(), 10)


async def test_a_drain_does_not_wait_for_blocks_longer_than_its_grace(pooled: Served) -> None:
    call = pooled.send(PROMPT, blocks=5)
    await pooled.until_load(1, 21 - 8)
    assert await pooled.servicer.drain(0.05) == 1
    assert (await refusal(call)).reason == common_pb2.REPLICA_DRAINING
