"""Metrics of one process: a meter, and the collector that the standard OTEL_* variables name, if any.

Without a collector nothing is kept: instruments are then no-ops.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Self

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from telemetry.otlp import Protocol, target_from_environment

logger = logging.getLogger(__name__)

SCOPE = "kvorum"
_LEAST_S = 0.1


class Meters:
    """The metrics of this process. Hold it and pass it on: nothing looks it up globally."""

    def __init__(self, meter: Meter, provider: MeterProvider | None = None) -> None:
        self.meter, self._provider = meter, provider

    @classmethod
    def silent(cls) -> Self:
        """Records nothing."""
        return cls(NoOpMeter(SCOPE))

    @classmethod
    def to(cls, reader: MetricReader, resource: Resource) -> Self:
        """Read by `reader`."""
        provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        return cls(provider.get_meter(SCOPE), provider)

    @classmethod
    def from_environment(cls, env: Mapping[str, str], resource: Resource) -> Self:
        """To the collector of OTEL_METRICS_EXPORTER and OTEL_EXPORTER_OTLP_*; silent without one.

        A value that cannot be honoured is logged, and means no collector.
        """
        target = target_from_environment(env, "METRICS")
        if target is None:
            return cls.silent()
        try:
            return cls.to(PeriodicExportingMetricReader(_exporter(target.protocol)), resource)
        except Exception as error:  # the library has no common error for malformed OTEL_* values
            logger.warning("cannot send metrics to %s, check OTEL_EXPORTER_OTLP_*: %s", target, error)
            return cls.silent()

    def shutdown(self, timeout_s: float) -> None:
        """Export once more, then stop. Blocks for at most about `timeout_s`; never raises. Idempotent."""
        provider, self._provider = self._provider, None
        if provider is None:
            return
        try:
            provider.shutdown(timeout_millis=max(timeout_s, _LEAST_S) * 1e3)
        except Exception as error:  # what the library raises when a reader is too late
            logger.warning("the last metrics were not sent: %s", error)


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
