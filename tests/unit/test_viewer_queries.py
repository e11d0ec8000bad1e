"""What is shown of a trace: its line in the list, its tree on one clock, its decision; and Jaeger's form."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_viewer import MS, a_request, a_span
from hypothesis import given
from hypothesis import strategies as st

from router.picker import Candidate
from router.span_attributes import of_route
from telemetry import spans
from telemetry.record import StoredLink, StoredSpan
from telemetry.store import SpanStore
from telemetry.viewer import jaeger, queries
from telemetry.viewer.queries import QuestionError, candidates, request_view, summary
from telemetry.viewer.reader import StoreReader
from telemetry.viewer.skew import PlacedSpan, place

HOSTILE = "<script>alert(1)</script>\u202e\x00\x1b[31m\"'&\ud800"


def named(placed: list[PlacedSpan], name: str) -> PlacedSpan:
    return next(one for one in placed if one.span.name == name)


def strict(value: Any) -> Any:
    """Through JSON as a browser reads it."""
    return json.loads(json.dumps(value, allow_nan=False))


def test_a_request_is_summed_up_from_the_router_and_its_replica() -> None:
    found = summary(a_request(7, base_ns=1_700_000_000_123_456_789))
    assert (found.trace_id, found.name, found.service) == (f"{7:032x}", spans.HTTP_REQUEST, "kvorum.http")
    assert (found.status, found.error_type, found.tenant, found.replica) == ("ok", "", "acme", "replica-0")
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (100, 11, 64)
    assert (found.start_ms, found.duration_ms, found.spans) == (1_700_000_000_123.456, 200.0, 6)
    assert found.ttft_ms == 60.0, "as the router saw it, from the topmost span's start"
    assert found.tpot_ms == pytest.approx((190 - 58) / 10)
    assert found.phases_ms[spans.REPLICA_DECODE] == 132.0


@pytest.mark.parametrize(
    ("change", "status", "error_type"),
    [
        ({"error": "REPLICA_LOST"}, "error", "REPLICA_LOST"),
        ({"error": "cancelled"}, "cancelled", "cancelled"),
    ],
)  # fmt: skip
def test_a_request_that_failed_says_how(change: dict[str, str], status: str, error_type: str) -> None:
    found = summary(a_request(**change))
    assert (found.status, found.error_type) == (status, error_type)


def test_a_refused_request_is_told_from_a_failed_one() -> None:
    by_router = a_span(spans.ROUTER_REQUEST, 0, 1, error="OVERLOADED", kvorum__outcome="refused")
    assert (summary([by_router]).status, summary([by_router]).error_type) == ("refused", "OVERLOADED")
    by_face = a_span(spans.HTTP_REQUEST, 0, 1, http__response__status_code=404)
    assert (summary([by_face]).status, summary([by_face]).error_type) == ("refused", "404")


def test_a_trace_without_its_end_is_incomplete_and_what_is_missing_is_none() -> None:
    found = summary([a_span(spans.REPLICA_QUEUE, 0, 1, parent="ab" * 8)])
    assert found.status == "incomplete"
    assert (found.input_tokens, found.ttft_ms, found.tpot_ms) == (None, None, None)


def test_time_per_token_counts_the_tokens_of_one_sequence() -> None:
    asked = a_span(spans.ROUTER_REQUEST, 0, 200, gen_ai__request__choice__count=2)
    decode = a_span(spans.REPLICA_DECODE, 50, 150, parent=asked, gen_ai__usage__output_tokens=22)
    assert summary([asked, decode]).tpot_ms == 10.0
    shortened = replace(decode, attributes={**decode.attributes, spans.MEASURED_S: 0.2})
    assert summary([asked, shortened]).tpot_ms == 20.0
    one = replace(decode, attributes={spans.GEN_AI_USAGE_OUTPUT_TOKENS: 2})
    assert summary([asked, one]).tpot_ms is None


def test_without_the_routers_event_its_figure_counts_and_without_that_the_replicas() -> None:
    asked = a_span(spans.ROUTER_REQUEST, 0, 200, gen_ai__response__time_to_first_chunk=0.07)
    decode = a_span(spans.REPLICA_DECODE, 50, 150, parent=asked, events=[(spans.FIRST_TOKEN, 50)])
    assert summary([asked, decode]).ttft_ms == 70.0
    assert summary([replace(asked, attributes={}), decode]).ttft_ms == 50.0


@pytest.mark.parametrize("skew_ms", [-3600_000.0, -30.0, 25.0, 500.0, 86_400_000.0])
def test_another_hosts_clock_is_corrected_and_the_correction_shown(skew_ms: float) -> None:
    request = a_request(skew_ms=skew_ms)
    placed = place(request)
    served, forward = named(placed, spans.REPLICA_GENERATE), named(placed, spans.ROUTER_FORWARD)
    assert forward.start_ns <= served.start_ns <= served.end_ns <= forward.end_ns
    assert served.skew_ns == -round(skew_ms * MS), "the middle of the parent is where it was"
    assert named(placed, spans.REPLICA_DECODE).skew_ns == served.skew_ns, "one clock, one correction"
    assert {one.skew_ns for one in placed if one.span.resource["host.name"] == "a"} == {0}
    view = request_view(request, [], size=6)
    assert view["marks"] == queries.request_view(a_request(), [], size=6)["marks"] | {
        "first_token_ms": view["marks"]["first_token_ms"], "last_token_ms": view["marks"]["last_token_ms"],
    }  # fmt: skip
    root = view["spans"][0]
    assert view["marks"]["last_token_ms"] == pytest.approx(root["start_ms"] + 190, abs=0.002)


def test_clocks_that_agree_are_left_alone() -> None:
    request = a_request(skew_ms=0.5)
    assert {one.skew_ns for one in place(request)} == {0}, (
        "it fits into its parent: nothing shows a difference"
    )


def test_a_call_that_comes_back_to_a_host_finds_its_clock_as_it_was() -> None:
    top = a_span("top", 0, 100, host="a")
    away = a_span("away", 1000, 1050, parent=top, host="b")
    back = a_span("back", 30, 40, parent=away, host="a")
    placed = place([back, away, top])
    assert [(one.span.name, one.depth, one.skew_ns / MS) for one in placed] == [
        ("top", 0, 0), ("away", 1, -975), ("back", 2, 0),
    ]  # fmt: skip


def test_a_span_that_outlives_its_parent_is_judged_by_its_start() -> None:
    top = a_span("top", 0, 100, host="a")
    after = a_span("after", 50, 900, parent=top, host="b")
    assert place([top, after])[1].skew_ns == 0
    before = a_span("before", -40, 900, parent=top, host="b")
    assert place([top, before])[1].skew_ns == 40 * MS


def test_siblings_are_in_the_order_of_their_corrected_times() -> None:
    top = a_span("top", 0, 100, host="a")
    first = a_span("first", 500, 540, parent=top, host="b")
    second = a_span("second", 60, 90, parent=top, host="a")
    assert [one.span.name for one in place([top, second, first])] == ["top", "first", "second"]


@given(seed=st.integers(0, 10_000), count=st.integers(1, 40))
def test_every_span_is_placed_once_after_its_parent_whatever_the_parents_are(seed: int, count: int) -> None:
    drawn = random.Random(seed)
    made: list[StoredSpan] = []
    for _ in range(count):
        start = drawn.uniform(-1e6, 1e6)
        parent = drawn.choice([None, "ff" * 8, *[span.span_id for span in made]])
        made.append(
            a_span("s", start, start + drawn.uniform(0, 1e5), parent=parent, host=drawn.choice("abc"))
        )
    if count > 2:  # a circle
        made[0] = replace(made[0], parent_id=made[-1].span_id)
    placed = place(drawn.sample(made, count))
    order = [one.span.span_id for one in placed]
    assert sorted(order) == sorted(span.span_id for span in made)
    for one in placed:
        if one.depth:
            assert order.index(one.span.parent_id or "") < order.index(one.span.span_id)
    assert strict(request_view(made, [], size=count))


def test_a_chain_of_thousands_of_spans_is_no_problem() -> None:
    made = [a_span("s", 0, 1)]
    for _ in range(5000):
        made.append(a_span("s", 0, 1, parent=made[-1]))
    assert place(made)[-1].depth == 5000


def test_the_routers_candidates_come_back_as_they_were_decided_on() -> None:
    decided = Candidate(
        "replica-0", "e1", chosen=True, cached_tokens=64, pending_tokens=2, pooled_tokens=3,
        uncached_tokens=36, queue_ms=1.5, prefill_ms=36, fetch_ms=0.5, interference_ms=0.2, overhead_ms=2,
        ttft_ms=40.2, harm_ms=0.5, affinity_ms=0.1, score_ms=40.6, sequences=3, backlog_tokens=120,
        kv_usage=0.25, degraded="a gap: 3 != 4",
    )  # fmt: skip
    decision: Any = SimpleNamespace(
        candidates=lambda: [Candidate("replica-1", "e9"), decided], policy="cost", why="least score",
        replica="replica-0", epoch="e1", degraded="",
    )  # fmt: skip
    route = replace(a_span(spans.ROUTER_ROUTE, 0, 1), attributes=of_route(decision))
    first, second = candidates(route)
    assert first == {
        "span_id": route.span_id, "replica": "replica-0", "epoch": "e1", "chosen": True, "cached": 64,
        "degraded": "a gap: 3 != 4", "pending": 2, "pooled": 3, "uncached": 36, "sequences": 3,
        "backlog": 120, "queue": 1.5, "prefill": 36.0, "fetch": 0.5, "interference": 0.2, "overhead": 2.0,
        "ttft": 40.2, "harm": 0.5, "affinity": 0.1, "score": 40.6, "kv": 0.25,
    }  # fmt: skip
    assert (second["replica"], second["chosen"], second["degraded"]) == ("replica-1", False, "")


@pytest.mark.parametrize(
    "lines",
    ["text", 7, None, [], [None, 3, "", HOSTILE, "@", "a@b", "a@b cached=x", "= = =" * 1000, "a@b " * 5000]],
)
def test_attributes_that_are_no_candidates_are_none(lines: object) -> None:
    assert candidates(a_span(spans.ROUTER_ROUTE, 0, 1, kvorum__candidates=lines)) == []


def test_odd_figures_of_a_candidate_are_unknown_ones() -> None:
    lines = ["a@b cached=1e400 queue=inf ttft=nan score=-1 kv=9" + "9" * 400]
    (found,) = candidates(a_span(spans.ROUTER_ROUTE, 0, 1, kvorum__candidates=lines))
    assert (found["cached"], found["queue"], found["ttft"], found["score"], found["kv"]) == (
        None,
        None,
        None,
        -1,
        None,
    )


def test_hostile_attributes_reach_the_page_as_text_and_as_valid_json() -> None:
    values = {
        "kvorum__tenant": HOSTILE, "nan": math.nan, "inf": -math.inf, "big": 1 << 62, "bytes": b"\x00",
        "list": [math.nan, HOSTILE], "gen_ai__usage__input_tokens": "many", "kvorum__outcome": {"a": [1]},
        "gen_ai__usage__output_tokens": -5, "gen_ai__response__time_to_first_chunk": math.nan,
        "gen_ai__request__choice__count": 1 << 60, "kvorum__replica": 7,
    }  # fmt: skip
    span = a_span(
        spans.ROUTER_REQUEST, 0, 1, events=[(HOSTILE, 0.5)], links=[StoredLink("x", HOSTILE)], **values
    )
    view = strict(
        request_view([replace(span, name=spans.ROUTER_REQUEST, status_message=HOSTILE)], [], size=1)
    )
    shown = view["spans"][0]["attributes"]
    assert shown["kvorum.tenant"] == HOSTILE
    assert (shown["nan"], shown["inf"], shown["big"], shown["list"][0]) == (
        "nan",
        "-inf",
        str(1 << 62),
        "nan",
    )
    assert (view["request"]["input_tokens"], view["request"]["output_tokens"]) == (None, None)
    assert strict(jaeger.trace([span]))


def test_engine_steps_are_shown_with_the_request_that_links_to_them(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db")
    step = a_span(spans.ENGINE_STEP, 1000, 1010, trace=99, host="b", kvorum__rank=1)
    request = a_request(skew_ms=500)
    link = StoredLink(step.trace_id, step.span_id)
    prefill = replace(request[-1], name=spans.REPLICA_PREFILL, span_id="ab" * 8, links=(link,))
    store.write([step, *request, prefill])
    view = StoreReader(store).request(f"{1:032x}")
    assert view is not None
    (shown,) = view["steps"]
    assert (shown["trace_id"], shown["attributes"]) == (step.trace_id, {"kvorum.rank": 1})
    assert shown["skew_ms"] == -500.0, "its host's clock is corrected as for the request"
    assert view["truncated"] is False


def test_the_list_goes_on_by_cursor_or_by_the_start_of_its_last_row(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db")
    for trace in range(1, 6):
        store.write(a_request(trace, base_ns=1_700_000_000_000_000_123 + trace * 7777))
    reader = StoreReader(store)
    for by_start in (False, True):
        seen, before = [], ""
        while page := reader.requests({"limit": "2", "before": before}):
            seen += [int(row["trace_id"], 16) for row in page["requests"]]
            if not page["requests"] or page["next"] is None:
                break
            before = str(page["requests"][-1]["start_ms"]) if by_start else page["next"]
        assert seen == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    "parameters",
    [
        {"slow_ms": "x"}, {"slow_ms": "-1"}, {"slow_ms": "nan"}, {"slow_ms": "inf"}, {"limit": "many"},
        {"before": "yesterday"}, {"before": "1-2"}, {"tenant": "x" * 300}, {"replica": "x" * 300},
    ],
)  # fmt: skip
def test_filters_that_make_no_sense_are_refused(tmp_path: Path, parameters: dict[str, str]) -> None:
    with pytest.raises(QuestionError):
        StoreReader(SpanStore(tmp_path / "traces.db")).requests(parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {"slow_ms": "1e300"}, {"limit": "0"}, {"limit": "999999999"}, {"before": "1e300"}, {"error": "<b>"},
        {"tenant": HOSTILE}, {"replica": "' OR 1=1 --"}, {"before": f"{'9' * 18}-{'f' * 32}"},
    ],
)  # fmt: skip
def test_odd_filters_are_answered(tmp_path: Path, parameters: dict[str, str]) -> None:
    store = SpanStore(tmp_path / "traces.db")
    store.write(a_request())
    assert strict(StoreReader(store).requests(parameters))


def test_jaeger_sees_processes_parents_links_errors_and_the_corrected_times() -> None:
    request = a_request(error="REPLICA_LOST", skew_ms=400, base_ns=10**18)
    linked = replace(request[2], links=(StoredLink("ab" * 16, "cd" * 8),), span_id="ef" * 8)
    found = strict(jaeger.trace([*request, linked]))
    by_name = {span["operationName"]: span for span in found["spans"]}
    http, served = by_name[spans.HTTP_REQUEST], by_name[spans.REPLICA_GENERATE]
    assert http["references"] == []
    assert {"key": "error", "type": "bool", "value": True} in http["tags"]
    assert {"key": "span.kind", "type": "string", "value": "server"} in http["tags"]
    assert found["processes"][http["processID"]]["serviceName"] == "kvorum.http"
    assert served["references"][0]["refType"] == "CHILD_OF"
    assert (served["startTime"], served["duration"]) == (10**15 + 8000, 186_000)
    assert "clock skew" in served["warnings"][0]
    kinds = [reference["refType"] for span in found["spans"] for reference in span["references"]]
    assert kinds.count("FOLLOWS_FROM") == 1
    assert len({span["processID"] for span in found["spans"]}) == len(found["processes"]) == 3


@pytest.mark.parametrize(
    ("parameters", "traces"),
    [
        ({}, {1, 2}), ({"operation": spans.ROUTER_REQUEST}, {1, 2}), ({"operation": "nothing"}, set()),
        ({"tags": '{"error":"true"}'}, {2}), ({"tags": '{"kvorum.tenant":"acme"}'}, {1}),
        ({"tags": '{"kvorum.tenant":"acme","error":"true"}'}, set()), ({"tag": "kvorum.outcome:error"}, {2}),
        ({"tags": '{"gen_ai.usage.input_tokens":100}', "limit": "1"}, {2}), ({"minDuration": "500ms"}, {2}),
        ({"maxDuration": "0.3s"}, {1, 2}), ({"maxDuration": "1us"}, set()),
        ({"start": "2000000000000000"}, set()),
        ({"end": "1"}, set()), ({"service": "nobody"}, set()), ({"tags": '{"host.name":"a"}'}, {1, 2}),
    ],
)  # fmt: skip
def test_jaegers_search_finds_traces(tmp_path: Path, parameters: dict[str, str], traces: set[int]) -> None:
    store = SpanStore(tmp_path / "traces.db")
    store.write(a_request(1, base_ns=10**18))
    store.write(a_request(2, base_ns=10**18 + 1, tenant="b", error="OVERLOADED", ms=900))
    found = StoreReader(store).jaeger_traces({"service": "kvorum.router", **parameters}, [])
    assert {int(one["traceID"], 16) for one in found["data"]} == traces


@pytest.mark.parametrize(
    "parameters",
    [
        {}, {"service": ""}, {"service": "s", "limit": "x"}, {"service": "s", "limit": "-1"},
        {"service": "s", "start": "1e9"}, {"service": "s", "minDuration": "5"},
        {"service": "s", "maxDuration": "-1s"},
        {"service": "s", "tags": "{"}, {"service": "s", "tags": "[]"}, {"service": "s", "tags": "[" * 90_000},
        {"service": "s", "tags": json.dumps({str(at): "x" for at in range(50)})},
    ],
)  # fmt: skip
def test_a_search_that_makes_no_sense_is_refused(tmp_path: Path, parameters: dict[str, str]) -> None:
    with pytest.raises(QuestionError):
        StoreReader(SpanStore(tmp_path / "traces.db")).jaeger_traces(parameters, [])


def test_traces_are_found_by_ids_without_their_leading_zeros(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db")
    store.write(a_request(0xAB))
    reader = StoreReader(store)
    assert reader.jaeger_traces({}, ["AB", "77"])["data"][0]["traceID"] == f"{0xAB:032x}"
    assert reader.jaeger_trace("ab") is not None
    assert reader.jaeger_trace("ac") is None
    assert reader.request("ab") is not None
    for odd in ("", "x", "a" * 33, "ab\n", "../../etc/passwd", "%00"):
        with pytest.raises(QuestionError):
            reader.request(odd)
