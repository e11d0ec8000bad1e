"""What was learned of a replica is forgotten in time: it is tried again, and its changes are noticed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cost import CostSettings
from router.decide import Decider
from router.fleet import Fleet
from router.picker import RouteRequest
from router.policies import make_policy
from router.speeds import Coefficients, Outcome, Speeds

SPEED = Coefficients(t0=8.0, a=0.04, b=4e-6, d=0.05, overhead=3.0)

Slowness = Callable[[int, float], float]  # of a row at a time: how many times as long it takes


def prefill_ms(speed: Coefficients, uncached: int) -> float:
    return speed.t0 + speed.a * uncached + speed.b * uncached * uncached / 2


def outcome(slowness: float, rng: np.random.Generator, *, noise: float = 0.0) -> Outcome:
    u = int(rng.integers(200, 4000))
    ms = prefill_ms(SPEED, u) * slowness * max(1 + noise * rng.standard_normal(), 0.1)
    return Outcome(u, 0, 0.0, 1.0, 0.0, ms, ms + SPEED.overhead)


def teach(
    speeds: Speeds, replica: str, slowness: float, start: float, *, count: int = 64, seed: int = 0
) -> None:
    """One outcome a second from `start` on."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        speeds.learn(replica, outcome(slowness, rng, noise=0.05), start + number)


def level(speeds: Speeds, replica: str) -> float:
    """How many times as long as `SPEED` a typical prompt takes there."""
    return prefill_ms(speeds.of(replica), 2000) / prefill_ms(SPEED, 2000)


def simulate(
    slowness: Slowness, *, seconds: int, rate: float = 1.0, replicas: int = 2, seed: int = 0
) -> list[tuple[float, int]]:
    """Requests one after another, 10 % noise, decided as in a router: when, and the row that was chosen."""
    costs = CostSettings()
    fleet, rng = Fleet(settings=costs), np.random.default_rng(seed)
    for number in range(replicas):
        fleet.set_standing(fleet.join(f"r{number}", "e"), usable=True)
    decider = Decider(fleet, make_policy("predicted-time", costs, random.Random(seed)))
    chosen = []
    for number in range(int(seconds * rate)):
        now = number / rate
        fleet.relax(now)
        u = int(rng.integers(200, 4000))
        decision = decider.decide(RouteRequest("m", np.zeros(u, np.int32)), now)
        assert decision is not None
        ms = prefill_ms(SPEED, u) * slowness(decision.row, now) * max(1 + 0.1 * rng.standard_normal(), 0.1)
        came = decision.outcome(cached_tokens=0, queue_ms=0.0, prefill_ms=ms, ttft_ms=ms + SPEED.overhead)
        fleet.learn(decision.key, came, now + ms / 1e3)
        chosen.append((now, decision.row))
    return chosen


@pytest.mark.parametrize("seed", range(4))
def test_replica_that_was_slow_an_hour_ago_is_tried_again_and_used(seed: int) -> None:
    """At one request a minute, too."""
    for rate, slow_until, end in ((1.0, 300, 1200), (1 / 60, 3600, 5 * 3600)):
        chosen = simulate(
            lambda row, now, until=slow_until: 10.0 if row == 1 and now < until else 1.0,  # type: ignore[misc]
            seconds=end,
            rate=rate,
            seed=seed,
        )
        while_slow = [row for now, row in chosen if slow_until / 3 < now < slow_until]
        after = [row for now, row in chosen if now > 2 * slow_until]
        assert np.mean(while_slow) < 0.1
        assert np.mean(after) > 0.2


@pytest.mark.parametrize("seed", range(4))
def test_equal_replicas_share_sparse_traffic_under_noise(seed: int) -> None:
    rows = [row for _, row in simulate(lambda row, now: 1.0, seconds=600, seed=seed)]
    assert 0.2 <= np.mean(rows) <= 0.8


@pytest.mark.parametrize("seed", range(4))
def test_replica_that_is_always_slower_gets_one_request_in_three_minutes(seed: int) -> None:
    chosen = simulate(lambda row, now: 3.0 if row == 1 else 1.0, seconds=3600, seed=seed)
    assert 10 <= sum(row for now, row in chosen if now > 60) <= 3600 / 180 + 2


@pytest.mark.parametrize("factor", [0.2, 1.6, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_replica_that_changed_is_noticed_within_ten_outcomes(factor: float, seed: int) -> None:
    speeds = Speeds()
    teach(speeds, "r0", 1.0, 0.0, count=500, seed=seed)
    rng = np.random.default_rng(seed + 100)
    for number in range(10):  # within one second: time has no part in it
        speeds.learn("r0", outcome(factor, rng, noise=0.05), 500.0 + number / 10)
    assert level(speeds, "r0") == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("factor", [10.0, 100.0])
def test_four_wild_outcomes_in_a_row_are_no_change(factor: float) -> None:
    speeds, rng = Speeds(), np.random.default_rng(1)
    teach(speeds, "r0", 1.0, 0.0, count=200)
    for number in range(4):
        speeds.learn("r0", outcome(factor, rng), 200.0 + number)
    teach(speeds, "r0", 1.0, 204.0, count=4)
    assert level(speeds, "r0") == pytest.approx(1.0, rel=0.05)


def test_slow_drift_is_followed_in_minutes_at_a_request_a_second() -> None:
    speeds, rng = Speeds(), np.random.default_rng(2)
    for second in range(900):
        speeds.learn("r0", outcome(1.0 + second / 900, rng, noise=0.1), float(second))
    assert level(speeds, "r0") == pytest.approx(2.0, rel=0.1)


def test_idle_replica_approaches_the_fastest_fresh_one_and_never_goes_below_it() -> None:
    speeds = Speeds()
    teach(speeds, "idle", 10.0, 0.0)
    teach(speeds, "middle", 3.0, 0.0)
    seen = []
    for second in range(0, 400, 5):
        for offset in range(5):
            rng = np.random.default_rng(second + offset)
            speeds.learn("fast", outcome(1.0, rng), 64.0 + second + offset)
        teach(speeds, "middle", 3.0, 64.0 + second, count=5, seed=second)
        speeds.relax(("idle", "middle", "fast"), 64.0 + second + 5)
        idle, fast = speeds.of("idle"), speeds.of("fast")
        seen.append(idle)
        for tokens in (200, 1000, 4000):
            assert prefill_ms(idle, tokens) >= prefill_ms(fast, tokens)
    assert level(speeds, "idle") == level(speeds, "fast") == pytest.approx(1.0, rel=0.1)
    assert level(speeds, "middle") == pytest.approx(3.0, rel=0.1)
    on_the_way = [found.a for found in seen[:25]]
    assert on_the_way == sorted(on_the_way, reverse=True)
    assert len(set(on_the_way)) > 10  # step by step


def test_first_outcome_after_a_time_of_doubt_convicts_or_acquits() -> None:
    for came in (10.0, 1.0, 3.0):
        speeds = Speeds()
        teach(speeds, "r0", 10.0, 0.0)
        teach(speeds, "r1", 1.0, 0.0, count=400)
        speeds.relax(("r0", "r1"), 400.0)
        assert level(speeds, "r0") == level(speeds, "r1")
        speeds.learn("r0", outcome(came, np.random.default_rng(5)), 400.0)
        assert level(speeds, "r0") == pytest.approx(came, rel=0.15)


def test_nothing_changes_between_fresh_replicas() -> None:
    speeds = Speeds()
    teach(speeds, "r0", 1.0, 0.0)
    teach(speeds, "r1", 5.0, 0.0)
    before = speeds.of("r0"), speeds.of("r1")
    for second in range(64, 90, 5):
        assert speeds.relax(("r0", "r1"), float(second)) == []
    assert (speeds.of("r0"), speeds.of("r1")) == before


def test_nothing_is_forgotten_while_nobody_has_outcomes() -> None:
    """After a quiet night what was known is still the best guess."""
    speeds = Speeds()
    teach(speeds, "r0", 10.0, 0.0)
    before = speeds.of("r0")
    speeds.relax(("r0",), 12 * 3600.0)
    assert speeds.of("r0") == before


def test_replica_that_has_gone_is_no_yardstick() -> None:
    speeds = Speeds()
    teach(speeds, "gone", 1.0, 0.0)
    teach(speeds, "idle", 10.0, 0.0)
    teach(speeds, "there", 5.0, 0.0, count=300)
    speeds.relax(("idle", "there"), 300.0)
    assert level(speeds, "idle") == pytest.approx(5.0, rel=0.1)


def test_replica_without_outcomes_is_taken_to_be_as_fast_as_the_fastest() -> None:
    speeds = Speeds()
    speeds.measured("new", 3.0, 50.0)
    teach(speeds, "r0", 1.0, 0.0)
    assert speeds.relax(("r0", "new"), 64.0) == ["new"]
    assert speeds.of("new") == speeds.of("r0")
    assert not speeds.measured("new", 4.0, 60.0)


def test_fleet_takes_what_time_did_to_speeds_every_few_seconds() -> None:
    fleet, rng = Fleet(), np.random.default_rng(3)
    for number in range(2):
        fleet.join(f"r{number}", "e")
    for second in range(300):
        fleet.learn("r0@e", outcome(1.0, rng), float(second))
        if second < 64:
            fleet.learn("r1@e", outcome(4.0, rng), float(second))
    slow = float(fleet.column("a")[1])
    fleet.relax(300.0)
    assert fleet.column("a")[1] == fleet.column("a")[0] < slow / 3
    fleet.learn("r1@e", outcome(4.0, rng), 301.0)
    assert fleet.column("a")[1] == pytest.approx(slow, rel=0.1)
    for second in range(301, 600):
        fleet.learn("r0@e", outcome(1.0, rng), float(second))
    fleet.relax(304.0)  # not yet again
    assert fleet.column("a")[1] == pytest.approx(slow, rel=0.1)


_times = st.one_of(st.floats(0, 3.6e6), st.sampled_from([1e-300, 1e-9, 1.0, 3.6e6]))
_counts = st.one_of(st.integers(0, 100_000), st.sampled_from([0, 1, 1 << 31]))
_outcomes = st.builds(
    Outcome,
    uncached=_counts, cached=_counts, running=_counts.map(float), steps=_counts.map(float),
    queue_ms=_times, prefill_ms=_times, ttft_ms=_times,
)  # fmt: skip
_events = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.one_of(st.none(), _outcomes), st.sampled_from([0.0, 0.1, 7.0, 200.0])
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(events=_events, repeat=st.integers(1, 6))
def test_any_sequence_gives_finite_coefficients_that_are_not_negative_and_the_same_again(
    events: list[tuple[str, Outcome | None, float]], repeat: int
) -> None:
    def run() -> list[Coefficients]:
        speeds, now, found = Speeds(), 0.0, []
        for name, came, pause in events * repeat:
            now += pause
            if came is None:
                speeds.relax("abc", now)
            else:
                speeds.learn(name, came, now)
            found.append(speeds.of(name))
        return found

    first = run()
    assert all(math.isfinite(value) and value >= 0 for found in first for value in astuple(found))
    assert run() == first


def test_outcomes_far_apart_are_learned_from_all_the_same() -> None:
    """One an hour: each is all there is to know."""
    speeds, rng = Speeds(), np.random.default_rng(4)
    slow = replace(SPEED, a=SPEED.a * 6)
    for hour in range(40):
        u = int(rng.integers(200, 4000))
        ms = prefill_ms(slow, u)
        speeds.learn("r0", Outcome(u, 0, 0.0, 1.0, 0.0, ms, ms), hour * 3600.0)
    for tokens in (500, 3000):
        assert prefill_ms(speeds.of("r0"), tokens) == pytest.approx(prefill_ms(slow, tokens), rel=0.1)


def test_coefficient_that_is_zero_elsewhere_is_still_learned_here() -> None:
    """The fastest replica has seen no long prompt, so its context term is 0; this one sees many."""
    speeds, rng = Speeds(), np.random.default_rng(3)
    speeds._learner("r1").adopt(Coefficients(t0=8.0, a=0.04, b=0.0, d=0.0), 0.0)
    for number in range(200):
        u = int(rng.integers(500, 30_000))
        ms = prefill_ms(SPEED, u)
        speeds.learn("r1", Outcome(u, 0, 0.0, 1.0, 0.0, ms, ms), float(number))
    assert speeds.of("r1").b == pytest.approx(SPEED.b, rel=0.2)
