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

logger = logging.getLogger(__name__)

_SCOPE = "kvorum"


class Meters:
    """The metrics of this process. Hold it and pass it on: nothing looks it up globally."""

    def __init__(self, meter: Meter, provider: MeterProvider | None = None) -> None:
        self.meter, self._provider = meter, provider

    @classmethod
    def silent(cls) -> Self:
        """Records nothing."""
        return cls(NoOpMeter(_SCOPE))

    @classmethod
    def to(cls, reader: MetricReader, resource: Resource) -> Self:
        """Read by `reader`."""
        provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        return cls(provider.get_meter(_SCOPE), provider)

    @classmethod
    def from_environment(cls, env: Mapping[str, str], resource: Resource) -> Self:
        """To the collector of OTEL_METRICS_EXPORTER and OTEL_EXPORTER_OTLP_*; silent without one.

        A value that cannot be honoured is logged, and means no collector.
        """
        asked = env.get("OTEL_METRICS_EXPORTER", "").strip().lower()
        endpoint = env.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        if asked not in ("", "otlp") or not (endpoint or asked):
            if asked not in ("", "none"):
                logger.warning("OTEL_METRICS_EXPORTER=%s is not supported: use otlp or none", asked)
            return cls.silent()
        try:
            return cls.to(PeriodicExportingMetricReader(_exporter(env)), resource)
        except Exception as error:  # the library has no common error for malformed OTEL_* values
            logger.warning("cannot send metrics, check OTEL_EXPORTER_OTLP_*: %s", error)
            return cls.silent()

    def shutdown(self, timeout_s: float) -> None:
        """Export once more, then stop. Blocks for at most about `timeout_s`. Idempotent."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.shutdown(timeout_millis=timeout_s * 1e3)


def _exporter(env: Mapping[str, str]) -> MetricExporter:
    protocol = env.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    # Imported here: 0.1 s that a process without a collector need not spend.
    if (protocol or "grpc") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter as GrpcExporter,
        )

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
        OTLPMetricExporter as HttpExporter,
    )

    return HttpExporter()
