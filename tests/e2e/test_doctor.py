"""`kvorum doctor` names the cause that was planted, in clusters that are slow for different reasons.

A slow link with overlap off needs two hosts: tests/lab/test_doctor_link.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from platform import machine
from typing import Any

import psutil
import pytest
from torch.backends.cpu import get_cpu_capability

from tests.e2e.conftest import ClusterSlot, RunningCluster, collect, idle
from workers.cpu_dtype import auto_dtype

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

slow = pytest.mark.skipif(
    os.environ.get("KVORUM_LAB") != "1"
    and auto_dtype(machine(), get_cpu_capability(), quantized=False) != "auto",
    reason="takes some minutes on a CPU without AVX-512: KVORUM_LAB=1",
)

_HOG = (
    "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.nice(int(sys.argv[2]))\nwhile True: pass"
)
_HOGS = 4
_VOCABULARY = 40_000


def some_prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids: no two seeds share a prefix."""
    generator = random.Random(seed)
    return [generator.randrange(100, _VOCABULARY) for _ in range(tokens)]


async def ask(
    cluster: RunningCluster, prompts: Sequence[Sequence[int]], tokens: int, *, at_once: bool
) -> None:
    """Send them, all at once or one after the other; each must be answered in full."""
    async with cluster.client() as client:
        asked = (
            collect(client, prompt, max_tokens=tokens, ignore_eos=True, temperature=0) for prompt in prompts
        )
        answers = await asyncio.gather(*asked) if at_once else [await one for one in asked]
    assert [answer.usage.completion_tokens for answer in answers] == [tokens] * len(prompts)


def examined(cluster: RunningCluster, requests: int, since_s: float = 0.0) -> list[dict[str, Any]]:
    """The doctor's findings, once it has seen all these requests; `since_s` is epoch seconds."""
    for _ in range(20):
        minutes = min((time.time() - since_s) / 60, 15.0)
        done = cluster.cli("doctor", "--name", cluster.name, "--json", "--minutes", str(minutes))
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        if shown["summary"]["requests"] >= requests:
            findings: list[dict[str, Any]] = shown["findings"]
            print(json.dumps(shown, indent=1))
            return findings
        time.sleep(0.5)
    raise AssertionError(f"the doctor saw {shown['summary']['requests']} of {requests} requests")


def single(slot: ClusterSlot, *flags: str) -> RunningCluster:
    return slot.get("--no-http", "--replicas", "1", "--max-model-len", "2048", *flags)


@contextmanager
def hogged(cluster: RunningCluster, replica: int) -> Iterator[None]:
    """Others compute on the core of this replica's shard, no less eagerly than itself."""
    [shard] = cluster.status()["replicas"][replica]["shards"]
    arguments = [str(shard["cores"][0]), str(psutil.Process(shard["pid"]).nice() - os.nice(0))]
    # Each in a session of its own: the kernel may share a core by sessions, not by processes.
    hogs = [
        subprocess.Popen([sys.executable, "-c", _HOG, *arguments], start_new_session=True)
        for _ in range(_HOGS)
    ]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


async def test_a_tiny_kv_space_is_named_with_how_much_more_is_needed(slot: ClusterSlot) -> None:
    cluster = single(slot, "--dtype", "float32", "--kv-cache-gib", "0.1")
    await ask(cluster, [some_prompt(n, 300) for n in range(12)], 100, at_once=True)
    finding = examined(cluster, 12)[0]
    assert finding["cause"] == "kv-space"
    assert finding["change"].startswith("--kv-cache-gib")


async def test_a_queue_that_is_computing_alone_asks_for_replicas(slot: ClusterSlot) -> None:
    cluster = single(slot)
    await ask(cluster, [some_prompt(n, 600) for n in range(20)], 4, at_once=True)
    finding = examined(cluster, 20)[0]
    assert finding["cause"] == "queue"
    assert finding["change"].startswith("--replicas 1 -> 2")


@slow
async def test_a_batch_that_is_too_large_is_named_with_one_that_was_seen(slot: ClusterSlot) -> None:
    cluster = single(slot, "--max-num-seqs", "384", "--kv-cache-gib", "2")
    few, many = 4, 360  # by the few it is known what a step takes whatever else runs
    await ask(cluster, [some_prompt(n, 8) for n in range(few)], 64, at_once=True)
    await ask(cluster, [some_prompt(100 + n, 8) for n in range(many)], 40, at_once=True)
    finding = examined(cluster, few + many)[0]
    assert finding["cause"] == "batch-too-large"
    assert finding["change"].startswith("--max-num-seqs 384 -> ")
    assert few <= int(finding["change"].rsplit(" ", 1)[1]) < many


async def test_round_robin_past_warm_caches_is_named(slot: ClusterSlot) -> None:
    cluster = slot.get("--no-http", "--replicas", "2", "--max-model-len", "2048", "--policy", "round-robin")
    shared = [
        some_prompt(n, 800) for n in range(5)
    ]  # an odd number: the next round goes to the other replica
    prompts = [
        prefix + some_prompt(100 * turn + n, 16) for turn in (1, 2, 3) for n, prefix in enumerate(shared)
    ]
    await ask(cluster, prompts, 4, at_once=False)
    finding = examined(cluster, 15)[0]
    assert finding["cause"] == "cold-cache"
    assert finding["change"] == "--policy round-robin -> predicted-time"


@slow
async def test_one_slow_replica_is_named(slot: ClusterSlot) -> None:
    cluster = slot.get("--no-http", "--replicas", "2", "--max-model-len", "2048", "--policy", "round-robin")
    cluster.wait(idle, "idle cluster")
    began = time.time()
    with hogged(cluster, 1):
        await ask(cluster, [some_prompt(9000 + n, 300) for n in range(10)], 24, at_once=False)
    finding = examined(cluster, 10, began)[0]
    assert finding["cause"] == "slow-replica"
    assert finding["figures"].startswith("replica-1 takes")
