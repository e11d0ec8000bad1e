"""Context over gRPC metadata, how spans end, and the engine's phases built after the fact."""

import asyncio
import collections
import math
import time

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes

from telemetry import phases, spans

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


class Recorder:
    """A tracer and what it recorded."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_context_survives_the_hop_over_metadata(recorder: Recorder) -> None:
    incoming: list[tuple[str, str | bytes]] = [
        ("user-agent", "grpc"),
        ("traceparent", PARENT),
        ("tracestate", "vendor=1,other=2"),
        ("baggage", "tenant=t%201,plan=gold"),
        ("trace-bin", b"\x00\xff"),
    ]
    context = spans.extract(incoming)
    span = spans.start(recorder.tracer, "hop", context)
    outgoing = dict(spans.inject(spans.below(span, context)))
    spans.finish(span)
    assert spans.trace_id_hex(span) == "ab" * 16
    assert recorder.spans["hop"].parent is not None
    assert recorder.spans["hop"].parent.span_id == int("cd" * 8, 16)
    assert outgoing["traceparent"].startswith(f"00-{'ab' * 16}-")
    assert "cd" * 8 not in outgoing["traceparent"]
    assert outgoing["tracestate"] == "vendor=1,other=2"
    assert dict(baggage.get_all(spans.extract(outgoing.items()))) == {"tenant": "t 1", "plan": "gold"}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "garbage",
        f"00-{'0' * 32}-{'cd' * 8}-01",
        f"00-{'ab' * 16}-{'0' * 16}-01",
        f"ff-{'ab' * 16}-{'cd' * 8}-01",
        f"00-{'AB' * 16}-{'cd' * 8}-01",
        f"00-{'ab' * 16}-{'cd' * 8}",
        f"00-{'ab' * 16}-{'cd' * 8}-01-more",
        PARENT + "x" * 10_000,
        PARENT.encode() + b"\xff",
        "00-\N{ARABIC-INDIC DIGIT ONE}" + PARENT[4:],
    ],
)
def test_a_malformed_traceparent_starts_a_new_trace(
    parent: str | bytes, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    span = spans.start(
        recorder.tracer, "fresh", spans.extract([("traceparent", parent), ("tracestate", "a=1")])
    )
    spans.finish(span)
    assert recorder.spans["fresh"].parent is None
    assert spans.trace_id_hex(span) != "ab" * 16
    assert caplog.records == [], "whoever calls us must not fill the log"


def test_two_traceparents_are_as_good_as_none() -> None:
    other = f"00-{'12' * 16}-{'34' * 8}-01"
    assert spans.inject(spans.extract([("traceparent", PARENT), ("traceparent", other)])) == []


def test_a_traceparent_in_bytes_is_understood() -> None:
    assert spans.inject(spans.extract([("traceparent", PARENT.encode())])) == [("traceparent", PARENT)]


@pytest.mark.parametrize("states", [["a=" + "x" * 511], ["a=" + "x" * 255, "b=" + "x" * 255]])
def test_a_tracestate_beyond_the_limit_is_not_passed_on(states: list[str]) -> None:
    context = spans.extract([("traceparent", PARENT), *(("tracestate", state) for state in states)])
    assert spans.inject(context) == [("traceparent", PARENT)]


def test_a_tracestate_at_the_limit_is_passed_on() -> None:
    states = ["a=" + "x" * 254, "b=" + "x" * 253]
    context = spans.extract([("traceparent", PARENT), *(("tracestate", state) for state in states)])
    assert dict(spans.inject(context))["tracestate"] == ",".join(states)


@pytest.mark.parametrize(
    "entries", ["=;,==,\x01", "a" * 5000 + "=1", ",".join(f"k{n}=v" for n in range(5000))]
)
def test_malformed_or_oversized_baggage_is_not_passed_on(
    entries: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = spans.extract([("traceparent", PARENT), ("baggage", entries)])
    assert spans.inject(context) == [("traceparent", PARENT)]
    assert caplog.records == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["traceparent", "tracestate", "baggage"]), st.text() | st.binary()),
        max_size=4,
    )
)
def test_no_metadata_makes_extract_raise(metadata: list[tuple[str, str | bytes]]) -> None:
    assert isinstance(spans.extract(metadata), Context)


@pytest.mark.parametrize(
    ("metadata", "counted"),
    [
        ([("traceparent", PARENT), ("tracestate", "a=1"), ("baggage", "a=1,b=2")], {}),
        ([], {}),
        ([("traceparent", "00-zz")], {"traceparent": 1}),
        ([("traceparent", PARENT), ("traceparent", PARENT)], {"traceparent": 1}),
        ([("traceparent", b"\xff")], {"traceparent": 1}),
        ([("traceparent", PARENT), ("tracestate", "a=" + "b" * 600)], {"tracestate": 1}),
        ([("baggage", "a=1,,nonsense")], {"baggage": 1}),
        ([("baggage", "a=" + "b" * 3000)], {"baggage": 1}),
    ],
)
def test_what_is_ignored_is_counted(
    metadata: list[tuple[str, str | bytes]], counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "malformed", collections.Counter())
    spans.extract(metadata)
    assert spans.malformed == counted


def test_extract_does_not_take_over_this_tasks_own_span(recorder: Recorder) -> None:
    with spans.recording(recorder.tracer, "mine"):
        assert spans.inject(spans.extract([])) == []


def test_gen_ai_names_are_those_of_the_conventions() -> None:
    standard = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    ours = {value for name, value in vars(spans).items() if name.startswith("GEN_AI_")}
    assert len(ours) > 10
    assert ours <= standard
    assert error_attributes.ERROR_TYPE == spans.ERROR_TYPE


class FakeRefusalError(Exception):
    code = grpc.StatusCode.NOT_FOUND


class FakeRpcError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (TimeoutError("5 s"), "timeout"),
        (FakeRefusalError("no such model"), "NOT_FOUND"),
        (FakeRpcError(), "UNAVAILABLE"),
        (SystemExit(3), "SystemExit"),
        (ValueError("x"), "ValueError"),
        ("REPLICA_LOST", "REPLICA_LOST"),
    ],
)
def test_a_failed_span_says_which_kind_of_failure(
    error: BaseException | str, expected: str, recorder: Recorder
) -> None:
    spans.finish(spans.start(recorder.tracer, "failed"), error, "while forwarding")
    found = recorder.spans["failed"]
    assert (found.attributes or {})["error.type"] == expected
    assert found.status.status_code is trace.StatusCode.ERROR
    assert found.status.description == "while forwarding"


def test_a_finished_span_without_error_has_no_status_and_no_error_type(recorder: Recorder) -> None:
    spans.finish(spans.start(recorder.tracer, "fine"))
    assert recorder.spans["fine"].status.status_code is trace.StatusCode.UNSET
    assert "error.type" not in (recorder.spans["fine"].attributes or {})


async def test_a_cancelled_block_ends_its_span_as_cancelled(recorder: Recorder) -> None:
    async def block() -> None:
        with spans.recording(recorder.tracer, "block"):
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (recorder.spans["block"].attributes or {})["error.type"] == "cancelled"
    assert recorder.spans["block"].events == ()


def test_nested_recordings_are_parent_and_child(recorder: Recorder) -> None:
    with spans.recording(recorder.tracer, "outer") as outer, spans.recording(recorder.tracer, "inner"):
        pass
    assert recorder.spans["inner"].parent == outer.get_span_context()
    assert not trace.get_current_span().get_span_context().is_valid


seconds = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 100)
epoch_ns = st.integers(10**18, 2 * 10**18)


@given(epoch_ns, st.tuples(seconds, seconds, seconds), epoch_ns, st.integers(-(10**6), 10**12))
def test_phases_stay_in_the_window_and_follow_each_other(
    arrival: int, durations: tuple[float, float, float], earliest: int, window: int
) -> None:
    at = phases.phase_bounds(arrival, durations, earliest_ns=earliest, latest_ns=earliest + window)
    edges = [at.queue_start_ns, at.prefill_start_ns, at.decode_start_ns, at.decode_end_ns]
    assert edges == sorted(edges)
    assert earliest <= edges[0]
    assert edges[-1] <= earliest + max(window, 0)


@given(epoch_ns, st.tuples(*[st.floats(0, 100)] * 3), epoch_ns, st.integers(0, 10**12))
def test_phases_keep_their_lengths_whenever_they_fit(
    arrival: int, durations: tuple[float, float, float], earliest: int, slack: int
) -> None:
    lengths = [round(duration * 1e9) for duration in durations]
    latest = earliest + sum(lengths) + slack
    at = phases.phase_bounds(arrival, durations, earliest_ns=earliest, latest_ns=latest)
    assert [
        at.prefill_start_ns - at.queue_start_ns,
        at.decode_start_ns - at.prefill_start_ns,
        at.decode_end_ns - at.decode_start_ns,
    ] == lengths
    if earliest <= arrival <= latest - sum(lengths):
        assert at.queue_start_ns == arrival


def engine_spans(
    recorder: Recorder, *, age_s: float = 10.0, **times: float | None
) -> dict[str, ReadableSpan]:
    """The children of a generate span that started `age_s` ago, which has ended since."""
    begin_ns = time.time_ns() - round(age_s * 1e9)
    owner = spans.start(recorder.tracer, spans.REPLICA_GENERATE, start_ns=begin_ns)
    times.setdefault("arrival_wall_s", begin_ns / 1e9 + 1)
    phases.record_engine_times(
        recorder.tracer,
        spans.below(owner),
        prefill_attributes={spans.CACHED_TOKENS: 16},
        decode_attributes={spans.GEN_AI_USAGE_OUTPUT_TOKENS: 9},
        **times,  # type: ignore[arg-type]
    )
    spans.finish(owner)
    return recorder.spans


def duration_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_engine_times_become_three_children_that_add_up(recorder: Recorder) -> None:
    found = engine_spans(recorder, queue_s=0.5, prefill_s=1.25, decode_s=2.0)
    owner, queue = found[spans.REPLICA_GENERATE], found[spans.REPLICA_QUEUE]
    prefill, decode = found[spans.REPLICA_PREFILL], found[spans.REPLICA_DECODE]
    assert all(child.parent == owner.context for child in (queue, prefill, decode))
    assert [duration_s(child) for child in (queue, prefill, decode)] == [0.5, 1.25, 2.0]
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert (prefill.attributes or {})[spans.CACHED_TOKENS] == 16
    assert [(event.name, event.timestamp) for event in decode.events] == [
        (spans.FIRST_TOKEN, decode.start_time),
        (spans.LAST_TOKEN, decode.end_time),
    ]
    assert spans.MEASURED_S not in (decode.attributes or {})


@given(
    st.floats(0, 20),
    st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf, 1e300]),
    st.tuples(seconds, seconds, seconds),
)
def test_engine_spans_never_stick_out_of_their_parent(
    age_s: float, arrival_shift_s: float, durations: tuple[float, float, float]
) -> None:
    queue_s, prefill_s, decode_s = durations
    found = engine_spans(
        Recorder(),
        age_s=age_s,
        arrival_wall_s=time.time() + arrival_shift_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
    )
    owner = found.pop(spans.REPLICA_GENERATE)
    assert len(found) == 3
    for child in found.values():
        assert owner.start_time <= child.start_time <= child.end_time <= owner.end_time  # type: ignore[operator]


def test_a_shortened_phase_tells_the_engines_own_figure(recorder: Recorder) -> None:
    found = engine_spans(recorder, age_s=1.0, queue_s=0.0, prefill_s=0.25, decode_s=50.0)
    decode = found[spans.REPLICA_DECODE]
    assert duration_s(decode) < 1.5
    assert (decode.attributes or {})[spans.MEASURED_S] == 50.0


def test_only_the_prefill_links_to_the_engine_steps(recorder: Recorder) -> None:
    begin_ns = time.time_ns() - 10**9
    owner = spans.start(recorder.tracer, spans.REPLICA_GENERATE, start_ns=begin_ns)
    step = spans.elsewhere(0xA1, 0xB1)
    phases.record_engine_times(
        recorder.tracer,
        spans.below(owner),
        arrival_wall_s=begin_ns / 1e9,
        queue_s=0.1,
        prefill_s=0.1,
        decode_s=0.1,
        prefill_links=[trace.Link(step)],
    )
    spans.finish(owner)
    linked = {name: [link.context for link in span.links] for name, span in recorder.spans.items()}
    assert linked == {
        spans.REPLICA_QUEUE: [],
        spans.REPLICA_PREFILL: [step],
        spans.REPLICA_DECODE: [],
        spans.REPLICA_GENERATE: [],
    }


def test_a_span_below_another_processes_span_has_its_trace(recorder: Recorder) -> None:
    spans.finish(spans.start(recorder.tracer, "below", spans.remote(spans.elsewhere(0xA1, 0xB1))))
    assert recorder.spans["below"].parent == spans.elsewhere(0xA1, 0xB1)
    spans.finish(spans.start(recorder.tracer, "top", spans.remote(None)))
    assert recorder.spans["top"].parent is None


def test_a_request_that_never_left_the_queue_has_no_later_phases(recorder: Recorder) -> None:
    found = engine_spans(recorder, queue_s=2.0, prefill_s=None, decode_s=None)
    assert set(found) == {spans.REPLICA_GENERATE, spans.REPLICA_QUEUE}


def test_engine_times_of_an_unsampled_request_record_nothing(recorder: Recorder) -> None:
    context = spans.extract([("traceparent", PARENT[:-1] + "0")])
    phases.record_engine_times(
        recorder.tracer, context, arrival_wall_s=time.time(), queue_s=1, prefill_s=1, decode_s=1
    )
    assert recorder.spans == {}


def test_a_monotonic_reading_converts_to_the_wall_clock() -> None:
    before = time.time()
    converted = spans.wall_from_monotonic(time.monotonic())
    assert before - 0.5 <= converted <= time.time() + 0.5
