"""What the HTTP face costs: `make bench NAME=http`.

The same rounds through our HTTP face (ingress, router, replica, shard actor) and through vLLM's own server,
in alternation in one run, with one engine a side on the same core and with the same settings. Both sides
run as they come: with metrics, ours with traces as well; vLLM's log of each request is off.

Throughput is that of a batch that stays full: each stream asks for the next answer as soon as it has one, and
answers differ in length, as they do. Where all are equally long, requests come in waves, and it counts how
close together those of a wave arrive: the engine computes late ones in steps of their own. That is one case.

A virtual machine's speed may change twofold within seconds: the same steps take 15 % more or less from round
to round. So rounds are short and many, and the ratio is the geometric mean of all pairs, with its interval.
What does not change with the machine is printed as well: the steps in which either engine computed the
same rounds. Where they are equal, what differs is how long a step takes.

A first token takes ten times as long to compute as to bring, so that the machine's moods hide what is to be
seen: a difference of 10 ms. Both engines tell how long they computed a prompt, from its first step to its
token. What is left of the client's time is what is in front of the engine, and steady; the difference of that
is what the face adds, if the engines take as long, and that ratio is printed with its interval. The plain
difference is printed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from operator import sub, truediv
from pathlib import Path

import aiohttp
import grpc

from cluster.adminclient import AdminClient
from cluster.state import ClusterState
from protos import replica_pb2, replica_pb2_grpc
from protos.channels import bearer
from tests.bench.clusters import running
from tests.bench.http_client import stream_text
from tests.bench.report import report
from tests.bench.workload import Result, Round, run
from tests.e2e.bare_server import bare_server
from workers.checkpoint import prepare
from workers.cpu_dtype import resolve_dtype

SETTLE_S = 1.5
"""vLLM's processes spin for a second after their last step; that must not fall into the other's turn."""

SIDES = ("kvorum", "bare")
CASES = {"8 streams": (8, 16), "16 streams": (16, 16), "8 streams in waves": (8, 0)}
"""How many streams, and by how many tokens the length of an answer differs from the mean."""
STEPS, PREFILLS_S = "iteration_tokens_total_count", "request_prefill_time_seconds_sum"
"""Of vLLM's own metrics."""
TOKENS = 32
ANSWERS = 2
"""Of each stream in a round."""
MODEL = "smollm2"
SHORT, LONG = PROMPTS = (128, 1024)
"""Tokens of the prompts whose first token is timed."""
FIRST_TOKENS = 3
"""Asked for one after the other in a turn."""

Values = dict[str, list[float]]


async def through(url: str, plan: Round) -> Result:
    """One round as an HTTP client."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
            return stream_text(session, url, MODEL, prompt, output_tokens)

        return await run(stream, plan)


class Engine:
    """What an engine says of itself: vLLM's metrics, which one server has at a URL, the other a replica."""

    def __init__(self, url: str, state: ClusterState | None = None) -> None:
        self.url, self._state = url, state
        if state is not None:
            with AdminClient(state.admin_address, state.token) as admin:
                [replica] = admin.status().replicas
            self._stub = replica_pb2_grpc.ReplicaStub(grpc.insecure_channel(replica.address))

    def total(self, name: str) -> float:
        """A counter, or the sum or count of a histogram, since the engine's start."""
        found = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", self._text(), re.MULTILINE)
        if found is None:
            raise RuntimeError(f"{self.url}: its engine has no metric vllm:{name}")
        return float(found[1])

    def _text(self) -> str:
        if self._state is not None:
            asked, credential = replica_pb2.GetMetricsRequest(), bearer(self._state.token)
            answer = self._stub.GetMetrics(asked, metadata=credential, timeout=10)
            return str(answer.text)
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as page:
            return str(page.read().decode())


@dataclass
class Found:
    """By case and side, or by side."""

    rate: dict[str, Values]
    """Tokens per second of each round."""
    steps: dict[str, dict[str, float]]
    """Of all rounds of the case, the first one that warms up included."""
    ttft_ms: dict[int, Values]
    """By prompt tokens and side, of each turn: the mean of its requests."""
    prefill_ms: dict[int, Values]
    """The same, of what the engine took."""


def compare(rounds: int, pairs: int) -> Found:
    """Both sides by turns."""
    rate: dict[str, Values] = {case: {side: [] for side in SIDES} for case in CASES}
    steps: dict[str, dict[str, float]] = {case: {} for case in CASES}
    ttft_ms: dict[int, Values] = {prompt: {side: [] for side in SIDES} for prompt in PROMPTS}
    prefill_ms: dict[int, Values] = {prompt: {side: [] for side in SIDES} for prompt in PROMPTS}
    flags = ["--replicas", "1", "--cores-per-shard", "1", "--max-model-len", "4096", "--kv-cache-gib", "1"]
    model = prepare("smollm2").path
    same = resolve_dtype("auto", "cpu", model, {})
    with (
        tempfile.TemporaryDirectory() as folder,
        running("bench-http", "--http-port", "0", *flags) as state,
        bare_server(model, Path(folder, "bare.log"), f"--dtype={same}") as bare,
    ):
        urls = {"kvorum": state.http_url, "bare": bare}
        engines = {"kvorum": Engine(state.http_url, state), "bare": Engine(bare)}
        for place, (case, (count, spread)) in enumerate(CASES.items()):
            began = {side: engines[side].total(STEPS) for side in SIDES}
            for number in range(-1, rounds):  # the first one warms both sides up
                plan = Round(1000 * place + number, ANSWERS * count, count, 64, TOKENS, spread)
                for side in _order(number):
                    time.sleep(SETTLE_S)
                    result = asyncio.run(through(urls[side], plan))
                    if number >= 0:
                        rate[case][side].append(result.tokens / result.elapsed_s)
            time.sleep(SETTLE_S)
            steps[case] = {side: engines[side].total(STEPS) - began[side] for side in SIDES}
            print(f"{rounds} rounds of {case} done", file=sys.stderr)
        for number, prompt in itertools.product(range(pairs), PROMPTS):
            plan = Round(90_000 + prompt + number, FIRST_TOKENS, 1, prompt, output_tokens=2)
            for side in _order(number):
                time.sleep(SETTLE_S)
                before = engines[side].total(PREFILLS_S)
                result = asyncio.run(through(urls[side], plan))
                spent_s = engines[side].total(PREFILLS_S) - before
                ttft_ms[prompt][side].append(1e3 * statistics.mean(result.ttft_s))
                prefill_ms[prompt][side].append(1e3 * spent_s / FIRST_TOKENS)
        print(f"{pairs} latency pairs done", file=sys.stderr)
    return Found(rate, steps, ttft_ms, prefill_ms)


def _order(number: int) -> Sequence[str]:
    return SIDES if number % 2 else SIDES[::-1]


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float]:
    """The geometric mean, and by which factor either way it is uncertain (95 %)."""
    logs = [math.log(ratio) for ratio in ratios]
    spread = statistics.stdev(logs) if len(logs) > 1 else math.inf
    return math.exp(statistics.mean(logs)), math.exp(1.96 * spread / math.sqrt(len(logs)))


def main(rounds: int, pairs: int) -> None:
    found = compare(rounds, pairs)
    ratios = {case: _paired(values, truediv) for case, values in found.rate.items()}
    fronts = {
        prompt: {
            side: list(map(sub, found.ttft_ms[prompt][side], found.prefill_ms[prompt][side]))
            for side in SIDES
        }
        for prompt in PROMPTS
    }
    all_ratios = [ratio for values in ratios.values() for ratio in values]
    ratio, factor = mean_ratio(all_ratios)
    added = _paired(fronts[SHORT], sub)
    lower, _, upper = statistics.quantiles(added, n=4, method="inclusive")
    figures = {
        "added_ttft_p50_ms": statistics.median(added),
        "throughput_ratio": ratio,
        "throughput_ratio_lowest_95": ratio / factor,
        "throughput_ratio_highest_95": ratio * factor,
        "throughput_ratio_median": statistics.median(all_ratios),
        "added_ttft_lower_quartile_ms": lower,
        "added_ttft_upper_quartile_ms": upper,
    }
    rows = []
    for case, values in ratios.items():
        name = case.replace(" ", "_")
        ratio, factor = mean_ratio(values)
        figures |= {
            f"throughput_ratio_{name}": ratio,
            **{f"engine_steps_{name}_{side}": found.steps[case][side] for side in SIDES},
        }
        rows.append(
            [f"tokens/s, {case}", *_both(found.rate[case], ".1f"), f"x {ratio:.3f} (/ or x {factor:.3f})"]
        )
        rows.append(["  engine steps", *(f"{found.steps[case][side]:.0f}" for side in SIDES), ""])
    for prompt in PROMPTS:
        took, engine, front = found.ttft_ms[prompt], found.prefill_ms[prompt], fronts[prompt]
        ratio, factor = mean_ratio(_paired(engine, truediv))
        figures |= {
            f"added_ttft_p50_ms_{prompt}": statistics.median(_paired(front, sub)),
            f"added_ttft_plain_p50_ms_{prompt}": statistics.median(_paired(took, sub)),
            f"ttft_p50_ms_{prompt}": statistics.median(took["kvorum"]),
            f"bare_ttft_p50_ms_{prompt}": statistics.median(took["bare"]),
            f"prefill_ratio_{prompt}": ratio,
            f"prefill_ratio_{prompt}_lowest_95": ratio / factor,
            f"prefill_ratio_{prompt}_highest_95": ratio * factor,
        }
        told = f"+ {statistics.median(_paired(took, sub)):.2f} ms"
        rows.append([f"TTFT p50 ms, {prompt} prompt tokens", *_both(took, ".2f"), told])
        told = f"x {ratio:.3f} (/ or x {factor:.3f})"
        rows.append(["  of it the engine's prefill", *_both(engine, ".2f"), told])
        told = f"+ {statistics.median(_paired(front, sub)):.2f} ms"
        rows.append(["  and in front of the engine", *_both(front, ".2f"), told])
    columns = ["", "Kvorum's HTTP face", "vLLM's server", "paired"]
    report("http", "What the HTTP face costs", columns, rows, figures)


def _paired(values: Values, how: Callable[[float, float], float]) -> list[float]:
    return [how(ours, theirs) for ours, theirs in zip(*(values[side] for side in SIDES), strict=True)]


def _both(values: Values, style: str) -> list[str]:
    return [format(statistics.median(values[side]), style) for side in SIDES]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=16, help="throughput rounds of each side and concurrency"
    )
    parser.add_argument("--pairs", type=int, default=40, help="latency turns of each side")
    main(**vars(parser.parse_args()))
