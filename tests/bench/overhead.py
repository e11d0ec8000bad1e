"""What the stack costs: `make bench NAME=overhead`.

1. The same rounds through client, router, replica and shard actor, and straight into bare AsyncLLM,
   in alternation in one run. Both engines use one core (the same) and the same settings.
2. The bare gRPC hop: the router in front of a fake replica, against the fake replica itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict

from router.client import KvorumClient
from tests.bench import router_hop
from tests.bench.clusters import running
from tests.bench.report import ROOT, report
from tests.bench.workload import Result, Round, run
from workers.checkpoint import prepare

SETTLE_S = 1.5
"""Bare vLLM's processes spin for a second after their last step; that must not fall into our turn."""


ANSWER_S = 300.0
"""Bare vLLM's start, or one turn, takes no longer."""


class BareEngine:
    """Bare AsyncLLM in its own process."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "tests.bench.bare_engine_main", model]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._wait_for("ready")

    def run(self, plan: Round) -> Result:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(plan)) + "\n")
        self._process.stdin.flush()
        return Result(**json.loads(self._wait_for("{")))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _wait_for(self, prefix: str) -> str:
        assert self._process.stdout is not None
        too_late = threading.Timer(ANSWER_S, self._process.kill)
        too_late.start()
        try:
            while not (line := self._process.stdout.readline()).startswith(prefix):
                if not line:
                    raise RuntimeError(f"bare vLLM ended, or gave no answer within {ANSWER_S:.0f} s")
        finally:
            too_late.cancel()
        return line


async def through_cluster(addresses: Sequence[str], plan: Round) -> Result:
    """One round as a gRPC client."""
    async with KvorumClient(*addresses) as client:

        async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
            async for message in client.generate(
                prompt, temperature=0, max_tokens=output_tokens, ignore_eos=True
            ):
                yield sum(len(choice.token_ids) for choice in message.choices)

        return await run(stream, plan)


def compare(rounds: int, pairs: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second of rounds with 8 streams, and seconds to the first token of single requests.

    Both sides take turns, in short turns: the machine's own speed may double within a minute.
    """
    model = str(prepare("smollm2").path)
    flags = ["--replicas", "1", "--cores-per-shard", "1", "--max-model-len", "4096", "--kv-cache-gib", "1"]
    rate: dict[str, list[float]] = {"kvorum": [], "bare": []}
    ttft_s: dict[str, list[float]] = {"kvorum": [], "bare": []}
    with running("bench-overhead", *flags) as state:
        bare = BareEngine(model)

        def turn(side: str, plan: Round) -> Result:
            time.sleep(SETTLE_S)
            if side == "bare":
                return bare.run(plan)
            return asyncio.run(through_cluster(state.router_addresses, plan))

        try:
            for number in range(-2, rounds):  # the first two warm both sides up
                plan = Round(1000 + number, requests=8, concurrency=8, prompt_tokens=64, output_tokens=32)
                for side in _order(number):
                    result = turn(side, plan)
                    if number >= 0:
                        rate[side].append(result.tokens / result.elapsed_s)
            print(f"{rounds} throughput rounds done", file=sys.stderr)
            for number in range(pairs):
                plan = Round(5000 + number, requests=3, concurrency=1, prompt_tokens=128, output_tokens=2)
                for side in _order(number):
                    ttft_s[side].append(statistics.median(turn(side, plan).ttft_s))
            print(f"{pairs} latency pairs done", file=sys.stderr)
        finally:
            bare.close()
    return rate, ttft_s


def _order(number: int) -> list[str]:
    return ["kvorum", "bare"] if number % 2 else ["bare", "kvorum"]


def main(rounds: int, pairs: int) -> None:
    hop = router_hop.figures()
    rate, ttft_s = compare(rounds, pairs)
    ttft = {side: [value * 1e3 for value in values] for side, values in ttft_s.items()}
    ratios = [ours / theirs for ours, theirs in zip(rate["kvorum"], rate["bare"], strict=True)]
    added = [ours - theirs for ours, theirs in zip(ttft["kvorum"], ttft["bare"], strict=True)]
    figures = {
        "throughput_ratio": statistics.median(ratios),
        "added_ttft_p50_ms": statistics.median(added),
        "router_added_p50_ms": hop["router_added_p50_ms"],
        "router_cpu_us_per_token": hop["router_cpu_us_per_token"],
        "router_rss_mib": hop["router_rss_mib"],
        "router_start_s": hop["router_start_s"],
        "router_tokens_per_s_per_core": hop["router_tokens_per_s_per_core"],
        "throughput_ratio_worst_round": min(ratios),
        "throughput_ratio_best_round": max(ratios),
    }
    rows = [
        ["tokens/s, 8 streams", *_both(rate, ".1f"), f"x {figures['throughput_ratio']:.3f}"],
        ["TTFT p50 ms, 1 stream", *_both(ttft, ".2f"), f"+ {figures['added_ttft_p50_ms']:.2f} ms"],
        [
            "router hop TTFT p50 ms",
            f"{hop['routed_ttft_p50_ms']:.2f}",
            f"{hop['direct_ttft_p50_ms']:.2f}",
            f"+ {hop['router_added_p50_ms']:.2f} ms",
        ],
    ]
    report("overhead", "What the stack costs", ["", "through Kvorum", "without", "paired"], rows, figures)


def _both(values: dict[str, list[float]], style: str) -> list[str]:
    return [format(statistics.median(values[side]), style) for side in ("kvorum", "bare")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=17, help="throughput rounds of each side")
    parser.add_argument("--pairs", type=int, default=15, help="latency turns of each side")
    main(**vars(parser.parse_args()))
