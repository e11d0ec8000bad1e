"""The simulator: replicas that behave as engines do, and the real router in virtual time."""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from router.cost import CostSettings
from router.policies import POLICY_NAMES
from tests.bench import simulate
from tests.bench.simulated_replica import Job, SimulatedReplica, Speed
from tests.bench.simulation import Outcome, Scenario, Simulation
from tests.bench.traces import BLOCK, Trace, generate, read

SPEED = Speed(
    base_ms=10.0, token_ms=0.1, pair_ms=0.0, sequence_ms=0.0, context_ms=0.0, max_batch_tokens=1024,
    max_sequences=4, kv_tokens=20 * BLOCK,
)  # fmt: skip


class Driver:
    """One replica with its own clock."""

    def __init__(self, speed: Speed = SPEED) -> None:
        self.now = 0.0
        self.wakes: list[tuple[float, int]] = []
        self.first: list[int] = []
        self.finished: list[int] = []
        self.replica = SimulatedReplica(
            speed,
            wake=lambda at, version: heapq.heappush(self.wakes, (at, version)),
            on_first=lambda job, now: self.first.append(job.number),
            on_finish=lambda job, now: self.finished.append(job.number),
        )

    def submit(
        self, number: int, prompt: int, output: int, *, family: int = 0, at: float | None = None
    ) -> Job:
        """A prompt; prompts of a family share what they can."""
        if at is not None:
            self.run(until=at)
            self.now = at
        keys = np.arange(1, prompt // BLOCK + 1, dtype=np.uint64) + np.uint64(1000 * family)
        job = Job(number, keys, prompt, output)
        self.replica.submit(job, self.now)
        return job

    def run(self, until: float = float("inf")) -> None:
        while self.wakes and self.wakes[0][0] <= until:
            self.now, version = heapq.heappop(self.wakes)
            self.replica.step_ended(self.now, version)
            self.replica.assert_whole()


def simulated(trace: Trace, policy: str = "predicted-time", **fields: float | int) -> Outcome:
    scenario = Scenario(trace, replicas=4, load=0.7, **fields)  # type: ignore[arg-type]
    return Simulation(scenario, policy, CostSettings()).run()


def test_one_request_takes_its_prefill_steps_and_its_decode_steps() -> None:
    driver = Driver()
    job = driver.submit(1, prompt=1500, output=11)
    driver.run()
    assert job.first_at * 1e3 == pytest.approx(2 * 10 + 150)  # two chunks: 1024 and 476 tokens
    assert job.ended_at * 1e3 == pytest.approx(170 + 10 * 10)
    assert driver.replica.computed_tokens == 1500
    assert driver.replica.busy_s == pytest.approx(job.ended_at)


def test_cached_blocks_are_not_computed_again_but_the_last_token_is() -> None:
    driver = Driver()
    driver.submit(1, prompt=2 * BLOCK, output=1)
    driver.run()
    job = driver.submit(2, prompt=2 * BLOCK, output=1)
    driver.run()
    assert job.cached == BLOCK
    assert driver.replica.computed_tokens == 3 * BLOCK


def test_newcomer_waits_for_the_step_under_way_and_not_for_merged_ones() -> None:
    driver = Driver()
    driver.submit(1, prompt=100, output=500)  # first token at 20 ms, then steps of 10 ms
    job = driver.submit(2, prompt=100, output=1, family=1, at=0.123)
    driver.run()
    assert job.started * 1e3 == pytest.approx(130)
    assert job.first_at * 1e3 == pytest.approx(130 + 10 + 10)


def test_decode_goes_first_and_prompts_share_what_is_left_of_the_budget() -> None:
    driver = Driver()
    driver.submit(1, prompt=512, output=50)
    first = driver.submit(2, prompt=1023, output=1, family=1, at=0.07)
    second = driver.submit(3, prompt=100, output=1, family=2, at=0.07)
    driver.run()
    assert second.started > first.started
    assert driver.first == [1, 2, 3]


def test_batch_is_never_larger_than_its_sequences() -> None:
    driver = Driver()
    for number in range(6):
        driver.submit(number, prompt=10, output=100, family=number)
    driver.run(until=0.5)
    report = driver.replica.report()
    assert (report.running, report.waiting, report.sequences) == (4, 2, 6)
    driver.run()
    assert sorted(driver.finished) == list(range(6))


def test_least_recently_used_prefix_is_evicted_and_reported_gone() -> None:
    driver = Driver()
    for family in range(3):
        driver.submit(family, prompt=8 * BLOCK, output=1, family=family)
        driver.run()
    stored, removed = driver.replica.cache.changes()
    assert set(stored.tolist()) == driver.replica.cache.resident()
    assert set(removed.tolist()) == {5, 6, 7, 8}  # 20 blocks: four of the oldest prompt, its end first
    again = driver.submit(9, prompt=8 * BLOCK, output=1, family=0)
    driver.run()
    assert again.cached == 4 * BLOCK


def test_sequences_that_outgrow_the_space_are_preempted_and_still_finish() -> None:
    driver = Driver()
    for number in range(3):
        driver.submit(number, prompt=6 * BLOCK, output=3 * BLOCK, family=number)
    driver.run()
    assert driver.replica.preemptions > 0
    assert sorted(driver.finished) == [0, 1, 2]
    assert sorted(driver.first) == [0, 1, 2]  # a first token is told once


def backlog(driver: Driver) -> tuple[float, float]:
    report = driver.replica.report()
    return report.prefill_backlog_tokens, report.prefill_backlog_pairs


def test_reported_backlog_says_how_long_the_prompts_will_take() -> None:
    speed = replace(SPEED, base_ms=0.0, pair_ms=1e-4)
    driver = Driver(speed)
    for number, prompt in enumerate((3000, 700, 5)):
        job = driver.submit(number, prompt, output=1, family=number)
        driver.run(until=0.0)
    tokens, pairs = backlog(driver)
    driver.run()
    assert job.first_at * 1e3 == pytest.approx(speed.token_ms * tokens + speed.pair_ms * pairs)


def test_backlog_falls_with_each_chunk_and_ends_with_the_first_token() -> None:
    driver = Driver()
    driver.submit(1, prompt=2048, output=5)
    assert backlog(driver) == (2048, 2048 * 2048 / 2)
    driver.run(until=0.115)
    assert backlog(driver) == (1024, 1024 * (1024 + 1024 / 2))
    driver.run(until=0.23)
    assert backlog(driver) == (0, 0)


def test_request_that_can_never_fit_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match="10000 \\+ 500 tokens"):
        Driver().submit(1, prompt=10_000, output=500)


def test_generated_trace_repeats_and_has_the_shape_it_claims() -> None:
    trace, again = generate(800, seed=3), generate(800, seed=3)
    assert np.array_equal(trace.keys, again.keys)
    assert np.array_equal(trace.arrival_s, again.arrival_s)
    assert not np.array_equal(trace.input_tokens, generate(800, seed=4).input_tokens)
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert 4000 < float(np.median(trace.input_tokens)) < 10_000
    assert 0.2 < trace.most_hits() < 0.6
    for at in range(len(trace)):
        assert len(trace.keys_of(at)) == trace.input_tokens[at] // BLOCK


def test_later_turn_repeats_the_keys_of_the_turn_before() -> None:
    trace = generate(800, seed=3)
    last: dict[int, int] = {}
    turns = 0
    for at, session in enumerate(trace.sessions.tolist()):
        before = last.get(session)
        if before is not None:
            turns += 1
            keys = trace.keys_of(before)
            assert np.array_equal(trace.keys_of(at)[: len(keys)], keys)
        last[session] = at
    assert turns > 100


def test_mooncake_lines_are_read_with_equal_prefixes_equal(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1600, "output_length": 0, "hash_ids": [0, 1, 3, 4]},
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    trace = read(path)
    first, second = trace.keys_of(0), trace.keys_of(1)
    assert (len(first), len(second)) == (2, 3)  # the last block of each is partial
    assert np.array_equal(first, second[:2])
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.output_tokens.tolist() == [3, 1]


@pytest.mark.parametrize(
    "line",
    ["{}", "nonsense", '{"timestamp": 0, "input_length": 2000, "output_length": 3, "hash_ids": [1]}'],
)
def test_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1"):
        read(path)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_every_request_and_leaks_nothing(policy: str) -> None:
    trace = generate(250, seed=1)
    outcome = simulated(trace, policy)  # asserts that leases, queues and blocks are balanced
    assert len(outcome.ttft_ms) == len(trace)
    assert (outcome.ttft_ms > 0).all()


def test_run_repeats_exactly() -> None:
    trace = generate(250, seed=1)
    first, second = simulated(trace), simulated(trace)
    assert np.array_equal(first.ttft_ms, second.ttft_ms)


def test_predicted_time_beats_its_rivals_on_p90_ttft() -> None:
    trace = generate(600, seed=1)
    p90 = {
        policy: float(np.percentile(simulated(trace, policy).ttft_ms, 90))
        for policy in ("predicted-time", *simulate.RIVALS)
    }
    assert min(p90, key=lambda policy: p90[policy]) == "predicted-time"


def test_overload_is_refused_when_the_queue_is_full_and_the_rest_is_served() -> None:
    trace = generate(300, seed=1)
    scenario = Scenario(trace, replicas=1, load=20.0, max_queue=10)
    outcome = Simulation(scenario, "predicted-time", CostSettings()).run()
    assert outcome.refused > 50
    assert outcome.refused + len(outcome.ttft_ms) == len(trace)
    assert outcome.wait_ms.max() > 0


def test_requests_past_their_deadline_are_refused() -> None:
    trace = generate(300, seed=1)
    scenario = Scenario(trace, replicas=1, load=20.0, deadline_s=20.0)
    outcome = Simulation(scenario, "round-robin", CostSettings()).run()
    assert outcome.refused > 50
    assert outcome.wait_ms.max() <= 20_000


def test_four_routers_share_replicas_without_herding() -> None:
    outcome = simulated(generate(600, seed=1), routers=4)
    assert outcome.busy_cv <= 0.3
    assert outcome.most_requests <= 600 / 4 * 2


def test_slower_replicas_get_fewer_requests_but_stay_in_use() -> None:
    trace = generate(600, seed=1)
    scenario = Scenario(trace, replicas=4, load=0.7, spread=0.5)
    simulation = Simulation(scenario, "predicted-time", CostSettings())
    simulation.run()
    jobs = np.array([replica.jobs for replica in simulation.replicas])
    assert jobs[scenario.factors().argmax()] < jobs[scenario.factors().argmin()]
    assert jobs.min() > 0


def test_impossible_load_is_an_error_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--requests", "10", "--load", "-1"]) == 2
    assert "load is -1" in capsys.readouterr().err
