"""Prefixes on real engines: what the router believes is what the engine finds."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from protos import admin_pb2, common_pb2
from protos.errors import KvorumError
from router.client import KvorumClient
from tests.e2e.conftest import KVORUM, RunningCluster, collect

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK = 128  # tokens, vLLM's default on CPU
SETTLED_S = 0.5  # several intervals of the replicas' updates


def prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(100, 40_000), k=tokens)


async def test_predicted_cached_tokens_are_those_that_the_engine_finds(
    pair: RunningCluster, client: KvorumClient
) -> None:
    """Prompts that share all, some and no blocks with earlier ones, in two namespaces, one at a time."""
    system = prompt(1, 3 * BLOCK + 40)
    asked: list[tuple[list[int], str]] = [
        (system + prompt(2, 50), ""),
        (system + prompt(3, 200), ""),
        (system[: 2 * BLOCK] + prompt(4, 90), ""),
        (system + prompt(2, 50), "salt"),
        (system + prompt(5, 10), "salt"),
        (system[: 2 * BLOCK], ""),  # a whole number of blocks: the last token is computed again
        (prompt(6, 60), ""),
    ]
    for tokens, salt in asked:
        await asyncio.sleep(SETTLED_S)
        explained = await client.explain(tokens, cache_salt=salt)
        assert explained.block_size == BLOCK
        assert [row.degraded for row in explained.candidates] == ["", ""]
        answer = await collect(client, tokens, cache_salt=salt, max_tokens=2, temperature=0)
        told = {row.replica: row.cached_tokens for row in explained.candidates}
        assert told[answer.served.replica] == answer.usage.cached_tokens


async def test_repeated_prompt_goes_where_its_blocks_are(client: KvorumClient) -> None:
    tokens = prompt(10, 8 * BLOCK + 30)
    first = await collect(client, tokens, max_tokens=2, temperature=0)
    for suffix in range(4):
        await asyncio.sleep(SETTLED_S)
        again = await collect(client, tokens + prompt(100 + suffix, 20), max_tokens=2, temperature=0)
        assert again.served.replica == first.served.replica
        assert again.usage.cached_tokens == 8 * BLOCK


async def test_burst_of_siblings_computes_their_prefix_at_most_once_a_replica(client: KvorumClient) -> None:
    system = prompt(20, 6 * BLOCK)
    answers = await asyncio.gather(
        *(collect(client, system + prompt(200 + i, 30), max_tokens=4, temperature=0) for i in range(6))
    )
    cold = Counter(a.served.replica for a in answers if a.usage.cached_tokens == 0)
    assert cold, "the first of them cannot have found anything"
    assert all(count == 1 for count in cold.values()), cold


async def test_lookaside_stream_is_the_same_and_leaves_no_lease(
    pair: RunningCluster, client: KvorumClient
) -> None:
    routed = await collect(client, "The capital of France is", max_tokens=8, temperature=0)
    async with KvorumClient(*pair.state.router_addresses, lookaside=True) as direct:
        answer = await collect(direct, "The capital of France is", max_tokens=8, temperature=0)
        assert answer.tokens == routed.tokens
        assert answer.served.replica in ("replica-0", "replica-1")
        (state,) = (await direct.router_states()).values()
    assert isinstance(state, admin_pb2.RouterState)
    assert (state.leases, state.in_flight) == (0, 0)


async def test_router_killed_in_mid_traffic_leaves_no_trace_and_clients_go_on(pair: RunningCluster) -> None:
    with another_router(pair) as (address, process):
        await knows_both(address)
        async with KvorumClient(address, *pair.state.router_addresses) as client:
            streams = [client.generate(prompt(30 + i, 40), max_tokens=400, ignore_eos=True) for i in range(4)]
            for stream in streams:
                await anext(stream)
            process.send_signal(signal.SIGKILL)
            for stream in streams:  # they end with a reason; nothing pretends to have finished
                with pytest.raises(KvorumError):
                    async for _ in stream:
                        pass
            assert (await collect(client, "Hello", max_tokens=2)).tokens[0]  # by the other router
    shown = await asyncio.to_thread(
        pair.wait,
        lambda s: all(r["load"]["sequences"] == 0 and r["load"]["running"] == 0 for r in s["replicas"]),
        "idle engines",
        30,
    )
    assert all(state["leases"] == 0 for state in shown["routing"].values())


def test_explain_and_status_say_what_the_router_knows(pair: RunningCluster) -> None:
    done = pair.cli("explain", "--name", pair.name, "Once upon a time", "--json")
    assert done.returncode == 0, done.stderr
    explained = json.loads(done.stdout)
    assert {row["replica"] for row in explained["candidates"]} == {"replica-0", "replica-1"}
    assert sum(row["chosen"] for row in explained["candidates"]) == 1
    table = pair.cli("explain", "--name", pair.name, "Once upon a time").stdout
    assert "would serve" in table
    (router,) = pair.status()["routing"].values()
    assert [view["standing"] for view in router["replicas"]] == ["ready", "ready"]
    assert [view["degraded"] for view in router["replicas"]] == ["", ""]


async def test_session_of_a_megabyte_is_refused_by_name(client: KvorumClient) -> None:
    with pytest.raises(KvorumError) as caught:
        await collect(client, "Hello", session="s" * 1_000_000)
    assert caught.value.reason == common_pb2.INVALID_REQUEST
    assert [violation.field for violation in caught.value.violations] == ["options.session"]


async def knows_both(address: str) -> None:
    """A router that has just started refuses, and its clients go to the next one."""
    async with KvorumClient(address) as client, asyncio.timeout(30):
        while True:
            try:
                (model,) = await client.list_models()
                await client.tokenize("hello")  # refused while the tokenizer is still on its way
                if model.ready_replicas == 2:
                    return
            except (KvorumError, ValueError):  # or no model is known yet
                await asyncio.sleep(0.05)


@contextmanager
def another_router(pair: RunningCluster) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`kvorum router` beside the cluster's own; its address and process."""
    environ: dict[str, Any] = {**pair.environ, "KVORUM_CLUSTER_TOKEN": pair.state.token}
    command = [*KVORUM, "router", "--controller", pair.state.admin_address, "--port", "0"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listens on" in line
        yield line.split("listens on ")[1].split(";")[0].strip(), process
    finally:
        process.kill()
        process.wait(timeout=30)
