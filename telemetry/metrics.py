"""Metrics of one process, and where they go: to the collector that the standard OTEL_* variables name, and to
the cluster's viewer. Each is served by a thread of its own; without either nothing is kept.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from opentelemetry.metrics import Meter, NoOpMeter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from telemetry.config import ViewerTarget
from telemetry.otlp import Protocol, hush, reasons, target_from_environment
from telemetry.tally import Counter, Histogram, Value

logger = logging.getLogger(__name__)

SCOPE = "kvorum"

Reading = tuple[float, Mapping[str, Value]]
"""A gauge's value and its attributes."""

_LEAST_S = 0.1
_LOG_INTERVAL_S = 60.0
_VIEWER_EVERY_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Target:
    """Who is told, and every how many seconds; None: as OTEL_METRIC_EXPORT_INTERVAL says.

    `name` is for messages.
    """

    exporter: MetricExporter
    name: str
    every_s: float | None = None


class Meters:
    """The metrics of this process. Hold it and pass it on: nothing looks it up globally."""

    def __init__(self, meter: Meter, provider: MeterProvider | None = None) -> None:
        self._meter, self._provider = meter, provider
        self._histograms: list[Histogram] = []

    @classmethod
    def silent(cls) -> Self:
        """Sends nothing."""
        return cls(NoOpMeter(SCOPE))

    @classmethod
    def to(cls, resource: Resource, *targets: Target) -> Self:
        """Sent to each of these."""
        meters = cls.silent()
        readers = [
            PeriodicExportingMetricReader(
                _Outlet(target.exporter, meters._histograms, target.name),
                None if target.every_s is None else target.every_s * 1e3,
            )
            for target in targets
        ]
        provider = MeterProvider(readers, resource, shutdown_on_exit=False)
        meters._meter, meters._provider = provider.get_meter(SCOPE), provider
        meters.gauge("process.memory.usage", "By", "memory of this process in RAM", _resident)
        return meters

    @classmethod
    def configured(cls, env: Mapping[str, str], resource: Resource, viewer: ViewerTarget | None) -> Self:
        """To the collector of OTEL_METRICS_EXPORTER and OTEL_EXPORTER_OTLP_*, and to the viewer.

        What cannot be honoured is logged and left out.
        """
        wanted: list[tuple[str, float | None, Callable[[], MetricExporter]]] = []
        if (target := target_from_environment(env, "METRICS")) is not None:
            wanted.append((str(target), None, partial(_exporter, target.protocol)))
        if viewer is not None:
            name = f"the viewer at {viewer.address}"
            wanted.append((name, _VIEWER_EVERY_S, partial(_push_exporter, viewer)))
        targets = []
        for name, every_s, make in wanted:
            try:
                targets.append(Target(make(), name, every_s))
            except Exception as error:  # the library has no common error for malformed OTEL_* values
                logger.warning("cannot send metrics to %s, check OTEL_EXPORTER_OTLP_*: %s", name, error)
        return cls.to(resource, *targets) if targets else cls.silent()

    @property
    def sent(self) -> bool:
        """Whether they go anywhere."""
        return self._provider is not None

    def counter(
        self,
        name: str,
        unit: str,
        about: str,
        *,
        keys: Sequence[str] = (),
        fixed: Mapping[str, Value] | None = None,
    ) -> Counter:
        """A counter; see `Counter`."""
        made = Counter(keys, fixed)
        self._meter.create_observable_counter(name, [made.observe], unit, about)
        return made

    def histogram(
        self,
        name: str,
        unit: str,
        about: str,
        *,
        bounds: Sequence[float],
        keys: Sequence[str] = (),
        fixed: Mapping[str, Value] | None = None,
    ) -> Histogram:
        """A histogram; see `Histogram`."""
        made = Histogram(name, unit, about, bounds=bounds, keys=keys, fixed=fixed)
        self._histograms.append(made)
        return made

    def gauge(self, name: str, unit: str, about: str, read: Callable[[], Iterable[Reading]]) -> None:
        """A value looked up when it is wanted, in an exporter's thread, so not in what a loop changes."""
        self._meter.create_observable_gauge(name, [lambda _: _observations(read())], unit, about)

    def total(self, name: str, unit: str, about: str, read: Callable[[], Iterable[Reading]]) -> None:
        """The same of a sum that only grows and is kept elsewhere."""
        self._meter.create_observable_counter(name, [lambda _: _observations(read())], unit, about)

    def flush(self, timeout_s: float) -> None:
        """Export now. Blocks for at most about `timeout_s`; never raises."""
        if self._provider is not None:
            try:
                self._provider.force_flush(timeout_s * 1e3)
            except Exception as error:  # what the library raises when a reader is too late
                logger.warning("metrics were not sent: %s", error)

    def shutdown(self, timeout_s: float) -> None:
        """Export once more, then stop. Blocks for at most about `timeout_s`; never raises. Idempotent."""
        provider, self._provider = self._provider, None
        if provider is None:
            return
        try:
            provider.shutdown(timeout_millis=max(timeout_s, _LEAST_S) * 1e3)
        except Exception as error:
            logger.warning("the last metrics were not sent: %s", error)


class _Outlet(MetricExporter):
    """An exporter that gets our histograms besides what the SDK collected.

    It complains once a minute, and raises nothing.
    """

    def __init__(self, inner: MetricExporter, histograms: Sequence[Histogram], target: str) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)
        self._inner, self._histograms, self._target = inner, histograms, target
        self._next_log = -math.inf
        hush()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        reasons.forget()
        try:
            result = self._inner.export(self._with_histograms(metrics_data), timeout_millis)
            reason = reasons.last
        except Exception as error:  # whatever an exporter raises must not end its thread
            result, reason = MetricExportResult.FAILURE, f"{_named(error)}"
        if result is not MetricExportResult.SUCCESS and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_INTERVAL_S
            logger.warning("cannot send metrics to %s: %s; serving goes on", self._target, reason)
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        self._inner.shutdown(timeout_millis)

    def _with_histograms(self, collected: MetricsData) -> MetricsData:
        """Into the one scope there is: the library's encoder keeps the last of several with one name."""
        now_ns = time.time_ns()
        made = [histogram.metric(now_ns) for histogram in list(self._histograms)]
        (resource,) = collected.resource_metrics
        (scope,) = resource.scope_metrics
        told = [*scope.metrics, *(metric for metric in made if metric.data.data_points)]
        return MetricsData([replace(resource, scope_metrics=[replace(scope, metrics=told)])])


def _named(error: Exception) -> str:
    """On one line; gRPC's own text is a dozen of them."""
    details = getattr(error, "details", None)
    text = details() if callable(details) else str(error)
    return f"{type(error).__name__.lstrip('_')}: {text}"


def _observations(readings: Iterable[Reading]) -> list[Observation]:
    return [Observation(value, dict(attributes)) for value, attributes in readings]


def _resident() -> list[Reading]:
    """Linux tells in pages; elsewhere there is no such file, and no such metric."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return []
    return [(pages * _PAGE_BYTES, {})]


def _exporter(protocol: Protocol) -> MetricExporter:
    # Imported here: 0.1 s that a process without a collector need not spend.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter as GrpcExporter,
        )

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
        OTLPMetricExporter as HttpExporter,
    )

    return HttpExporter()


def _push_exporter(viewer: ViewerTarget) -> MetricExporter:
    from telemetry.push import PushExporter  # noqa: PLC0415 - as above

    return PushExporter(viewer)
