"""Counters and histograms of the hot path: what they add up to, and what they make of nonsense."""

from __future__ import annotations

import math

import pytest
from fakes_metrics import FakeCollector
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.metrics import CallbackOptions

from telemetry.tally import MOST_SERIES, Counter, Histogram

BOUNDS = (1.0, 2.0, 4.0)


def a_histogram(**given: object) -> Histogram:
    return Histogram("h", "s", "about", bounds=BOUNDS, **given)  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_counts_each_value_once_in_the_first_bucket_that_holds_it(values: list[float]) -> None:
    histogram = a_histogram()
    for value in values:
        histogram.record(value)
    points = histogram.metric(7).data.data_points
    if not values:
        assert points == []
        return
    (point,) = points
    edges = (*BOUNDS, math.inf)
    expected = [0] * len(edges)
    for value in values:
        expected[next(at for at, edge in enumerate(edges) if value <= edge)] += 1
    assert list(point.bucket_counts) == expected
    assert (point.count, point.min, point.max) == (len(values), min(values), max(values))
    assert point.sum == pytest.approx(sum(values))
    assert point.time_unix_nano == 7


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_measurement_is_not_recorded(value: float) -> None:
    histogram = a_histogram()
    histogram.record(value)
    assert histogram.metric(0).data.data_points == []


def test_attributes_come_from_keys_and_fixed_ones_and_empty_values_are_left_out() -> None:
    counter = Counter(("outcome", "tenant"), {"model": "m"})
    counter.add(2, "ok", "")
    counter.add(3, "ok", "acme")
    counter.add(-5, "ok", "acme")
    found = {tuple((o.attributes or {}).items()): o.value for o in counter.observe(CallbackOptions())}
    assert found == {
        (("model", "m"), ("outcome", "ok")): 2,
        (("model", "m"), ("outcome", "ok"), ("tenant", "acme")): 3,
    }


def test_beyond_the_most_series_all_goes_to_one_and_nothing_is_lost() -> None:
    counter, histogram = Counter(("who",)), a_histogram(keys=("who",))
    for number in range(MOST_SERIES + 50):
        counter.add(1, f"t{number}")
        histogram.record(1.0, f"t{number}")
    counter.add(1, "t0")
    sums = counter.observe(CallbackOptions())
    points = histogram.metric(0).data.data_points
    assert (len(sums), len(points)) == (MOST_SERIES + 1, MOST_SERIES + 1)
    assert sum(o.value for o in sums) == MOST_SERIES + 51
    assert sum(point.count for point in points) == MOST_SERIES + 50
    over = [point for point in points if (point.attributes or {}).get("otel.metric.overflow")]
    assert [point.count for point in over] == [50]


def test_a_collector_gets_them_beside_the_librarys_own() -> None:
    collector = FakeCollector()
    meters = collector.meters
    requests = meters.counter("requests", "{request}", "about", keys=("outcome",))
    took = meters.histogram("took", "s", "about", bounds=BOUNDS, fixed={"model": "m"})
    meters.gauge("level", "1", "about", lambda: [(0.5, {"replica": "r0"})])
    for _ in range(3):
        requests.add(1, "ok")
        took.record(1.5)
    assert collector.value("requests", outcome="ok") == 3
    assert collector.value("took", model="m").count == 3
    assert collector.value("level", replica="r0") == 0.5
    assert collector.value("process.memory.usage") > 1_000_000
    assert collector.metrics()["took"].unit == "s"
    took.record(9.0)
    point = collector.value("took", model="m")
    assert (point.count, list(point.bucket_counts)) == (4, [0, 3, 0, 1])
