"""OTLP exports from anybody: what is valid is kept, what is not is refused and counted, nothing breaks."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
from helpers_viewer import MS, a_gauge, an_export, metrics
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from telemetry.record import StoredSpan
from telemetry.store import SpanStore
from telemetry.viewer import decode
from telemetry.viewer.metric_table import MetricTable
from telemetry.viewer.receiver import MalformedExportError, Receiver, ReceiverBusyError, Slots
from telemetry.viewer.settings import ViewerSettings
from telemetry.viewer.wire import fits

ROOT = Path(__file__).parents[2]
HEX_TRACE, HEX_SPAN = "0af7651916cd43dd8448eb211c80319C", "b7ad6b7169203331"


@pytest.fixture
def store(tmp_path: Path) -> SpanStore:
    return SpanStore(tmp_path / "traces.db")


def a_receiver(store: SpanStore) -> Receiver:
    return Receiver(store, MetricTable(max_series=100, silence_s=60), ViewerSettings())


def decoded(request: ExportTraceServiceRequest, now_ns: int | None = None) -> decode.Decoded:
    return decode.spans_of(request, now_ns=now_ns or time.time_ns(), max_chars=100)


def only(request: ExportTraceServiceRequest) -> StoredSpan:
    return decoded(request).spans[0]


def as_json(span: dict[str, object]) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


async def test_an_export_in_json_has_its_ids_in_hex_and_unknown_fields_are_passed_over(
    store: SpanStore,
) -> None:
    start_ns = time.time_ns()
    span = {
        "traceId": HEX_TRACE, "spanId": HEX_SPAN, "parentSpanId": "00f067aa0ba902b7", "name": "n", "kind": 3,
        "startTimeUnixNano": str(start_ns), "endTimeUnixNano": str(start_ns + MS), "status": {"code": 2},
        "attributes": [{"key": "a", "value": {"intValue": "7"}}],
        "links": [{"traceId": HEX_TRACE, "spanId": HEX_SPAN}],
        "newInVersion9": {"x": [1]},
    }  # fmt: skip
    receipt = await a_receiver(store).take("traces", as_json(span), "json")
    assert receipt.rejected == 0
    (found,) = store.trace(HEX_TRACE)
    assert (found.span_id, found.parent_id, found.kind, found.status) == (
        HEX_SPAN, "00f067aa0ba902b7", "CLIENT", "ERROR",
    )  # fmt: skip
    assert found.attributes == {"a": 7}
    assert found.links[0].trace_id == HEX_TRACE.lower()
    assert found.end_ns - found.start_ns == MS


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b'"x"', b"{", b"\xff\xfe", b"{" * 50_000, b"[" * 50_000, b'{"resourceSpans": 1}',
        b'{"resourceSpans": {"a": 1}}', b'{"a": 1, "a": 2}', as_json({"traceId": "zz!"}),
        as_json({"traceId": "\ud800", "name": "\ud800"}), as_json({"startTimeUnixNano": -1}),
        as_json({"startTimeUnixNano": 1 << 70}), as_json({"name": 1}), as_json({"attributes": [None]}),
        as_json({"attributes": [{"key": "k", "value": {"doubleValue": "1e999x"}}]}),
    ],
)  # fmt: skip
async def test_json_that_is_no_export_is_refused_and_counted(store: SpanStore, body: bytes) -> None:
    receiver = a_receiver(store)
    with pytest.raises(MalformedExportError, match="no OTLP export of traces in json"):
        await receiver.take("traces", body, "json")
    assert receiver.counts == {("traces", "malformed"): 1}


@given(body=st.binary(max_size=300))
def test_bytes_of_any_kind_are_kept_rejected_or_malformed_but_never_another_error(body: bytes) -> None:
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except Exception:
        return
    found = decoded(request)
    assert len(found.spans) + found.rejected == sum(
        len(scope.spans) for group in request.resource_spans for scope in group.scope_spans
    )


@given(cuts=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8))
def test_a_damaged_export_never_breaks_the_decoder(cuts: list[tuple[int, int]]) -> None:
    whole = an_export()
    span = whole.resource_spans[0].scope_spans[0].spans[0]
    span.attributes.add(key="list").value.array_value.values.add().double_value = float("nan")
    span.links.add(trace_id=bytes(16), span_id=bytes(8))
    body = bytearray(whole.SerializeToString())
    for at, value in cuts:
        body[at % len(body)] = value
    try:
        request = ExportTraceServiceRequest.FromString(bytes(body))
    except Exception:
        return
    decoded(request)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trace_id": b""}, "trace_id"), ({"trace_id": bytes(16)}, "trace_id"),
        ({"span_id": b"123"}, "span_id"),
        ({"parent_span_id": b"12345"}, "parent_span_id"), ({"start_time_unix_nano": 0}, "start_time"),
        ({"start_time_unix_nano": (1 << 64) - 1}, "start_time"),
    ],
)  # fmt: skip
def test_a_span_that_cannot_be_placed_is_rejected_with_the_reason(
    fields: dict[str, object], reason: str
) -> None:
    found = decoded(an_export(**fields))
    assert (found.spans, found.rejected) == ([], 1)
    assert reason in found.reason


def test_a_span_that_ends_before_it_begins_or_in_another_age_is_put_right() -> None:
    now_ns = time.time_ns()
    backwards = only(an_export(start_ns=now_ns, end_time_unix_nano=1))
    assert backwards.end_ns == backwards.start_ns
    endless = decoded(an_export(end_time_unix_nano=(1 << 64) - 1), now_ns).spans[0]
    assert endless.end_ns == now_ns + 86_400 * 10**9


def test_values_of_every_kind_become_plain_ones_within_bounds() -> None:
    request = an_export(name="n" * 1000)
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.attributes.add(key="text").value.string_value = "x" * 1000
    span.attributes.add(key="bytes").value.bytes_value = b"\x00\xff"
    span.attributes.add(key="none")
    span.attributes.add(key="").value.bool_value = True
    nested = span.attributes.add(key="map").value.kvlist_value.values.add(key="k")
    nested.value.array_value.values.add().int_value = 1
    mixed = span.attributes.add(key="list").value.array_value
    mixed.values.add().int_value = 1
    mixed.values.add().array_value.values.add().bool_value = True
    for at in range(500):
        span.attributes.add(key=f"k{at}").value.int_value = at
        span.events.add(name="e", time_unix_nano=(1 << 64) - 1)
        span.links.add(trace_id=b"no", span_id=b"no")
    found = only(request)
    assert found.attributes["text"] == "x" * 99 + "…"
    assert found.attributes["bytes"] == "AP8="
    assert json.loads(found.attributes["map"]) == {"k": [1]}
    assert found.attributes["list"] == [1, "[true]"]
    assert not {"none", ""} & found.attributes.keys()
    assert len(found.attributes) == 128
    assert (len(found.events), len(found.links), len(found.name)) == (128, 0, 256)


def test_one_span_takes_no_more_room_than_a_trace_can_afford() -> None:
    request = an_export()
    span = request.resource_spans[0].scope_spans[0].spans[0]
    for at in range(100):
        span.events.add(name="e").attributes.add(key=f"k{at}").value.string_value = "x" * 4000
    found = decode.spans_of(request, now_ns=time.time_ns(), max_chars=4096).spans[0]
    assert sum(len(str(event.attributes)) for event in found.events) < 70_000
    assert len(found.events) == 100


def test_an_export_of_countless_spans_is_cut_off() -> None:
    request = an_export()
    scope = request.resource_spans[0].scope_spans[0]
    for _ in range(decode.MOST_SPANS + 50):
        scope.spans.add()
    found = decoded(request)
    assert (len(found.spans), found.rejected) == (1, decode.MOST_SPANS + 50)


def test_a_full_disk_costs_the_spans_and_says_so_and_the_next_ones_are_kept(tmp_path: Path) -> None:
    code = (
        "import asyncio, resource, sys; from pathlib import Path\n"
        "from helpers_viewer import an_export\n"
        "from test_viewer_receiver import a_receiver, SpanStore\n"
        "store = SpanStore(Path(sys.argv[1])); store.write([]); receiver = a_receiver(store)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "async def send(number, chars):\n"
        "    request = an_export(span_id=number.to_bytes(8))\n"
        "    span = request.resource_spans[0].scope_spans[0].spans[0]\n"
        "    for at in range(60): span.attributes.add(key=f'k{at}').value.string_value = 'x' * chars\n"
        "    receipt = await receiver.take('traces', request.SerializeToString(), 'protobuf')\n"
        "    print(receipt.rejected, receipt.message)\n"
        "asyncio.run(send(1, 10))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))\n"
        "asyncio.run(send(2, 1000)); asyncio.run(send(3, 1000))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "asyncio.run(send(4, 1000))\n"
        "print([span.span_id[-1] for span in store.trace('01' * 16)], dict(receiver.counts))\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    command = [sys.executable, "-c", code, str(tmp_path / "traces.db")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True)
    refused = "1 the span store cannot be written"
    counts = {("traces", "accepted"): 2, ("traces", "failed"): 2}
    assert done.stdout.splitlines() == ["0 ", refused, refused, "0 ", f"['1', '4'] {counts}"]


async def test_a_store_that_cannot_be_opened_is_logged_once_and_not_for_each_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    receiver = a_receiver(SpanStore(tmp_path / "file" / "traces.db"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            receipt = await receiver.take("traces", an_export().SerializeToString(), "protobuf")
            assert receipt.rejected == 1
    assert receiver.counts["traces", "failed"] == 3
    assert len(caplog.records) == 1


async def test_metrics_are_counted_as_kept_and_rejected(store: SpanStore) -> None:
    receiver = a_receiver(store)
    body = metrics({"service.name": "s"}, a_gauge("a", {"x": 1, "y": 2}), a_gauge("--", {"x": 1}))
    receipt = await receiver.take("metrics", body.SerializeToString(), "protobuf")
    assert receipt.rejected == 1
    assert "--" in receipt.message
    assert receiver.counts == {("metrics", "accepted"): 2, ("metrics", "rejected"): 1}
    with pytest.raises(MalformedExportError, match="metrics in protobuf"):
        await receiver.take("metrics", b"\xff\xff", "protobuf")


def test_slots_are_given_back_whatever_happens() -> None:
    slots = Slots(1)

    def use() -> None:
        with slots.one():
            with pytest.raises(ReceiverBusyError), slots.one():
                pass
            raise RuntimeError("inside")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="inside"):
            use()


def test_the_parts_of_a_message_are_counted_at_all_depths_without_parsing_it() -> None:
    request = an_export(name="abc")
    span = request.resource_spans[0].scope_spans[0].spans[0]
    for at in range(10):
        span.events.add().attributes.add(key="k").value.array_value.values.add().int_value = at
    # group, scope, span and its three strings; each event, attribute, key, value, list, item
    whole = request.SerializeToString()
    assert fits(whole, request.DESCRIPTOR, 66)
    assert not fits(whole, request.DESCRIPTOR, 65)
    assert fits(b"\x12\x00" * 1000, request.DESCRIPTOR, 1000)


@given(body=st.binary(max_size=200))
def test_counting_the_parts_of_anything_comes_to_an_end(body: bytes) -> None:
    fits(body, ExportTraceServiceRequest.DESCRIPTOR, 1000)


@pytest.mark.parametrize(("encoding", "part"), [("protobuf", b"\x0a\x00"), ("json", b"{},")])
async def test_a_body_of_countless_empty_parts_is_refused_before_it_is_parsed(
    store: SpanStore, encoding: Literal["protobuf", "json"], part: bytes
) -> None:
    body = part * 1_000_001 if encoding == "protobuf" else b'{"resourceSpans":[' + part * 500_000 + b"{}]}"
    with pytest.raises(MalformedExportError, match="it has more than"):
        await a_receiver(store).take("traces", body, encoding)
