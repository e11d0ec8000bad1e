"""The columns a decision is made from: what reports, leases and time do to them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest

from router.cost import CostSettings, attention_pairs
from router.fleet import Fleet, LoadReport
from router.leases import Lease, LeasedLoad, LeaseTable
from router.speeds import Outcome


class Clock:
    """A hand that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fleet_of(count: int, **settings: float) -> Fleet:
    fleet = Fleet(settings=CostSettings(**settings))
    for number in range(count):
        fleet.set_standing(fleet.join(f"r{number}", "e1"), usable=True)
    return fleet


def leases_into(fleet: Fleet, clock: Callable[[], float]) -> LeaseTable:
    def changed(key: str, load: LeasedLoad) -> None:
        fleet.leased(key, load, clock())

    return LeaseTable(changed)


def sequences(fleet: Fleet, now: float = 100.0) -> list[float]:
    return [float(value) for value in fleet.load(fleet.ready(), now).sequences]


def backlog(fleet: Fleet, now: float = 100.0) -> list[float]:
    return [float(value) for value in fleet.load(fleet.ready(), now).backlog]


def work(fleet: Fleet, now: float = 100.0) -> list[float]:
    return [float(value) for value in fleet.load(fleet.ready(), now).backlog_ms()]


def lease_of(table: LeaseTable, *prompts: int, key: str = "r0@e1") -> list[Lease]:
    return [
        table.take(key, prefill_tokens=u, prefill_pairs=attention_pairs(u, 0), decode_tokens=9)
        for u in prompts
    ]


def report_of(*prompts: int) -> LoadReport:
    """1 ms a token, and as attention goes by it 1 ms per 10,000 pairs."""
    return LoadReport(
        prefill_backlog_tokens=sum(prompts),
        prefill_backlog_pairs=sum(attention_pairs(u, 0) for u in prompts),
        prefill_ms_per_token=1.0,
    )


def test_row_is_found_by_key_and_joining_twice_gives_the_same() -> None:
    fleet = Fleet()
    row = fleet.join("r0", "e1")
    assert fleet.join("r0", "e1") == row == fleet.row("r0@e1")
    assert fleet.row("r0@e2") is None


def test_restarted_replica_is_another_row_without_its_past() -> None:
    fleet = fleet_of(2)
    row = fleet.row("r0@e1")
    assert row is not None
    fleet.report(row, LoadReport(running=7, prefill_backlog_tokens=500), 100.0)
    fleet.index.store(row, np.array([1, 2, 3], np.uint64))
    fleet.leave(row)
    again = fleet.join("r0", "e2")
    fleet.set_standing(again, usable=True)
    assert fleet.index.blocks(again) == 0
    assert sequences(fleet) == [0.0, 0.0]
    assert backlog(fleet) == [0.0, 0.0]


def test_speed_outlives_a_restart() -> None:
    fleet = fleet_of(1)
    for _ in range(20):
        fleet.learn("r0@e1", Outcome(1000, 0, 0, 1, 0.0, 3000.0, 3000.0), 100.0)
    fleet.leave(0)
    fresh = fleet.join("r0", "e2")
    assert fleet.column("a")[fresh] > 1.5


def test_outcome_of_a_replica_that_has_left_is_still_learned() -> None:
    fleet = fleet_of(1)
    fleet.leave(0)
    fleet.learn("r0@e1", Outcome(1000, 0, 0, 1, 0.0, 3000.0, 3000.0), 100.0)
    assert fleet.speeds.errors("r0").outcomes == 1


def test_rows_are_reused_and_columns_grow() -> None:
    fleet = fleet_of(40)
    for row in range(40):
        fleet.leave(row)
    assert len(fleet) == 0
    assert sorted(fleet.join(f"s{n}", "e") for n in range(41)) == list(range(41))


def test_row_of_a_prompt_in_flight_is_not_given_to_another_replica() -> None:
    """Else the newcomer would be credited with a prompt that was sent to the dead one."""
    fleet = fleet_of(1)
    keys = np.array([5, 6, 7], np.uint64)
    handle = fleet.begin(0, "r0@e1", keys)
    fleet.leave(0)
    assert fleet.join("r1", "e1") != 0
    fleet.end(handle)
    fleet.end(handle)
    assert fleet.inflight.match(keys) == {}
    assert fleet.join("r2", "e1") == 0


def test_prompt_for_a_replica_that_has_just_left_is_not_in_flight() -> None:
    fleet = fleet_of(1)
    fleet.leave(0)
    handle = fleet.begin(0, "r0@e1", np.array([5], np.uint64))
    assert fleet.inflight.match(np.array([5], np.uint64)) == {}
    fleet.end(handle)


def test_nobodys_row_is_refused() -> None:
    fleet = fleet_of(1)
    for row in (1, -1):
        with pytest.raises(KeyError, match="no replica has row"):
            fleet.report(row, LoadReport(), 100.0)


def test_suspects_are_ready_only_when_nobody_else_is() -> None:
    fleet = fleet_of(3)
    fleet.set_standing(0, usable=True, suspect=True)
    assert fleet.ready().tolist() == [1, 2]
    fleet.set_standing(1, usable=False, degraded="draining")
    fleet.set_standing(2, usable=False)
    assert fleet.ready().tolist() == [0]
    fleet.set_standing(0, usable=False)
    assert fleet.ready().tolist() == []


def test_lease_taken_before_the_report_is_not_counted_twice() -> None:
    fleet, clock = fleet_of(1), Clock()
    table = leases_into(fleet, clock)
    held = [table.take("r0@e1", prefill_tokens=0, decode_tokens=1) for _ in range(4)]
    fleet.report(0, LoadReport(running=4), clock.now)
    assert sequences(fleet) == [4.0]
    held.append(table.take("r0@e1", prefill_tokens=0, decode_tokens=1))
    assert sequences(fleet) == [5.0]
    for lease in held:
        lease.release()
    assert sequences(fleet) == [0.0]


def test_own_leases_are_the_least_load_there_can_be() -> None:
    fleet, clock = fleet_of(1), Clock()
    held = [leases_into(fleet, clock).take("r0@e1", prefill_tokens=0, decode_tokens=1, sequences=6)]
    fleet.report(0, LoadReport(running=1), clock.now)
    assert sequences(fleet) == [6.0]
    assert len(held) == 1


def test_change_since_the_report_stands_for_as_many_as_there_are_routers() -> None:
    fleet, clock = fleet_of(2), Clock()
    table = leases_into(fleet, clock)
    for key in ("r0@e1", "r1@e1"):
        table.take(key, prefill_tokens=0, decode_tokens=1, sequences=100)
    for row in (0, 1):
        fleet.report(row, LoadReport(running=400), clock.now)
    assert fleet.routers == pytest.approx(4.0, rel=0.02)
    table.take("r0@e1", prefill_tokens=0, decode_tokens=1)
    assert sequences(fleet) == pytest.approx([400 + fleet.routers, 400])


def test_prompt_leased_since_the_report_stands_for_those_of_the_other_routers_too() -> None:
    fleet, clock = fleet_of(1), Clock()
    table = leases_into(fleet, clock)
    table.take("r0@e1", prefill_tokens=0, decode_tokens=1, sequences=100)
    clock.now += 1.0
    fleet.report(0, LoadReport(running=400, prefill_backlog_tokens=50), clock.now)
    table.take("r0@e1", prefill_tokens=1000, decode_tokens=1)
    assert backlog(fleet, clock.now) == pytest.approx([50 + 1000 * fleet.routers])


def test_one_foreign_request_is_no_second_router() -> None:
    fleet, clock = fleet_of(2), Clock()
    leases_into(fleet, clock).take("r0@e1", prefill_tokens=0, decode_tokens=1, sequences=3)
    fleet.report(0, LoadReport(running=4), clock.now)
    assert fleet.routers < 1.5
    fleet.report(1, LoadReport(running=900), clock.now)
    assert fleet.routers == 16.0
    fleet.leave(1)
    assert fleet.routers < 1.5


def test_backlog_drains_at_the_measured_speed() -> None:
    fleet = fleet_of(1)
    fleet.report(0, LoadReport(prefill_backlog_tokens=1000, prefill_ms_per_token=2.0), 100.0)
    assert backlog(fleet, 100.0) == [1000.0]
    assert backlog(fleet, 101.0) == [500.0]
    assert backlog(fleet, 200.0) == [0.0]
    assert backlog(fleet, 99.0) == [1000.0]  # a clock that went back


def test_time_before_a_prompt_came_does_not_drain_it() -> None:
    fleet, clock = fleet_of(1), Clock()
    table = leases_into(fleet, clock)
    fleet.report(0, LoadReport(prefill_ms_per_token=1.0), 0.0)
    table.take("r0@e1", prefill_tokens=500, decode_tokens=1)
    assert backlog(fleet, clock.now) == [500.0]
    assert backlog(fleet, clock.now + 0.2) == pytest.approx([300.0])


def test_first_token_ends_its_backlog_once() -> None:
    """Drained by time or by its first token, never by both."""
    fleet, clock = fleet_of(1), Clock()
    table = leases_into(fleet, clock)
    fleet.report(0, LoadReport(prefill_ms_per_token=1.0), clock.now)
    first = table.take("r0@e1", prefill_tokens=400, decode_tokens=9)
    table.take("r0@e1", prefill_tokens=600, decode_tokens=9)
    clock.now += 0.4
    first.generated(1)
    assert backlog(fleet, clock.now) == pytest.approx([600.0])


def test_cancelled_prompt_leaves_the_backlog_at_once() -> None:
    fleet, clock = fleet_of(1), Clock()
    with leases_into(fleet, clock).take("r0@e1", prefill_tokens=30_000, decode_tokens=9):
        assert backlog(fleet) == [30_000.0]
    assert backlog(fleet) == [0.0]


def test_long_prompt_waiting_is_more_work_than_many_short_ones_of_as_many_tokens() -> None:
    fleet = fleet_of(2)
    fleet.report(0, report_of(80_000), 100.0)
    fleet.report(1, report_of(*[1000] * 80), 100.0)
    assert backlog(fleet) == [80_000, 80_000]
    assert work(fleet) == pytest.approx([80_000 + 320_000, 80_000 + 4000])


def test_leases_and_reports_of_the_same_prompts_agree() -> None:
    fleet, clock = fleet_of(2), Clock()
    table = leases_into(fleet, clock)
    for row in (0, 1):
        fleet.report(row, report_of(), clock.now)
    lease_of(table, 20_000, 300, 7)
    fleet.report(1, report_of(20_000, 300, 7), clock.now)
    for later in (0.0, 5.0, 30.0):
        leased, reported = work(fleet, clock.now + later)
        assert leased == pytest.approx(reported)
        assert leased > 0
    clock.now += 1.0
    fleet.report(0, report_of(20_000, 300, 7), clock.now)  # who reports what is leased does not add to it
    assert work(fleet, clock.now)[0] == pytest.approx(20_307 + 1e-4 * (2e8 + 45_000 + 24.5))


def test_backlog_drains_in_the_time_that_its_prompts_take_and_to_nothing() -> None:
    fleet = fleet_of(1)
    fleet.report(0, report_of(10_000), 100.0)  # 10 s of tokens, 5 s of pairs
    assert work(fleet, 106.0) == pytest.approx([9000])
    assert backlog(fleet, 106.0) == pytest.approx([6000])
    assert work(fleet, 114.999) == pytest.approx([1.0])
    assert work(fleet, 115.0) == pytest.approx([0.0], abs=1e-6)
    assert work(fleet, 116.0) == backlog(fleet, 116.0) == [0.0]


def test_long_prompt_is_not_over_when_its_tokens_alone_would_be() -> None:
    fleet, clock = fleet_of(1), Clock()
    fleet.report(0, report_of(), clock.now)
    table = leases_into(fleet, clock)
    (first,) = lease_of(table, 10_000)
    clock.now += 10.0
    second = lease_of(table, 100)
    assert work(fleet, clock.now) == pytest.approx([5000 + 100.5])
    first.generated(1)  # sooner than predicted
    assert work(fleet, clock.now) == pytest.approx([100.5], rel=0.02)
    second[0].release()
    assert work(fleet, clock.now) == [0.0]


def test_pairs_stand_for_those_of_the_other_routers_too() -> None:
    fleet, clock = fleet_of(1), Clock()
    table = leases_into(fleet, clock)
    table.take("r0@e1", prefill_tokens=0, decode_tokens=1, sequences=100)
    clock.now += 1.0
    fleet.report(0, LoadReport(running=400, prefill_ms_per_token=1.0), clock.now)
    lease_of(table, 1000)
    assert work(fleet, clock.now) == pytest.approx([(1000 + 50) * fleet.routers])


def test_replica_that_reports_tokens_only_is_taken_by_its_tokens() -> None:
    fleet, clock = fleet_of(1), Clock()
    table = leases_into(fleet, clock)
    held = lease_of(table, 3000)
    clock.now += 1.0
    report = LoadReport(prefill_backlog_tokens=3000, prefill_ms_per_token=1.0)
    fleet.report(0, report, clock.now)
    assert work(fleet, clock.now) == [3000.0]
    held += lease_of(table, 1000)
    assert work(fleet, clock.now) == pytest.approx([4000 + 50])
    for lease in held:
        lease.generated(1)
        load = fleet.load(fleet.ready(), clock.now)
        assert load.backlog_pairs.min() >= 0
    assert work(fleet, clock.now) == backlog(fleet, clock.now) == [0.0]


def test_report_that_crossed_a_lease_on_the_wire_does_not_hide_it() -> None:
    fleet, clock = fleet_of(1), Clock()
    table = leases_into(fleet, clock)
    lease_of(table, 500, 1500)
    clock.now += 0.01
    fleet.report(0, report_of(), clock.now)
    assert backlog(fleet, clock.now) == [2000.0]
    assert work(fleet, clock.now) == pytest.approx([2000 + 12.5 + 112.5])
    clock.now += 1.0
    fleet.report(0, report_of(), clock.now)  # by now it would be in there
    assert backlog(fleet, clock.now) == work(fleet, clock.now) == [0.0]


def test_load_is_zero_after_any_interleaving_of_leases_and_reports() -> None:
    rng, fleet, clock = random.Random(3), fleet_of(4), Clock()
    table, live = leases_into(fleet, clock), list[Lease]()
    for _ in range(2000):
        clock.now += rng.random() * 0.02
        what = rng.random()
        if what < 0.45:
            live += lease_of(table, rng.randrange(2000), key=f"r{rng.randrange(4)}@e1")
        elif what < 0.9 and live:
            lease = live.pop(rng.randrange(len(live)))
            lease.generated(rng.randrange(3))
            lease.release()
        else:
            row = rng.randrange(4)
            held = table.load(f"r{row}@e1")
            report = LoadReport(
                sequences=held.sequences,
                prefill_backlog_tokens=rng.random() * held.prefill_tokens,
                prefill_backlog_pairs=rng.random() * held.prefill_pairs,
            )
            fleet.report(row, report, clock.now)
        load = fleet.load(fleet.ready(), clock.now)
        assert load.sequences.min() >= 0
        assert load.backlog.min() >= 0
        assert load.backlog_pairs.min() >= 0
    for lease in live:
        lease.release()
    for row in range(4):
        fleet.report(row, LoadReport(), clock.now)
    assert sequences(fleet, clock.now) == backlog(fleet, clock.now) == work(fleet, clock.now) == [0.0] * 4


@pytest.mark.parametrize("bad", [math.nan, -5.0, -math.inf])
def test_nonsense_in_a_report_counts_as_nothing(bad: float) -> None:
    fleet = fleet_of(1)
    fleet.report(0, LoadReport(*[bad] * len(fields(LoadReport))), 100.0)
    assert sequences(fleet) == backlog(fleet) == work(fleet) == [0.0]
    assert fleet.room(100.0).tolist() == [True]


def test_endless_report_does_not_poison_the_others() -> None:
    fleet = fleet_of(2)
    fleet.report(0, LoadReport(*[math.inf] * len(fields(LoadReport))), 100.0)
    load = fleet.load(fleet.ready(), 100.0)
    assert np.isfinite(load.sequences).all()
    assert np.isfinite(load.backlog_ms()).all()
    fleet.report(0, LoadReport(), 100.0)
    assert fleet.routers == 1.0


def test_room_ends_with_the_batch_or_with_the_queue() -> None:
    fleet = fleet_of(4, replica_queue_ms=1000.0)
    for row, (running, waiting_tokens) in enumerate([(7, 0), (8, 0), (0, 999), (0, 1001)]):
        report = LoadReport(
            running=running,
            max_sequences=8,
            prefill_backlog_tokens=waiting_tokens,
            prefill_ms_per_token=1.0,
        )
        fleet.report(row, report, 100.0)
    assert fleet.room(100.0).tolist() == [True, False, True, False]
    assert not fleet.saturated(100.0)
    fleet.set_standing(0, usable=False)
    fleet.set_standing(2, usable=False)
    assert fleet.saturated(100.0)
    assert fleet.room(100.1).tolist() == [False, False, False, True]


def test_room_ends_with_the_time_that_the_queue_takes_not_with_its_tokens() -> None:
    fleet = fleet_of(2, replica_queue_ms=10_000.0)
    fleet.report(0, report_of(8000), 100.0)  # 8 s of tokens, 3.2 s of pairs
    fleet.report(1, report_of(*[500] * 16), 100.0)
    assert fleet.room(100.0).tolist() == [False, True]
    fleet.set_standing(1, usable=False)
    assert fleet.room(101.19).tolist() == [False, False]
    assert fleet.room(101.21).tolist() == [True, False]


def test_nothing_to_pick_means_no_room_and_no_speed() -> None:
    fleet = fleet_of(1)
    assert fleet.prefill_tokens_per_s() > 0
    fleet.set_standing(0, usable=False)
    assert fleet.saturated(100.0)
    assert fleet.prefill_tokens_per_s() == 0


def test_expected_answer_follows_what_is_generated_and_what_is_allowed() -> None:
    fleet = fleet_of(1)
    assert fleet.expected_tokens(5) == 5
    for _ in range(500):
        fleet.learn("r0@e1", Outcome(9, 0, 0, 1, 0.0, 9.0, 9.0, generated_tokens=40.0), 100.0)
    assert fleet.expected_tokens(8000) == pytest.approx(40, rel=0.01)


def test_steady_leases_do_not_make_a_report_of_their_progress_unheard() -> None:
    fleet, now = fleet_of(1), [100.0]
    leases = leases_into(fleet, lambda: now[0])
    for _ in range(100):
        leases.take("r0@e1", prefill_tokens=1000, decode_tokens=0)
        now[0] += 0.04
    fleet.report(0, LoadReport(prefill_backlog_tokens=40_000, prefill_ms_per_token=1.0), now[0])
    (backlog,) = fleet.load(fleet.ready(), now[0]).backlog
    assert 40_000 <= backlog < 42_000
