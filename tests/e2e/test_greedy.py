"""The whole stack changes nothing: greedy output equals bare vLLM's, token for token."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Answer, ClusterSlot, RunningCluster, collect
from tests.e2e.prompts import MAX_TOKENS, PROMPTS
from workers.checkpoint import prepare

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Reference = list[dict[str, object]]


@pytest.fixture(scope="module")
def reference(slot: ClusterSlot, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Bare vLLM's answers at TP=1 on the original checkpoint, in float32.

    In bf16 a near-tie may flip with the shape of the batch, with no fault anywhere; in float32 it does not.
    """
    slot.clear()
    out = tmp_path_factory.mktemp("bare") / "answers.json"
    environ = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    command = [sys.executable, "-m", "tests.e2e.bare_vllm", str(prepare("smollm2").path), str(out)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command, env=environ, cwd=root, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: Reference = json.loads(out.read_text())
    return answers


async def test_tp2_on_the_padded_checkpoint_equals_bare_vllm(
    reference: Reference, split: RunningCluster
) -> None:
    (replica,) = split.status()["replicas"]
    assert len(replica["shards"]) == 2
    assert {shard["collective"] for shard in replica["shards"]} == {"shm"}
    _assert_equal(await _one_by_one(split), reference)
    _assert_equal(await _eight_at_a_time(split), reference)


def test_status_tells_which_path_the_shards_of_one_host_take(split: RunningCluster) -> None:
    told = json.loads(split.cli("status", "--name", split.name, "--overlap", "--json").stdout)
    (replica,) = told["replicas"]
    assert [shard["rank"] for shard in replica["shards"]] == [0, 1]
    for shard in replica["shards"]:
        assert shard["path"] == "stock"
        assert "shared-memory" in shard["reason"]
        assert shard["model"] == "LlamaForCausalLM"
        assert shard["stock"]["steps"] > 0
        assert 0 < shard["stock"]["all_reduce_s"] < shard["stock"]["forward_s"]
    assert "stock path: one host" in split.cli("status", "--name", split.name).stdout


async def test_tp1_equals_bare_vllm(reference: Reference, pair: RunningCluster) -> None:
    _assert_equal(await _one_by_one(pair), reference)


async def test_eight_concurrent_streams_equal_bare_vllm(reference: Reference, pair: RunningCluster) -> None:
    _assert_equal(await _eight_at_a_time(pair), reference)


async def _one_by_one(cluster: RunningCluster) -> list[Answer]:
    async with cluster.client() as client:
        return [await collect(client, prompt, max_tokens=MAX_TOKENS, temperature=0) for prompt in PROMPTS]


async def _eight_at_a_time(cluster: RunningCluster) -> list[Answer]:
    gate = asyncio.Semaphore(8)

    async def one(prompt: str) -> Answer:
        async with gate:
            return await collect(client, prompt, max_tokens=MAX_TOKENS, temperature=0)

    async with cluster.client() as client:
        return await asyncio.gather(*(one(prompt) for prompt in PROMPTS))


def _assert_equal(answers: list[Answer], reference: Reference) -> None:
    got = [{"ids": answer.tokens[0], "text": answer.text} for answer in answers]
    assert got == reference
