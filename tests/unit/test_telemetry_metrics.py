"""Where metrics go: to the viewer, to the collector of the OTEL_* variables, and no harm from a dead one."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.context import Context
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)

from telemetry import spans
from telemetry.config import TelemetryConfig, ViewerTarget
from telemetry.setup import Telemetry, configure


class FakeViewer(MetricsServiceServicer):
    """An OTLP/gRPC receiver on a free port; remembers requests and the credentials they came with."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.credentials: list[object] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        add_MetricsServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # noqa: N802
        self, request: ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> ExportMetricsServiceResponse:
        self.requests.append(request)
        self.credentials.append(dict(context.invocation_metadata()).get("authorization"))
        return ExportMetricsServiceResponse()

    def names(self) -> set[str]:
        return {
            metric.name
            for request in self.requests
            for each in request.resource_metrics
            for scope in each.scope_metrics
            for metric in scope.metrics
        }

    def stop(self) -> None:
        self._server.stop(None)


@pytest.fixture(autouse=True)
def _no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def viewer() -> Iterator[FakeViewer]:
    viewer = FakeViewer()
    yield viewer
    viewer.stop()


def a_process(address: str, token: str = "") -> Telemetry:
    config = TelemetryConfig(store="off", viewer=ViewerTarget(address=address, token=token))
    return configure("kvorum.router", "router-7", config)


def test_the_viewer_is_told_who_speaks_and_by_which_token(viewer: FakeViewer) -> None:
    telemetry = a_process(viewer.address, "s3cret")
    took = telemetry.meters.histogram("took", "s", "about", bounds=(1.0,))
    took.record(0.5)
    telemetry.meters.flush(5)
    telemetry.shutdown()
    assert {"took", "process.memory.usage"} <= viewer.names()
    assert set(viewer.credentials) == {"Bearer s3cret"}
    resource = viewer.requests[0].resource_metrics[0].resource
    told = {item.key: item.value.string_value for item in resource.attributes}
    assert (told["service.name"], told["service.instance.id"]) == ("kvorum.router", "router-7")


def test_the_last_figures_are_sent_at_shutdown(viewer: FakeViewer) -> None:
    telemetry = a_process(viewer.address)
    telemetry.meters.counter("requests", "{request}", "about").add(5)
    telemetry.shutdown(5)
    (metric,) = [
        metric
        for scope in viewer.requests[-1].resource_metrics[0].scope_metrics
        for metric in scope.metrics
        if metric.name == "requests"
    ]
    assert metric.sum.data_points[0].as_int == 5


def test_viewer_and_collector_each_get_all_of_them(
    viewer: FakeViewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = FakeViewer()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://{collector.address}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    telemetry = a_process(viewer.address)
    telemetry.meters.histogram("took", "s", "about", bounds=(1.0,)).record(0.5)
    telemetry.meters.counter("requests", "{request}", "about").add(5)
    telemetry.shutdown(5)
    collector.stop()
    assert {"took", "requests"} <= viewer.names()
    assert {"took", "requests"} <= collector.names()


@pytest.mark.parametrize("how", ["silent", "refusing"])
def test_a_dead_viewer_costs_no_more_than_a_line_in_the_log(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if how == "silent":
            listener.listen()
        telemetry = a_process(f"127.0.0.1:{listener.getsockname()[1]}", "s3cret")
        requests = telemetry.meters.counter("requests", "{request}", "about")
        began = time.monotonic()
        for _ in range(1000):
            requests.add(1)
        with spans.recording(telemetry.tracer, "x", Context()):
            pass
        assert time.monotonic() - began < 1, "recording waits for nobody"
        telemetry.meters.flush(3)
        telemetry.meters.flush(3)
        began = time.monotonic()
        telemetry.shutdown(0.5)
        assert time.monotonic() - began < 5
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1, told
    assert "cannot send metrics to the viewer" in told[0]
    assert "s3cret" not in told[0]
    assert "\n" not in told[0]


def test_the_fate_of_spans_and_callers_malformed_headers_are_metrics(viewer: FakeViewer) -> None:
    telemetry = a_process(viewer.address)
    spans.extract([("traceparent", "nonsense")])
    telemetry.shutdown(5)
    assert "kvorum.telemetry.malformed" in viewer.names()


def test_without_a_destination_nothing_is_kept_for_one() -> None:
    telemetry = configure("s", "i", TelemetryConfig(store="off"))
    assert not telemetry.meters.sent
    telemetry.meters.counter("requests", "{request}", "about").add(1)
    telemetry.meters.flush(1)
    telemetry.shutdown()


def test_a_token_is_in_no_text_of_the_configuration() -> None:
    config = TelemetryConfig(viewer=ViewerTarget(address="h:1", token="s3cret"))
    assert "s3cret" not in repr(config) + str(config)
    assert TelemetryConfig.model_validate(config.model_dump(mode="json")) == config
