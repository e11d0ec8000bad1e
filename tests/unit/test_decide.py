"""From a request to a replica, over the real index, cost, leases and policies."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf import descriptor

from protos import inference_pb2
from router.blockhash import prompt_keys
from router.cost import CostSettings
from router.decide import Decider, Decision
from router.fleet import Fleet, LoadReport
from router.leases import Lease, LeasedLoad, LeaseTable
from router.picker import Candidate, RouteRequest
from router.policies import make_policy

BLOCK = 16
NOW = 100.0

Tokens = npt.NDArray[np.int32]


def tokens(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def request(prompt: Tokens, **fields: str | int) -> RouteRequest:
    return RouteRequest("fake", prompt, "rev", max_tokens=20, **fields)  # type: ignore[arg-type]


def keys_of(prompt: Tokens) -> npt.NDArray[np.uint64]:
    return prompt_keys(prompt, BLOCK, "rev")


class FakeRouter:
    """Everything of a router that decides, over replicas that are only rows. Its clock is `now`."""

    def __init__(self, replicas: int, *, seed: int = 0, policy: str = "predicted-time") -> None:
        self.now = NOW
        self.fleet = Fleet(settings=CostSettings())
        self.fleet.block_size = BLOCK
        for number in range(replicas):
            row = self.fleet.join(f"r{number}", "e1")
            self.fleet.set_standing(row, usable=True)
            self.report(row)
        self.leases = LeaseTable(self._leased)
        self.decider = Decider(self.fleet, make_policy(policy, rng=random.Random(seed)))
        self.held: list[tuple[Lease, int]] = []

    def _leased(self, key: str, load: LeasedLoad) -> None:
        self.fleet.leased(key, load, self.now)

    def report(self, row: int, sequences: float = 0, backlog: float = 0, pairs: float = 0) -> None:
        report = LoadReport(
            sequences=sequences,
            prefill_backlog_tokens=backlog,
            prefill_backlog_pairs=pairs,
            max_sequences=256,
            max_batch_tokens=2048,
            prefill_ms_per_token=1.0,
        )
        self.fleet.report(row, report, self.now)

    def cache(self, row: int, prompt: Tokens) -> None:
        self.fleet.index.store(row, keys_of(prompt))

    def decide(self, prompt: Tokens, **fields: str | int) -> Decision:
        decision = self.decider.decide(request(prompt, **fields), self.now)
        assert decision is not None
        return decision

    def send(self, prompt: Tokens) -> Decision:
        """Decide, lease, and leave the prompt in flight."""
        decision = self.decide(prompt)
        lease = self.leases.take(
            decision.key,
            prefill_tokens=decision.uncached_tokens,
            prefill_pairs=decision.uncached_pairs,
            decode_tokens=20,
        )
        self.held.append((lease, self.fleet.begin(decision.row, decision.key, decision.keys)))
        return decision


def candidate(decision: Decision, replica: str) -> Candidate:
    (found,) = [c for c in decision.candidates() if c.replica == replica]
    return found


def test_warm_replica_that_is_idle_serves_its_prefix() -> None:
    router = FakeRouter(8)
    prompt = tokens(1000)
    router.cache(5, prompt)
    decisions = [router.decide(prompt) for _ in range(30)]
    assert {decision.replica for decision in decisions} == {"r5"}
    assert decisions[0].cached_tokens == 992
    assert decisions[0].uncached_tokens == 8
    assert "992 of 1000" in decisions[0].why


def test_lease_has_the_pairs_of_the_tokens_that_are_not_cached() -> None:
    router = FakeRouter(1)
    prompt = tokens(1000)
    assert router.decide(prompt).uncached_pairs == 1000 * 1000 / 2
    router.cache(0, prompt[:800])
    assert router.decide(prompt).uncached_pairs == 200 * (800 + 200 / 2)


def test_short_prompts_ahead_are_preferred_to_a_long_one_of_as_many_tokens() -> None:
    router = FakeRouter(2)
    router.report(0, backlog=8000, pairs=8000 * 8000 / 2)
    router.report(1, backlog=8000, pairs=8 * 1000 * 1000 / 2)
    decision = router.decide(tokens(100))
    assert decision.replica == "r1"
    long, short = candidate(decision, "r0"), candidate(decision, "r1")
    assert long.backlog_tokens == short.backlog_tokens == 8000
    assert long.queue_ms - short.queue_ms == pytest.approx(1e-4 * (32e6 - 4e6))  # b a/10,000


def test_idle_cluster_prefers_nobody_for_a_cold_prompt() -> None:
    router = FakeRouter(4)
    counts = Counter(router.decide(tokens(100)).replica for _ in range(2000))
    assert all(400 < count < 600 for count in counts.values())
    assert len(counts) == 4


def test_burst_of_siblings_joins_while_waiting_is_cheaper_and_then_spills() -> None:
    """Neither scattered over all replicas nor all on one (field note 12)."""
    router = FakeRouter(8)
    prefix = tokens(2000)
    burst = [np.concatenate([prefix, tokens(100, seed)]) for seed in range(1, 41)]
    placed = [router.send(prompt) for prompt in burst]
    first = placed[0].replica
    joined = next(n for n, decision in enumerate(placed) if decision.replica != first)
    assert joined >= 4, "siblings scattered although the prefix was about to be cached"
    assert all(decision.pending_tokens == 2000 for decision in placed[1:joined])
    used = Counter(decision.replica for decision in placed)
    assert max(used.values()) <= 10, used  # 20 tails take as long as one prefix


def test_sibling_spills_exactly_when_the_predicted_cost_says_so() -> None:
    router = FakeRouter(2)
    prefix = tokens(2000)
    for seed in range(1, 41):
        decision = router.send(np.concatenate([prefix, tokens(100, seed)]))
        scores = {c.replica: c.score_ms for c in decision.candidates()}
        allowed = min(scores.values()) + max(1.0, 0.03 * min(c.ttft_ms for c in decision.candidates()))
        assert scores[decision.replica] <= allowed + 1e-6


def test_hot_prefix_spills_to_a_second_replica_before_the_first_is_drowned() -> None:
    """One hot prefix, 48 at a time, every one of them answered by a warm replica or a new one (13)."""
    router = FakeRouter(2)
    prefix = tokens(2000)
    router.cache(0, prefix)
    counts: Counter[str] = Counter()
    for seed in range(192):
        decision = router.send(np.concatenate([prefix, tokens(40, seed + 1)]))
        counts[decision.replica] += 1
        router.cache(decision.row, prefix)
        if len(router.held) > 48:
            lease, handle = router.held.pop(0)
            router.fleet.end(handle)
            lease.release()
        router.now += 0.05
    assert min(counts.values()) > 192 * 0.25, counts


def test_load_decides_between_replicas_without_any_overlap() -> None:
    """448 requests that share nothing spread evenly (field note 9)."""
    router = FakeRouter(2)
    counts = Counter(router.send(tokens(64, seed)).replica for seed in range(448))
    assert abs(counts["r0"] - counts["r1"]) < 448 * 0.1


@pytest.mark.parametrize("start", [[0] * 8, [0, *[40] * 7]], ids=["idle", "one-empty"])
def test_four_routers_do_not_herd_on_one_stale_view(start: list[int]) -> None:
    """160 cold prompts between two reports; a fair share is what evens the loads (field note 10)."""
    for seed in range(5):
        routers = [FakeRouter(8, seed=seed * 4 + n) for n in range(4)]
        for router in routers:
            for row, sequences in enumerate(start):
                key = f"r{row}@e1"
                if sequences:
                    router.leases.take(
                        key, prefill_tokens=0, decode_tokens=9 * sequences, sequences=sequences // 4
                    )
                router.report(row, sequences, backlog=sequences * 25)
        got = Counter(
            router.send(tokens(500, seed * 1000 + n * 4 + at)).row
            for n in range(40)
            for at, router in enumerate(routers)
        )
        assert sum(got.values()) == 160
        ideal = [(160 + sum(start)) / 8 - sequences for sequences in start]
        assert max(got.values()) <= max(ideal) * 1.6, got
        assert min(got[row] for row in range(8)) > 0


def test_replica_that_is_degraded_or_suspect_gets_no_credit_and_says_why() -> None:
    router = FakeRouter(3)
    prompt = tokens(1000)
    for row in range(3):
        router.cache(row, prompt)
    router.fleet.set_standing(0, usable=True, degraded="events were lost")
    router.fleet.set_standing(1, usable=True, suspect=True)
    decision = router.decide(prompt)
    assert decision.replica == "r2"
    assert candidate(decision, "r0").cached_tokens == 0
    assert candidate(decision, "r0").degraded == "events were lost"
    assert "r1" not in {c.replica for c in decision.candidates()}
    router.fleet.set_standing(0, usable=False)
    router.fleet.set_standing(2, usable=False)
    last = router.decide(prompt)
    assert (last.replica, last.cached_tokens) == ("r1", 0)
    assert "suspect" in last.degraded
    assert "suspect" in last.why


def test_prompt_in_flight_gives_no_credit_on_a_degraded_replica() -> None:
    router = FakeRouter(1)
    prompt = tokens(1000)
    router.send(prompt)
    router.fleet.set_standing(0, usable=True, degraded="unsynced")
    assert router.decide(prompt).pending_tokens == 0


def test_prompt_that_has_been_computed_is_no_longer_pending() -> None:
    router = FakeRouter(1)
    router.send(tokens(1000))
    assert router.decide(tokens(1000)).pending_tokens == 992
    router.fleet.end(router.held[0][1])
    assert router.decide(tokens(1000)).pending_tokens == 0


def test_other_salt_shares_nothing() -> None:
    router = FakeRouter(1)
    prompt = tokens(1000)
    router.cache(0, prompt)
    assert router.decide(prompt, cache_salt="theirs").cached_tokens == 0
    assert router.decide(prompt, lora="adapter").cached_tokens == 0


def test_unknown_block_size_counts_nothing_as_cached() -> None:
    router = FakeRouter(2)
    router.fleet.block_size = 0
    decision = router.decide(tokens(1000))
    assert decision.uncached_tokens == 1000
    assert len(decision.keys) == 0


def test_replica_tried_before_is_not_tried_again() -> None:
    router = FakeRouter(3)
    prompt = tokens(1000)
    router.cache(0, prompt)
    tried = {"r0@e1"}
    for _ in range(20):
        decision = router.decider.decide(request(prompt), NOW, exclude=tried)
        assert decision is not None
        assert decision.key not in tried
    assert router.decider.decide(request(prompt), NOW, exclude={"r0@e1", "r1@e1", "r2@e1"}) is None


def test_suspect_is_tried_when_all_sound_ones_have_been() -> None:
    router = FakeRouter(2)
    router.fleet.set_standing(1, usable=True, suspect=True)
    decision = router.decider.decide(request(tokens(10)), NOW, exclude={"r0@e1"})
    assert decision is not None
    assert decision.replica == "r1"


def test_nothing_to_pick_is_no_decision() -> None:
    router = FakeRouter(1)
    router.fleet.set_standing(0, usable=False)
    assert router.decider.decide(request(tokens(10)), NOW) is None
    assert FakeRouter(0).decider.decide(request(tokens(10)), NOW) is None


def test_sessions_prefer_the_same_replica_in_every_router_and_spread_over_all() -> None:
    first, second = FakeRouter(6, seed=1), FakeRouter(6, seed=2)
    chosen = Counter[str]()
    for number in range(300):
        session = f"session-{number}"
        ours, theirs = first.decide(tokens(50), session=session), second.decide(tokens(50), session=session)
        assert ours.replica == theirs.replica
        chosen[ours.replica] += 1
    assert min(chosen[f"r{n}"] for n in range(6)) > 25


def test_leaving_replica_moves_only_its_own_sessions() -> None:
    router = FakeRouter(6)
    sessions = [f"session-{number}" for number in range(200)]
    before = {s: router.decide(tokens(50), session=s).replica for s in sessions}
    router.fleet.leave(3)
    after = {s: router.decide(tokens(50), session=s).replica for s in sessions}
    assert all(after[s] == before[s] for s in sessions if before[s] != "r3")


def test_session_does_not_hold_a_request_on_a_busy_replica() -> None:
    router = FakeRouter(4)
    home = router.decide(tokens(50), session="s")
    router.report(home.row, sequences=3, backlog=4000)
    assert router.decide(tokens(50), session="s").replica != home.replica


def test_candidates_have_every_term_of_the_report() -> None:
    """Field for field as in the protos, so that `Explain` can fill them by name."""
    described: descriptor.Descriptor = inference_pb2.CandidateReport.DESCRIPTOR
    assert set(Candidate.__slots__) == {field.name for field in described.fields}


def test_terms_of_a_candidate_add_up() -> None:
    router = FakeRouter(3)
    router.report(1, sequences=5, backlog=300)
    chosen = [c for c in router.decide(tokens(700)).candidates() if c.chosen]
    assert len(chosen) == 1
    c = candidate(router.decide(tokens(700)), "r1")
    parts = c.queue_ms + c.prefill_ms + c.fetch_ms + c.interference_ms + c.overhead_ms
    assert parts == pytest.approx(c.ttft_ms)
    assert c.ttft_ms + c.harm_ms - c.affinity_ms == pytest.approx(c.score_ms)
    assert c.cached_tokens + c.pending_tokens + c.uncached_tokens == 700
    assert (c.sequences, c.backlog_tokens) == (5, 300)


def test_explain_lists_also_those_that_are_not_picked_from() -> None:
    router = FakeRouter(4)
    router.fleet.set_standing(1, usable=False, degraded="draining")
    router.fleet.set_standing(2, usable=False)
    router.fleet.set_standing(3, usable=True, suspect=True)
    explained = router.decider.explain(request(tokens(100)), NOW)
    assert [c.replica for c in explained.candidates] == ["r0", "r1", "r2", "r3"]
    assert [c.chosen for c in explained.candidates] == [True, False, False, False]
    assert explained.candidates[0].degraded == ""
    assert [c.degraded.split(":")[0] for c in explained.candidates[1:]] == [
        "draining",
        "not usable now",
        "suspect",
    ]


def test_explain_works_when_nothing_can_be_picked() -> None:
    router = FakeRouter(1)
    router.fleet.set_standing(0, usable=False, degraded="connection lost")
    explained = router.decider.explain(request(tokens(100)), NOW)
    assert explained.decision is None
    assert [c.degraded for c in explained.candidates] == ["connection lost"]


def test_candidates_of_a_decision_do_not_change_when_the_fleet_does() -> None:
    router = FakeRouter(2)
    decision = router.decide(tokens(100))
    before = decision.candidates()
    router.fleet.leave(0)
    router.fleet.join("other", "e9")
    router.report(1, sequences=50, backlog=9999)
    assert decision.candidates() == before


def test_outcome_carries_what_was_predicted_and_what_came() -> None:
    router = FakeRouter(1)
    decision = router.send(tokens(5000))
    outcome = decision.outcome(
        cached_tokens=160, queue_ms=5.0, prefill_ms=4800.0, ttft_ms=4900.0, generated_tokens=7.0
    )
    assert (outcome.uncached, outcome.cached, outcome.steps) == (4840, 160, 3)
    assert outcome.predicted_ttft_ms == decision.ttft_ms
    assert outcome.predicted_cached == 0
    router.fleet.learn(decision.key, outcome, NOW)
    assert router.fleet.speeds.errors("r0").cached_tokens == 160


def test_replica_that_turns_out_slow_is_chosen_less() -> None:
    router = FakeRouter(2)
    for _ in range(30):
        for key, ms in (("r0@e1", 3000.0), ("r1@e1", 500.0)):
            decision = router.decider.decide(request(tokens(500)), NOW, exclude={"r0@e1", "r1@e1"} - {key})
            assert decision is not None
            outcome = decision.outcome(cached_tokens=0, queue_ms=0.0, prefill_ms=ms, ttft_ms=ms)
            router.fleet.learn(key, outcome, NOW)
    assert {router.decide(tokens(500)).replica for _ in range(20)} == {"r1"}


@pytest.mark.parametrize("replicas", [1, 7, 64])
def test_every_request_goes_to_a_replica_that_may_be_picked(replicas: int) -> None:
    rng = random.Random(replicas)
    router = FakeRouter(replicas, seed=replicas)
    for step in range(150):
        row = rng.randrange(replicas)
        router.fleet.set_standing(row, usable=rng.random() < 0.7, suspect=rng.random() < 0.2)
        router.report(row, rng.randrange(300), rng.randrange(5000))
        decision = router.decider.decide(request(tokens(rng.randrange(1, 400), step)), NOW)
        members = [m for m in router.fleet.members if m is not None and m.usable]
        if decision is None:
            assert not members
            continue
        chosen = router.fleet.members[decision.row]
        assert chosen is not None
        assert chosen.usable
        assert not chosen.suspect or all(m.suspect for m in members)
