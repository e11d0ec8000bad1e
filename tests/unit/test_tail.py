"""Requests that were not sampled, and are recorded after all: by error and by slowness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes_cluster import Script
from fakes_http import FakeServer, answers, asked
from fakes_router import collected, running_stack
from opentelemetry.context import Context
from test_http_edge import CHAT, an_edge
from test_router_tracing import LOST

from cluster.openai.asgi import Receive, Scope, Send
from protos.errors import KvorumError
from router.tracing import TracingObserver
from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.ids import GivenIds
from telemetry.record import StoredSpan
from telemetry.setup import Telemetry, configure, open_store
from telemetry.tail import Tail

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
TRACE = UNSAMPLED.split("-")[1]


@pytest.fixture
def config(tmp_path: Path) -> TelemetryConfig:
    return TelemetryConfig(store="on", store_path=tmp_path / "traces.db", sample_ratio=0.0)


@pytest.fixture
def telemetry(config: TelemetryConfig) -> Iterator[Telemetry]:
    telemetry = configure("kvorum.router", "router-0", config)
    yield telemetry
    telemetry.shutdown()


def stored(telemetry: Telemetry, config: TelemetryConfig, trace_id: str = TRACE) -> dict[str, StoredSpan]:
    assert telemetry.flush(10)
    return {span.name: span for span in open_store(config).trace(trace_id)}


async def test_failed_request_of_an_unsampled_trace_is_recorded_whole(
    telemetry: Telemetry, config: TelemetryConfig
) -> None:
    script = Script(error_after=(1, LOST))
    async with running_stack(observer=TracingObserver(telemetry), script=script) as stack:
        with pytest.raises(KvorumError):
            await collected(stack.client, "a bc", max_tokens=5, metadata=(("traceparent", UNSAMPLED),))
        sent = stack.replicas[0].seen[0].metadata["traceparent"]
    found = stored(telemetry, config)
    assert set(found) == {
        spans.ROUTER_REQUEST, spans.ROUTER_TOKENIZE, spans.ROUTER_ROUTE, spans.ROUTER_FORWARD,
    }  # fmt: skip
    request = found[spans.ROUTER_REQUEST]
    assert request.parent_id == "b7ad6b7169203331"
    assert request.attributes[spans.SAMPLED_BY] == "error"
    assert request.attributes[spans.ERROR_TYPE] == "REPLICA_LOST"
    assert {found[name].parent_id for name in found if name != spans.ROUTER_REQUEST} == {request.span_id}
    assert sent.endswith("-00"), "the replica records nothing of it"
    assert sent.split("-")[2] == found[spans.ROUTER_FORWARD].span_id


async def test_slow_request_is_recorded_and_a_fast_one_is_not(config: TelemetryConfig) -> None:
    for keep_slow_s, expected in ((60.0, set()), (1e-6, {"slow"})):
        slow = config.model_copy(update={"keep_slow_s": keep_slow_s})
        telemetry = configure("kvorum.router", "router-0", slow)
        async with running_stack(observer=TracingObserver(telemetry)) as stack:
            await collected(stack.client, [1], max_tokens=1, metadata=(("traceparent", UNSAMPLED),))
        found = stored(telemetry, config)
        telemetry.shutdown()
        assert {s.attributes[spans.SAMPLED_BY] for s in found.values() if s.name == spans.ROUTER_REQUEST} == (
            expected
        )


async def test_a_request_that_begins_its_trace_here_gets_a_root(
    telemetry: Telemetry, config: TelemetryConfig
) -> None:
    async with running_stack(observer=TracingObserver(telemetry)) as stack:
        with pytest.raises(KvorumError):
            await collected(stack.client, [1], top_p=9.0)
    assert telemetry.flush(10)
    (summary,) = open_store(config).recent(10)
    assert (summary.root, summary.errors) == (spans.ROUTER_REQUEST, 1)


async def test_the_http_face_keeps_the_root_of_a_failed_request(
    telemetry: Telemetry, config: TelemetryConfig
) -> None:
    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("inside")

    for server in (FakeServer(crash), FakeServer(answers(200, {})), FakeServer(answers(404, {}))):
        await asked(an_edge(server, telemetry=telemetry), CHAT, headers={"traceparent": UNSAMPLED})
    found = stored(telemetry, config)
    assert found[spans.HTTP_REQUEST].attributes[spans.SAMPLED_BY] == "error"
    assert found[spans.HTTP_REQUEST].attributes[spans.HTTP_STATUS] == 500
    assert len(open_store(config).trace(TRACE)) == 1


def test_a_flood_of_failures_is_cut_to_fifty_a_second() -> None:
    now = [0.0]
    tail = Tail(Telemetry.silent().tracer, GivenIds(), slow_s=5, clock=lambda: now[0])
    assert [tail.why(failed=True, took_s=0) for _ in range(60)].count("error") == 50
    now[0] += 0.5
    assert [tail.why(failed=True, took_s=0) for _ in range(60)].count("error") == 25
    now[0] += 1000
    assert [tail.why(failed=False, took_s=6) for _ in range(60)].count("slow") == 50


@pytest.mark.parametrize("how", ["all sampled", "switched off", "another sampler"])
def test_there_is_no_tail_where_it_has_nothing_to_say(
    how: str, config: TelemetryConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = {"all sampled": {"sample_ratio": 1.0}, "switched off": {"keep_slow_s": 0.0}}.get(how, {})
    if how == "another sampler":
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    telemetry = configure("s", "i", config.model_copy(update=update))
    assert telemetry.tail is None
    telemetry.shutdown()


def test_spans_of_a_kept_trace_need_no_sampled_parent(telemetry: Telemetry, config: TelemetryConfig) -> None:
    assert telemetry.tail is not None
    own = spans.elsewhere(int(TRACE, 16), 0xB1)
    root = telemetry.tail.start("root", own, spans.elsewhere(0, 0), start_ns=1_000)
    spans.finish(telemetry.tail.start("child", None, own, start_ns=1_500), end_ns=1_600)
    spans.finish(root, end_ns=2_000)
    found = {s.name: s for s in open_store_of_1970(telemetry, config)}
    assert found["root"].span_id == f"{0xB1:016x}"
    assert found["root"].parent_id is None
    assert found["child"].parent_id == f"{0xB1:016x}"
    assert spans.start(telemetry.tracer, "other", Context()).is_recording() is False


def open_store_of_1970(telemetry: Telemetry, config: TelemetryConfig) -> list[StoredSpan]:
    assert telemetry.flush(10)
    return open_store(config).trace(TRACE)
