"""Requests, steps, replicas and metrics as `kvorum doctor` reads them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.evidence import read_candidates, read_metrics, read_replicas, read_request, read_step
from protos import admin_pb2
from telemetry import spans
from telemetry.record import StoredSpan

LINE = (
    "replica-{n}@e1 cached={cached} pending=0 pooled=0 uncached=10 queue=0.0 prefill=9.5 fetch=0.0 "
    "interference=0.0 overhead=1.0 ttft=10.5 harm=0.0 affinity=0.0 score=10.5 sequences=3 backlog=0 kv=0.25"
)


def a_span(name: str, begin_s: float, end_s: float, **attributes: Any) -> StoredSpan:
    return StoredSpan(
        trace_id="a" * 32,
        span_id=f"{hash((name, begin_s)) & (2**64 - 1):016x}",
        parent_id=None,
        name=name,
        kind="INTERNAL",
        start_ns=int(begin_s * 1e9),
        end_ns=int(end_s * 1e9),
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
    )


def a_trace() -> list[StoredSpan]:
    request = {
        spans.GEN_AI_USAGE_INPUT_TOKENS: 100, spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 48,
        spans.GEN_AI_USAGE_OUTPUT_TOKENS: 42, spans.GEN_AI_REQUEST_CHOICE_COUNT: 2, spans.TENANT: "acme",
        spans.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: 1.5,
    }  # fmt: skip
    lines = [LINE.format(n=0, cached=48), LINE.format(n=1, cached=96) + " degraded='kv=9 is no term'"]
    return [
        a_span(spans.ROUTER_REQUEST, 10.0, 14.0, **request),
        a_span(spans.ROUTER_ADMIT, 10.0, 10.25),
        a_span(spans.ROUTER_ROUTE, 10.25, 10.26, **{spans.CANDIDATES: lines, spans.POLICY: "round-robin"}),
        a_span(spans.REPLICA_GENERATE, 10.3, 14.0, **{spans.REPLICA: "replica-0"}),
        a_span(spans.REPLICA_QUEUE, 10.3, 10.5, **{spans.MEASURED_S: 0.75}),
        a_span(spans.REPLICA_PREFILL, 10.5, 11.5, **{spans.COMPUTED_TOKENS: 52}),
        a_span(spans.REPLICA_DECODE, 11.5, 13.5),
    ]


def test_a_whole_trace_is_one_request_with_its_phases() -> None:
    request = read_request(a_trace())
    assert request is not None
    assert (request.replica, request.tenant, request.policy) == ("replica-0", "acme", "round-robin")
    assert (request.prompt, request.cached, request.computed, request.output) == (100, 48, 52, 21)
    assert (request.held_s, request.queue_s, request.prefill_s, request.decode_s) == (0.25, 0.75, 1.0, 2.0)
    assert request.waited_s == 1.0
    assert (request.ttft_s, request.tpot_s, request.first_token_s) == (1.5, 0.1, 11.5)
    assert request.missed == 48


def test_a_trace_without_the_routers_span_is_no_request() -> None:
    assert read_request(a_trace()[1:]) is None


def test_a_request_that_failed_early_has_phases_of_no_length() -> None:
    request = read_request([a_span(spans.ROUTER_REQUEST, 1.0, 1.5, **{spans.ERROR_TYPE: "OVERLOADED"})])
    assert request is not None
    assert (request.error, request.duration_s, request.waited_s) == ("OVERLOADED", 0.5, 0.0)
    assert request.tpot_s is None
    assert request.missed == 0


def test_a_quoted_reason_adds_no_terms_to_a_candidate() -> None:
    [candidate] = read_candidates([LINE.format(n=1, cached=7) + " degraded='kv=9.0 cached=99'"])
    assert (candidate.replica, candidate.cached, candidate.kv_usage) == ("replica-1", 7, 0.25)


@pytest.mark.parametrize("hostile", [None, 7, "text", [None, 3, "", "@", "cached=", "a cached=1e999"]])
def test_candidates_of_another_shape_are_left_out(hostile: Any) -> None:
    assert all(candidate.cached in (0, 1) for candidate in read_candidates(hostile))


def test_a_step_without_times_is_none() -> None:
    told = {spans.STEP_TOKENS: 512, spans.STEP_FORWARD_S: 0.5}
    assert read_step(a_span(spans.ENGINE_STEP, 0, 1, **told)) is None
    step = read_step(a_span(spans.ENGINE_STEP, 0, 1, **told, **{spans.STEP_EXPOSED_S: 0.25}))
    assert step is not None
    assert (step.tokens, step.forward_s, step.exposed_s) == (512, 0.5, 0.25)


def test_replicas_say_their_room_and_how_much_their_shards_wait() -> None:
    status = admin_pb2.ClusterStatus()
    replica = status.replicas.add(replica="replica-0", state=admin_pb2.READY)
    replica.load.kv_blocks, replica.load.block_size, replica.load.max_sequences = 100, 16, 32
    overlap = admin_pb2.OverlapStatus()
    shards = overlap.replicas.add(replica="replica-0").shards
    for rank in range(2):
        shard = shards.add(rank=rank, mode="off", collective="gloo")
        shard.stock.steps, shard.stock.timed_steps = 10, 5
        shard.stock.forward_s, shard.stock.exposed_s = 4.0, 0.5
    [facts] = read_replicas(status, overlap)
    assert (facts.state, facts.kv_tokens, facts.max_sequences) == ("ready", 1600, 32)
    assert (facts.overlap, facts.collective, facts.exposed) == ("off", "gloo", 0.25)
    assert read_replicas(status)[0].exposed is None


def test_metrics_are_summed_by_a_label_and_garbage_has_none() -> None:
    text = "# TYPE a counter\n" + "\n".join(
        f'a_total{{outcome="{outcome}",replica="{n}"}} {n}' for outcome in ("ok", "error") for n in (1, 2)
    )
    assert read_metrics(text + "\n").by("a_total", "outcome") == {"ok": 3.0, "error": 3.0}
    assert read_metrics("<html> {{{ 1 2 3").by("a_total", "outcome") == {}
