"""The router's metrics, read by a reader in memory from a real router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes_cluster import FakeReplica, Script
from fakes_router import assert_nothing_leaked, collected, eventually, running_stack, warmed
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from protos.errors import KvorumError

PROMPT = list(range(100, 300))


class Reader:
    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.meter = self._provider.get_meter("test")

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        if data is None:
            return []
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
        return [point for metric in metrics if metric.name == name for point in metric.data.data_points]

    def value(self, name: str, **attributes: str) -> Any:
        (point,) = [p for p in self.points(name) if dict(p.attributes or {}) == attributes]
        return point.value if hasattr(point, "value") else point

    async def shows(self, expected: Any, name: str, **attributes: str) -> None:
        """Wait for a gauge's value, collected in a thread as exporters do; fail when it does not come."""
        found: Any = None
        for _ in range(500):
            points = await asyncio.to_thread(self.points, name)
            found = [p.value for p in points if attributes.items() <= dict(p.attributes or {}).items()]
            if found == expected:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} {attributes}: {found}, not {expected}")


async def test_prompt_tokens_and_hits_are_counted_by_replica() -> None:
    reader = Reader()
    async with running_stack(meter=reader.meter, script=Script(cached_tokens=150)) as stack:
        for _ in range(2):
            await collected(stack.client, PROMPT, max_tokens=1)
    assert reader.value("kvorum.router.prompt", replica="r0") == 400
    assert reader.value("kvorum.router.prompt.cached", replica="r0") == 300


async def test_prediction_errors_are_measured() -> None:
    reader = Reader()
    async with running_stack(meter=reader.meter, script=Script(cached_tokens=150)) as stack:
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
    async with running_stack(meter=reader.meter) as stack:
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
    async with running_stack(replicas=0, extra=[replica], meter=reader.meter) as stack:
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
    async with running_stack(extra=[liar], meter=reader.meter) as stack:
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
    async with running_stack(replicas=2, meter=reader.meter) as stack:
        await reader.shows([0, 0], "kvorum.router.replica.blocks")
        await stack.controller.announce(stack.replicas[0].member())
        await eventually(lambda: len(stack.server.state().replicas) == 1)
        await reader.shows([0], "kvorum.router.replica.blocks")


async def test_refusals_are_counted_by_reason() -> None:
    reader = Reader()
    async with running_stack(meter=reader.meter, max_streams=1, script=Script(hang_after=0)) as stack:
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
    async with running_stack(meter=reader.meter, script=Script(hang_after=0)) as stack:
        running = asyncio.ensure_future(collected(stack.client, [1]))
        await eventually(lambda: bool(stack.replicas[0].seen))
        running.cancel()
        await assert_nothing_leaked(stack.server)
    assert reader.points("kvorum.router.ttft.error") == []
    assert reader.points("kvorum.router.refused") == []
