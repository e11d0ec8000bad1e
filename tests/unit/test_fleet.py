"""The columns a decision is made from: what reports, leases and time do to them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from router.cost import CostSettings
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


def leases_into(fleet: Fleet, clock: Clock) -> LeaseTable:
    def changed(key: str, load: LeasedLoad) -> None:
        fleet.leased(
            key,
            sequences=load.sequences,
            prefill_tokens=load.prefill_tokens,
            decode_tokens=load.decode_tokens,
            now=clock(),
        )

    return LeaseTable(changed)


def sequences(fleet: Fleet, now: float = 100.0) -> list[float]:
    return [float(value) for value in fleet.load(fleet.ready(), now).sequences]


def backlog(fleet: Fleet, now: float = 100.0) -> list[float]:
    return [float(value) for value in fleet.load(fleet.ready(), now).backlog]


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


def test_report_that_crossed_a_lease_on_the_wire_does_not_hide_it() -> None:
    fleet, clock = fleet_of(1), Clock()
    leases_into(fleet, clock).take("r0@e1", prefill_tokens=2000, decode_tokens=9)
    clock.now += 0.01
    fleet.report(0, LoadReport(), clock.now)
    assert backlog(fleet, clock.now) == [2000.0]
    clock.now += 1.0
    fleet.report(0, LoadReport(), clock.now)  # by now it would be in there
    assert backlog(fleet, clock.now) == [0.0]


def test_load_is_zero_after_any_interleaving_of_leases_and_reports() -> None:
    rng, fleet, clock = random.Random(3), fleet_of(4), Clock()
    table, live = leases_into(fleet, clock), list[Lease]()
    for _ in range(2000):
        clock.now += rng.random() * 0.02
        what = rng.random()
        if what < 0.45:
            tokens = rng.randrange(2000)
            live.append(table.take(f"r{rng.randrange(4)}@e1", prefill_tokens=tokens, decode_tokens=9))
        elif what < 0.9 and live:
            lease = live.pop(rng.randrange(len(live)))
            lease.generated(rng.randrange(3))
            lease.release()
        else:
            row = rng.randrange(4)
            fleet.report(row, LoadReport(sequences=table.sequences(f"r{row}@e1")), clock.now)
        load = fleet.load(fleet.ready(), clock.now)
        assert load.sequences.min() >= 0
        assert load.backlog.min() >= 0
    for lease in live:
        lease.release()
    for row in range(4):
        fleet.report(row, LoadReport(), clock.now)
    assert sequences(fleet, clock.now) == backlog(fleet, clock.now) == [0.0] * 4


@pytest.mark.parametrize("bad", [math.nan, -5.0, -math.inf])
def test_nonsense_in_a_report_counts_as_nothing(bad: float) -> None:
    fleet = fleet_of(1)
    fleet.report(0, LoadReport(*[bad] * 9), 100.0)
    assert sequences(fleet) == backlog(fleet) == [0.0]
    assert fleet.room(100.0).tolist() == [True]


def test_endless_report_does_not_poison_the_others() -> None:
    fleet = fleet_of(2)
    fleet.report(0, LoadReport(*[math.inf] * 9), 100.0)
    load = fleet.load(fleet.ready(), 100.0)
    assert np.isfinite(load.sequences).all()
    assert np.isfinite(load.backlog).all()
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
    assert 0 < fleet.predicted_wait_ms(100.0) <= 1.0
    assert fleet.room(100.1).tolist() == [False, False, False, True]


def test_nothing_to_pick_means_no_room_and_no_end_of_waiting() -> None:
    fleet = fleet_of(1)
    assert fleet.predicted_wait_ms(100.0) == 0
    fleet.set_standing(0, usable=False)
    assert fleet.saturated(100.0)
    assert fleet.predicted_wait_ms(100.0) == math.inf


def test_expected_answer_follows_what_is_generated_and_what_is_allowed() -> None:
    fleet = fleet_of(1)
    assert fleet.expected_tokens(5) == 5
    for _ in range(500):
        fleet.learn("r0@e1", Outcome(9, 0, 0, 1, 0.0, 9.0, 9.0, generated_tokens=40.0), 100.0)
    assert fleet.expected_tokens(8000) == pytest.approx(40, rel=0.01)
