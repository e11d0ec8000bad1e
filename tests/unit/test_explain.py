"""Decisions that one can read: Explain, the router's state, and the route span. None leases anything."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from fakes_cluster import FakeReplica, Script
from fakes_router import (
    SpanRecorder,
    Stack,
    assert_nothing_leaked,
    collected,
    eventually,
    running_stack,
    warmed,
)

from protos import admin_pb2
from protos.errors import KvorumError
from router.client import KvorumClient
from telemetry import spans

PROMPT = list(range(100, 300))
TERMS = (
    "cached", "pending", "pooled", "uncached", "queue", "prefill", "fetch", "interference", "overhead",
    "ttft", "harm", "affinity", "score", "sequences", "backlog", "kv",
)  # fmt: skip


async def state(stack: Stack) -> admin_pb2.RouterState:
    """Over the wire."""
    (found,) = (await stack.client.router_states()).values()
    assert isinstance(found, admin_pb2.RouterState)
    return found


async def test_explain_leases_nothing_and_calls_no_replica() -> None:
    async with running_stack(replicas=2) as stack:
        for _ in range(5):
            await stack.client.explain(PROMPT, max_tokens=8)
        assert stack.server.members.leased() == {}
        assert all(replica.seen == [] for replica in stack.replicas)
        await assert_nothing_leaked(stack.server)
        assert all(c.backlog_tokens == 0 for c in (await stack.client.explain(PROMPT)).candidates)


async def test_explain_says_what_generate_then_does() -> None:
    async with running_stack(replicas=4) as stack:
        warmed(stack.replicas[3], PROMPT)
        await eventually(lambda: stack.view("r3").blocks == 12)
        found = await stack.client.explain(PROMPT)
        messages = await collected(stack.client, PROMPT, max_tokens=1)
    assert found.chosen == messages[0].served.replica == "r3"
    assert (found.model, found.prompt_tokens, found.block_size) == ("fake", 200, 16)
    assert found.policy == "predicted-time"
    assert "192 of 200 prompt tokens" in found.why
    assert [c.replica for c in found.candidates if c.chosen] == ["r3"]


async def test_explain_lists_every_replica_and_why_one_is_not_taken() -> None:
    odd, draining, silent, alien, lying = (
        FakeReplica(name) for name in ("odd", "draining", "silent", "alien", "lying")
    )
    odd.block_size = 64
    lying.edit_update = lambda update: setattr(update, "seq", 1 if update.HasField("snapshot") else -1)
    extra = [odd, draining, silent, lying]
    async with running_stack(replicas=2, extra=extra) as stack:
        listed = await alien.start()
        stack.replicas.append(alien)
        member = listed.member()
        alien.model.revision = "r2"
        await stack.controller.announce(*[r.member() for r in stack.replicas if r is not alien], member)
        fleet = stack.group.fleet
        sound = ("r0", "r1", "silent", "draining")  # once most have said how large their blocks are
        await eventually(lambda: fleet.block_size == 16 and not any(stack.view(n).degraded for n in sound))
        draining.draining = True
        draining.push()
        silent.speaking.clear()
        await eventually(lambda: any(m and m.suspect and m.replica == "silent" for m in fleet.members))
        await eventually(lambda: "revision" in stack.view("alien").degraded)
        why: dict[str, str] = {}
        async with asyncio.timeout(5):
            # Between a fresh snapshot and its next lie it is believed.
            while "seq" not in why.get("lying", ""):
                found = await stack.client.explain(PROMPT)
                why = {c.replica: c.degraded for c in found.candidates}
    assert sorted(why) == ["alien", "draining", "lying", "odd", "r0", "r1", "silent"]
    assert (why["r0"], why["r1"]) == ("", "")
    assert "revision 'r2'" in why["alien"]
    assert why["draining"] == "draining"
    assert "seq" in why["lying"]
    assert "64 tokens" in why["odd"]
    assert "suspect" in why["silent"]
    assert found.chosen not in {"alien", "draining", "silent"}


async def test_terms_of_every_candidate_add_up() -> None:
    async with running_stack(replicas=3) as stack:
        stack.replicas[0].load.prefill_backlog_tokens = 500
        stack.replicas[1].load.running = stack.replicas[1].load.sequences = 7
        for replica in stack.replicas:
            replica.push()
        await eventually(lambda: stack.group.fleet.column("reported_sequences").sum() == 7)
        found = await stack.client.explain(PROMPT, session="s", max_tokens=50)
    for c in found.candidates:
        ttft = c.queue_ms + c.prefill_ms + c.fetch_ms + c.interference_ms + c.overhead_ms
        assert c.ttft_ms == pytest.approx(ttft)
        assert c.score_ms == pytest.approx(c.ttft_ms + c.harm_ms - c.affinity_ms)
        assert c.cached_tokens + c.pending_tokens + c.uncached_tokens == 200
    assert found.candidates[0].queue_ms > 0
    assert found.candidates[1].interference_ms > 0
    assert sum(c.affinity_ms > 0 for c in found.candidates) == 1


async def test_explain_works_when_nothing_can_serve_and_when_all_are_full() -> None:
    replica = FakeReplica("r0", script=Script(hang_after=0))
    replica.load.max_sequences = 1
    async with running_stack(replicas=0, extra=[replica]) as stack:
        running = [asyncio.ensure_future(collected(stack.client, [1])) for _ in range(3)]
        await eventually(lambda: len(stack.group.turnstile) == 2)
        full = await stack.client.explain(PROMPT)
        await replica.die()
        await eventually(lambda: not stack.server.members.servable("fake"))
        gone = await stack.client.explain(PROMPT)
        for task in running:
            task.cancel()
        await assert_nothing_leaked(stack.server)
    assert (full.chosen, full.queue_length) == ("r0", 2)
    assert full.queue_wait_ms > 0
    assert (gone.chosen, gone.why) == ("", "no replica may be picked now")
    assert [c.degraded for c in gone.candidates] == ["not connected"]


async def test_explain_checks_a_request_as_generate_does() -> None:
    async with running_stack() as stack:
        for fields, code in (
            ({"top_p": 9.0}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"lora": "none"}, grpc.StatusCode.NOT_FOUND),
            ({"model": "other"}, grpc.StatusCode.NOT_FOUND),
            ({"session": "x" * 1000}, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(KvorumError) as caught:
                await stack.client.explain([1], **fields)
            assert caught.value.code is code


async def test_router_state_shows_streams_leases_queues_and_each_replica() -> None:
    gate = asyncio.Event()
    replica = FakeReplica("r0", script=Script(gate=gate))
    replica.load.max_sequences = 2
    async with running_stack(replicas=0, extra=[replica]) as stack:
        keys = warmed(replica, PROMPT)
        await eventually(lambda: stack.view("r0").blocks == len(keys))
        running = [asyncio.ensure_future(collected(stack.client, [1], max_tokens=1)) for _ in range(5)]
        await eventually(lambda: len(stack.group.turnstile) == 3)
        busy = await state(stack)
        gate.set()
        await asyncio.gather(*running)
        idle = await state(stack)
    assert (busy.policy, busy.in_flight, busy.leases) == ("predicted-time", 5, 2)
    (queue,) = busy.queues
    assert (queue.model, queue.length) == ("fake", 3)
    assert queue.oldest_wait_s > 0
    assert queue.predicted_drain_s > 0
    (view,) = busy.replicas
    assert (view.replica, view.epoch, view.standing) == ("r0", replica.epoch, "ready")
    assert (view.degraded, view.blocks, view.block_size, view.leases) == ("", len(keys), 16, 2)
    assert (idle.in_flight, idle.leases, idle.queues[0].length) == (0, 0, 0)


# The route span


async def test_route_span_has_every_candidate_with_every_term_and_why() -> None:
    record = SpanRecorder()
    async with running_stack(replicas=3, observer=record.observer) as stack:
        warmed(stack.replicas[1], PROMPT)
        await eventually(lambda: stack.view("r1").blocks == 12)
        await collected(stack.client, PROMPT, max_tokens=1)
        key = stack.key("r1")
    route = record.attributes(spans.ROUTER_ROUTE)
    assert (route[spans.POLICY], route[spans.REPLICA]) == ("predicted-time", "r1")
    assert "192 of 200" in route[spans.WHY]
    assert len(route[spans.CANDIDATES]) == 3
    assert route[spans.CANDIDATES][0].startswith(f"{key} cached=192 ")
    for line in route[spans.CANDIDATES]:
        assert [part.split("=")[0] for part in line.split()[1:]] == list(TERMS)
    assert spans.DEGRADED not in route


async def test_route_span_says_when_the_cache_of_the_chosen_one_is_not_known() -> None:
    record = SpanRecorder()
    liar = FakeReplica("liar")
    liar.edit_update = lambda update: setattr(update, "blocks_count", 5)
    async with running_stack(replicas=0, extra=[liar], observer=record.observer) as stack:
        await eventually(lambda: stack.view("liar").views_dropped > 0)
        await collected(stack.client, PROMPT, max_tokens=1)
    route = record.attributes(spans.ROUTER_ROUTE)
    assert "unsynced" in route[spans.DEGRADED]
    assert "degraded=" in route[spans.CANDIDATES][0]


async def test_forward_span_has_the_prediction_beside_what_was_measured() -> None:
    record = SpanRecorder()
    async with running_stack(observer=record.observer, script=Script(cached_tokens=150)) as stack:
        warmed(stack.replicas[0], PROMPT)
        await eventually(lambda: stack.view("r0").blocks == 12)
        await collected(stack.client, PROMPT, max_tokens=1)
    forward = record.attributes(spans.ROUTER_FORWARD)
    assert forward[spans.PREDICTED_CACHED_TOKENS] == 192
    assert forward[spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 150
    assert forward[spans.PREDICTED_TTFT_S] > 0
    assert forward[spans.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] > 0


async def test_request_that_waited_has_its_wait_as_a_span_and_one_that_did_not_has_none() -> None:
    record = SpanRecorder()
    gate = asyncio.Event()
    replica = FakeReplica("r0", script=Script(gate=gate))
    replica.load.max_sequences = 1
    async with running_stack(replicas=0, extra=[replica], observer=record.observer) as stack:
        running = [asyncio.ensure_future(collected(stack.client, [1], max_tokens=1)) for _ in range(2)]
        await eventually(lambda: len(stack.group.turnstile) == 1)
        gate.set()
        await asyncio.gather(*running)
    assert len(record.named(spans.ROUTER_ROUTE)) == 2
    assert len(record.named(spans.ROUTER_ADMIT)) == 1


async def test_request_refused_in_the_queue_has_the_reason_on_its_wait() -> None:
    record = SpanRecorder()
    replica = FakeReplica("r0", script=Script(hang_after=0))
    replica.load.max_sequences = 1
    async with running_stack(replicas=0, extra=[replica], observer=record.observer) as stack:
        first = asyncio.ensure_future(collected(stack.client, [1]))
        await eventually(lambda: bool(replica.seen))
        with pytest.raises(KvorumError):
            await collected(stack.client, [1], timeout=0.3)
        first.cancel()
        await assert_nothing_leaked(stack.server)
    assert record.attributes(spans.ROUTER_ADMIT)[spans.ERROR_TYPE] == "OVERLOADED"


async def test_lookaside_attempt_is_one_trace_from_the_router_to_the_replica() -> None:
    record = SpanRecorder()
    async with running_stack(token="t", observer=record.observer) as stack:
        async with KvorumClient(stack.address, lookaside=True) as client:
            await collected(client, [1], max_tokens=1)
        await assert_nothing_leaked(stack.server)
        parent = stack.replicas[0].seen[0].metadata["traceparent"]
    (forward,) = record.named(spans.ROUTER_FORWARD)
    assert forward.context is not None
    assert f"{forward.context.trace_id:032x}-{forward.context.span_id:016x}" in parent
    assert (forward.attributes or {})[spans.OUTCOME] == "ok"


async def test_prompt_text_is_in_no_span() -> None:
    record = SpanRecorder()
    async with running_stack(observer=record.observer) as stack:
        await collected(stack.client, "zebra zebra zebra", max_tokens=1, session="quagga")
    finished = record.exporter.get_finished_spans()
    assert {spans.ROUTER_ROUTE, spans.ROUTER_FORWARD} <= {span.name for span in finished}
    text = json.dumps([dict(span.attributes or {}) for span in finished], default=str)
    assert "zebra" not in text
    assert "quagga" not in text
