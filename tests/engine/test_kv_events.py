"""On a real vLLM engine, what a watcher of the replica knows is exactly what the next request reuses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from fakes_replica import FakeObserver
from one_process import start_engine

from protos import blockkeys, common_pb2, replica_pb2, replica_pb2_grpc
from protos.channels import bind, create_server
from workers.checkpoint import prepare
from workers.config import EngineConfig
from workers.engine import Engine
from workers.servicer import ReplicaServicer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

BLOCK, BLOCKS, VOCAB = 32, 64, 40_000


@dataclass
class Mirror:
    """A router's view of the replica, from WatchReplica alone."""

    keys: set[int] = field(default_factory=set)
    last: replica_pb2.ReplicaUpdate = field(default_factory=replica_pb2.ReplicaUpdate)
    snapshot: replica_pb2.ReplicaSnapshot = field(default_factory=replica_pb2.ReplicaSnapshot)

    loads: list[common_pb2.ReplicaLoad] = field(default_factory=list)  # of every update

    async def follow(self, updates: AsyncIterable[replica_pb2.ReplicaUpdate]) -> None:
        async for update in updates:
            assert update.seq == self.last.seq + 1
            if update.seq == 1:
                self.snapshot = update.snapshot
            for change in update.blocks:
                assert change.tier == replica_pb2.DEVICE
                base = set() if change.cleared else self.keys - unpack(change.removed)
                self.keys = base | unpack(change.stored)
            assert update.blocks_count == len(self.keys)
            assert update.blocks_xor == int(np.bitwise_xor.reduce(np.array([0, *self.keys], np.uint64)))
            self.last = update
            self.loads.append(update.load)

    def cached_tokens(self, prompt: list[int], salt: str = "") -> int:
        root = blockkeys.root(self.snapshot.model.revision, "", salt)
        keys = blockkeys.keys(np.array(prompt), self.last.block_size, root).tolist()
        found = next((index for index, key in enumerate(keys) if key not in self.keys), len(keys))
        return min(found, (len(prompt) - 1) // self.last.block_size) * self.last.block_size


def unpack(keys: bytes) -> set[int]:
    return set(np.frombuffer(keys, "<u8").tolist())


@dataclass
class Replica:
    """One engine behind its gRPC server, and one watcher."""

    engine: Engine
    stub: replica_pb2_grpc.ReplicaAsyncStub
    mirror: Mirror
    watching: asyncio.Task[None]
    sent: int = 0

    async def generate(
        self, prompt: Iterable[int], salt: str = "", tokens: int = 4, **fields: Any
    ) -> list[common_pb2.GenerateResponse]:
        self.sent += 1
        sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        request = replica_pb2.ReplicaGenerateRequest(
            request_id=f"test-{self.sent}", prompt_token_ids=prompt, cache_salt=salt, sampling=sampling
        )
        request.MergeFrom(replica_pb2.ReplicaGenerateRequest(**fields))
        return [message async for message in self.stub.Generate(request, timeout=60)]

    async def until_whole(self) -> None:
        """Until a watcher hears that the view is the whole truth again."""
        updates = self.stub.WatchReplica(replica_pb2.WatchReplicaRequest())
        degraded = []
        async for update in updates:
            degraded.append(update.blocks_degraded)
            if not update.blocks_degraded:
                break
        assert degraded[0] == "a test threw them away"
        updates.cancel()

    async def settle(self, calm_s: float = 0.25) -> None:
        """Until nothing more has arrived for so long, and the watcher knows all of it."""
        calm, before = 0, None
        for _ in range(600):
            now = (set(self.engine.resident.keys().tolist()), self.mirror.last.load.running)
            calm = calm + 1 if now == before and now == (self.mirror.keys, 0) else 0
            before = now
            if calm >= calm_s / 0.05:
                return
            assert not self.watching.done(), self.watching.exception()
            await asyncio.sleep(0.05)
        raise AssertionError(f"the watcher never caught up: {self.mirror.last}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Replica]:
    prepared = prepare("smollm2")
    config = EngineConfig(
        max_model_len=512,
        kv_cache_gib=0.1,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        engine_args={"block_size": BLOCK, "num_gpu_blocks_override": BLOCKS},
    )
    engine, info = start_engine(config, prepared)
    await engine.warm_up()
    model = common_pb2.ModelInfo(revision=prepared.revision, vocab_size=info.vocab_size)
    snapshot = replica_pb2.ReplicaSnapshot(replica="r0", model=model, key_scheme=blockkeys.SCHEME)
    server = create_server(tokens=[])
    servicer = ReplicaServicer(engine, snapshot, "e0", FakeObserver())
    replica_pb2_grpc.add_ReplicaServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        mirror = Mirror()
        watching = asyncio.create_task(mirror.follow(stub.WatchReplica(replica_pb2.WatchReplicaRequest())))
        yield Replica(engine, stub, mirror, watching)
        watching.cancel()
    await server.stop(None)
    await engine.stop_following()
    await asyncio.to_thread(engine.shutdown)


async def test_a_fresh_replica_knows_its_block_size_and_holds_nothing(replica: Replica) -> None:
    await replica.settle()
    assert replica.mirror.last.block_size == BLOCK
    assert replica.mirror.keys == set()
    assert replica.mirror.last.blocks_degraded == ""
    assert (await replica.generate([1] * 100))[0].usage.cached_tokens == 0  # nor does the engine
    load = replica.mirror.last.load
    assert (load.max_sequences, load.max_batch_tokens, load.kv_blocks) == (8, 128, BLOCKS)


async def test_the_view_predicts_what_each_request_will_reuse_exactly(replica: Replica) -> None:
    """Shared prefixes, salts and generated tokens, in a cache that holds a quarter of them."""
    rng = random.Random(3)
    families = [[rng.randrange(1000, VOCAB) for _ in range(320)] for _ in range(5)]
    hits = evictions = 0
    for _ in range(30):
        prompt = rng.choice(families)[: rng.randrange(17, 320)]
        prompt += [rng.randrange(1000, VOCAB) for _ in range(rng.randrange(40))]
        salt = rng.choice(["", "", "", "tenant"])
        await replica.settle()
        before, predicted = set(replica.mirror.keys), replica.mirror.cached_tokens(prompt, salt)
        messages = await replica.generate(prompt, salt, tokens=rng.randrange(1, 20))
        assert messages[0].usage.cached_tokens == predicted
        await replica.settle()
        hits += predicted > 0
        evictions += len(before - replica.mirror.keys)
    assert hits > 10
    assert evictions > 30
    assert replica.engine.resident.counters.contradictions == 0
    assert replica.engine.resident.counters.unknown_parents == 0


async def test_concurrent_copies_are_followed_too(replica: Replica) -> None:
    """Requests in one batch each compute the prefix they share; each copy is removed by itself."""
    rng = random.Random(4)
    shared = [rng.randrange(1000, VOCAB) for _ in range(100)]
    for _ in range(4):
        prompts = [shared + [rng.randrange(1000, VOCAB) for _ in range(60)] for _ in range(4)]
        await asyncio.gather(*(replica.generate(prompt) for prompt in prompts))
        await replica.settle()
        for prompt in (*prompts, [*shared, 5]):
            predicted = replica.mirror.cached_tokens(prompt)
            assert (await replica.generate(prompt, tokens=1))[0].usage.cached_tokens == predicted
            await replica.settle()


async def test_cancelled_requests_leave_an_exact_view_and_no_load(replica: Replica) -> None:
    prompt = [7] * 300
    sending = [asyncio.create_task(replica.generate([*prompt, n], tokens=200)) for n in range(4)]
    async with asyncio.timeout(20):
        while replica.engine.load.accepted.sequences < 4:  # noqa: ASYNC110 (what it looks at has no event)
            await asyncio.sleep(0.01)
    for task in sending:
        task.cancel()
    await asyncio.wait(sending)
    await replica.settle(calm_s=4.0)  # the step that is under way still fills blocks
    assert replica.mirror.last.load.sequences == 0
    assert replica.mirror.last.load.prefill_backlog_tokens == 0
    predicted = replica.mirror.cached_tokens(prompt)
    assert (await replica.generate(prompt))[0].usage.cached_tokens == predicted


async def test_load_is_reported_while_requests_wait_and_speeds_after(replica: Replica) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(1000, VOCAB) for _ in range(400)] for _ in range(4)]
    start = len(replica.mirror.loads)
    await asyncio.gather(*(replica.generate(prompt) for prompt in prompts))
    await replica.settle()
    seen = [(load.sequences, load.prefill_backlog_tokens) for load in replica.mirror.loads[start:]]
    assert max(sequences for sequences, _ in seen) == 4
    assert 800 < max(backlog for _, backlog in seen) <= 1600
    assert len({backlog for _, backlog in seen}) > 3  # it shrinks chunk by chunk
    load = replica.mirror.last.load
    assert (load.sequences, load.prefill_backlog_tokens) == (0, 0)
    assert load.prefill_ms_per_token > 0
    assert load.decode_step_ms > load.prefill_ms_per_token


async def test_the_first_message_tells_the_times_until_it(replica: Replica) -> None:
    messages = await replica.generate([9] * 200, tokens=5)
    first, last = messages[0].times, messages[-1].times
    assert first.prefill > 0
    assert (first.queue, first.prefill) == (last.queue, last.prefill)
    assert last.decode > first.decode == 0


async def test_a_reset_empties_the_view_and_what_follows_is_exact_again(replica: Replica) -> None:
    prompt = [11] * 200
    await replica.generate(prompt)
    await replica.settle()
    assert replica.mirror.cached_tokens(prompt) > 0
    assert await replica.engine.reset_prefix_cache()
    await replica.settle()
    assert replica.mirror.keys == set()
    assert (await replica.generate(prompt))[0].usage.cached_tokens == 0
    await replica.settle()
    predicted = replica.mirror.cached_tokens(prompt)
    assert predicted == 192
    assert (await replica.generate(prompt))[0].usage.cached_tokens == predicted


async def test_lost_events_are_mended_by_a_reset_once_idle(replica: Replica) -> None:
    prompt = [12] * 200
    await replica.generate(prompt)
    await replica.settle()
    replica.engine.resident.lost_events("a test threw them away")
    await replica.generate([13] * 100)
    await asyncio.wait_for(replica.until_whole(), 20)
    await replica.settle()
    assert replica.mirror.keys == set()
    assert (await replica.generate(prompt))[0].usage.cached_tokens == 0
