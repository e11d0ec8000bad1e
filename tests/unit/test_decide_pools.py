"""Decisions where replicas share finished blocks: what is loaded, what is pulled, what is computed."""

from __future__ import annotations

import numpy as np
import pytest
from test_decide import BLOCK, NOW, FakeRouter, Tokens, candidate, keys_of, request, tokens

from protos import replica_pb2
from router.decide import Decision
from router.fetch_speeds import Pulled
from router.pool import Share

HOST = int(replica_pb2.HOST)
BLOCK_BYTES = 2_000_000  # 1 ms to load, 16 ms to pull over 1 Gbit/s; 16 tokens take 16 ms to compute
SLOW = 40_000_000


class PoolRouter(FakeRouter):
    """`hosts`: the host of each replica; replicas of one host share an arena."""

    def __init__(self, hosts: str, *, block_bytes: int = BLOCK_BYTES, policy: str = "predicted-time") -> None:
        super().__init__(len(hosts), policy=policy)
        self.hosts = hosts
        for row, host in enumerate(hosts):
            self.fleet.set_pool(row, Share(host, "n", f"{host}:1", block_bytes))

    def pooled(self, host: str, prompt: Tokens) -> None:
        """The arena of that host holds it, and its replicas have said so."""
        for row, each in enumerate(self.hosts):
            if each == host:
                self.fleet.index.store(row, keys_of(prompt), HOST)

    def quick(self, source: str, target: str, gbit_s: float = 100.0) -> None:
        """Pulls have shown so."""
        for mib in (1, 20, 40, 60):
            size = mib << 20
            self.fleet.pools.speeds.learn(
                f"{source}/n", f"{target}/n", Pulled(size, size * 8 / gbit_s / 1e6), NOW
            )
        self.fleet.pools.relax()


def only(router: FakeRouter, replica: str, prompt: Tokens) -> Decision:
    """What is decided when no other may be picked."""
    others = {m.key for m in router.fleet.members if m is not None and m.replica != replica}
    decision = router.decider.decide(request(prompt), NOW, exclude=others)
    assert decision is not None
    return decision


def test_replica_loads_what_its_host_has_and_computes_the_rest() -> None:
    router, prompt = PoolRouter("ab"), tokens(1000)
    router.cache(0, prompt[:320])
    router.pooled("a", prompt[:800])
    decision = only(router, "r0", prompt)
    assert (decision.cached_tokens, decision.pooled_tokens, decision.uncached_tokens) == (320, 480, 200)
    assert decision.pull is None
    assert decision.fetch_ms == pytest.approx(480 / BLOCK * 1.0 + 40.0)  # and a step, by the prior
    assert "480 of them in its host's memory" in decision.why
    assert decision.uncached_pairs == 200 * (800 + 100)


def test_blocks_are_pulled_from_another_host_where_that_is_quicker_than_computing() -> None:
    router, prompt = PoolRouter("ab", block_bytes=2 * BLOCK_BYTES), tokens(1000)
    router.pooled("b", prompt)
    slow = only(router, "r0", prompt)
    assert slow.pull is None  # 62 * 32 ms on the way, and 62 * 2 to be loaded
    router.quick("b", "a")
    decision = only(router, "r0", prompt)
    assert decision.pull is not None
    assert (decision.pull.agent, decision.pull.blocks) == ("b:1", 62)
    assert decision.pull.bytes == 62 * 2 * BLOCK_BYTES
    assert (decision.cached_tokens, decision.pooled_tokens, decision.uncached_tokens) == (0, 992, 8)
    assert decision.ttft_ms < slow.ttft_ms
    assert "992 of them from b:1" in decision.why


def test_only_what_the_own_host_lacks_travels_and_all_of_it_is_loaded() -> None:
    router, prompt = PoolRouter("ab"), tokens(1000)
    router.cache(0, prompt[:160])
    router.pooled("a", prompt[:320])
    router.pooled("b", prompt[:960])
    router.quick("b", "a")
    decision = only(router, "r0", prompt)
    assert decision.pull is not None
    assert (decision.pull.blocks, decision.pull.bytes) == (60, 40 * BLOCK_BYTES)
    assert decision.fetch_ms == pytest.approx(decision.pull.ms + 50 * 1.0 + 40.0)
    assert (decision.cached_tokens, decision.pooled_tokens) == (160, 800)


def test_slow_way_is_not_taken() -> None:
    router, prompt = PoolRouter("ab", block_bytes=SLOW), tokens(1000)
    router.pooled("b", prompt)
    decision = only(router, "r0", prompt)
    assert (decision.pull, decision.pooled_tokens, decision.uncached_tokens) == (None, 0, 1000)


def test_warm_host_is_preferred_while_it_is_free_and_another_pulls_when_it_is_busy() -> None:
    router, prompt = PoolRouter("ab"), tokens(1000)
    router.cache(1, prompt)
    router.pooled("b", prompt)
    router.quick("b", "a")
    assert router.decide(prompt).replica == "r1"
    router.report(1, backlog=3000)
    decision = router.decide(prompt)
    assert decision.replica == "r0"
    assert decision.pull is not None


def test_neighbour_on_the_warm_host_needs_no_pull() -> None:
    router, prompt = PoolRouter("aab"), tokens(1000)
    router.cache(0, prompt)
    router.pooled("a", prompt)
    router.quick("a", "b")
    router.report(0, backlog=3000)
    decision = router.decide(prompt)
    assert (decision.replica, decision.pull, decision.pooled_tokens) == ("r1", None, 992)


def test_what_only_the_other_engine_holds_cannot_be_pulled() -> None:
    router, prompt = PoolRouter("ab"), tokens(1000)
    router.cache(1, prompt)
    router.pooled("b", prompt[:480])
    router.quick("b", "a")
    decision = only(router, "r0", prompt)
    assert decision.pull is not None
    assert decision.pull.blocks == 30


def test_prompt_in_flight_is_neither_pulled_nor_loaded_again() -> None:
    router, prompt = PoolRouter("ab"), tokens(1000)
    router.pooled("b", prompt)
    router.quick("b", "a")
    key = only(router, "r0", prompt).key
    router.fleet.begin(0, key, keys_of(prompt))
    decision = only(router, "r0", prompt)
    assert (decision.pull, decision.pooled_tokens, decision.pending_tokens) == (None, 0, 992)


@pytest.mark.parametrize("standing", [{"degraded": "unsynced"}, {"suspect": True}])
def test_no_memory_is_credited_to_a_replica_that_is_not_trusted(standing: dict[str, str | bool]) -> None:
    router, prompt = PoolRouter("ab"), tokens(1000)
    router.pooled("a", prompt)
    router.pooled("b", prompt)
    router.quick("b", "a")
    router.fleet.set_standing(0, usable=True, **standing)  # type: ignore[arg-type]
    listed = router.decider.explain(request(prompt), NOW).candidates
    untrusted = next(c for c in listed if c.replica == "r0")
    assert (untrusted.pooled_tokens, untrusted.source, untrusted.uncached_tokens) == (0, "", 1000)
    router.quick("a", "b")
    router.fleet.index.clear(1, HOST)
    assert only(router, "r1", prompt).pull is None  # nor is it a source


def test_lease_and_harm_are_of_computed_tokens_alone() -> None:
    router, prompt = PoolRouter("ab"), tokens(1000)
    router.pooled("b", prompt)
    router.quick("b", "a")
    pulling = router.decider.explain(request(prompt), NOW)
    fetched = next(c for c in pulling.candidates if c.replica == "r0")
    router.cache(0, prompt)
    resident = candidate(router.decide(prompt), "r0")
    assert fetched.source == "b:1"
    assert fetched.harm_ms == resident.harm_ms
    assert fetched.uncached_tokens == resident.uncached_tokens == 8


def test_candidates_of_pooled_replicas_add_up() -> None:
    router, prompt = PoolRouter("aab"), tokens(1000)
    router.cache(1, prompt[:160])
    router.pooled("b", prompt)
    router.pooled("a", prompt[:480])
    router.quick("b", "a")
    for c in router.decide(prompt).candidates():
        parts = c.queue_ms + c.prefill_ms + c.fetch_ms + c.interference_ms + c.overhead_ms
        assert parts == pytest.approx(c.ttft_ms)
        assert c.ttft_ms + c.harm_ms - c.affinity_ms == pytest.approx(c.score_ms)
        assert c.cached_tokens + c.pending_tokens + c.pooled_tokens + c.uncached_tokens == 1000
        assert c.pooled_tokens > 0
        assert c.fetch_ms > 0
    assert {c.source for c in router.decide(prompt).candidates()} == {"", "b:1"}


def test_prediction_counts_pooled_tokens_as_cached() -> None:
    router, prompt = PoolRouter("a"), tokens(1000)
    router.pooled("a", prompt[:800])
    decision = router.decide(prompt)
    outcome = decision.outcome(cached_tokens=800, queue_ms=60.0, prefill_ms=200.0, ttft_ms=270.0)
    router.fleet.learn(decision.key, outcome, NOW)
    assert decision.expected_cached == 800
    assert router.fleet.speeds.errors("r0").cached_tokens == 0


def test_time_on_the_way_is_not_learned_as_overhead() -> None:
    router, prompt = PoolRouter("a"), tokens(1000)
    decision = router.decide(prompt)
    for _ in range(20):
        outcome = decision.outcome(
            cached_tokens=0, queue_ms=0.0, prefill_ms=1000.0, ttft_ms=1510.0, pull_ms=500.0
        )
        router.fleet.learn(decision.key, outcome, NOW)
    assert router.fleet.speeds.of("r0").overhead == pytest.approx(10.0)


def test_replica_that_left_takes_its_arena_along() -> None:
    router, prompt = PoolRouter("ab"), tokens(1000)
    router.pooled("b", prompt)
    router.quick("b", "a")
    assert only(router, "r0", prompt).pull is not None
    router.fleet.leave(1)
    assert router.decide(prompt).pull is None
    router.fleet.leave(0)
    assert not router.fleet.pools.shared


def test_restarted_replica_without_a_pool_has_none() -> None:
    router, prompt = PoolRouter("a"), tokens(1000)
    router.pooled("a", prompt)
    router.fleet.set_pool(0, None)
    decision = router.decide(prompt)
    assert (decision.pooled_tokens, decision.uncached_tokens) == (0, 1000)


def test_prompt_shorter_than_a_block_is_decided_as_ever() -> None:
    decision = PoolRouter("ab").decide(tokens(5))
    assert (decision.pull, decision.pooled_tokens, decision.uncached_tokens) == (None, 0, 5)


@pytest.mark.parametrize("policy", ["prefix-affinity", "round-robin", "least-loaded"])
def test_other_policies_have_blocks_pulled_too_but_do_not_take_them_for_cached(policy: str) -> None:
    router, prompt = PoolRouter("abcd", policy=policy), tokens(1000)
    router.pooled("b", prompt)
    for target in "acd":
        router.quick("b", target)
    decisions = [router.decide(prompt) for _ in range(20)]
    assert all(decision.pooled_tokens == 992 for decision in decisions)
    if policy == "prefix-affinity":
        assert {decision.replica for decision in decisions} == {"r1"}
    else:
        assert {bool(decision.pull) for decision in decisions} == {True, False}


def test_decisions_without_arenas_are_the_same_as_ever() -> None:
    """Arenas that hold nothing of a prompt change no number of its decision."""
    plain, pooled = FakeRouter(4), PoolRouter("aabb")
    for router in (plain, pooled):
        router.cache(2, tokens(640))
        router.report(1, sequences=3, backlog=400)
    pooled.pooled("a", tokens(640, seed=9))
    for seed in (0, 1, 2):
        prompt = np.concatenate((tokens(640), tokens(100, seed=seed)))
        ours, theirs = pooled.decide(prompt), plain.decide(prompt)
        assert [(c.replica, c.score_ms) for c in ours.candidates()] == [
            (c.replica, c.score_ms) for c in theirs.candidates()
        ]
