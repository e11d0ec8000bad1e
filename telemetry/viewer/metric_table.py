"""The last metrics that each process of the cluster has sent, bounded, and forgotten when it falls silent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    DataPointFlags,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
)

from telemetry import spans
from telemetry.record import SERVICE_INSTANCE, SERVICE_NAME
from telemetry.viewer.decode import attributes_of
from telemetry.viewer.prometheus import Exposition, family_name, label_text, number_text

_LABELS: Final = (
    ("service", SERVICE_NAME),
    ("instance", SERVICE_INSTANCE),
    ("replica", spans.REPLICA),
    ("rank", spans.RANK),
    ("epoch", spans.EPOCH),
    ("host_name", "host.name"),
)
"""What of a process's resource stands on its series; together they name the process."""
_LIFE: Final = ("host.name", "process.pid")
"""Changed, they tell that another process goes by the same labels: a restart, after which all counts anew."""
_CUMULATIVE: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
_MAX_LABEL_CHARS: Final = 256
_MAX_LABELS_CHARS: Final = 2048
_MOST_BUCKETS: Final = 200
_MOST_POINTS: Final = 20_000
"""Of one metric in one export."""
_MOST_PROCESSES: Final = 1000
_MISSED: Final = 3
"""A process that reports seldom is silent when it has missed so many reports."""
_MAX_SILENCE_S: Final = 600.0
_LOOK_S: Final = 1.0

_Labels = tuple[tuple[str, str], ...]
_Point = NumberDataPoint | HistogramDataPoint


class _RefusedError(Exception):
    """Why a metric, or a point of one, is not kept."""


@dataclass(frozen=True, slots=True)
class Intake:
    """Points kept and refused, and why the last of these was."""

    accepted: int
    rejected: int
    reason: str = ""


@dataclass(slots=True)
class _Series:
    """One metric of one process: its lines by labels. A point of a histogram is several lines."""

    source: tuple[str, str]  # instrumentation scope and name: two must not share a family
    kind: str
    about: str
    heard: float = 0.0
    time_ns: int = 0
    points: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.points.values()))


@dataclass(slots=True)
class _Process:
    labels: _Labels
    life: tuple[str, ...]
    heard: float
    interval_s: float = 0.0
    families: dict[str, _Series] = field(default_factory=dict)


class MetricTable:
    """Series by process. Safe to share between threads.

    Sums and histograms have to be cumulative, as OpenTelemetry's exporters send them unless told otherwise.
    What a process no longer reports of a metric goes with that metric's next report.

    Args:
        max_series: lines of the exposition; points beyond that are refused.
        silence_s: a process, or a metric of one, that was not reported for so long is forgotten; later when
            its process reports seldom.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, max_series: int, silence_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_series = max_series
        self._silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._processes: dict[_Labels, _Process] = {}
        self._kinds: dict[str, str] = {}
        self._size = 0
        self._looked = -math.inf

    @property
    def processes(self) -> int:
        """How many are known."""
        return len(self._processes)

    @property
    def series(self) -> int:
        """Lines of the exposition."""
        return self._size

    def take(self, request: ExportMetricsServiceRequest) -> Intake:
        """Keep what is valid in an export."""
        accepted = rejected = 0
        reason = ""
        with self._lock:
            self._forget()
            for group in request.resource_metrics:
                process = self._process(group)
                for scope in group.scope_metrics:
                    for metric in scope.metrics:
                        taken, offered, why = self._metric(process, scope.scope.name, metric)
                        accepted, rejected = accepted + taken, rejected + offered - taken
                        reason = why or reason
        return Intake(accepted, rejected, reason)

    def expose(self, exposition: Exposition) -> None:
        """Add all that is known to an exposition."""
        with self._lock:
            self._forget()
            for process in self._processes.values():
                for name, series in process.families.items():
                    exposition.add(
                        name, series.kind, series.about, chain.from_iterable(series.points.values())
                    )

    def _process(self, group: ResourceMetrics) -> _Process | None:
        resource = attributes_of(group.resource.attributes, _MAX_LABEL_CHARS)
        labels, life = _labels(resource), tuple(str(resource.get(name, "")) for name in _LIFE)
        now, known = self._clock(), self._processes.get(labels)
        if known is not None and known.life == life:
            known.interval_s = max(now - known.heard, known.interval_s / 2)
            known.heard = now
            return known
        self._drop(labels)
        if len(self._processes) >= _MOST_PROCESSES:
            return None
        return self._processes.setdefault(labels, _Process(labels, life, now))

    def _metric(self, process: _Process | None, scope: str, metric: Metric) -> tuple[int, int, str]:
        """Points taken, points offered, and why one was not taken."""
        points = _points(metric)
        try:
            if process is None:
                raise _RefusedError(f"{_MOST_PROCESSES} processes report already")
            kind = _kind(metric)
            name = family_name(metric.name, metric.unit, counter=kind == "counter")
            series = self._series(process, name, kind, (scope, metric.name[:_MAX_LABEL_CHARS]))
        except _RefusedError as error:
            return 0, len(points), f"{metric.name[:_MAX_LABEL_CHARS]}: {error}" if points else ""
        if not points:
            return 0, 0, ""
        series.about, series.heard = metric.description, process.heard
        taken, reason = self._fill(series, name, process.labels, points)
        if series.points:
            process.families[name], self._kinds[name] = series, kind
        else:
            process.families.pop(name, None)
        return taken, len(points), f"{name}: {reason}" if reason else ""

    def _series(self, process: _Process, name: str, kind: str, source: tuple[str, str]) -> _Series:
        if not name:
            raise _RefusedError("the name has nothing that Prometheus allows")
        if self._kinds.get(name, kind) != kind:
            raise _RefusedError(f"it is reported as a {self._kinds[name]} elsewhere, and as a {kind} here")
        series = process.families.get(name) or _Series(source, kind, "")
        if series.source != source:
            raise _RefusedError(f"{series.source} of the same process is exposed as {name} already")
        return series

    def _fill(self, series: _Series, name: str, labels: _Labels, points: Sequence[_Point]) -> tuple[int, str]:
        time_ns = max(point.time_unix_nano for point in points)
        self._size -= len(series)
        if time_ns != series.time_ns:  # else a part of the same report, which came in several exports
            series.points, series.time_ns = {}, time_ns
        self._size += len(series)
        taken, reason = 0, "" if len(points) <= _MOST_POINTS else f"more than {_MOST_POINTS} points"
        for point in points[:_MOST_POINTS]:
            text = label_text(labels, attributes_of(point.attributes, _MAX_LABEL_CHARS))
            try:
                lines = _lines(name, text, point)
            except _RefusedError as error:
                reason = str(error)
                continue
            more = len(lines) - len(series.points.get(text, ()))
            if self._size + more > self._max_series:
                reason = f"{self._max_series} series are kept already"
                continue
            series.points[text] = lines
            if not lines:
                del series.points[text]
            self._size += more
            taken += 1
        return taken, reason

    def _forget(self) -> None:
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        for labels, process in list(self._processes.items()):
            patience = min(max(self._silence_s, _MISSED * process.interval_s), _MAX_SILENCE_S)
            if now - process.heard > patience:
                self._drop(labels)
                continue
            for name, series in list(process.families.items()):
                if now - series.heard > patience:
                    self._size -= len(process.families.pop(name))
        self._kinds = {
            name: series.kind for one in self._processes.values() for name, series in one.families.items()
        }

    def _drop(self, labels: _Labels) -> None:
        process = self._processes.pop(labels, None)
        if process is not None:
            self._size -= sum(map(len, process.families.values()))


def _labels(resource: Mapping[str, Any]) -> _Labels:
    if not resource.get(SERVICE_INSTANCE):
        place = ":".join(str(resource[name]) for name in _LIFE if name in resource)
        resource = {**resource, SERVICE_INSTANCE: place or "unknown"}
    return tuple((label, str(resource[name])) for label, name in _LABELS if name in resource)


def _points(metric: Metric) -> Sequence[Any]:
    kind = metric.WhichOneof("data")
    return getattr(metric, kind).data_points if kind else ()


def _kind(metric: Metric) -> str:
    data = metric.WhichOneof("data")
    if data == "gauge":
        return "gauge"
    if data == "sum" and metric.sum.aggregation_temporality == _CUMULATIVE:
        return "counter" if metric.sum.is_monotonic else "gauge"
    if data == "histogram" and metric.histogram.aggregation_temporality == _CUMULATIVE:
        return "histogram"
    raise _RefusedError(
        "only gauges, and sums and histograms (with explicit buckets) of cumulative temporality, are taken"
    )


def _lines(name: str, labels: str, point: _Point) -> list[str]:
    """The exposition of a point; none of one that says there is no value any more."""
    if len(labels) > _MAX_LABELS_CHARS:
        raise _RefusedError(f"its labels are longer than {_MAX_LABELS_CHARS} characters")
    if point.flags & DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK:
        return []
    if isinstance(point, HistogramDataPoint):
        return _histogram(name, labels, point)
    kind = point.WhichOneof("value")
    if kind is None:
        raise _RefusedError("a point has no value")
    return [f"{name}{{{labels}}} {number_text(point.as_int if kind == 'as_int' else point.as_double)}"]


def _histogram(name: str, labels: str, point: HistogramDataPoint) -> list[str]:
    bounds, counts = list(point.explicit_bounds), list(point.bucket_counts) or [point.count]
    ordered = all(low < high for low, high in pairwise(bounds)) and all(map(math.isfinite, bounds))
    if len(counts) != len(bounds) + 1 or len(counts) > _MOST_BUCKETS or not ordered:
        raise _RefusedError(
            f"bounds of buckets must increase, {_MOST_BUCKETS} at most, one count more than bounds"
        )
    lines, total = [], 0
    for bound, count in zip((*map(number_text, bounds), "+Inf"), counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
    if point.HasField("sum"):
        lines.append(f"{name}_sum{{{labels}}} {number_text(point.sum)}")
    return [*lines, f"{name}_count{{{labels}}} {total}"]
