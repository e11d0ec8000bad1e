"""Two real engines on one pool: what one has computed the other loads, and answers as if it had computed it.

In float32, where a loaded, a cached and a computed prefix are followed by the same tokens; in bfloat16 a near
tie may go either way, with no fault anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from one_process import start_engine

from protos import blockkeys, common_pb2, replica_pb2
from workers.checkpoint import prepare
from workers.config import EngineConfig
from workers.engine import Engine
from workers.kvpool.arena import Arena
from workers.kvpool.router_keys import UNNAMED
from workers.resident import HOST

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

BLOCK, VOCABULARY = 32, 40_000


@dataclass
class Answer:
    tokens: list[int]
    cached: int
    pooled: int = 0


@dataclass
class Replica:
    engine: Engine
    revision: str
    sent: int = 0

    async def ask(self, prompt: list[int], tokens: int = 40, salt: str = "") -> Answer:
        self.sent += 1
        request = replica_pb2.ReplicaGenerateRequest(
            request_id=f"test-{self.sent}",
            prompt_token_ids=prompt,
            cache_salt=salt,
            sampling=common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0),
        )
        answer = Answer([], 0)
        async with asyncio.timeout(120):
            async for output in self.engine.generate(request):
                answer.tokens += output.outputs[0].token_ids
                answer.cached = max(answer.cached, output.num_cached_tokens or 0)
                answer.pooled = self.engine.pooled_tokens.of(request.request_id)
        return answer

    async def forget(self) -> None:
        """Empty the engine's own prefix cache: from here on it has only what it loads."""
        for _ in range(400):
            if await self.engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.05)
        raise TimeoutError("the prefix cache is in use")

    def keys(self, prompt: list[int], salt: str = "") -> list[int]:
        root = blockkeys.root(self.revision, "", salt)
        found: list[int] = blockkeys.keys(np.array(prompt), BLOCK, root).tolist()
        return found


@dataclass
class Pool:
    """The arena, as anybody on the host sees it."""

    arena: Arena

    def slot(self, key: int) -> int | None:
        """Of the block that the router knows by this key."""
        return dict(zip(self._ready("extra").tolist(), self._slots().tolist(), strict=True)).get(key)

    def content(self, key: int) -> bytes:
        slot = self.slot(key)
        assert slot is not None
        return b"".join(
            bytes(self.arena._segment.part(slot, rank)) for rank in range(self.arena.header.geometry.ranks)
        )

    def spoil(self, key: int) -> None:
        slot = self.slot(key)
        assert slot is not None
        self.arena._segment.part(slot, 0)[1000] ^= 1

    async def until(self, *keys: int) -> None:
        """These are stored."""
        await until(lambda: all(self.slot(key) is not None for key in keys))

    def keys(self) -> set[int]:
        """Of all that is stored and that the router can name."""
        return set(self._ready("extra").tolist()) - {UNNAMED}

    def _slots(self) -> Any:
        return np.flatnonzero(self.arena._segment.state == 2)

    def _ready(self, name: str) -> Any:
        return getattr(self.arena._segment, name)[self._slots()]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError("it never came true")


def prompt(seed: int, length: int = 300) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000, VOCABULARY) for _ in range(length)]


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        dtype="float32",
        max_model_len=512,
        kv_cache_gib=0.15,
        max_num_seqs=8,
        kv_pool_gib=0.06,  # some 40 blocks
        kv_pool_folder=str(folder),
        engine_args={"block_size": BLOCK},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Replica, Replica, Pool]]:
    folder = tmp_path_factory.mktemp("pool")
    prepared = prepare("smollm2")
    replicas = []
    for _ in range(2):
        engine, _info = start_engine(config(folder), prepared)
        await engine.warm_up()
        replicas.append(Replica(engine, prepared.revision))
    (path,) = folder.glob("*.arena")  # equal engines have one namespace
    with Arena.open(path) as arena:
        yield replicas[0], replicas[1], Pool(arena)
    for replica in replicas:
        await replica.engine.stop_following()
        await asyncio.to_thread(replica.engine.shutdown)


async def test_a_prompt_computed_by_one_is_loaded_by_the_other_and_answered_equally(
    pair: tuple[Replica, Replica, Pool],
) -> None:
    one, other, pool = pair
    asked = prompt(1)
    first = await one.ask(asked)
    await pool.until(*one.keys(asked))
    second = await other.ask(asked)
    alone = await other.ask(asked, salt="computed by itself")
    assert (first.cached, second.cached, alone.cached) == (0, 9 * BLOCK, 0)
    assert first.tokens == second.tokens == alone.tokens


async def test_blocks_have_the_bytes_that_any_replica_computes(pair: tuple[Replica, Replica, Pool]) -> None:
    one, other, pool = pair
    asked = prompt(2)
    answer = (await one.ask(asked)).tokens
    whole = asked + answer[:-1]
    await pool.until(*one.keys(whole))
    await other.ask(asked, salt="x")
    await pool.until(*other.keys(whole, "x"))
    for mine, its in zip(one.keys(whole), other.keys(whole, "x"), strict=True):
        assert pool.content(mine) == pool.content(its)
    turn = whole + prompt(3, 40)
    assert (await other.ask(turn)).cached == len(whole) // BLOCK * BLOCK
    await one.ask(turn, salt="y")
    await pool.until(*one.keys(turn, "y"), *other.keys(turn))
    # What was computed on top of loaded blocks; its rounding may differ from that of one longer step.
    for mine, its in zip(one.keys(turn, "y"), other.keys(turn), strict=True):
        left, right = (np.frombuffer(pool.content(key), np.float32) for key in (mine, its))
        np.testing.assert_allclose(left, right, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("spoilt", [[0], [4], [2, 8]])
async def test_a_damaged_block_is_computed_and_nobody_notices(
    pair: tuple[Replica, Replica, Pool], spoilt: list[int]
) -> None:
    one, other, pool = pair
    asked = prompt(100 + spoilt[0])
    right = (await one.ask(asked)).tokens
    await pool.until(*(keys := one.keys(asked)))
    corrupt = pool.arena.counters().corrupt
    for number in spoilt:
        pool.spoil(keys[number])
    assert (await other.ask(asked)).tokens == right
    assert pool.arena.counters().corrupt == corrupt + len(spoilt)
    assert pool.slot(keys[spoilt[0]]) is None


async def test_a_full_pool_serves_what_it_has(pair: tuple[Replica, Replica, Pool]) -> None:
    one, other, pool = pair
    for seed in range(200, 207):
        asked = prompt(seed)
        right = await one.ask(asked)
        await pool.until(one.keys(asked)[0])
        assert (await other.ask(asked)).tokens == right.tokens
    assert pool.arena.counters().evicted > 0
    assert pool.arena.check() == []


async def test_many_requests_at_once_are_answered_as_when_alone(pair: tuple[Replica, Replica, Pool]) -> None:
    one, other, pool = pair
    asked = [prompt(300, 200) + prompt(seed, 60) for seed in range(301, 307)]
    right = [(await one.ask(each, 16)).tokens for each in asked]
    await pool.until(one.keys(asked[-1])[-1])
    answers = await asyncio.gather(*(other.ask(each, 16) for each in asked))
    assert [answer.tokens for answer in answers] == right
    assert all(answer.cached >= 6 * BLOCK for answer in answers)


async def test_the_routers_view_holds_loaded_blocks_as_the_engines_own(
    pair: tuple[Replica, Replica, Pool],
) -> None:
    one, other, pool = pair
    asked = prompt(400)
    await one.ask(asked)
    await pool.until(*(keys := one.keys(asked)))
    await other.forget()
    assert other.engine.resident.prefix(keys) == 0
    assert (await other.ask(asked, 1)).cached == 9 * BLOCK
    await until(lambda: other.engine.resident.prefix(keys) == 9)
    assert not other.engine.resident._published[HOST]  # vLLM tells of none there
    assert other.engine.resident.degraded == ""
    assert other.engine.resident.counters.unknown_parents == 0


async def test_every_replica_tells_what_the_pool_holds_and_what_it_loaded(
    pair: tuple[Replica, Replica, Pool],
) -> None:
    one, other, pool = pair
    asked = prompt(500)
    assert (await one.ask(asked)).pooled == 0
    await pool.until(*one.keys(asked))
    resident = one.engine.resident, other.engine.resident
    await until(lambda: all(set(each.keys(HOST).tolist()) == pool.keys() for each in resident))
    assert one.engine.kv_pool is not None
    assert one.engine.kv_pool == other.engine.kv_pool
    assert one.engine.kv_pool.namespace == pool.arena.path.stem
    assert (await other.ask(asked)).pooled == 9 * BLOCK
    await until(lambda: other.engine.load.snapshot().pool_load_ms_per_block > 0)
    assert other.engine.load.snapshot().pool_slots == pool.arena.usage().slots
    twice = other.engine.resident.local_prefix(other.keys(asked))
    assert twice == len(other.keys(asked))
    assert (await other.ask(asked)).pooled == 0  # now it has them itself


async def test_nothing_is_held_when_nobody_asks(pair: tuple[Replica, Replica, Pool]) -> None:
    arena = pair[2].arena
    await until(lambda: (arena.usage().leased, arena.usage().writing) == (0, 0))
    assert len(arena.usage().owners) == 2
