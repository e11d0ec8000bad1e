"""How quick the ways between hosts are, as pulls have shown."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fetch_speeds import PRIOR_LATENCY_MS, PRIOR_MS_PER_BYTE, FetchSpeeds, PairSpeed, Pulled

MIB = 1 << 20
NOW = 1000.0


def taught(
    speeds: FetchSpeeds, latency_ms: float, gbit_s: float, pulls: int, *, pair: tuple[str, str] = ("a", "b"),
    now: float = NOW, noise: float = 0.0, seed: int = 0,
) -> float:  # fmt: skip
    """Pulls of many sizes over a link like this, a second each; when the last one was."""
    rng = random.Random(seed)
    for number in range(pulls):
        size = rng.randrange(1, 64) * MIB
        ms = (latency_ms + size * 8 / gbit_s / 1e6) * math.exp(rng.gauss(0, noise))
        speeds.learn(*pair, Pulled(size, ms), now + number)
    return now + pulls - 1


def ms(speed: PairSpeed, size: int) -> float:
    return speed.latency_ms + size * speed.ms_per_byte


def test_nothing_known_is_a_gigabit_and_five_milliseconds() -> None:
    assert FetchSpeeds().of("a", "b", NOW) == PairSpeed(PRIOR_LATENCY_MS, PRIOR_MS_PER_BYTE)
    assert ms(FetchSpeeds().of("a", "b", NOW), 125_000_000) == pytest.approx(1005)


@pytest.mark.parametrize("gbit_s", [0.1, 1.0, 10.0, 200.0])
def test_latency_and_bandwidth_are_told_apart_by_pulls_of_different_sizes(gbit_s: float) -> None:
    speeds = FetchSpeeds()
    end = taught(speeds, latency_ms=20.0, gbit_s=gbit_s, pulls=16, noise=0.02)
    speed = speeds.of("a", "b", end)
    for size in (MIB, 60 * MIB):
        assert ms(speed, size) == pytest.approx(20.0 + size * 8 / gbit_s / 1e6, rel=0.25)


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_first_pull_already_tells_a_quick_pair_from_a_slow_one(factor: float) -> None:
    speeds = FetchSpeeds()
    size = 32 * MIB
    expected = ms(speeds.of("a", "b", NOW), size)
    speeds.learn("a", "b", Pulled(size, expected * factor), NOW)
    assert ms(speeds.of("a", "b", NOW), size) == pytest.approx(expected * factor, rel=0.05)


def test_a_wild_pull_moves_nothing() -> None:
    speeds = FetchSpeeds()
    end = taught(speeds, 5.0, 10.0, 12, noise=0.05)
    before = ms(speeds.of("a", "b", end), 32 * MIB)
    speeds.learn("a", "b", Pulled(32 * MIB, 100 * before), end + 1)
    assert ms(speeds.of("a", "b", end + 1), 32 * MIB) == pytest.approx(before, rel=0.2)


def test_a_link_that_turned_slow_is_believed_after_some_pulls() -> None:
    speeds = FetchSpeeds()
    end = taught(speeds, 5.0, 10.0, 16)
    end = taught(speeds, 5.0, 1.0, 10, now=end + 1, seed=1)
    assert ms(speeds.of("a", "b", end), 32 * MIB) == pytest.approx(5 + 32 * MIB * 8 / 1e6, rel=0.2)


def test_pairs_nothing_is_known_of_are_taken_to_be_like_the_others() -> None:
    speeds = FetchSpeeds()
    for number in range(5):
        taught(speeds, 2.0, 25.0, 6, pair=("a", f"b{number}"), seed=number)
    taught(speeds, 2.0, 0.1, 6, pair=("a", "slow"))
    unknown = speeds.of("x", "y", NOW)
    assert ms(unknown, 32 * MIB) == pytest.approx(2.0 + 32 * MIB * 8 / 25e6, rel=0.2)
    assert ms(speeds.of("a", "slow", NOW + 5), 32 * MIB) > 1000


def test_pair_is_left_alone_longer_after_each_failure_and_at_most_a_minute() -> None:
    speeds, now, pauses = FetchSpeeds(), NOW, []
    for _ in range(9):
        speeds.failed("a", "b", now)
        until = speeds.of("a", "b", now).avoided_until
        pauses.append(until - now)
        now = until
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60])
    assert speeds.of("b", "a", now).avoided_until == -math.inf


def test_pull_that_works_ends_the_failures() -> None:
    speeds = FetchSpeeds()
    for _ in range(4):
        speeds.failed("a", "b", NOW)
    speeds.learn("a", "b", Pulled(MIB, 10.0), NOW + 1)
    assert speeds.of("a", "b", NOW + 1).avoided_until == -math.inf
    speeds.failed("a", "b", NOW + 2)
    assert speeds.of("a", "b", NOW + 2).avoided_until == pytest.approx(NOW + 3)


def test_failures_do_not_change_what_is_known_of_the_speed() -> None:
    speeds = FetchSpeeds()
    end = taught(speeds, 2.0, 10.0, 6)
    before = speeds.of("a", "b", end)
    speeds.failed("a", "b", end)
    after = speeds.of("a", "b", end)
    assert (after.latency_ms, after.ms_per_byte) == (before.latency_ms, before.ms_per_byte)


def test_slow_pair_is_worth_another_try_after_minutes_without_a_pull() -> None:
    speeds = FetchSpeeds()
    for number in range(3):
        taught(speeds, 2.0, 10.0, 6, pair=("a", f"b{number}"), seed=number)
    end = taught(speeds, 2.0, 0.1, 6, pair=("a", "slow"))
    at = [ms(speeds.of("a", "slow", end + after), 32 * MIB) for after in (0, 20, 60, 120, 200, 900)]
    assert at[0] == at[1]
    assert at[1] > at[2] > at[3] > at[4] == at[5]
    assert at[5] == pytest.approx(ms(speeds.guess, 32 * MIB))


@pytest.mark.parametrize(("gbit_s", "convicted"), [(0.1, True), (10.0, False)])
def test_one_pull_acquits_a_doubted_pair_or_convicts_it_again(gbit_s: float, convicted: bool) -> None:
    speeds = FetchSpeeds()
    for number in range(3):
        taught(speeds, 2.0, 10.0, 6, pair=("a", f"b{number}"), seed=number)
    end = taught(speeds, 2.0, 0.1, 16, pair=("a", "slow"))
    taught(speeds, 2.0, gbit_s, 1, pair=("a", "slow"), now=end + 300)
    usual = ms(speeds.of("a", "b0", end), 32 * MIB)
    assert (ms(speeds.of("a", "slow", end + 300), 32 * MIB) > 20 * usual) == convicted


def test_quick_pair_stays_quick_without_pulls() -> None:
    speeds = FetchSpeeds()
    end = taught(speeds, 2.0, 100.0, 8)
    for number in range(3):
        taught(speeds, 2.0, 1.0, 6, pair=("c", f"b{number}"), seed=number)
    assert speeds.of("a", "b", end + 3600) == speeds.of("a", "b", end)


@pytest.mark.parametrize(
    "pulled",
    [Pulled(0, 5.0), Pulled(-1, 5.0), Pulled(MIB, math.nan), Pulled(MIB, -1.0), Pulled(1 << 60, 5.0)],
)
def test_what_cannot_be_is_not_learned(pulled: Pulled) -> None:
    speeds = FetchSpeeds()
    assert not speeds.learn("a", "b", pulled, NOW)
    assert len(speeds) == 0


def test_pairs_are_bounded_and_those_heard_of_least_lately_go_first() -> None:
    speeds = FetchSpeeds(most=3)
    for name in ("a", "b", "c", "a", "d"):
        speeds.learn(name, "x", Pulled(MIB, 1e4), NOW)
    assert len(speeds) == 3
    speeds.failed("e", "x", NOW)
    assert speeds.of("b", "x", NOW) == speeds.guess
    assert speeds.of("e", "x", NOW).avoided_until > NOW


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["learn", "fail"]),
            st.integers(1, 1 << 40),
            st.floats(0, 3_600_000, allow_nan=False),
            st.floats(0, 400),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_comes_speeds_stay_finite_and_not_negative(
    steps: list[tuple[str, int, float, float]],
) -> None:
    speeds, now = FetchSpeeds(), NOW
    for what, size, took, pause in steps:
        now += pause
        if what == "learn":
            assert speeds.learn("a", "b", Pulled(size, took), now)
        else:
            speeds.failed("a", "b", now)
        for speed in (speeds.of("a", "b", now), speeds.of("a", "b", now + 500), speeds.guess):
            assert math.isfinite(ms(speed, size))
            assert min(speed.latency_ms, speed.ms_per_byte) >= 0
            assert speed.avoided_until <= now + 60


def test_pairs_of_an_arena_that_is_forgiven_are_avoided_no_more_and_as_quick_as_they_were() -> None:
    speeds = FetchSpeeds()
    end = taught(speeds, 5.0, 10.0, 12)
    before = speeds.of("a", "b", end)
    for pair in (("a", "b"), ("b", "c"), ("c", "d")):
        for _ in range(3):
            speeds.failed(*pair, end)
    speeds.forgive("b")
    assert speeds.of("a", "b", end) == before
    assert speeds.of("b", "c", end).avoided_until == -math.inf
    assert speeds.of("c", "d", end).avoided_until == end + 4.0
    speeds.failed("a", "b", end)
    assert speeds.of("a", "b", end).avoided_until == end + 1.0  # from the beginning again
