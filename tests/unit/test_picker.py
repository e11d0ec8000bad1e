"""How each policy spreads requests."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from router.config import RouterConfig
from router.picker import (
    POLICIES,
    Candidate,
    LeastLoaded,
    RoundRobin,
    RouteRequest,
    Uniform,
    estimated_load,
    make_policy,
    routers_seen,
)

REQUEST = RouteRequest(model="fake", prompt_token_ids=[1, 2, 3])


def idle(count: int) -> list[Candidate]:
    return [Candidate(f"r{i}", "e1") for i in range(count)]


def simulate(policies: list[LeastLoaded], requests: int, start: list[int]) -> list[int]:
    """Each router routes `requests` in turn, on one stale report of `start`, seeing its own leases only."""
    loads = list(start)
    own = [[0] * len(start) for _ in policies]
    for _ in range(requests):
        for policy, leased in zip(policies, own, strict=True):
            share = [load // len(policies) for load in start]
            candidates = [
                Candidate(f"r{i}", "e1", start[i], share[i] + leased[i], share[i]) for i in range(len(start))
            ]
            chosen = int(policy.pick(candidates, REQUEST).replica[1:])
            leased[chosen] += 1
            loads[chosen] += 1
    return loads


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_returns_the_only_candidate(name: str) -> None:
    (only,) = idle(1)
    assert make_policy(name).pick([only], REQUEST) is only


def test_every_policy_of_the_configuration_exists() -> None:
    for name in RouterConfig.model_json_schema()["properties"]["policy"]["enum"]:
        make_policy(name)


def test_round_robin_takes_each_in_turn() -> None:
    policy = RoundRobin(random.Random(3))
    picked = [policy.pick(idle(3), REQUEST).replica for _ in range(6)]
    assert picked[:3] == picked[3:]
    assert set(picked) == {"r0", "r1", "r2"}


def test_round_robin_of_several_routers_starts_at_different_replicas() -> None:
    first = {RoundRobin(random.Random(seed)).pick(idle(4), REQUEST).replica for seed in range(40)}
    assert len(first) == 4


def test_random_reaches_every_replica_about_equally() -> None:
    policy = Uniform(random.Random(1))
    counts = Counter(policy.pick(idle(4), REQUEST).replica for _ in range(4000))
    assert all(800 < count < 1200 for count in counts.values())


def test_least_loaded_prefers_the_lower_report() -> None:
    a, b, c = Candidate("a", "e", 5, 5, 5), Candidate("b", "e", 2, 2, 2), Candidate("c", "e", 9, 9, 9)
    assert LeastLoaded(random.Random(0)).pick([a, b, c], REQUEST) is b


def test_least_loaded_counts_its_own_leases_before_any_report() -> None:
    a, b = Candidate("a", "e", leased=3), Candidate("b", "e", leased=1)
    assert LeastLoaded(random.Random(0)).pick([a, b], REQUEST) is b


def test_lease_taken_before_the_report_is_not_counted_twice() -> None:
    assert estimated_load(Candidate("a", "e", reported=4, leased=4, leased_at_report=4), 1.0) == 4
    assert estimated_load(Candidate("a", "e", reported=4, leased=6, leased_at_report=4), 1.0) == 6
    assert estimated_load(Candidate("a", "e", reported=4, leased=1, leased_at_report=4), 1.0) == 1


def test_ties_are_broken_uniformly() -> None:
    policy = LeastLoaded(random.Random(5))
    counts = Counter(policy.pick(idle(4), REQUEST).replica for _ in range(4000))
    assert all(800 < count < 1200 for count in counts.values())


def test_lone_router_balances_exactly() -> None:
    policy, leased = LeastLoaded(random.Random(2)), [0] * 4
    for _ in range(40):
        candidates = [Candidate(f"r{i}", "e1", leased=leased[i]) for i in range(4)]
        leased[int(policy.pick(candidates, REQUEST).replica[1:])] += 1
    assert leased == [10] * 4


def test_idle_replica_of_equal_ones_gets_traffic_from_every_policy_seed() -> None:
    """Nothing about a replica's name or place makes it lose ties."""
    firsts = {LeastLoaded(random.Random(seed)).pick(idle(5), REQUEST).replica for seed in range(60)}
    assert len(firsts) == 5


def test_routers_with_equal_stale_views_do_not_all_choose_the_same_replica() -> None:
    candidates = [Candidate("a", "e", 40, 5, 5)] + [Candidate(f"b{i}", "e", 48, 6, 6) for i in range(3)]
    first = {LeastLoaded(random.Random(seed)).pick(candidates, REQUEST).replica for seed in range(50)}
    assert len(first) > 1


def test_many_routers_fill_an_empty_replica_without_flooding_it() -> None:
    routers = [LeastLoaded(random.Random(seed)) for seed in range(8)]
    loads = simulate(routers, requests=20, start=[0, 64, 64, 64])  # 160 requests on one stale report
    assert sum(loads) == 64 * 3 + 160
    assert loads[0] < 110  # each of them alone would have sent all 160 there
    assert loads[0] > 40


def test_share_of_the_reported_load_tells_how_many_routers_there_are() -> None:
    assert routers_seen(idle(3)) == 1
    assert routers_seen([Candidate("a", "e", 8, 8, 8)]) == 1
    assert routers_seen([Candidate("a", "e", 8, 2, 2), Candidate("b", "e", 8, 2, 2)]) == 4
    assert routers_seen([Candidate("a", "e", 900, 0, 0)]) == 16


def test_restarted_replica_is_another_target() -> None:
    before = Candidate("a", "e1")
    assert before.key != replace(before, epoch="e2").key
