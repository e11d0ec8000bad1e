"""The simulator with memory that hosts share: an arena as the real one, and pulls that take their time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulate import SPEED, Driver

from router.cost import CostSettings
from tests.bench import simulate
from tests.bench.simulated_pool import PoolShape, SimulatedArena, SimulatedHosts
from tests.bench.simulated_replica import SimulatedReplica
from tests.bench.simulation import Outcome, Scenario, Simulation
from tests.bench.traces import BLOCK, generate

SHAPE = PoolShape(host_replicas=2, host_gib=256.0, load_gb_s=20.0, network_gbit_s=100.0)


class Host(Driver):
    """A replica with an arena of its own, of which a block takes 7 ms."""

    def __init__(self, arena: SimulatedArena) -> None:
        super().__init__()
        self.loads: list[float] = []
        self.replica = SimulatedReplica(
            SPEED,
            wake=lambda at, version: self.wakes.append((at, version)),
            on_first=lambda job, now: self.first.append(job.number),
            on_finish=lambda job, now: self.finished.append(job.number),
            arena=arena,
            load_ms=7.0,
            later=self.loads.append,
        )

    def run(self, until: float = float("inf")) -> None:
        while self.wakes or self.loads:
            step, loaded = min(self.wakes, default=(until + 1, 0)), min(self.loads, default=until + 1)
            if min(step[0], loaded) > until:
                return
            if loaded <= step[0]:
                self.loads.remove(loaded)
                self.now = loaded
                self.replica.loads_ended(loaded)
            else:
                self.wakes.remove(step)
                self.now, version = step
                self.replica.step_ended(self.now, version)
            self.replica.assert_whole()


def arena(slots: int = 100, admission: str = "lru", followers: int = 1) -> SimulatedArena:
    return SimulatedArena(slots, admission, followers)


def test_what_a_neighbour_computed_is_loaded_instead_of_being_computed() -> None:
    shared = arena()
    first, second = Host(shared), Host(shared)
    first.submit(1, prompt=4 * BLOCK, output=1)
    first.run()
    job = second.submit(2, prompt=4 * BLOCK, output=1)
    second.run()
    assert (job.cached, job.pooled) == (3 * BLOCK, 3 * BLOCK)
    assert second.replica.computed_tokens == BLOCK
    assert job.started * 1e3 == pytest.approx(3 * 7.0)
    assert job.first_at * 1e3 == pytest.approx(3 * 7.0 + 10 + 0.1 * BLOCK)


def test_own_cache_goes_before_the_arena_and_is_not_loaded_again() -> None:
    shared = arena()
    shared.store([1, 2, 3, 4, 5])
    host = Host(shared)
    host.submit(1, prompt=3 * BLOCK, output=1)
    host.run()
    assert host.replica.loaded_blocks == 2  # its last token is computed, and that block with it
    job = host.submit(2, prompt=6 * BLOCK, output=1)
    host.run()
    assert (job.cached, job.pooled) == (5 * BLOCK, 2 * BLOCK)


def test_others_are_computed_while_one_is_loaded_and_it_goes_on_afterwards() -> None:
    shared = arena()
    shared.store(list(range(1, 9)))
    host = Host(shared)
    loading = host.submit(1, prompt=8 * BLOCK, output=1)
    other = host.submit(2, prompt=100, output=200, family=7)
    host.run()
    assert other.first_at < loading.started
    assert loading.started * 1e3 == pytest.approx(50, abs=10)  # 49 ms, and the step under way
    assert sorted(host.finished) == [1, 2]


def test_loads_of_one_engine_go_one_after_the_other() -> None:
    shared = arena()
    shared.store([1, 2, 3, 1001, 1002, 1003])
    host = Host(shared)
    first = host.submit(1, prompt=4 * BLOCK, output=1)
    second = host.submit(2, prompt=4 * BLOCK, output=1, family=1)
    host.run()
    assert first.started * 1e3 == pytest.approx(21)
    assert second.started * 1e3 >= 42
    assert first.pooled == second.pooled == 3 * BLOCK


def test_report_counts_what_the_arena_has_as_no_backlog() -> None:
    shared = arena()
    shared.store([1, 2, 3])
    host = Host(shared)
    host.submit(1, prompt=4 * BLOCK, output=1)
    report = host.replica.report()
    assert (report.prefill_backlog_tokens, report.sequences) == (BLOCK, 1)
    host.run()
    assert host.replica.report().pool_load_ms_per_block == 7.0


def test_expected_request_counts_before_it_is_submitted_and_once() -> None:
    host = Host(arena())
    job = host.submit(1, prompt=10, output=1)
    host.run()
    again = type(job)(2, np.zeros(0, np.uint64), 2000, 1)
    host.replica.expect(again)
    assert not host.replica.idle
    assert host.replica.report().sequences == 1
    host.replica.submit(again, host.now)
    assert host.replica.report().sequences == 1
    host.run()
    assert host.replica.idle


def test_least_recently_used_block_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    shared = arena(slots=6)
    shared.store([1, 2, 3])
    shared.store([11, 12, 13])
    shared.asked([1, 2, 3])
    shared.store([21, 22])
    assert shared.hits([11, 12, 13]) == 1
    assert shared.hits([1, 2, 3]) == 3
    shared.store([31, 32])
    assert shared.hits([1, 2, 3]) == 2


def test_followers_are_told_each_for_itself_what_changed_on_balance() -> None:
    shared = arena(slots=2, followers=2)
    shared.store([1, 2])
    assert sorted(shared.changes(0)[0].tolist()) == [1, 2]
    shared.store([3])
    stored, removed = shared.changes(0)
    assert (stored.tolist(), removed.tolist()) == ([3], [2])
    assert sorted(shared.changes(1)[0].tolist()) == [1, 3]
    assert [len(each) for each in shared.changes(1)] == [0, 0]


def test_tinylfu_keeps_what_is_asked_for_again_and_again() -> None:
    kept = {}
    for admission in ("lru", "tinylfu"):
        shared = arena(slots=8, admission=admission)
        shared.store(list(range(1, 9)))
        for number in range(200):
            shared.asked(list(range(1, 9)) if number % 10 == 0 else [1000 + number])
            if number % 10:
                shared.store([1000 + number, 5000 + number])
        kept[admission] = shared.hits(list(range(1, 9)))
    assert kept["tinylfu"] == 8
    assert kept["lru"] < 8


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(["lru", "tinylfu"]),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 30), max_size=8, unique=True)), max_size=40),
)
def test_arena_never_overflows_and_its_follower_knows_exactly_what_it_holds(
    admission: str, steps: list[tuple[bool, list[int]]]
) -> None:
    shared = arena(slots=10, admission=admission)
    known: set[int] = set()
    for store, keys in steps:
        if store:
            shared.store(keys)
        else:
            shared.asked(keys)
        stored, removed = shared.changes(0)
        known = known - set(removed.tolist()) | set(stored.tolist())
        assert len(shared) <= 10
        assert known == {key for key in range(1, 31) if shared.hits([key])}


def test_pulls_of_one_host_go_one_after_the_other_each_way() -> None:
    hosts = SimulatedHosts(replace(SHAPE, network_ms=0.0), 6)
    alone = SHAPE.pull_s(10) - 1e-3
    assert hosts.pull(0, 1, list(range(10)), 5.0) == pytest.approx(5 + alone)
    assert hosts.pull(0, 2, list(range(10)), 5.0) == pytest.approx(5 + 2 * alone)
    assert hosts.pull(1, 0, list(range(10)), 5.0) == pytest.approx(5 + alone)
    assert (hosts.pulls, hosts.pulled_bytes) == (3, 30 * SHAPE.block_bytes)


def outcome(pool: PoolShape | None, **fields: float) -> Outcome:
    scenario = Scenario(generate(800, seed=1), replicas=6, load=0.9, pool=pool, **fields)  # type: ignore[arg-type]
    return Simulation(scenario, "predicted-time", CostSettings()).run()


@pytest.mark.parametrize("admission", ["lru", "tinylfu"])
def test_shared_memory_saves_computing_and_time(admission: str) -> None:
    alone, shared = outcome(None), outcome(replace(SHAPE, admission=admission))
    assert len(shared.ttft_ms) == len(alone.ttft_ms) == 800
    assert shared.computed_tokens < alone.computed_tokens
    assert shared.hit_rate > alone.hit_rate
    assert float(shared.ttft_ms.mean()) < float(alone.ttft_ms.mean())
    assert 0 < shared.pooled_rate <= shared.hit_rate
    assert alone.pulls == alone.pulled_bytes == 0


def test_hosts_pull_where_the_network_is_quick_and_not_where_it_is_slow() -> None:
    quick = outcome(replace(SHAPE, network_gbit_s=400.0))
    slow = outcome(replace(SHAPE, network_gbit_s=0.5))
    assert quick.pulls > 5
    assert slow.pulls < quick.pulls / 2


def test_predictions_with_pulls_are_about_as_good_as_without() -> None:
    alone, shared = outcome(None), outcome(SHAPE)
    off = [float(np.median(np.abs(each.error_ms))) for each in (alone, shared)]
    assert off[1] < 2 * off[0] + 10


def test_impossible_pools_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--requests", "10", "--host-gib", "0.01", "--pools", "lru"]) == 2
    assert "hold no block" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        simulate.main(["--pools", "fifo"])


def test_table_compares_pools_for_our_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, dict[str, float]]] = []
    monkeypatch.setattr(
        simulate,
        "report",
        lambda name, title, columns, rows, figures: written.append(
            (f"{len(columns)} {[len(row) for row in rows]}", figures)
        ),
    )
    arguments = "--requests 60 --replicas 4 --load 0.5 --host-replicas 2 --policies predicted-time,random"
    assert simulate.main(arguments.split()) == 0
    ((shape, figures),) = written
    assert shape == f"{len(simulate.COLUMNS)} {[len(simulate.COLUMNS)] * 4}"
    assert {"recomputed_predicted_time_4_0.5", "recomputed_predicted_time_4_0.5_tinylfu"} <= set(figures)
    assert "recomputed_random_4_0.5_lru" not in figures
