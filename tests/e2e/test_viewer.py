"""The viewer of a running cluster: what it shows, and that nobody misses it while it is dead."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from cluster.processes import leftovers
from cluster.viewer_client import is_alive
from router.client import KvorumClient
from telemetry import spans
from tests.e2e.conftest import RunningCluster, collect

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_ACTOR = "ray::ViewerActor"


def fetched(cluster: RunningCluster, path: str) -> str:
    """What the viewer answers there."""
    with urllib.request.urlopen(cluster.state.viewer_url + path, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def told(cluster: RunningCluster, path: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(fetched(cluster, path))
    return shown


async def eventually(condition: Callable[[], bool], what: str) -> None:
    for _ in range(120):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.25)
    raise AssertionError(f"no {what} within 30 s")


def viewer_process(cluster: RunningCluster) -> psutil.Process | None:
    found = [process for process in leftovers(cluster.state.id) if process.name().startswith(_ACTOR)]
    return found[0] if found else None


async def test_the_page_shows_a_request_and_the_fleet(client: KvorumClient, pair: RunningCluster) -> None:
    answer = await collect(client, "The sea is", max_tokens=6, ignore_eos=True, tenant="acme")
    await pair.trace(answer.served.trace_id, {spans.ROUTER_REQUEST, spans.REPLICA_DECODE})
    assert "<html" in await asyncio.to_thread(fetched, pair, "/")
    listed = await asyncio.to_thread(told, pair, "/api/requests?tenant=acme")
    assert listed["requests"][0]["trace_id"] == answer.served.trace_id
    assert listed["requests"][0]["replica"] == answer.served.replica
    fleet = await asyncio.to_thread(told, pair, "/api/fleet")
    assert [replica["state"] for replica in fleet["replicas"]] == ["READY", "READY"]
    assert fleet["routing"]["router-0"]["policy"] == "predicted-time"


async def test_one_scrape_has_the_metrics_of_every_process_and_engine(
    client: KvorumClient, pair: RunningCluster
) -> None:
    await collect(client, "The sea is", max_tokens=6, ignore_eos=True)
    wanted = ("kvorum_router_requests_total", "gen_ai_server_request_duration_seconds", "system_memory_usage")

    def is_whole() -> bool:
        text = fetched(pair, "/metrics")
        engines = set(re.findall(r'^vllm:num_requests_running\{.*?replica="([^"]+)"', text, re.MULTILINE))
        return engines == {"replica-0", "replica-1"} and all(name in text for name in wanted)

    await eventually(is_whole, f"scrape with {wanted} and two engines")


async def test_requests_are_served_while_the_viewer_is_dead_and_it_comes_back_at_its_address(
    client: KvorumClient, pair: RunningCluster
) -> None:
    before = viewer_process(pair)
    assert before is not None
    before.send_signal(signal.SIGKILL)
    answer = await collect(client, "The sea is", max_tokens=6, ignore_eos=True)
    assert answer.usage.completion_tokens == 6
    await eventually(lambda: is_alive(pair.state.viewer_url), "viewer at the same address")
    await eventually(lambda: bool(told(pair, "/api/fleet")["replicas"]), "fleet in the new viewer")
    assert pair.status()["viewer"] == {"url": pair.state.viewer_url, "alive": True}
