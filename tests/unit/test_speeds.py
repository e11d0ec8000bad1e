"""What a replica costs is learned from outcomes, and absurd ones teach nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from router.speeds import Coefficients, Outcome, Speeds

CPU = Coefficients(t0=30.0, a=1.2, b=1e-4, d=1.0)
GPU = Coefficients(t0=8.0, a=0.04, b=4e-6, d=0.05)


def true_ms(speed: Coefficients, uncached: int, cached: int, decodes: float) -> float:
    return (
        speed.t0
        + speed.a * uncached
        + speed.b * uncached * (cached + uncached / 2)
        + speed.d * decodes * math.ceil(uncached / 2048)
    )


def outcomes(speed: Coefficients, count: int, seed: int, *, outliers: float = 0.0) -> list[Outcome]:
    """Prompts of all lengths, 5 % noise; `outliers` of them, and the first, 10 or 100 times too slow."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt = int(rng.integers(50, 8000))
        cached = int(rng.choice([0.0, 0.5, 0.9]) * prompt)
        decodes = float(rng.integers(0, 20))
        ms = true_ms(speed, prompt - cached, cached, decodes) * (1 + 0.05 * rng.standard_normal())
        if outliers and (number == 0 or rng.random() < outliers):
            ms *= rng.choice([10.0, 100.0])
        steps = math.ceil((prompt - cached) / 2048)
        made.append(Outcome(prompt - cached, cached, decodes, steps, 0.0, ms, ms + 4.0))
    return made


def errors(learned: Coefficients, speed: Coefficients) -> npt.NDArray[np.float64]:
    """Relative errors of the predicted prefill over prompts of typical shapes."""
    shapes = [(u, c, r) for u in (500, 2000, 6000) for c in (0, 2000) for r in (0, 8)]
    return np.array([true_ms(learned, *shape) / true_ms(speed, *shape) - 1 for shape in shapes])


def learned(given: list[Outcome]) -> Coefficients:
    speeds = Speeds()
    for outcome in given:
        speeds.learn("r0", outcome, 0.0)
    return speeds.of("r0")


@pytest.mark.parametrize("speed", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(10))
def test_thirty_outcomes_with_noise_and_outliers_predict_within_ten_percent(
    speed: Coefficients, seed: int
) -> None:
    off = errors(learned(outcomes(speed, 30, seed, outliers=0.05)), speed)
    assert np.abs(off).mean() < 0.1


def test_outliers_move_a_fit_hardly_at_all() -> None:
    clean = outcomes(CPU, 64, seed=4)
    dirty = [replace(o, prefill_ms=o.prefill_ms * 100, ttft_ms=o.ttft_ms * 100) for o in clean[::16]]
    before = errors(learned(clean), CPU)
    after = errors(learned([*clean[4:], *dirty]), CPU)
    assert np.abs(after - before).max() < 0.05


def test_wild_first_request_does_not_set_the_level() -> None:
    first = Outcome(1000, 0, 0, 1, 0.0, 100_000.0, 100_000.0)
    assert learned([first]).a < 5 * Speeds().of("x").a
    assert np.abs(errors(learned([first, *outcomes(GPU, 12, seed=1)]), GPU)).mean() < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_several_wild_first_requests_are_outvoted(seed: int) -> None:
    given = outcomes(CPU, 40, seed)
    wild = [replace(o, prefill_ms=o.prefill_ms * 100, ttft_ms=o.ttft_ms * 100) for o in given[:3]]
    assert np.abs(errors(learned([*wild, *given[3:]]), CPU)).mean() < 0.05


def test_replica_that_became_slower_is_learned_anew() -> None:
    slower = replace(CPU, t0=60.0, a=2.4, b=2e-4, d=2.0)
    given = outcomes(CPU, 64, seed=2) + outcomes(slower, 80, seed=3)
    assert np.abs(errors(learned(given), slower)).mean() < 0.1


def test_what_uniform_traffic_does_not_show_keeps_the_proportions_of_the_prior() -> None:
    """Sixty-four short prompts and more say nothing of long ones."""
    short = [Outcome(20, 0, 0, 1, 0.0, ms, ms) for ms in [true_ms(CPU, 20, 0, 0)] * 200]
    off = errors(learned(outcomes(CPU, 64, seed=5) + short), CPU)
    assert np.abs(off).max() < 0.5


@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_seen_does_not_wander_off_under_noise(seed: int) -> None:
    """Prompts that shared their steps took up to several times their own time, for hours."""
    rng, speeds = np.random.default_rng(seed), Speeds()
    for outcome in outcomes(GPU, 3000, seed):
        alone = replace(outcome, running=float(rng.integers(0, 3)))
        ms = true_ms(GPU, alone.uncached, alone.cached, alone.running) * (1 + rng.exponential(1.0))
        speeds.learn("r0", replace(alone, prefill_ms=ms), 0.0)
    found = speeds.of("r0")
    assert found.d < 20 * GPU.a
    assert found.t0 < 5 * GPU.t0
    assert np.median(errors(found, GPU)) < 1.5


def test_coefficients_are_never_negative() -> None:
    rng = np.random.default_rng(8)
    speeds = Speeds()
    for _ in range(300):
        u, c, r = (int(x) for x in rng.integers(0, 3000, 3))
        speeds.learn("r0", Outcome(u, c, r, 1, 0.0, float(rng.lognormal(3, 2)), 1.0), 0.0)
        now = speeds.of("r0")
        assert min(now.t0, now.a, now.b, now.d, now.overhead) >= 0
        assert all(math.isfinite(x) for x in (now.t0, now.a, now.b, now.d, now.overhead))


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_ms": math.nan},
        {"prefill_ms": math.inf},
        {"prefill_ms": -1.0},
        {"prefill_ms": 0.0},
        {"prefill_ms": 3_600_001.0},
        {"ttft_ms": -5.0},
        {"queue_ms": math.nan},
        {"uncached": -1},
        {"running": math.inf},
    ],
)
def test_absurd_outcome_is_refused_and_counted(change: dict[str, float]) -> None:
    speeds = Speeds()
    before = speeds.of("r0")
    assert not speeds.learn("r0", replace(Outcome(100, 0, 0, 1, 0.0, 50.0, 55.0), **change), 0.0)  # type: ignore[arg-type]
    assert speeds.of("r0") == before
    assert speeds.errors("r0").rejected == 1
    assert speeds.errors("r0").outcomes == 0


def test_measured_speed_is_the_prior_until_there_are_outcomes() -> None:
    speeds = Speeds()
    assert speeds.measured("r0", 1.5, 20.0)
    assert not speeds.measured("r0", 1.5, 20.0)  # nothing new
    assert (speeds.of("r0").a, speeds.of("r0").t0) == (1.5, 20.0)
    speeds.learn("r0", Outcome(100, 0, 0, 1, 0.0, 50.0, 55.0), 0.0)
    assert not speeds.measured("r0", 9.0, 9.0)


@pytest.mark.parametrize("nonsense", [math.nan, -1.0, math.inf, 0.0])
def test_nonsense_measurement_leaves_the_neutral_prior(nonsense: float) -> None:
    speeds = Speeds()
    before = speeds.of("r0")
    speeds.measured("r0", nonsense, nonsense)
    assert speeds.of("r0") == before


def test_unknown_replica_starts_as_fast_as_its_peers() -> None:
    speeds = Speeds()
    for name in ("r0", "r1", "r2"):
        for outcome in outcomes(GPU, 30, seed=1):
            speeds.learn(name, outcome, 0.0)
    assert speeds.of("new").a == pytest.approx(GPU.a, rel=0.2)


def test_overhead_is_what_the_engine_does_not_explain() -> None:
    given = [replace(o, ttft_ms=o.ttft_ms + 6.0) for o in outcomes(GPU, 40, seed=6)]
    given[7] = replace(given[7], ttft_ms=given[7].ttft_ms + 5000.0)
    given[8] = replace(given[8], ttft_ms=0.0)  # clocks that disagree
    assert learned(given).overhead == pytest.approx(10.0)


def test_prediction_errors_are_followed() -> None:
    speeds = Speeds()
    for _ in range(50):
        outcome = Outcome(100, 64, 0, 1, 0.0, 50.0, 60.0, predicted_ttft_ms=75.0, predicted_cached=96)
        speeds.learn("r0", outcome, 0.0)
    assert speeds.errors("r0").ttft_ms == pytest.approx(15.0)
    assert speeds.errors("r0").cached_tokens == pytest.approx(32.0)
    assert speeds.errors("r0").outcomes == 50


def test_memory_is_bounded_by_the_least_recently_used() -> None:
    speeds = Speeds(most=3)
    for outcome in outcomes(GPU, 30, seed=1):
        speeds.learn("kept", outcome, 0.0)
    for number in range(50):
        speeds.of("kept")
        speeds.measured(f"r{number}", 1.0, 0.0)
    assert len(speeds) == 3
    assert speeds.errors("kept").outcomes == 30
