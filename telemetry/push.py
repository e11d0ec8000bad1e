"""Metrics to the viewer of a cluster.

Not through the library's exporter: that one obeys the OTEL_* variables, which are about the user's own
collector, and repeats a call that failed. Here the next push says all that the lost one would have said.
"""

from __future__ import annotations

from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from telemetry.config import ViewerTarget

EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"

_TIMEOUT_S = 2.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class PushExporter(MetricExporter):
    """Cumulative metrics over OTLP/gRPC, each push bounded by two seconds.

    `export` raises grpc.RpcError when the viewer does not take them.
    """

    def __init__(self, viewer: ViewerTarget) -> None:
        super().__init__()
        self._metadata = (("authorization", f"Bearer {viewer.token}"),) if viewer.token else ()
        self._channel = grpc.insecure_channel(viewer.address, _OPTIONS)
        self._call: Any = self._channel.unary_unary(
            EXPORT,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=ExportMetricsServiceResponse.FromString,
        )

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        timeout_s = min(timeout_millis / 1e3, _TIMEOUT_S)
        self._call(encode_metrics(metrics_data), timeout=timeout_s, metadata=self._metadata)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        self._channel.close()
