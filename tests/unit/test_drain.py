"""How fast the queue drains is predicted, then measured, and no accident decides it."""

from __future__ import annotations

import pytest

from router.admission import AdmissionQueue, Item
from router.drain import DrainRate


def test_drain_is_predicted_until_it_has_been_measured() -> None:
    rate = DrainRate()
    assert rate.tokens_per_s() is None
    assert rate.tokens_per_s(500.0) == 500.0
    rate.waiting(0.0)
    for second in range(1, 300):
        rate.released(2000, float(second))
    assert rate.tokens_per_s() == pytest.approx(2000.0)
    blended = rate.tokens_per_s(500.0)
    assert blended is not None
    assert 1700 < blended < 2000


def test_time_in_which_nothing_waits_is_no_stall() -> None:
    rate = DrainRate()
    for hour in range(100):
        start = hour * 3600.0
        rate.waiting(start)
        rate.released(1000, start + 1.0)
        rate.pause(start + 1.0)
    assert rate.tokens_per_s() == pytest.approx(1000.0)


def test_one_burst_does_not_decide_the_rate() -> None:
    rate = DrainRate()
    rate.waiting(0.0)
    for second in range(1, 100):
        rate.released(1000, float(second))
    rate.released(10**9, 100.0)
    measured = rate.tokens_per_s()
    assert measured is not None
    assert measured < 1200


def test_stall_lowers_the_rate_while_it_lasts() -> None:
    queue = AdmissionQueue(1000)
    for n in range(100):
        queue.offer(Item(f"t{n % 3}", 1000, 0.0, 1e6), 0.0)
    for second in range(1, 50):
        queue.pop(float(second))
    before = queue.predicted_drain_s()
    for second in range(50, 110):
        queue.observe(float(second), stalled=False)
    after = queue.predicted_drain_s()
    assert before is not None
    assert after is not None
    assert after > 3 * before


def test_time_in_which_nothing_can_serve_does_not_lower_the_rate() -> None:
    queue = AdmissionQueue(1000)
    for n in range(100):
        queue.offer(Item(f"t{n % 3}", 1000, 0.0, 1e6), 0.0)
    for second in range(1, 50):
        queue.pop(float(second))
    before = queue.predicted_drain_s()
    for second in range(49, 110):
        queue.observe(float(second), stalled=True)
    assert queue.predicted_drain_s() == before
