"""What shared KV blocks are worth: `make bench NAME=kvpool`.

A prompt is computed by one replica and asked of another: from the pool of their host, from the pool of the
other host (two emulated ones, 1 Gbit/s; needs root and iproute2), from the replica's own cache, and computed.
Then what offering blocks costs those who compute: two clusters by turns, one with a pool, one without.

    make bench NAME=kvpool
    make bench NAME=kvpool ARGS="--sizes 2000 --turns 3 --no-hosts --rounds 0"
    make bench NAME=kvpool ARGS="--sizes --rounds 150"   # only what storing costs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cluster.state import ClusterState
from router.client import KvorumClient
from tests.bench.clusters import running
from tests.bench.report import ROOT, report
from tests.bench.workload import Result, Round, run
from tests.lab.lab import Lab, missing
from tests.lab.ray_nodes import start_ray

SIZES = (500, 1000, 2000, 4000, 6000)
RATE = "1gbit"
POOL = ("--kv-pool-gib", "2")
SHAPE = ("--max-model-len", "8192", "--cores-per-shard", "1")
STATE = {"KVORUM_STATE_DIR": "/tmp/state"}
UP_S, MEASURE_S = 400.0, 1200.0
STORE_ROUND = {"requests": 4, "concurrency": 4, "prompt_tokens": 384, "output_tokens": 16}
STARTS = 3
"""Of both clusters: where a process's memory lies makes it faster or slower for as long as it lives."""
SETTLE_S = 0.2

Found = dict[str, Any]


def on_one_host(arguments: Sequence[str]) -> Found:
    """Two replicas that share their host's arena."""
    with running("bench-kvpool", "--replicas", "2", *SHAPE, *POOL) as state:
        client = [sys.executable, "-m", "tests.bench.kvpool_client", "bench-kvpool", "--restart", *arguments]
        environ = dict(os.environ) | {"KVORUM_STATE_DIR": str(_folder(state))}
        done = subprocess.run(
            client, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=MEASURE_S, check=True
        )
    return _said(done.stdout)


def on_two_hosts(arguments: Sequence[str]) -> Found:
    """A replica on each of two emulated hosts, whose agents exchange blocks over a link of RATE."""
    kvorum = [sys.executable, "-m", "cluster.cli"]
    with Lab(2, RATE) as lab:
        nodes, head = start_ray(lab), lab.hosts[0]
        joining = ["--ray-address", nodes.address, "--placement", "spread", "--port", "0"]
        joining += ["--no-http", "--no-viewer", "--detach", "--replicas", "2"]
        try:
            up = [*kvorum, "up", "--name", "bench-kvpool", *joining, *SHAPE, *POOL]
            head.run(up, STATE, timeout_s=UP_S)
            client = [sys.executable, "-m", "tests.bench.kvpool_client", "bench-kvpool", *arguments]
            asked = head.popen(client, STATE, stdout=subprocess.PIPE, text=True)
            out, _ = asked.communicate(timeout=MEASURE_S)
            if asked.returncode:
                raise RuntimeError(f"the measurement on two hosts ended with {asked.returncode}")
        finally:
            head.run([*kvorum, "down", "--grace", "1"], STATE, timeout_s=120, check=False)
    return _said(out)


def storing(rounds: int) -> list[list[float]]:
    """Throughput with a pool that stores every block, over that without: of each pair of rounds, by start.

    The rounds are short, since the machine's speed changes from one second to the next.
    """
    shape = ("--replicas", "1", *SHAPE)
    starts: list[list[float]] = []
    for start in range(STARTS):
        with running("bench-stored", *shape, *POOL) as pooled, running("bench-bare", *shape) as bare:
            states = {"pool": pooled, "none": bare}
            starts.append(asyncio.run(_pairs(states, -(-rounds // STARTS), 10_000 * (start + 1))))
        print(f"what storing costs: start {start + 1} of {STARTS} measured", file=sys.stderr, flush=True)
    return starts


async def _pairs(states: Mapping[str, ClusterState], rounds: int, seed: int) -> list[float]:
    ratios: list[float] = []
    async with AsyncExitStack() as stack:
        clients = {
            side: await stack.enter_async_context(KvorumClient(*state.router_addresses))
            for side, state in states.items()
        }
        for number in range(-3, rounds):  # the first ones warm both up
            taken = {}
            for side in ("pool", "none") if number % 2 else ("none", "pool"):
                await asyncio.sleep(SETTLE_S)
                result = await _round(clients[side], Round(seed + number, **STORE_ROUND))
                taken[side] = result.tokens / result.elapsed_s
            if number >= 0:
                ratios.append(taken["pool"] / taken["none"])
    return ratios


async def _round(client: KvorumClient, plan: Round) -> Result:
    async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
        async for message in client.generate(
            prompt, temperature=0, max_tokens=output_tokens, ignore_eos=True
        ):
            yield sum(len(choice.token_ids) for choice in message.choices)

    return await run(stream, plan)


def _folder(state: ClusterState) -> Path:
    """Where its state file is: beside its spans."""
    assert state.span_store is not None
    return state.span_store.parent


def _said(out: str) -> Found:
    said: Found = json.loads(out.splitlines()[-1])
    return said


def _paired(found: Found, size: int, above: str, below: str) -> float:
    turns: list[dict[str, float]] = found["found"][str(size)]
    return statistics.median(turn[above] / turn[below] for turn in turns)


def main(sizes: Sequence[int], turns: int, rounds: int, *, hosts: bool) -> None:
    arguments = ["--turns", str(turns), "--sizes", *map(str, sizes)]
    measured: dict[str, Found] = {"one host": on_one_host(arguments)} if sizes else {}
    hosts &= bool(sizes)
    if hosts and (why := missing()):
        print(f"no two hosts: {why}", file=sys.stderr)
    elif hosts:
        measured[f"two hosts, {RATE}"] = on_two_hosts(arguments)
    starts = storing(rounds) if rounds else []
    figures = _figures(measured, sizes, starts)
    rows = []
    for where, found in measured.items():
        for size in sizes:
            values = found["found"][str(size)]
            medians = [
                f"{1e3 * statistics.median(turn[name] for turn in values):.1f}"
                for name in ("computed", "pooled", "local")
            ]
            over = [_paired(found, size, "computed", "pooled"), _paired(found, size, "pooled", "local")]
            rows.append([where, str(size), *medians, *(f"{ratio:.2f}" for ratio in over)])
    columns = [
        "where",
        "tokens",
        "computed ms",
        "pooled ms",
        "local ms",
        "computed / pooled",
        "pooled / local",
    ]
    report("kvpool", "TTFT by where a prompt's blocks are (medians; paired ratios)", columns, rows, figures)


def _figures(
    measured: Mapping[str, Found], sizes: Sequence[int], starts: Sequence[Sequence[float]]
) -> dict[str, float]:
    figures: dict[str, float] = {}
    for size in sizes:
        here = measured["one host"]
        figures[f"arena_over_local_{size}"] = _paired(here, size, "pooled", "local")
        figures[f"recompute_over_arena_{size}"] = _paired(here, size, "computed", "pooled")
        for there in list(measured.values())[1:]:
            figures[f"recompute_over_peer_{size}"] = _paired(there, size, "computed", "pooled")
    logs = [[math.log(ratio) for ratio in ratios] for ratios in starts]
    if every := [log for one in logs for log in one]:
        figures["store_throughput_ratio"] = math.exp(statistics.mean(every))
        for number, one in enumerate(logs):
            figures[f"store_throughput_ratio_start_{number + 1}"] = math.exp(statistics.mean(one))
    if len(every) > 1:
        figures["store_throughput_error"] = 1.96 * statistics.stdev(every) / math.sqrt(len(every))
    if 2000 in sizes and here["restarted"]:
        pooled = statistics.median(turn["pooled"] for turn in here["found"]["2000"])
        figures["restart_ttft_over_arena"] = statistics.median(here["restarted"]) / pooled
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="prompt lengths, tokens")
    parser.add_argument("--turns", type=int, default=5, help="prompts of each length")
    parser.add_argument(
        "--rounds", type=int, default=150, help="pairs of rounds for what storing costs, 0: leave it out"
    )
    parser.add_argument("--no-hosts", dest="hosts", action="store_false", help="leave two hosts out")
    main(**vars(parser.parse_args()))
