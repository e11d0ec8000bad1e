"""The router's metrics, read by a reader in memory from a real router."""

from __future__ import annotations

import asyncio

import pytest
from fakes_cluster import FakeReplica, Script
from fakes_metrics import FakeCollector
from fakes_router import assert_nothing_leaked, collected, eventually, running_stack, warmed
from test_lookaside import TOKEN
from test_router_tracing import LOST

from protos.errors import KvorumError
from router.client import KvorumClient
from router.metrics import RouterMetrics
from router.observe import Outcome

PROMPT = list(range(100, 300))


class Reader(FakeCollector):
    def __init__(self, *, tenants: bool = False) -> None:
        super().__init__()
        self.router = RouterMetrics(self.meters, tenants=tenants)


async def test_prompt_tokens_and_hits_are_counted_by_replica() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router, script=Script(cached_tokens=150)) as stack:
        for _ in range(2):
            await collected(stack.client, PROMPT, max_tokens=1)
    assert reader.value("kvorum.router.prompt", replica="r0") == 400
    assert reader.value("kvorum.router.prompt.cached", replica="r0", tier="unexpected") == 300


async def test_prediction_errors_are_measured() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router, script=Script(cached_tokens=150)) as stack:
        warmed(stack.replicas[0], PROMPT)
        await eventually(lambda: stack.view("r0").blocks == 12)
        await collected(stack.client, PROMPT, max_tokens=1)
    cached = reader.value("kvorum.router.cached.error", replica="r0")
    ttft = reader.value("kvorum.router.ttft.error", replica="r0")
    assert (cached.count, cached.sum) == (1, 192 - 150)
    assert ttft.count == 1
    assert 0 <= ttft.sum < 5


async def test_each_decision_and_its_wait_are_measured_once() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router) as stack:
        for _ in range(3):
            await collected(stack.client, [1], max_tokens=1)
        await stack.client.explain([1])
    assert reader.value("kvorum.router.decision.duration").count == 3
    assert reader.value("kvorum.router.queue.wait").count == 3


async def test_queue_is_shown_for_autoscaling() -> None:
    reader = Reader()
    gate = asyncio.Event()
    replica = FakeReplica("r0", script=Script(gate=gate))
    replica.load.max_sequences = 1
    async with running_stack(replicas=0, extra=[replica], metrics=reader.router) as stack:
        running = [asyncio.ensure_future(collected(stack.client, [1], max_tokens=1)) for _ in range(4)]
        await eventually(lambda: len(stack.group.turnstile) == 3)
        await reader.shows([3], "kvorum.router.queue.length", model="fake")
        assert reader.value("kvorum.router.queue.oldest_wait", model="fake") > 0
        await asyncio.sleep(0.005)  # so that three have waited longer than the first bucket
        gate.set()
        await asyncio.gather(*running)
        await reader.shows([0], "kvorum.router.queue.length", model="fake")
        assert reader.value("kvorum.router.queue.oldest_wait", model="fake") == 0
    waits = reader.value("kvorum.router.queue.wait")
    assert (waits.count, waits.bucket_counts[0]) == (4, 1)


async def test_degraded_replica_and_its_dropped_views_are_shown() -> None:
    reader = Reader()
    liar = FakeReplica("liar")
    liar.edit_update = lambda update: setattr(update, "blocks_count", 5)
    async with running_stack(extra=[liar], metrics=reader.router) as stack:
        keys = warmed(stack.replicas[0], PROMPT)
        await eventually(lambda: stack.view("r0").blocks == len(keys))
        await eventually(lambda: stack.view("liar").views_dropped > 0)
        await reader.shows([1], "kvorum.router.replica.degraded", replica="liar")
        await reader.shows([0], "kvorum.router.replica.degraded", replica="r0")
        await reader.shows([12], "kvorum.router.replica.blocks", replica="r0")
        await reader.shows([0], "kvorum.router.replica.blocks", replica="liar")
        assert reader.value("kvorum.router.replica.views_dropped", replica="r0") == 0
        assert reader.value("kvorum.router.replica.views_dropped", replica="liar") > 0


async def test_replica_that_has_left_is_shown_no_longer() -> None:
    reader = Reader()
    async with running_stack(replicas=2, metrics=reader.router) as stack:
        await reader.shows([0, 0], "kvorum.router.replica.blocks")
        await stack.controller.announce(stack.replicas[0].member())
        await eventually(lambda: len(stack.server.state().replicas) == 1)
        await reader.shows([0], "kvorum.router.replica.blocks")


async def test_refusals_are_counted_by_reason() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router, max_streams=1, script=Script(hang_after=0)) as stack:
        first = asyncio.ensure_future(collected(stack.client, [1]))
        await eventually(lambda: stack.server.in_flight == 1)
        for prompt in ([1], [2]):
            with pytest.raises(KvorumError):
                await collected(stack.client, prompt)
        first.cancel()
        await assert_nothing_leaked(stack.server)
        with pytest.raises(KvorumError):
            await collected(stack.client, [1], top_p=9.0)
    assert reader.value("kvorum.router.refused", reason="OVERLOADED") == 2
    assert reader.value("kvorum.router.refused", reason="INVALID_REQUEST") == 1


async def test_cancelled_request_before_its_first_token_counts_no_prediction() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router, script=Script(hang_after=0)) as stack:
        running = asyncio.ensure_future(collected(stack.client, [1]))
        await eventually(lambda: bool(stack.replicas[0].seen))
        running.cancel()
        await assert_nothing_leaked(stack.server)
    assert reader.points("kvorum.router.ttft.error") == []
    assert reader.points("kvorum.router.refused") == []


async def test_requests_are_counted_by_how_they_ended() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router, replicas=2, policy="round-robin") as stack:
        await collected(stack.client, [1], max_tokens=1, tenant="acme")
        with pytest.raises(KvorumError):
            await collected(stack.client, [1], top_p=9.0)
        with pytest.raises(KvorumError):
            await collected(stack.client, [1], model="who")
        for replica in stack.replicas:
            replica.script = Script(error_after=(1, LOST))
        with pytest.raises(KvorumError):
            await collected(stack.client, [1], max_tokens=5)
        for replica in stack.replicas:
            replica.script = Script(hang_after=1)
        stream = stack.client.generate([1], max_tokens=5)
        await anext(stream)
        await stream.aclose()
        await assert_nothing_leaked(stack.server)
    value = reader.value
    assert value("kvorum.router.requests", outcome="ok", model="fake") == 1
    assert value("kvorum.router.requests", outcome="refused", model="fake") == 1
    assert value("kvorum.router.requests", outcome="refused") == 1, "no label is made of a name nobody knows"
    assert value("kvorum.router.requests", outcome="error", model="fake") == 1
    assert value("kvorum.router.requests", outcome="cancelled", model="fake") == 1
    assert value("kvorum.router.request.duration", outcome="ok", model="fake").count == 1


async def test_second_attempts_are_counted_apart() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router, replicas=2) as stack:
        for replica in stack.replicas:
            replica.script = Script(error_at_start=LOST)
        with pytest.raises(KvorumError):
            await collected(stack.client, [1], max_tokens=1)
    points = reader.points("kvorum.router.attempts")
    assert sorted((p.attributes["retried"], p.value) for p in points) == [(False, 1), (True, 1)]


async def test_routed_streams_count_as_others_do() -> None:
    reader = Reader()
    async with (
        running_stack(token=TOKEN, metrics=reader.router) as stack,
        KvorumClient(stack.address, lookaside=True) as client,
    ):
        await collected(client, [1, 2, 3], max_tokens=2)
        await assert_nothing_leaked(stack.server)
    assert reader.value("kvorum.router.requests", outcome="ok", model="fake") == 1
    assert reader.value("kvorum.router.ttft", replica="r0").count == 1
    assert reader.value("kvorum.router.attempts", replica="r0", retried=False) == 1


async def test_tenants_are_labels_only_when_asked_for_and_a_hundred_at_most() -> None:
    for wanted in (False, True):
        reader = Reader(tenants=wanted)
        for number in range(130):
            outcome = Outcome()
            reader.router.finished(outcome, model="m", tenant=f"t{number}", took_s=0.1)
        points = reader.points("kvorum.router.requests")
        assert sum(point.value for point in points) == 130
        assert len(points) == (101 if wanted else 1)
        if wanted:
            assert reader.value("kvorum.router.requests", outcome="ok", model="m", tenant="other") == 30


async def test_cached_tokens_are_counted_by_where_they_were_expected() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router, script=Script(cached_tokens=200)) as stack:
        warmed(stack.replicas[0], PROMPT)
        await eventually(lambda: stack.view("r0").blocks == 12)
        await collected(stack.client, PROMPT, max_tokens=1)
    hits = {p.attributes["tier"]: p.value for p in reader.points("kvorum.router.prompt.cached")}
    assert hits == {"resident": 192, "unexpected": 8}


async def test_streams_and_leases_are_shown() -> None:
    reader = Reader()
    async with running_stack(metrics=reader.router, script=Script(hang_after=1)) as stack:
        stream = stack.client.generate([1], max_tokens=5)
        await anext(stream)
        await reader.shows([1], "kvorum.router.in_flight")
        await reader.shows([1], "kvorum.router.leases", replica="r0")
        await stream.aclose()
        await reader.shows([0], "kvorum.router.leases", replica="r0")
