"""Replicas that share blocks through vLLM's own scheduler and connector answer as if each computed alone.

Only the model is a stand-in, one that notices a wrong byte (see `scheduled_engine`).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from scheduled_engine import BLOCK, REVISION, Answer, ScheduledEngine, engines, vllm_config
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from protos import blockkeys
from workers.kvpool import jobs, spec
from workers.kvpool.arena import Arena
from workers.kvpool.copier import Copier
from workers.kvpool.errors import ArenaBusy, ArenaMissingError
from workers.kvpool.layout import State
from workers.kvpool.manager import LOADS_PER_REQUEST, ArenaManager
from workers.kvpool.no_pool import NoPool
from workers.kvpool.owners import OwnerKind
from workers.kvpool.pages import BlockPages
from workers.resident import DEVICE

pytestmark = pytest.mark.timeout(600)

PROMPT = list(range(100, 300))
"""Six full blocks, and a part of one."""
ONE_BLOCK = 2 * 2 * BLOCK * 256
"""Bytes in the arena, all ranks' parts together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-async"])
def config(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> VllmConfig:
    tp, overlapping = request.param
    return vllm_config(model, tmp_path / "pool", tp=tp, engine_args={"async_scheduling": overlapping})


@pytest.fixture
def pair(config: VllmConfig) -> Iterator[tuple[ScheduledEngine, ScheduledEngine]]:
    with engines(2, config) as (one, other):
        yield one, other


@pytest.fixture
def alone(model: Path) -> Iterator[ScheduledEngine]:
    """An engine without a pool."""
    with engines(1, vllm_config(model, None)) as (engine,):
        yield engine


def arena_of(engine: ScheduledEngine) -> Arena:
    manager = engine.scheduler.connector.scheduler.manager
    assert isinstance(manager, ArenaManager)
    return manager._arena


def assert_nothing_is_held(engine: ScheduledEngine) -> None:
    arena = arena_of(engine)
    assert (arena.usage().leased, arena.usage().writing, arena.check()) == (0, 0, [])
    assert engine.scheduler.kv_cache_manager.usage == 0


def router_keys(prompt: list[int], lora: str = "", salt: str = "") -> list[int]:
    keys: list[int] = blockkeys.keys(np.array(prompt), BLOCK, blockkeys.root(REVISION, lora, salt)).tolist()
    return keys


def spoil(arena: Arena, *numbers: int) -> None:
    """Flip a bit in these blocks of PROMPT."""
    for number in numbers:
        (slot,) = np.flatnonzero(arena._segment.extra == router_keys(PROMPT)[number])
        arena._segment.part(int(slot), 0)[7] ^= 1


def test_a_prompt_that_one_replica_computed_another_loads(
    pair: tuple[ScheduledEngine, ScheduledEngine], alone: ScheduledEngine
) -> None:
    one, other = pair
    first = one.ask("a", PROMPT, 40)
    second = other.ask("b", PROMPT, 40)
    assert first.tokens == second.tokens == alone.ask("a", PROMPT, 40).tokens
    assert (first.cached, second.cached) == (0, 6 * BLOCK)
    assert (other.stats.hits, other.stats.loaded, other.stats.lost) == (6, 6, 0)
    assert other.stats.loaded_bytes == 6 * ONE_BLOCK
    assert_nothing_is_held(one)
    assert_nothing_is_held(other)


def test_a_prompt_of_full_blocks_alone_is_loaded_but_for_its_last_token(
    pair: tuple[ScheduledEngine, ScheduledEngine],
) -> None:
    one, other = pair
    prompt = PROMPT[: 4 * BLOCK]
    assert one.ask("a", prompt).tokens == other.ask("b", prompt).tokens
    assert other.stats.loaded == 4


def test_the_next_turn_of_a_chat_finds_the_answer_in_the_pool(
    pair: tuple[ScheduledEngine, ScheduledEngine],
) -> None:
    one, other = pair
    answer = one.ask("a", PROMPT, 100).tokens
    turn = [*PROMPT, *answer[:-1], 1, 2, 3]
    assert other.ask("b", turn).cached == (len(PROMPT) + len(answer) - 1) // BLOCK * BLOCK


def test_what_a_replica_has_itself_it_does_not_load(pair: tuple[ScheduledEngine, ScheduledEngine]) -> None:
    one, other = pair
    one.ask("a", PROMPT)
    other.ask("b", PROMPT[: 3 * BLOCK + 1])
    loaded = other.stats.loaded
    assert other.ask("c", PROMPT).cached == 6 * BLOCK
    assert other.stats.loaded - loaded == 3


@pytest.mark.parametrize("spoilt", [(0,), (3,), (5,), (1, 4), (0, 1, 2, 3, 4, 5)])
def test_damaged_blocks_are_computed_and_the_answer_is_the_same(
    pair: tuple[ScheduledEngine, ScheduledEngine], spoilt: tuple[int, ...]
) -> None:
    one, other = pair
    right = one.ask("a", PROMPT, 40).tokens
    spoil(arena_of(one), *spoilt)
    answer = other.ask("b", PROMPT, 40)
    assert answer.tokens == right
    assert (other.stats.lost, arena_of(one).counters().corrupt) == (len(spoilt), len(spoilt))
    other.forget()
    assert other.ask("c", PROMPT, 40) == Answer(right, spoilt[0] * BLOCK)  # computes, and stores anew
    other.forget()
    assert other.ask("d", PROMPT, 40) == Answer(right, 6 * BLOCK)
    assert_nothing_is_held(other)


def test_a_block_that_several_ranks_lost_in_different_steps_counts_once(
    pair: tuple[ScheduledEngine, ScheduledEngine],
) -> None:
    engine, _ = pair
    told = engine.scheduler.connector.update_connector_output
    for lost, done in (({5}, None), ({5, 6}, None), ({6}, {"a"}), ({5}, {"b"})):
        told(KVConnectorOutput(invalid_block_ids=lost, finished_recving=done))
    engine.add("a", PROMPT)
    engine.finish()
    assert engine.stats.lost == 3


def test_loads_that_never_succeed_are_given_up(
    pair: tuple[ScheduledEngine, ScheduledEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    right = one.ask("a", PROMPT).tokens

    def fails(*_: object) -> Arena:
        raise ArenaMissingError("no arena here")

    monkeypatch.setattr(Copier, "_open", fails)
    assert other.ask("b", PROMPT).tokens == right
    assert other.stats.lost == LOADS_PER_REQUEST * 6
    assert_nothing_is_held(other)


def test_an_arena_that_is_full_serves_what_it_has(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path / "pool", kv_pool_gib=0.0008)  # room for a few blocks
    with engines(2, config) as (one, other):
        slots = arena_of(one).usage().slots
        assert 6 < slots < 24
        for number in range(12):
            prompt = [number, *PROMPT]
            right = one.ask(f"a{number}", prompt).tokens
            assert other.ask(f"b{number}", prompt) == Answer(right, 6 * BLOCK)
        assert arena_of(one).counters().evicted > 0
        assert_nothing_is_held(one)


def test_a_replica_whose_neighbour_was_killed_goes_on(pair: tuple[ScheduledEngine, ScheduledEngine]) -> None:
    one, other = pair
    right = one.ask("a", PROMPT).tokens
    one.add("b", [1, *PROMPT])
    one.step()  # its blocks have slots, and are being written
    arena_of(one)._file.locks.close()  # as the kernel does
    assert arena_of(other).reap() == 1
    assert other.ask("c", PROMPT) == Answer(right, 6 * BLOCK)
    assert other.ask("d", [1, *PROMPT]).cached == 0
    assert_nothing_is_held(other)


@pytest.mark.parametrize("lost", ["lookup", "lease", "allocate", "commit", "release"])
def test_an_arena_that_fails_costs_nothing_but_its_use(
    pair: tuple[ScheduledEngine, ScheduledEngine], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    one, other = pair
    right = one.ask("a", PROMPT).tokens

    def fails(*_: object, **__: object) -> None:
        raise OSError("no locks left")

    monkeypatch.setattr(Arena, lost, fails)
    assert other.ask("b", PROMPT).tokens == right
    assert other.ask("c", [9, *PROMPT]).tokens == one.ask("d", [9, *PROMPT]).tokens


def test_salts_and_adapters_are_kept_apart(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path / "pool")
    with engines(2, config) as (one, other):
        law, med = LoRARequest("law", 1, "/law"), LoRARequest("med", 2, "/med")
        asked: list[dict[str, Any]] = [
            {},
            {"salt": "x"},
            {"salt": "y"},
            {"lora": law},
            {"lora": med, "salt": "x"},
        ]
        for number, more in enumerate(asked):
            assert one.ask(f"a{number}", PROMPT, **more).cached == 0
            assert one.stats.hits == 0
        for number, more in enumerate(asked):
            assert other.ask(f"b{number}", PROMPT, **more).cached == 6 * BLOCK
        snapshot = arena_of(one).snapshot()
        spaces = ("", ""), ("", "x"), ("", "y"), ("law", ""), ("med", "x")
        assert set(snapshot.extras) == {key for space in spaces for key in router_keys(PROMPT, *space)}


def test_the_routers_index_follows_the_engines_own_cache_and_not_the_pool(
    pair: tuple[ScheduledEngine, ScheduledEngine],
) -> None:
    one, other = pair
    for engine, names in ((one, "ab"), (other, "cd")):
        engine.ask(names[0], PROMPT, 40)
        engine.ask(names[1], [5, *PROMPT])
    assert other.stats.loaded == 12
    assert {getattr(event, "medium", None) for event in one.events + other.events} == {"GPU"}
    for number, engine in enumerate(pair, start=6):
        assert engine.resident.tiers() == [DEVICE]
        assert (engine.resident.degraded, engine.resident.counters.unknown_parents) == ("", 0)
        for prompt in (PROMPT, [5, *PROMPT], [number, *PROMPT]):
            keys = engine.resident.prompt_keys(np.array(prompt))
            predicted = engine.resident.prefix(keys) * BLOCK
            hits = engine.stats.hits
            assert engine.ask(f"probe {prompt[0]}", prompt, 1).cached == predicted
            assert engine.stats.hits == hits
    other.forget()
    other.step()  # publishes it
    assert other.resident.blocks() == 0
    assert other.ask("e", PROMPT).cached == 6 * BLOCK  # from the pool
    assert other.resident.blocks() == 6


def test_a_connector_reset_lets_transfers_in_flight_end_and_serves_on(
    pair: tuple[ScheduledEngine, ScheduledEngine],
) -> None:
    one, other = pair
    right = one.ask("a", PROMPT).tokens
    one.add("b", [2, *PROMPT], 40)
    first = one.step()["b"]
    assert arena_of(one).usage().writing > 0
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert arena_of(one).usage().writing == 0
    rest = one.finish()["b"].tokens
    assert other.ask("c", [2, *PROMPT], 40) == Answer(first + rest, 6 * BLOCK)
    assert other.ask("d", PROMPT) == Answer(right, 6 * BLOCK)
    assert_nothing_is_held(one)
    assert_nothing_is_held(other)


def test_a_request_cancelled_while_its_blocks_load_leaves_nothing_behind(
    pair: tuple[ScheduledEngine, ScheduledEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    right = one.ask("a", PROMPT).tokens
    go = threading.Event()
    scatter = BlockPages.scatter
    monkeypatch.setattr(BlockPages, "scatter", lambda *args: go.wait(30) and scatter(*args))
    other.add("b", PROMPT)
    other.step()
    other.abort("b")
    other.step()
    go.set()
    other.finish()
    assert_nothing_is_held(other)
    assert other.ask("c", PROMPT).tokens == right


class Traffic:
    """Random requests to replicas whose caches are too small for them, over an arena too small for all."""

    def __init__(self, seed: int, replicas: list[ScheduledEngine]) -> None:
        self.dice = random.Random(seed)
        self.replicas = replicas
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.cancelled: set[str] = set()
        self._heads = [self._tokens(self.dice.randrange(40, 260)) for _ in range(6)]

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            for index, engine in enumerate(self.replicas):
                self._ask(engine, f"{number}-{index}")
            if self.dice.random() < 0.2:
                self._damage(arena_of(self.replicas[0]))
        for engine in self.replicas:
            for name, answer in engine.finish().items():
                self.answers.setdefault(name, []).extend(answer.tokens)

    def _ask(self, engine: ScheduledEngine, name: str) -> None:
        dice, head = self.dice, self.dice.choice(self._heads)
        self.asked[name] = head[: dice.randrange(20, len(head) + 1)] + self._tokens(5), dice.randrange(1, 60)
        engine.add(name, *self.asked[name])
        for _ in range(dice.randrange(8)):
            for done, given in engine.step().items():
                self.answers.setdefault(done, []).extend(given)
        if dice.random() < 0.1:
            self.cancelled.add(name)
            engine.abort(name)

    def _damage(self, arena: Arena) -> None:
        ready = np.flatnonzero(arena._segment.state == State.READY)
        if ready.size:
            arena._segment.part(int(self.dice.choice(ready)), 0)[3] ^= 1

    def _tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(500) for _ in range(count)]


@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_with_evictions_preemptions_damage_and_cancels_is_answered_right(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    if seed < 2:
        monkeypatch.setattr(jobs, "STORES_WAITING_BYTES", (1, 4 * ONE_BLOCK)[seed])
    small = {"blocks": 24, "kv_pool_gib": 0.0025, "kv_pool_admission": ("lru", "tinylfu")[seed % 3 // 2]}
    how = {"async_scheduling": seed >= 3}
    config = vllm_config(model, tmp_path / "pool", tp=1 + seed % 2, engine_args=how, **small)
    with engines(3, config) as replicas, engines(1, vllm_config(model, None)) as (alone,):
        traffic = Traffic(seed, replicas)
        traffic.run(60)
        for name in traffic.asked.keys() - traffic.cancelled:
            assert traffic.answers[name] == alone.ask(name, *traffic.asked[name]).tokens, name
        for engine in replicas:
            assert_nothing_is_held(engine)
        counters = arena_of(replicas[0]).counters()
        loaded = sum(engine.stats.loaded for engine in replicas)
        assert min(counters.evicted + counters.abandoned, counters.corrupt, loaded) > 0
        assert max(engine.preemptions for engine in replicas) > 0


def test_an_engine_whose_arena_cannot_be_made_runs_without(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path / "pool", kv_pool_gib=1e-6)
    with engines(1, config) as (engine,):
        manager = engine.scheduler.connector.scheduler.manager
        assert isinstance(manager, NoPool)
        assert "give the KV pool at least" in manager.why
        assert engine.ask("a", PROMPT).tokens == engine.ask("b", PROMPT).tokens
        assert engine.stats.slots == 0


def test_an_engine_that_starts_while_the_arena_is_busy_waits_for_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config(model, tmp_path / "pool")
    with engines(1, config) as (one,):
        right = one.ask("a", PROMPT).tokens
        busy, attach = [ArenaBusy("busy")] * 3, Arena.attach

        def late(arena: Arena, kind: OwnerKind) -> None:
            if busy:
                raise busy.pop()
            attach(arena, kind)

        monkeypatch.setattr(Arena, "attach", late)
        with engines(1, config) as (other,):
            assert other.ask("b", PROMPT) == Answer(right, 6 * BLOCK)
        monkeypatch.setattr(spec, "ATTACH_WITHIN_S", 0.0)
        busy += [ArenaBusy("still busy")] * 3
        with engines(1, config) as (third,):
            assert third.scheduler.connector.scheduler.manager.why == "still busy"


def test_replicas_of_other_settings_do_not_share(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    with (
        engines(1, vllm_config(model, folder)) as (one,),
        engines(1, vllm_config(model, folder, tp=2)) as (two,),
    ):
        one.ask("a", PROMPT)
        assert two.ask("b", PROMPT).cached == 0
        assert arena_of(one).path != arena_of(two).path
