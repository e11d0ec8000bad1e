"""One Prometheus text for the whole cluster: right names, bounded series, silent processes forgotten."""

import math
import re
from collections.abc import Callable

import pytest
from helpers_viewer import a_gauge, metrics
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.viewer.metric_table import MetricTable
from telemetry.viewer.prometheus import Exposition, family_name, label_text

ROUTER = {"service.name": "kvorum.router", "service.instance.id": "router-0", "process.pid": "7"}
CUMULATIVE, DELTA = 2, 1


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_table(max_series: int = 1000, clock: Callable[[], float] | None = None) -> MetricTable:
    return MetricTable(max_series=max_series, silence_s=60, clock=clock or Clock())


def text_of(table: MetricTable) -> str:
    exposition = Exposition()
    table.expose(exposition)
    assert exposition.refused == 0
    return exposition.text()


def samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels; fails on what Prometheus would not read, or finds twice."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = f"{sample.name}{sorted(sample.labels.items())}"
            assert key not in found, f"{key} stands twice"
            found[key] = sample.value
    assert len(re.findall(r"^# TYPE (\S+)", text, re.M)) == len(set(re.findall(r"^# TYPE (\S+)", text, re.M)))
    return found


def a_histogram(
    name: str, bounds: list[float], counts: list[int], *, temporality: int = CUMULATIVE
) -> Metric:
    metric = Metric(name=name, unit="s")
    metric.histogram.aggregation_temporality = temporality
    metric.histogram.data_points.add(
        explicit_bounds=bounds, bucket_counts=counts, count=sum(counts), sum=1.5, time_unix_nano=1
    )
    return metric


def test_names_are_those_of_the_opentelemetry_exporter_for_prometheus() -> None:
    instruments = [
        ("kvorum.router.ttft", "s"), ("kvorum.router.requests", "{request}"), ("hw.power", "W"),
        ("gen_ai.server.request.duration", "s"), ("e-f.g", "odd unit"),
        ("system.memory.usage", "By"), ("kvorum.replica.kv.usage", "1"), ("hw.temperature", "Cel"),
        ("a.total", ""), ("b_seconds", "s"), ("c", "By/s"), ("d", "{token}/s"),
    ]  # fmt: skip
    registry, memory = CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider(
        [
            PrometheusMetricReader(registry=registry, scope_info_enabled=False, disable_target_info=True),
            memory,
        ],
        Resource.create(ROUTER),
    )
    meter = provider.get_meter("kvorum")
    for name, unit in instruments:
        meter.create_counter(f"count.{name}", unit).add(3, {"k.x": True, "y": 'a"\n\\'})
        meter.create_gauge(f"gauge.{name}", unit).set(0.5, {"k.x": "v"})
        meter.create_up_down_counter(f"updown.{name}", unit).add(-2)
        meter.create_histogram(f"histogram.{name}", unit).record(0.2)
    theirs = set(re.findall(r"^# TYPE (\S+ \S+)", generate_latest(registry).decode(), re.M))
    data = memory.get_metrics_data()
    assert data is not None
    table = a_table()
    taken = table.take(ExportMetricsServiceRequest.FromString(encode_metrics(data).SerializeToString()))
    assert taken.rejected == 0
    ours = text_of(table)
    assert set(re.findall(r"^# TYPE (\S+ \S+)", ours, re.M)) == theirs
    found = samples(ours)
    key = [("instance", "router-0"), ("k_x", "true"), ("service", "kvorum.router"), ("y", 'a"\n\\')]
    assert found[f"count_kvorum_router_ttft_seconds_total{key}"] == 3


def test_labels_say_whose_a_series_is_and_attributes_never_hide_that() -> None:
    odd = {"service": "x", "le": "y", "a.b": 1, "a_b": 2, "9": "n", "__name__": "z", "": "e", "é": "u"}
    text = label_text([("service", "s")], odd)
    assert text == 'service="s",_name_="z",a_b="1;2",exported_le="y",exported_service="x"'
    (only,) = text_string_to_metric_families(f"m{{{text}}} 1\n")
    assert only.samples[0].labels["service"] == "s"
    assert only.samples[0].labels["a_b"] == "1;2"


@given(
    name=st.text(max_size=20), unit=st.text(max_size=8), key=st.text(max_size=8), value=st.text(max_size=20)
)
def test_whatever_a_metric_is_called_prometheus_can_read_the_text(
    name: str, unit: str, key: str, value: str
) -> None:
    table = a_table()
    metric = Metric(name=name, unit=unit, description=value)
    metric.gauge.data_points.add(as_double=math.nan).attributes.add(key=key).value.string_value = value
    taken = table.take(metrics({"service.name": value}, metric))
    assert (taken.accepted, taken.rejected) == ((1, 0) if family_name(name, unit, counter=False) else (0, 1))
    assert len(samples(text_of(table))) == taken.accepted


def test_a_gauge_of_something_gone_disappears_with_the_next_report() -> None:
    table = a_table()
    table.take(metrics(ROUTER, a_gauge("kv", {"replica-0": 1, "replica-1": 2}, time_ns=1)))
    table.take(metrics(ROUTER, a_gauge("kv", {"replica-0": 3}, time_ns=2)))
    assert list(samples(text_of(table)).values()) == [3]
    assert table.series == 1


def test_a_report_that_comes_in_several_exports_is_whole() -> None:
    table = a_table()
    table.take(metrics(ROUTER, a_gauge("kv", {"a": 1}, time_ns=5)))
    table.take(metrics(ROUTER, a_gauge("kv", {"b": 2}, time_ns=5)))
    assert sorted(samples(text_of(table)).values()) == [1, 2]


def test_a_process_that_restarts_takes_the_place_of_the_one_before() -> None:
    table = a_table()
    table.take(metrics(ROUTER, a_gauge("old", {"a": 1})))
    table.take(metrics({**ROUTER, "process.pid": "8"}, a_gauge("new", {"a": 2})))
    assert list(samples(text_of(table)).values()) == [2]
    assert (table.processes, table.series) == (1, 1)


def test_a_process_is_forgotten_a_minute_after_its_last_report() -> None:
    clock = Clock()
    table = a_table(clock=clock)
    table.take(metrics(ROUTER, a_gauge("kv", {"a": 1})))
    clock.now += 59
    assert samples(text_of(table))
    clock.now += 3
    assert text_of(table) == ""
    assert (table.processes, table.series) == (0, 0)
    other = Metric(name="kv")
    other.sum.aggregation_temporality, other.sum.is_monotonic = CUMULATIVE, False
    other.sum.data_points.add(as_int=1)
    assert table.take(metrics(ROUTER, other)).rejected == 0, "nor is the kind of its metrics remembered"


def test_a_process_that_reports_once_a_minute_is_not_forgotten_in_between() -> None:
    clock = Clock()
    table = a_table(clock=clock)
    for second in range(4):
        table.take(metrics(ROUTER, a_gauge("kv", {"a": second}, time_ns=second)))
        clock.now += 60
    clock.now += 60
    assert list(samples(text_of(table)).values()) == [3]


def test_a_metric_that_its_process_no_longer_reports_is_forgotten_alone() -> None:
    clock = Clock()
    table = a_table(clock=clock)
    table.take(metrics(ROUTER, a_gauge("gone", {"a": 1}), a_gauge("kv", {"a": 1})))
    for second in range(14):
        clock.now += 5
        table.take(metrics(ROUTER, a_gauge("kv", {"a": 2}, time_ns=second)))
    assert list(samples(text_of(table)).values()) == [2]


def test_two_processes_share_a_family_and_one_of_another_kind_is_refused() -> None:
    table = a_table()
    other = {**ROUTER, "service.instance.id": "router-1"}
    table.take(metrics(ROUTER, a_gauge("kv", {"a": 1})))
    assert table.take(metrics(other, a_gauge("kv", {"a": 2}))).rejected == 0
    assert len(samples(text_of(table))) == 2
    clash = a_histogram("kv", [1.0], [1, 1])
    clash.unit = ""
    refused = table.take(metrics({**ROUTER, "service.instance.id": "router-2"}, clash))
    assert (refused.accepted, refused.rejected) == (0, 1)
    assert "gauge" in refused.reason


def test_names_that_become_the_same_do_not_overwrite_each_other() -> None:
    table = a_table()
    found = table.take(metrics(ROUTER, a_gauge("a.b", {"x": 1}), a_gauge("a_b", {"x": 2})))
    assert (found.accepted, found.rejected) == (1, 1)
    assert list(samples(text_of(table)).values()) == [1]


def test_series_beyond_the_bound_are_refused_and_the_bound_frees_up_again() -> None:
    table = a_table(max_series=10)
    many = {str(at): float(at) for at in range(50)}
    found = table.take(metrics(ROUTER, a_gauge("kv", many)))
    assert (found.accepted, found.rejected) == (10, 40)
    assert "10 series" in found.reason
    assert table.take(metrics(ROUTER, a_histogram("h", [1.0], [1, 1]))).rejected == 1
    assert table.take(metrics(ROUTER, a_gauge("kv", {"a": 1}, time_ns=2))).rejected == 0
    assert table.take(metrics(ROUTER, a_histogram("h", [1.0], [1, 1]))).rejected == 0
    assert table.series == len(samples(text_of(table))) == 5


@pytest.mark.parametrize(
    "metric",
    [
        a_histogram("h", [1.0, 1.0], [1, 1, 1]), a_histogram("h", [2.0, 1.0], [1, 1, 1]),
        a_histogram("h", [1.0], [1]), a_histogram("h", [math.nan], [1, 1]),
        a_histogram("h", [math.inf], [1, 1]),
        a_histogram("h", [float(at) for at in range(500)], [1] * 501),
        a_histogram("h", [1.0], [1, 1], temporality=DELTA), Metric(name="s", summary={"data_points": [{}]}),
        Metric(name="e", exponential_histogram={"data_points": [{}]}),
        Metric(name="n", gauge={"data_points": [{}]}),
        Metric(name="x" * 5, gauge={"data_points": [{"as_int": 1, "attributes": [
            {"key": f"k{at}", "value": {"string_value": "v" * 300}} for at in range(128)]}]}),
    ],
)  # fmt: skip
def test_points_that_make_no_sense_are_refused(metric: Metric) -> None:
    table = a_table()
    found = table.take(metrics(ROUTER, metric))
    assert (found.accepted, found.rejected) == (0, 1)
    assert found.reason
    assert (text_of(table), table.series) == ("", 0)


def test_a_histogram_is_exposed_with_cumulative_buckets() -> None:
    table = a_table()
    table.take(metrics(ROUTER, a_histogram("h", [0.1, 1.0], [1, 2, 3])))
    text = text_of(table)
    assert 'h_seconds_bucket{service="kvorum.router",instance="router-0",le="1.0"} 3' in text
    assert 'le="+Inf"} 6' in text
    assert "h_seconds_count" in text
    assert len(samples(text)) == 5


def test_countless_processes_do_not_fill_the_memory() -> None:
    table = a_table(max_series=100_000)
    for number in range(1100):
        table.take(metrics({"service.instance.id": f"i{number}"}, a_gauge("kv", {"a": 1})))
    assert table.processes == 1000
    assert table.series == 1000


def engine_text() -> str:
    registry = CollectorRegistry()
    Histogram("vllm:ttft_seconds", 'Help with \\ and\nlines "x"', ["engine"], registry=registry).labels(
        "0"
    ).observe(1)
    Counter("vllm:tokens", "Tokens", ["engine", "replica"], registry=registry).labels(
        '0"\n,replica="', "own"
    ).inc(7)
    return generate_latest(registry).decode()


def test_the_engines_texts_are_merged_with_a_label_and_each_family_stands_once() -> None:
    exposition = Exposition()
    for replica in ("replica-0", 'replica"1\n'):
        exposition.merge(engine_text(), "replica", replica)
    text = exposition.text()
    found = samples(text)
    assert exposition.refused == 0
    assert text.count("# TYPE vllm:tokens_total counter") == 1
    assert '# HELP vllm:ttft_seconds Help with \\\\ and\\nlines "x"' in text
    labels = [("engine", '0"\n,replica="'), ("exported_replica", "own"), ("replica", 'replica"1\n')]
    assert found[f"vllm:tokens_total{labels}"] == 7
    assert len(found) == 2 * len(samples(engine_text()))


def test_garbage_in_an_engines_text_is_left_out_and_counted() -> None:
    exposition = Exposition()
    bad = 'x{a="b} 1\nx{a=b} 1\nx y\n{} 1\n\ud800 1\nx 0x1\nx 1 2 3\n<script>\n'
    exposition.merge(bad + "# TYPE ok nonsense\nok 1\nhuge 1e999\nlate 1 1700000000\n# EOF\n", "replica", "r")
    assert exposition.refused == 8
    assert samples(exposition.text()) == {
        "ok[('replica', 'r')]": 1, "huge[('replica', 'r')]": math.inf, "late[('replica', 'r')]": 1,
    }  # fmt: skip


def test_a_family_that_two_sources_call_different_kinds_keeps_the_first() -> None:
    exposition = Exposition()
    exposition.merge("# TYPE a gauge\na 1\n", "replica", "r0")
    exposition.merge("# TYPE a counter\na 2\n", "replica", "r1")
    assert samples(exposition.text()) == {"a[('replica', 'r0')]": 1}
    assert exposition.refused == 1
