"""Counters and histograms for code that every request or engine step passes: a fraction of a microsecond
a record, where the SDK's own take five to nine.

A series is found by the tuple of its attribute values; nothing is copied, locked or looked up besides. The
price: exact only where one thread records (an event loop does); any thread may read.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData

Value = str | int | bool
"""Of an attribute. An empty string leaves the attribute out."""

MOST_SERIES = 2000
"""Of one instrument, the SDK's own limit; what comes later goes to one series marked as overflow."""

_OVERFLOW: dict[str, Value] = {"otel.metric.overflow": True}
_MIN, _MAX, _SUM = -3, -2, -1


class Counter:
    """A sum that only grows.

    Args:
        keys: names of the attributes whose values `add` takes, in this order.
        fixed: attributes of every series.
    """

    def __init__(self, keys: Sequence[str] = (), fixed: Mapping[str, Value] | None = None) -> None:
        self._keys, self._fixed = tuple(keys), fixed or {}
        self._sums: dict[tuple[Value, ...], int] = {}

    def add(self, amount: int, *values: Value) -> None:
        """Negative amounts are ignored."""
        sums = self._sums
        if amount < 0:
            return
        if values not in sums and len(sums) >= MOST_SERIES:
            values = ()
        sums[values] = sums.get(values, 0) + amount

    def observe(self, _options: CallbackOptions) -> list[Observation]:
        """The callback of an observable counter."""
        return [
            Observation(total, _attributes(self._keys, values, self._fixed))
            for values, total in list(self._sums.items())
        ]


class Histogram:
    """How values are spread over buckets. Cumulative, whatever temporality a collector prefers.

    Args:
        bounds: upper bounds of the buckets, inclusive, rising; one more bucket takes what is larger.
        keys, fixed: as for `Counter`.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        about: str,
        *,
        bounds: Sequence[float],
        keys: Sequence[str] = (),
        fixed: Mapping[str, Value] | None = None,
    ) -> None:
        self.name, self.unit, self.about = name, unit, about
        self._bounds, self._keys, self._fixed = tuple(bounds), tuple(keys), fixed or {}
        self._began_ns = time.time_ns()
        # Counts by bucket, then least, most and sum.
        self._cells: dict[tuple[Value, ...], list[float]] = {}

    def record(self, value: float, *values: Value) -> None:
        """What is negative, infinite or NaN is ignored."""
        if not 0 <= value < math.inf:
            return
        cell = self._cells.get(values)
        if cell is None:
            cell = self._new(values)
        cell[bisect_left(self._bounds, value)] += 1
        cell[_SUM] += value
        if value < cell[_MIN]:  # noqa: PLR1730 - min() takes three times as long
            cell[_MIN] = value
        if value > cell[_MAX]:  # noqa: PLR1730
            cell[_MAX] = value

    def metric(self, now_ns: int) -> Metric:
        """All series as they are now."""
        # A cell is copied in one step of the interpreter, so no count can be missing from its own sum.
        cells = [(values, cell.copy()) for values, cell in list(self._cells.items())]
        points = [
            HistogramDataPoint(
                attributes=_attributes(self._keys, values, self._fixed),
                start_time_unix_nano=self._began_ns,
                time_unix_nano=now_ns,
                count=int(sum(cell[:_MIN])),
                sum=cell[_SUM],
                bucket_counts=[int(count) for count in cell[:_MIN]],
                explicit_bounds=self._bounds,
                min=cell[_MIN],
                max=cell[_MAX],
            )
            for values, cell in cells
        ]
        data = HistogramData(points, AggregationTemporality.CUMULATIVE)
        return Metric(self.name, self.about, self.unit, data)

    def _new(self, values: tuple[Value, ...]) -> list[float]:
        if len(self._cells) >= MOST_SERIES:
            values = ()
        empty: list[float] = [0] * (len(self._bounds) + 1) + [math.inf, 0, 0]
        return self._cells.setdefault(values, empty)


def _attributes(
    keys: tuple[str, ...], values: tuple[Value, ...], fixed: Mapping[str, Value]
) -> dict[str, Value]:
    if len(values) != len(keys):
        return {**fixed, **_OVERFLOW}
    named = {key: value for key, value in zip(keys, values, strict=True) if value != ""}
    return {**fixed, **named}
