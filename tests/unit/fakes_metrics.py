"""Metrics kept in memory, as a collector would get them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import (
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.resources import Resource

from telemetry.metrics import Meters, Target


class FakeCollector(MetricExporter):
    """Remembers what it was told last. `meters` tells it when asked for a value, and never else."""

    def __init__(self) -> None:
        super().__init__()
        self.told: MetricsData | None = None
        self.meters = Meters.to(Resource.get_empty(), Target(self, "a test", math.inf))

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        encode_metrics(metrics_data)  # raises what an exporter would
        self.told = metrics_data
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        """Nothing to end."""

    def metrics(self) -> dict[str, Metric]:
        """All of them as they are now, by name."""
        self.meters.flush(10)
        assert self.told is not None
        scopes = [scope for each in self.told.resource_metrics for scope in each.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def points(self, name: str) -> list[Any]:
        metric = self.metrics().get(name)
        return [] if metric is None else list(metric.data.data_points)

    def value(self, name: str, **attributes: Any) -> Any:
        """The only point with exactly these attributes: a number, or a histogram's point."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        found = {tuple((point.attributes or {}).items()): point for point in self.points(name)}
        (point,) = [point for labels, point in found.items() if dict(labels) == wanted]
        return point if isinstance(point, HistogramDataPoint) else point.value

    async def shows(self, expected: Any, name: str, **attributes: str) -> None:
        """Wait for a gauge's value, collected in a thread as exporters do; fail when it does not come."""
        found: Any = None
        for _ in range(500):
            points = await asyncio.to_thread(self.points, name)
            found = [p.value for p in points if attributes.items() <= dict(p.attributes or {}).items()]
            if found == expected:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} {attributes}: {found}, not {expected}")
