"""Engine steps seen from outside: durations of all of them, spans of sampled requests' prefill steps."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes_metrics import FakeCollector
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics.export import HistogramDataPoint
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos import replica_pb2
from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.record import StoredSpan
from telemetry.setup import Telemetry, configure, open_store
from telemetry.tree import render_text, with_linked
from workers import step_tracing
from workers.observe import Sent
from workers.overlap.report import StepRecord
from workers.placement import ReplicaPlacement, ShardSlot
from workers.step_tracing import StepTrace, StepTracing, build, external_id, links
from workers.tracing import ReplicaTracing

ROOT = Path(__file__).parents[2]
EPOCH = "e1e2e3e4"
PLACEMENT = ReplicaPlacement(
    replica="replica-0",
    epoch=EPOCH,
    namespace="kvorum-test",
    ray_address="127.0.0.1:1",
    device="cpu",
    collective="gloo",
    slots=tuple(ShardSlot(rank, rank, f"node-{rank}", "127.0.0.1") for rank in range(2)),
)
BEGIN_NS = time.time_ns()


def a_step(number: int = 1, *, requests: tuple[tuple[str, int], ...] = (), **more: Any) -> StepRecord:
    """An overlapped step of 100 ms by default."""
    facts: dict[str, Any] = {
        "started_ns": BEGIN_NS + number * 10**9,
        "tokens": sum(tokens for _, tokens in requests),
        "chunks": 4,
        "forward_s": 0.1,
        "all_reduce_s": 0.06,
        "exposed_s": 0.02,
    }
    return StepRecord(number, requests=requests, **(facts | more))


class Recorder:
    """The tracing of one process, exported to memory."""

    def __init__(self, **settings: Any) -> None:
        config = TelemetryConfig(store="off", **{"step_ratio": 1.0, **settings})
        self._exporter = InMemorySpanExporter()
        self.telemetry = configure("kvorum.test", "t", config)
        if self.telemetry.provider is not None:
            self.telemetry.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def shard(self, rank: int = 0) -> StepTracing:
        return StepTracing(self.telemetry, PLACEMENT, rank)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture(autouse=True)
def _no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def serve(
    telemetry: Telemetry, request_id: str, *, prompt: int = 700, cached: int = 0, sequences: int | None = None
) -> None:
    """A request's life at the replica as its tracing sees it; the engine is a record of its times."""
    wire = replica_pb2.ReplicaGenerateRequest(request_id=request_id, prompt_token_ids=[1] * prompt)
    if sequences is not None:
        wire.sampling.n = sequences
    scope = ReplicaTracing(telemetry, PLACEMENT, "model").start(wire, [])
    now = time.monotonic()
    times: Any = SimpleNamespace(
        queued_ts=now - 0.4, scheduled_ts=now - 0.3, first_token_ts=now - 0.2, last_token_ts=now
    )
    scope.finish(None, Sent(prompt, accepted=True, cached_tokens=cached, first_at=now, times=times))


def prefill_links(recorder: Recorder) -> set[tuple[int, int]]:
    (prefill,) = (span for span in recorder.spans if span.name == spans.REPLICA_PREFILL)
    return {(link.context.trace_id, link.context.span_id) for link in prefill.links}


def test_the_prefill_links_to_the_spans_that_every_rank_records() -> None:
    replica, shards = Recorder(), [Recorder(), Recorder()]
    serve(replica.telemetry, "request-7")
    for rank, shard in enumerate(shards):
        shard.shard(rank).step(a_step(requests=(("request-7-0a1b2c3d", 700),)))
    recorded = {ids(span) for shard in shards for span in shard.spans}
    assert len(recorded) == 2
    assert prefill_links(replica) == recorded


def test_the_first_of_several_sequences_is_the_one_that_is_linked() -> None:
    replica, shard = Recorder(), Recorder()
    serve(replica.telemetry, "several", sequences=3)
    shard.shard(0).step(a_step(requests=(("0_several-0a1b2c3d", 700), ("1_several-0a1b2c3d", 44))))
    assert len(shard.spans) == 2
    assert ids(shard.spans[0]) in prefill_links(replica)
    assert ids(shard.spans[1]) not in prefill_links(replica)


def test_a_prompt_that_is_cached_but_for_one_token_has_no_step_to_link_to() -> None:
    replica = Recorder()
    serve(replica.telemetry, "cached", prompt=129, cached=128)
    assert prefill_links(replica) == set()


def test_the_other_phases_have_no_links() -> None:
    replica = Recorder()
    serve(replica.telemetry, "request-7")
    assert {span.name for span in replica.spans if span.links} == {spans.REPLICA_PREFILL}


def test_steps_of_one_request_are_one_trace_with_the_first_ranks_first_step_on_top() -> None:
    shards = [Recorder(), Recorder()]
    observers = [shard.shard(rank) for rank, shard in enumerate(shards)]
    for number in (1, 2, 3):
        for observer in observers:
            observer.step(a_step(number, requests=(("long-00000000", 512), ("other-11111111", 1))))
    found = [span for shard in shards for span in shard.spans]
    assert len({ids(span) for span in found}) == 6
    assert len({ids(span)[0] for span in found}) == 1
    tops = [span for span in found if span.parent is None]
    assert tops == [shards[0].spans[0]]
    assert {span.parent.span_id for span in found if span.parent is not None} == {ids(tops[0])[1]}


def test_a_step_span_tells_what_the_step_took() -> None:
    recorder = Recorder()
    step = a_step(9, requests=(("a-00000000", 500), ("b-00000000", 1)))
    recorder.shard(1).step(step)
    (span,) = recorder.spans
    assert dict(span.attributes or {}) == {
        spans.RANK: 1,
        spans.REQUEST_ID: "a",
        spans.STEP_NUMBER: 9,
        spans.STEP_TOKENS: 501,
        spans.STEP_REQUEST_TOKENS: 500,
        spans.STEP_PATH: "overlapped",
        spans.STEP_CHUNKS: 4,
        spans.STEP_FORWARD_S: 0.1,
        spans.STEP_COMPUTE_S: pytest.approx(0.08),
        spans.STEP_ALL_REDUCE_S: 0.06,
        spans.STEP_EXPOSED_S: 0.02,
    }
    assert (span.start_time, span.end_time) == (step.started_ns, step.started_ns + 100_000_000)


def test_times_that_a_device_does_not_tell_are_left_out() -> None:
    recorder = Recorder()
    recorder.shard().step(
        a_step(requests=(("a-00000000", 500),), chunks=1, all_reduce_s=None, exposed_s=None)
    )
    attributes = recorder.spans[0].attributes or {}
    assert attributes[spans.STEP_PATH] == "stock"
    assert not {spans.STEP_COMPUTE_S, spans.STEP_ALL_REDUCE_S, spans.STEP_EXPOSED_S} & attributes.keys()


def test_decode_steps_have_no_spans() -> None:
    recorder = Recorder()
    recorder.shard().step(a_step(requests=(("a-00000000", 1), ("b-00000000", 1))))
    assert recorder.spans == []


def test_speculative_decoding_does_not_flood_a_trace() -> None:
    recorder = Recorder()
    shard = recorder.shard()
    for number in range(500):
        shard.step(a_step(number, requests=(("a-00000000", 4),)))
    assert 1 < len(recorder.spans) < 100


def test_a_step_with_many_prefills_records_few_spans_and_still_counts_all() -> None:
    recorder = Recorder()
    shard = recorder.shard()
    many = tuple((f"r{at}-00000000", 2) for at in range(200))
    shard.step(a_step(1, requests=many))
    assert 1 < len(recorder.spans) < 50
    before = len(recorder.spans)
    shard.step(a_step(2, requests=(many[-1],)))
    (later,) = recorder.spans[before:]
    assert ids(later)[1] == StepTrace.of(EPOCH, "r199").span_id(0, 1)


def test_only_the_latest_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tracing, "_REMEMBERED_REQUESTS", 10)
    shard = Recorder().shard()
    for number in range(100):
        shard.step(a_step(number, requests=((f"r{number}-00000000", 9), ("constant-00000000", 9))))
    assert len(shard._requests) == 10
    constant = shard._requests["constant"]
    assert constant is not None
    assert constant.done == 100


names = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=40)


@given(names, st.integers(0, 2**32 - 1))
def test_the_engines_suffix_is_stripped_and_nothing_else(request_id: str, random_bits: int) -> None:
    assert external_id(f"{request_id}-{random_bits:08x}") == request_id


@given(names, names)
def test_each_request_has_its_own_trace_in_each_epoch(one: str, other: str) -> None:
    assert StepTrace.of("a", one) != StepTrace.of("b", one)
    if one != other:
        assert StepTrace.of("a", one) != StepTrace.of("a", other)
    trace = StepTrace.of("a", one)
    assert len({trace.span_id(rank, step) for rank in range(4) for step in range(4)}) == 16


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"step_ratio": 0.0}, 0.0),
        ({"step_ratio": 0.25}, 0.25),
        ({"step_ratio": 1.0}, 1.0),
        ({"step_ratio": 0.5, "sample_ratio": 0.5}, 0.25),
        ({"step_ratio": 1.0, "sample_ratio": 0.0}, 0.0),
        ({"step_ratio": 1.0, "enabled": False}, 0.0),
    ],
)
def test_replica_and_shards_choose_the_same_requests(settings: dict[str, Any], expected: float) -> None:
    replica, shard = Recorder(**settings), Recorder(**settings)
    observer = shard.shard(1)
    linked = set()
    for at in range(1000):
        request_id = f"request-{at}"
        observer.step(a_step(at, requests=((f"{request_id}-00000000", 9),)))
        if found := links(replica.telemetry, PLACEMENT, request_id, 1):
            linked.add((found[1].context.trace_id, found[1].context.span_id))
    assert linked == {ids(span) for span in shard.spans}
    assert len(linked) / 1000 == pytest.approx(expected, abs=0.06)


def test_a_sampler_that_drops_all_drops_step_spans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    recorder = Recorder()
    for rank in (0, 1):
        recorder.shard(rank).step(a_step(requests=(("a-00000000", 9),)))
    assert recorder.spans == []
    assert links(recorder.telemetry, PLACEMENT, "a", 1) == []


def test_other_spans_of_the_process_keep_ids_of_their_own() -> None:
    recorder = Recorder()
    recorder.shard().step(a_step(requests=(("a-00000000", 9),)))
    spans.finish(spans.start(recorder.telemetry.tracer, "other", spans.remote(None)))
    step, other = (ids(span) for span in recorder.spans)
    assert step[0] != other[0]
    assert step[1] != other[1]


def metering(reader: FakeCollector) -> StepTracing:
    config = TelemetryConfig(store="off")
    return StepTracing(Telemetry(config, None, {}, reader.meters), PLACEMENT, 0)


def histograms(reader: FakeCollector) -> dict[tuple[str, str, int], tuple[int, float]]:
    """(count, sum) by instrument, path and chunks."""
    found = {}
    for name, metric in reader.metrics().items():
        for point in metric.data.data_points:
            if not isinstance(point, HistogramDataPoint):
                continue
            attributes = point.attributes
            assert attributes is not None
            path, chunks = attributes[spans.STEP_PATH], attributes[spans.STEP_CHUNKS]
            assert isinstance(path, str)
            assert isinstance(chunks, int)
            short = name.removeprefix("kvorum.shard.step.")
            found[short, path, chunks] = (point.count, round(point.sum, 6))
    return found


def test_every_step_is_measured_by_path_and_chunks() -> None:
    reader = FakeCollector()
    shard = metering(reader)
    for number in range(3):
        shard.step(a_step(number, requests=(("a-00000000", 1),), chunks=1, exposed_s=0.06))
    shard.step(a_step(4, requests=(("a-00000000", 900),)))
    assert histograms(reader) == {
        ("duration", "stock", 1): (3, 0.3),
        ("all_reduce", "stock", 1): (3, 0.18),
        ("all_reduce.exposed", "stock", 1): (3, 0.18),
        ("duration", "overlapped", 4): (1, 0.1),
        ("all_reduce", "overlapped", 4): (1, 0.06),
        ("all_reduce.exposed", "overlapped", 4): (1, 0.02),
    }


def test_a_device_that_tells_no_all_reduce_has_only_durations() -> None:
    reader = FakeCollector()
    metering(reader).step(a_step(all_reduce_s=None, exposed_s=None))
    assert list(histograms(reader)) == [("duration", "overlapped", 4)]


def test_a_failure_in_here_does_not_reach_the_computing_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    shard = recorder.shard()
    monkeypatch.setattr(recorder.telemetry, "record", None)
    for number in range(3):
        shard.step(a_step(number, requests=(("a-00000000", 9),)))
    assert [record.getMessage() for record in caplog.records] == ["rank 0 records no more engine steps"]


def as_sent(config: TelemetryConfig) -> dict[str, Any]:
    """As vLLM carries it to the shards: it hashes its additional_config as JSON."""
    values: dict[str, Any] = json.loads(json.dumps(config.model_dump(mode="json")))
    return values


def test_a_shard_records_to_the_replicas_store_and_says_who_it_is(tmp_path: Path) -> None:
    config = TelemetryConfig(store="on", store_path=tmp_path / "traces.db", step_ratio=1.0)
    replica = configure("kvorum.replica", f"replica-0/{EPOCH}", config)
    serve(replica, "request-7")
    replica.shutdown()
    for rank in (0, 1):
        shard = build(as_sent(config), PLACEMENT, rank)
        shard.step(a_step(requests=(("request-7-0a1b2c3d", 700),)))
        shard.shutdown()

    store = open_store(config)
    by_root = {summary.root: store.trace(summary.trace_id) for summary in store.recent()}
    steps, request = by_root[spans.ENGINE_STEP], by_root[spans.REPLICA_GENERATE]
    assert {span.service for span in steps} == {"kvorum.shard"}
    assert {span.instance for span in steps} == {f"replica-0/{EPOCH}/0", f"replica-0/{EPOCH}/1"}
    assert {span.resource[spans.RANK] for span in steps} == {0, 1}
    assert {span.resource[spans.REPLICA] for span in steps} == {"replica-0"}
    assert_steps_stand_below_the_prefill(request, steps)


def assert_steps_stand_below_the_prefill(request: list[StoredSpan], steps: list[StoredSpan]) -> None:
    lines = render_text(with_linked(request, [steps])).splitlines()[1:]
    names = [line.split()[0] for line in lines]
    at = names.index(spans.REPLICA_PREFILL)
    assert names[at + 1 : at + 3] == [spans.ENGINE_STEP] * 2
    depths = [len(line) - len(line.lstrip()) for line in lines[at : at + 3]]
    assert depths[0] < depths[1] < depths[2]


@pytest.mark.parametrize(
    "values", [None, {"no_such_setting": 1}, {"step_ratio": 7}, as_sent(TelemetryConfig(enabled=False))]
)
def test_a_shard_without_usable_settings_is_silent(values: dict[str, Any] | None) -> None:
    shard = build(values, PLACEMENT, 0)
    shard.step(a_step(requests=(("a-00000000", 9),)))
    shard.shutdown()


def test_malformed_variables_do_not_stop_a_shard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    build(as_sent(TelemetryConfig(store="off")), PLACEMENT, 3).step(a_step())
    assert "no telemetry of rank 3, check OTEL_*" in caplog.text


def test_a_single_sequence_is_not_taken_for_one_of_several() -> None:
    telemetry = Recorder().telemetry
    one, several = (links(telemetry, PLACEMENT, "a", sequences)[0].context for sequences in (1, 2))
    assert one.trace_id == StepTrace.of(EPOCH, "a").trace_id
    assert several.trace_id == StepTrace.of(EPOCH, "0_a").trace_id


def test_ranks_that_begin_elsewhere_still_have_one_root() -> None:
    """Slots come in any order; the lowest rank's first step is the root."""
    recorder = Recorder()
    turned = replace(PLACEMENT, slots=PLACEMENT.slots[::-1])
    for rank in (1, 0):
        StepTracing(recorder.telemetry, turned, rank).step(a_step(requests=(("a-00000000", 9),)))
    assert [span.parent is None for span in recorder.spans] == [False, True]


def test_tracing_of_steps_and_requests_needs_neither_engine_nor_torch() -> None:
    code = (
        "import sys; import workers.step_tracing, workers.tracing;"
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
