"""What a replica records of its requests: metrics by how they ended, spans on every way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from fakes_metrics import FakeCollector
from fakes_router import SpanRecorder
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from protos import common_pb2, replica_pb2
from protos.errors import KvorumError, invalid
from telemetry import spans
from workers.engine_metrics import exposition
from workers.kvpool.stats import PoolStats
from workers.metrics import MeasuringObserver, ReplicaMetrics
from workers.observe import Sent
from workers.placement import ReplicaPlacement, ShardSlot
from workers.tracing import ReplicaTracing

PLACEMENT = ReplicaPlacement(
    replica="replica-0",
    epoch="e0",
    namespace="n",
    ray_address="a",
    device="cpu",
    collective="none",
    slots=(ShardSlot(rank=0, bundle=0, node_id="n", node_ip="i", cores=()),),
    start_timeout_s=1.0,
)
FIXED = {
    "gen_ai__operation__name": "text_completion",
    "gen_ai__provider__name": "kvorum",
    "gen_ai__request__model": "m",
}
OF_MODEL = {"gen_ai__request__model": "m"}
LOST = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the engine died")


def a_request(n: int = 1, prompt: int = 100) -> replica_pb2.ReplicaGenerateRequest:
    return replica_pb2.ReplicaGenerateRequest(
        request_id="r", prompt_token_ids=[1] * prompt, sampling=common_pb2.SamplingParams(n=n, max_tokens=9)
    )


def an_answer(generated: int, *, prompt: int = 100) -> Sent:
    now = time.monotonic()
    times: Any = SimpleNamespace(
        queued_ts=now - 1.0, scheduled_ts=now - 0.9, first_token_ts=now - 0.5, last_token_ts=now
    )
    return Sent(
        prompt,
        accepted=True,
        cached_tokens=60,
        generated_tokens=generated,
        finish_reasons=[common_pb2.LENGTH],
        first_at=now,
        times=times,
    )


def observed(
    load: common_pb2.ReplicaLoad | None = None,
    pool: Callable[[], PoolStats] = PoolStats,
) -> tuple[FakeCollector, MeasuringObserver, SpanRecorder]:
    collector, record = FakeCollector(), SpanRecorder()
    metrics = ReplicaMetrics(collector.meters, "m", lambda: load or common_pb2.ReplicaLoad(), pool)
    return collector, MeasuringObserver(ReplicaTracing(record.telemetry, PLACEMENT, "m"), metrics), record


def test_a_served_request_is_measured_by_the_conventions() -> None:
    collector, observer, _ = observed()
    observer.start(a_request(n=2), ()).finish(None, an_answer(generated=12))
    assert collector.value("gen_ai.server.request.duration", **FIXED).count == 1
    assert collector.value("gen_ai.server.time_to_first_token", **FIXED).count == 1
    tpot = collector.value("gen_ai.server.time_per_output_token", **FIXED)
    assert tpot.sum == pytest.approx(0.5 / 5), "two sequences of six tokens, five after the first"
    assert collector.value("kvorum.replica.queue.duration", **OF_MODEL).sum == pytest.approx(0.1)
    assert collector.value("kvorum.replica.prefill.duration", **OF_MODEL).sum == pytest.approx(0.4)
    tokens = {
        p.attributes[spans.GEN_AI_TOKEN_TYPE]: p.value for p in collector.points("kvorum.replica.tokens")
    }
    assert tokens == {"input": 100, "output": 12}
    assert collector.value("kvorum.replica.requests", outcome="ok", **OF_MODEL) == 1


@pytest.mark.parametrize(
    ("error", "outcome", "kind"),
    [
        (LOST, "error", "REPLICA_LOST"),
        (invalid("top_p", "no"), "refused", "INVALID_REQUEST"),
        (asyncio.CancelledError(), "cancelled", "cancelled"),
        (ZeroDivisionError(), "error", "ZeroDivisionError"),
    ],
)
def test_what_ends_a_request_is_counted_and_closes_its_span(
    error: BaseException, outcome: str, kind: str
) -> None:
    collector, observer, record = observed()
    observer.start(a_request(), ()).finish(error, Sent(100, accepted=outcome != "refused"))
    assert collector.value("kvorum.replica.requests", outcome=outcome, **OF_MODEL) == 1
    took = collector.value("gen_ai.server.request.duration", error__type=kind, **FIXED)
    assert took.count == 1
    assert collector.points("gen_ai.server.time_to_first_token") == []
    assert record.attributes(spans.REPLICA_GENERATE)[spans.ERROR_TYPE] == kind
    waited = record.named(spans.REPLICA_QUEUE)
    assert len(waited) == (0 if outcome == "refused" else 1), "what was refused has waited for nothing"


def test_a_request_cancelled_in_decode_has_all_its_phases() -> None:
    _, observer, record = observed()
    observer.start(a_request(), ()).finish(asyncio.CancelledError(), an_answer(generated=3))
    names = {span.name for span in record.exporter.get_finished_spans()}
    assert names == {
        spans.REPLICA_GENERATE, spans.REPLICA_QUEUE, spans.REPLICA_PREFILL, spans.REPLICA_DECODE,
    }  # fmt: skip
    attributes = record.attributes(spans.REPLICA_GENERATE)
    assert attributes[spans.GEN_AI_USAGE_OUTPUT_TOKENS] == 3
    assert attributes[spans.GEN_AI_RESPONSE_FINISH_REASONS] == ("length",)


def test_requests_that_outlive_the_process_end_with_it_once() -> None:
    _, observer, record = observed()
    scope = observer.start(a_request(), ())
    record.telemetry.shutdown()
    assert record.attributes(spans.REPLICA_GENERATE)[spans.ERROR_TYPE] == "REPLICA_LOST"
    scope.finish(None, an_answer(generated=1))
    assert len(record.named(spans.REPLICA_GENERATE)) == 1


def test_the_engines_last_step_is_shown() -> None:
    load = common_pb2.ReplicaLoad(running=3, waiting=2, kv_usage=0.5, kv_blocks=400)
    collector, _, _ = observed(load)
    names = ("running", "waiting", "kv.usage", "kv.blocks")
    shown = {name: collector.value(f"kvorum.replica.{name}") for name in names}
    assert shown == {"running": 3, "waiting": 2, "kv.usage": 0.5, "kv.blocks": 400}
    load.running = 7
    assert collector.value("kvorum.replica.running") == 7


def test_only_vllms_families_are_told() -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "about", ["engine"], registry=registry).labels("0").set(3)
    Gauge("process_secrets", "about", registry=registry).set(1)
    (family,) = text_string_to_metric_families(exposition(registry))
    assert family.name == "vllm:num_requests_running"
    assert [(s.labels, s.value) for s in family.samples] == [({"engine": "0"}, 3.0)]


def test_what_the_engine_does_with_its_pool_is_shown() -> None:
    now = PoolStats(
        slots=40, hits=5, misses=3, loaded=4, lost=1, stored=9, loaded_bytes=4096, busy=2, evicted=6
    )
    collector, _, _ = observed(pool=lambda: now)
    lookups = {p.attributes["result"]: p.value for p in collector.points("kvorum.replica.pool.lookups")}
    assert lookups == {"hit": 5, "miss": 3}
    blocks = {p.attributes["event"]: p.value for p in collector.points("kvorum.replica.pool.blocks")}
    assert blocks == {"loaded": 4, "lost": 1, "stored": 9, "dropped": 0, "refused": 0}
    assert collector.value("kvorum.replica.pool.transferred", direction="load") == 4096
    shown = {name: collector.value(f"kvorum.replica.pool.{name}") for name in ("busy", "slots", "evicted")}
    assert shown == {"busy": 2, "slots": 40, "evicted": 6}
    now = PoolStats(slots=40, evicted=7)
    assert collector.value("kvorum.replica.pool.evicted") == 7


def test_an_engine_without_a_pool_shows_none() -> None:
    collector, _, _ = observed()
    assert not [name for name in collector.metrics() if "pool" in name and collector.points(name)]


def fetched(blocks: int = 3, failed: str = "") -> Sent:
    """A request for which another host was asked for blocks."""
    sent = an_answer(generated=1)
    sent.fetch_at = time.monotonic() - 1.2
    sent.fetch = common_pb2.KvFetch(agent="far:9", blocks=blocks, bytes=300, seconds=0.1, failed=failed)
    sent.pooled_tokens = 48
    return sent


@pytest.mark.parametrize(
    ("blocks", "failed", "outcome"), [(3, "", "whole"), (1, "far:9 stalled", "part"), (0, "no room", "none")]
)
def test_blocks_from_another_host_are_counted_and_have_a_span(blocks: int, failed: str, outcome: str) -> None:
    collector, observer, record = observed()
    observer.start(a_request(), ()).finish(None, fetched(blocks, failed))
    assert collector.value("kvorum.replica.pulls", outcome=outcome) == 1
    assert collector.value("kvorum.replica.pull.blocks") == blocks
    assert collector.value("kvorum.replica.pull.transferred") == 300
    assert collector.value("kvorum.replica.pull.duration", outcome=outcome).sum == pytest.approx(0.1)
    (span,) = record.named(spans.REPLICA_KV_FETCH)
    told = dict(span.attributes or {})
    assert told.pop(spans.KV_FETCH_FAILED, "") == failed
    assert told == {
        spans.KV_FETCH_SOURCE: "far:9", spans.KV_FETCH_BLOCKS: blocks, spans.KV_FETCH_BYTES: 300,
    }  # fmt: skip
    (generate,) = record.named(spans.REPLICA_GENERATE)
    assert span.parent is not None
    assert span.parent.span_id == generate.get_span_context().span_id
    assert generate.start_time <= span.start_time <= span.end_time <= generate.end_time
    assert record.attributes(spans.REPLICA_PREFILL)[spans.POOLED_TOKENS] == 48


def test_a_request_that_ends_while_it_waits_for_blocks_has_not_waited_for_the_engine() -> None:
    collector, observer, record = observed()
    sent = Sent(100, accepted=True, fetch_at=time.monotonic())
    observer.start(a_request(), ()).finish(asyncio.CancelledError(), sent)
    assert collector.value("kvorum.replica.pulls", outcome="cancelled") == 1
    assert collector.points("kvorum.replica.pull.duration") == []
    assert record.attributes(spans.REPLICA_KV_FETCH)[spans.ERROR_TYPE] == "cancelled"
    assert record.named(spans.REPLICA_QUEUE) == []


def test_a_request_that_ends_in_the_queue_has_waited_there_from_the_fetch_on() -> None:
    _, observer, record = observed()
    scope = observer.start(a_request(), ())
    sent = Sent(100, accepted=True, fetch_at=time.monotonic(), fetch=common_pb2.KvFetch(seconds=0.0))
    scope.finish(asyncio.CancelledError(), sent)
    (fetch,), (queue,) = record.named(spans.REPLICA_KV_FETCH), record.named(spans.REPLICA_QUEUE)
    assert fetch.end_time <= queue.start_time
