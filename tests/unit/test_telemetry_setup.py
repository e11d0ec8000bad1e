"""One process's tracing: own provider, destinations from the environment, no harm from a dead one."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from pydantic import ValidationError

from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.ids import GivenIds
from telemetry.otlp import OtlpTarget, target_from_environment, traces_are_off
from telemetry.setup import Telemetry, configure, open_store

ROOT = Path(__file__).parents[2]


class FakeCollector(TraceServiceServicer):
    """An OTLP/gRPC receiver on a free port that remembers what it got."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:  # noqa: N802
        self.requests.append(request)
        return ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(None)


@pytest.fixture(autouse=True)
def _no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    collector = FakeCollector()
    yield collector
    collector.stop()


@pytest.fixture
def config(tmp_path: Path) -> TelemetryConfig:
    return TelemetryConfig(store_path=tmp_path / "traces.db")


def record_request(telemetry: Telemetry) -> str:
    """A root with two children; returns the trace id."""
    with spans.recording(telemetry.tracer, "root", Context(), attributes={"kvorum.tenant": "t1"}) as root:
        for name in ("one", "two"):
            spans.finish(spans.start(telemetry.tracer, name, spans.below(root)))
        return spans.trace_id_hex(root)


def span_names(request: ExportTraceServiceRequest) -> list[str]:
    return [
        span.name for group in request.resource_spans for scope in group.scope_spans for span in scope.spans
    ]


def test_without_variables_spans_go_to_the_local_store_with_their_process(config: TelemetryConfig) -> None:
    telemetry = configure("kvorum.router", "router-7", config)
    trace_id = record_request(telemetry)
    assert telemetry.flush(10)
    found = open_store(config).trace(trace_id)
    assert [span.name for span in found] == ["root", "one", "two"]
    assert {span.parent_id for span in found[1:]} == {found[0].span_id}
    assert (found[0].service, found[0].instance) == ("kvorum.router", "router-7")
    assert found[0].resource["process.pid"] == os.getpid()
    assert found[0].resource["host.name"] == socket.gethostname()
    assert telemetry.counts()["store"].exported == 3
    telemetry.shutdown()


def test_a_grpc_collector_receives_the_same_spans_as_the_store(
    config: TelemetryConfig, collector: FakeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    both = config.model_copy(update={"store": "on"})
    telemetry = configure("kvorum.replica", "r0", both)
    trace_id = record_request(telemetry)
    assert telemetry.flush(10)
    telemetry.shutdown()

    received = {
        span.span_id.hex(): (
            span.name,
            span.trace_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
        )
        for request in collector.requests
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    }
    stored = {
        span.span_id: (span.name, span.trace_id, span.start_ns, span.end_ns)
        for span in open_store(both).trace(trace_id)
    }
    assert received == stored
    assert len(received) == 3
    resource = {item.key: item.value for item in collector.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"].string_value == "kvorum.replica"
    assert resource["service.instance.id"].string_value == "r0"


def test_an_http_collector_receives_the_spans(
    config: TelemetryConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[tuple[str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    telemetry = configure("kvorum.router", "r0", config)
    record_request(telemetry)
    assert telemetry.flush(10)
    telemetry.shutdown()
    server.shutdown()
    server.server_close()
    traces = [body for path, body in bodies if path == "/v1/traces"]
    assert {path for path, _ in bodies} == {"/v1/traces", "/v1/metrics"}
    assert sorted(
        name for body in traces for name in span_names(ExportTraceServiceRequest.FromString(body))
    ) == [
        "one",
        "root",
        "two",
    ]


def test_with_a_collector_the_store_is_left_alone(
    config: TelemetryConfig, collector: FakeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    telemetry = configure("kvorum.router", "r0", config)
    record_request(telemetry)
    telemetry.shutdown(10)
    assert set(telemetry.counts()) == {"otlp"}
    assert config.store_path is not None
    assert not config.store_path.exists()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_dead_collector_blocks_neither_spans_nor_flush_nor_shutdown_nor_the_store(
    protocol: str,
    config: TelemetryConfig,
    silent_port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    both = config.model_copy(update={"store": "on", "max_queued_spans": 512})
    telemetry = configure("kvorum.router", "r0", both)
    began = time.monotonic()
    trace_id = record_request(telemetry)
    assert not telemetry.flush(0.3)
    for _ in range(400):
        record_request(telemetry)
    telemetry.shutdown(0.3)
    assert time.monotonic() - began < 8, "the exporter's own patience is 10 s"
    counts = telemetry.counts()
    assert counts["otlp"].exported == 0
    assert counts["otlp"].dropped >= 400
    assert len(open_store(both).trace(trace_id)) == 3
    assert len(caplog.records) <= 2, "one about spans, one about metrics"


def test_a_refusing_port_is_logged_once_with_the_reason(
    config: TelemetryConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://user:secret@127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    telemetry = configure("kvorum.router", "r0", config)
    for _ in range(3):
        record_request(telemetry)
        assert telemetry.flush(20)
    telemetry.shutdown()
    assert telemetry.counts()["otlp"].failed == 9
    [message] = [  # an export of the test before may end in this one
        record.getMessage()
        for record in caplog.records
        if f"cannot export spans to http://127.0.0.1:{port} (OTLP grpc)" in record.getMessage()
    ]
    assert "UNAVAILABLE" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, OtlpTarget("grpc", "http://a:4317")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "  "}, None),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"},
            OtlpTarget("grpc", "http://b"),
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            OtlpTarget("http/protobuf", "http://a"),
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, OtlpTarget("grpc", "http://localhost:4317")),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, None),
        ({"OTEL_TRACES_EXPORTER": "zipkin", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, None),
    ],
)
def test_the_standard_variables_name_the_collector(env: dict[str, str], expected: OtlpTarget | None) -> None:
    assert target_from_environment(env) == expected


def test_exporter_none_switches_the_store_off_too_unless_asked_for(
    config: TelemetryConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert traces_are_off(os.environ)
    assert configure("s", "i", config).counts() == {}
    asked = configure("s", "i", config.model_copy(update={"store": "on"}))
    assert set(asked.counts()) == {"store"}
    asked.shutdown()


@pytest.mark.parametrize("how", ["config", "variable"])
def test_switched_off_nothing_is_recorded_but_the_callers_trace_is_passed_on(
    how: str, config: TelemetryConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    telemetry = configure("s", "i", config.model_copy(update={"enabled": how != "config"}))
    headers = [("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")]
    span = spans.start(telemetry.tracer, "root", spans.extract(headers))
    assert spans.inject(spans.below(span)) == headers
    spans.finish(span)
    assert telemetry.flush(1)
    assert telemetry.counts() == {}


def test_the_ratio_samples_new_traces_and_a_callers_decision_is_kept(config: TelemetryConfig) -> None:
    telemetry = configure("s", "i", config.model_copy(update={"sample_ratio": 0.0}))
    record_request(telemetry)
    assert telemetry.counts()["store"].accepted == 0
    sampled = spans.extract([("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")])
    spans.finish(spans.start(telemetry.tracer, "kept", sampled))
    assert telemetry.counts()["store"].accepted == 1
    telemetry.shutdown()


def test_ids_do_not_repeat_when_an_engine_seeds_the_global_generator(config: TelemetryConfig) -> None:
    import random

    telemetry = configure("s", "i", config.model_copy(update={"store": "off"}))
    ids = set()
    for _ in range(10):
        random.seed(0)
        ids.add(record_request(telemetry))
    assert len(ids) == 10


def test_a_span_is_recorded_under_the_ids_its_caller_derived(config: TelemetryConfig) -> None:
    config = config.model_copy(update={"store_max_age_s": 1e10})  # spans of 1970
    telemetry = configure("kvorum.shard", "s", config, {"kvorum.rank": 3})
    first, second = spans.elsewhere(0xA1, 0xB1), spans.elsewhere(0xA1, 0xB2)
    telemetry.record("child", second, first, start_ns=5, end_ns=9, attributes={"at": 1})
    telemetry.record("first", first, None, start_ns=1, end_ns=10, attributes={})
    assert telemetry.flush(10)
    found = open_store(config).trace(f"{0xA1:032x}")
    assert [(span.name, span.span_id, span.parent_id, span.start_ns, span.end_ns) for span in found] == [
        ("first", f"{0xB1:016x}", None, 1, 10),
        ("child", f"{0xB2:016x}", f"{0xB1:016x}", 5, 9),
    ]
    assert found[1].attributes == {"at": 1}
    assert found[1].resource["kvorum.rank"] == 3
    assert found[1].service == "kvorum.shard"
    telemetry.shutdown()


def test_given_ids_hold_for_their_block_and_their_thread() -> None:
    ids, elsewhere = GivenIds(), []
    with ids.given(0xA, 0xB):
        assert (ids.generate_trace_id(), ids.generate_span_id()) == (0xA, 0xB)
        thread = threading.Thread(target=lambda: elsewhere.append(ids.generate_trace_id()))
        thread.start()
        thread.join()
    assert elsewhere != [0xA]
    assert ids.generate_trace_id() != 0xA


def test_a_new_trace_is_sampled_whatever_span_happens_to_be_open(config: TelemetryConfig) -> None:
    telemetry = configure("kvorum.test", "t", config)
    dropped = NonRecordingSpan(SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(0)))
    with use_span(dropped):
        assert telemetry.samples(1, "x")
    telemetry.shutdown()


def test_silent_telemetry_records_nothing_and_samples_nothing() -> None:
    telemetry = Telemetry.silent()
    assert not telemetry.samples(1, "x")
    telemetry.record("x", spans.elsewhere(1, 2), None, start_ns=1, end_ns=2, attributes={})
    telemetry.shutdown()
    assert telemetry.counts() == {}


def test_malformed_exporter_settings_do_not_stop_the_process(
    config: TelemetryConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    telemetry = configure("kvorum.router", "r0", config)
    assert set(telemetry.counts()) == {"store"}
    assert "check OTEL_EXPORTER_OTLP_*" in caplog.text
    telemetry.shutdown()


def test_a_batch_larger_than_the_queue_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"max_batch_spans \(512\) must not exceed max_queued_spans \(10\)"
    ):
        TelemetryConfig(max_queued_spans=10)


def test_every_setting_has_a_description_for_its_flag() -> None:
    assert [name for name, field in TelemetryConfig.model_fields.items() if not field.description] == []


def run_script(code: str, *arguments: str) -> dict[str, object]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=60, check=True)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_ours_records_whether_it_comes_first_or_after_another_provider(tmp_path: Path) -> None:
    code = """
import json, sys
from pathlib import Path
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from telemetry.config import TelemetryConfig
from telemetry.setup import configure
other = TracerProvider()
if sys.argv[2] == "second":
    trace.set_tracer_provider(other)
telemetry = configure("s", "i", TelemetryConfig(store_path=Path(sys.argv[1])))
telemetry.tracer.start_span("x").end()
trace.get_tracer("elsewhere").start_span("y").end()
telemetry.flush(10)
globally_ours = trace.get_tracer_provider() is telemetry.provider
print(json.dumps({"ours": globally_ours, "exported": telemetry.counts()["store"].exported}))
"""
    assert run_script(code, str(tmp_path / "a.db"), "first") == {"ours": True, "exported": 2}
    assert run_script(code, str(tmp_path / "b.db"), "second") == {"ours": False, "exported": 1}


def test_a_process_that_just_ends_leaves_its_spans_in_the_store(tmp_path: Path) -> None:
    code = """
import json, sys
from pathlib import Path
from telemetry.config import TelemetryConfig
from telemetry.setup import configure
telemetry = configure("s", "i", TelemetryConfig(store_path=Path(sys.argv[1]), export_delay_ms=60_000))
span = telemetry.tracer.start_span("x")
span.end()
print(json.dumps({"trace": f"{span.get_span_context().trace_id:032x}"}))
"""
    result = run_script(code, str(tmp_path / "traces.db"))
    store = open_store(TelemetryConfig(store_path=tmp_path / "traces.db"))
    assert [span.name for span in store.trace(str(result["trace"]))] == ["x"]


def test_spans_of_a_forked_child_and_of_its_parent_are_all_kept_once(tmp_path: Path) -> None:
    code = """
import json, os, sys
from pathlib import Path
from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.setup import configure
telemetry = configure("s", "i", TelemetryConfig(store_path=Path(sys.argv[1])))
root = spans.start(telemetry.tracer, "root")
spans.finish(spans.start(telemetry.tracer, "before", spans.below(root)))
telemetry.flush(10)
spans.finish(spans.start(telemetry.tracer, "waiting", spans.below(root)))
child = os.fork()
spans.finish(spans.start(telemetry.tracer, "after", spans.below(root)))
if child == 0:
    os._exit(0 if telemetry.flush(10) else 1)
_, status = os.waitpid(child, 0)
spans.finish(root)
telemetry.flush(10)
print(json.dumps({"trace": spans.trace_id_hex(root), "child": status}))
"""
    result = run_script(code, str(tmp_path / "traces.db"))
    assert result["child"] == 0
    store = open_store(TelemetryConfig(store_path=tmp_path / "traces.db"))
    names = sorted(span.name for span in store.trace(str(result["trace"])))
    assert names == ["after", "after", "before", "root", "waiting"]


def test_tracing_without_a_collector_imports_no_otlp_exporter(tmp_path: Path) -> None:
    code = """
import json, sys
from pathlib import Path
from telemetry.config import TelemetryConfig
from telemetry.setup import configure
configure("s", "i", TelemetryConfig(store_path=Path(sys.argv[1])))
heavy = ("opentelemetry.exporter", "grpc", "ray", "torch", "requests")
print(json.dumps({"imported": [name for name in heavy if name in sys.modules]}))
"""
    assert run_script(code, str(tmp_path / "traces.db")) == {"imported": []}
