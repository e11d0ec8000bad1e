"""How each policy spreads requests."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from router.cost import CostSettings, Prediction
from router.picker import Policy, RouteRequest, View, routers_seen
from router.policies import POLICY_NAMES, make_policy
from router.predicted_time import equilibrium

REQUEST = RouteRequest(model="fake", prompt_token_ids=[1, 2, 3])


def view_of(
    sequences: list[float],
    *,
    cached: list[int] | None = None,
    score: list[float] | None = None,
    prefill: float = 10.0,
    affinity: list[float] | None = None,
    routers: float = 1.0,
) -> View:
    """Replicas with these loads; the score is the load in tens of ms unless given."""
    count = len(sequences)
    none, load = np.zeros(count), np.array(sequences, float)
    costs = load * 10.0 + 100.0 if score is None else np.array(score, float)
    credit = none if affinity is None else np.array(affinity, float)
    prediction = Prediction(
        queue=none,
        prefill=np.full(count, prefill),
        fetch=none,
        interference=none,
        overhead=none,
        ttft=costs,
        harm=none,
        affinity=credit,
        score=costs,
        running=load,
    )
    held = np.array(cached or [0] * count, np.int64)
    return View(np.arange(count), load, none, held, prediction, routers)


def policy(name: str, seed: int = 0, settings: CostSettings | None = None) -> Policy:
    return make_policy(name, settings, random.Random(seed))


def spread(name: str, view: View, times: int = 4000) -> Counter[int]:
    one = policy(name, 5)
    return Counter(one.choose(view, REQUEST) for _ in range(times))


def simulate(name: str, routers: int, each: int, start: list[int]) -> list[int]:
    """Each router routes `each` requests in turn, on one stale report, seeing its own leases only."""
    policies = [policy(name, seed) for seed in range(routers)]
    reported, taken = np.array(start, float), np.zeros((routers, len(start)))
    for _ in range(each):
        for one, own in zip(policies, taken, strict=True):
            view = view_of((reported + own * routers).tolist(), routers=float(routers))
            own[one.choose(view, REQUEST)] += 1
    return [int(x) for x in reported + taken.sum(axis=0)]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_returns_the_only_replica(name: str) -> None:
    assert policy(name).choose(view_of([7]), REQUEST) == 0
    assert policy(name).choose(view_of([7], routers=4.0), REQUEST) == 0


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_goes_by_its_own_name(name: str) -> None:
    assert policy(name).name == name


def test_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(KeyError, match=r"no policy 'fastest'.*predicted-time.*round-robin"):
        make_policy("fastest")


@pytest.mark.parametrize("name", [n for n in POLICY_NAMES if n != "round-robin"])
def test_ties_are_broken_uniformly(name: str) -> None:
    """A tie-break by order sends an idle cluster's traffic to one replica (field note 11)."""
    counts = spread(name, view_of([0, 0, 0, 0]))
    assert all(800 < counts[place] < 1200 for place in range(4))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_routers_do_not_start_at_the_same_replica(name: str) -> None:
    firsts = {policy(name, seed).choose(view_of([0] * 5), REQUEST) for seed in range(60)}
    assert firsts == set(range(5))


def test_round_robin_takes_each_in_turn() -> None:
    one = policy("round-robin", 3)
    picked = [one.choose(view_of([0, 9, 9]), REQUEST) for _ in range(6)]
    assert picked[:3] == picked[3:]
    assert set(picked) == {0, 1, 2}


def test_random_does_not_look_at_load() -> None:
    assert all(800 < count < 1200 for count in spread("random", view_of([0, 5, 50, 500])).values())


@pytest.mark.parametrize("name", ["least-loaded", "predicted-time", "prefix-affinity"])
def test_lower_load_wins(name: str) -> None:
    assert spread(name, view_of([5, 2, 9]), 50) == {1: 50}


def test_power_of_two_never_takes_the_most_loaded_of_two() -> None:
    counts = spread("power-of-two", view_of([5, 1, 9]))
    assert counts[1] > counts[0] > counts[2] > 0  # 5/9, 3/9, 1/9: drawn with replacement


def test_prefix_affinity_follows_the_longest_prefix_until_that_replica_is_overloaded() -> None:
    cached = [0, 640, 64, 640]
    assert spread("prefix-affinity", view_of([0, 6, 0, 4], cached=cached), 50) == {3: 50}
    assert set(spread("prefix-affinity", view_of([2, 30, 2, 30], cached=cached), 50)) == {0, 2}


def test_near_ties_are_chosen_with_equal_chances() -> None:
    counts = spread("predicted-time", view_of([0] * 4, score=[100.0, 102.9, 103.1, 400.0]))
    assert set(counts) == {0, 1}
    assert 1800 < counts[0] < 2200


def test_short_times_tie_by_milliseconds() -> None:
    view = view_of([0] * 3, score=[2.0, 2.9, 3.1])
    assert set(spread("predicted-time", view)) == {0, 1}


def test_session_keeps_its_replica_among_near_ties_only() -> None:
    one = policy("predicted-time")
    request = RouteRequest(model="fake", prompt_token_ids=[1], session="s")
    near = view_of([0] * 3, score=[100.0, 100.0, 101.0], affinity=[0, 0, 20.0])
    assert {one.choose(near, request) for _ in range(50)} == {2}
    far = view_of([0] * 3, score=[100.0, 400.0, 500.0], affinity=[0, 0, 20.0])
    assert {one.choose(far, request) for _ in range(50)} == {0}


def test_equilibrium_leaves_no_replica_that_a_router_would_rather_take() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        count = int(rng.integers(1, 30))
        score, work = rng.uniform(0, 100, count), rng.uniform(0.1, 200, count)
        chances = equilibrium(score, work)
        assert chances.sum() == pytest.approx(1.0)
        assert chances.min() >= 0
        felt = score + work * chances
        used = chances > 1e-12
        assert felt[used] == pytest.approx(np.full(used.sum(), felt[used].min()))
        assert (felt[~used] >= felt[used].min() - 1e-9).all()


def test_equilibrium_without_work_is_the_minimum() -> None:
    assert equilibrium(np.array([5.0, 3.0, 9.0]), np.full(3, 1e-6)).tolist() == pytest.approx([0, 1, 0])


@pytest.mark.parametrize("name", ["predicted-time", "least-loaded"])
def test_routers_with_equal_stale_views_do_not_all_choose_the_same_replica(name: str) -> None:
    """Every router taking the best of one stale view makes it the worst (field note 10)."""
    view = view_of([40, 44, 44, 44], prefill=30.0, routers=8.0)
    chosen = Counter(policy(name, seed).choose(view, REQUEST) for seed in range(80))
    assert len(chosen) == 4
    assert max(chosen.values()) < 60


@pytest.mark.parametrize("name", ["predicted-time", "least-loaded"])
def test_many_routers_fill_an_empty_replica_without_flooding_it(name: str) -> None:
    loads = simulate(name, routers=8, each=20, start=[0, 64, 64, 64])  # 160 requests on one stale report
    assert sum(loads) == 64 * 3 + 160
    assert loads[0] < 110  # each of them alone would have sent all 160 there
    assert loads[0] > 40


def test_lone_router_balances_exactly() -> None:
    for name in ("least-loaded", "predicted-time"):
        assert simulate(name, routers=1, each=40, start=[0] * 4) == [10] * 4


def test_share_of_the_reported_load_tells_how_many_routers_there_are() -> None:
    assert routers_seen(0, 0) == 1
    assert routers_seen(800, 800) == 1
    assert routers_seen(800, 200) == pytest.approx(4, rel=0.02)
    assert routers_seen(900, 0) == 16
    assert routers_seen(1, 0) == 2  # one request of somebody else proves little
    assert routers_seen(5, 9) == 1
