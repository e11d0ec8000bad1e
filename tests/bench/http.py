"""What the HTTP face costs: `make bench NAME=http`.

The same rounds through our HTTP face (ingress, router, replica, shard actor) and through vLLM's own server,
in alternation in one run, with one engine a side on the same core and with the same settings. Both sides
run as they come: with metrics, ours with traces as well; vLLM's log of each request is off.

Throughput is that of a batch that stays full: each stream asks for the next answer as soon as it has one, and
answers differ in length, as they do. Where all are equally long, requests come in waves, and it counts how
close together those of a wave arrive: the engine computes late ones in steps of their own. That is measured
too.

A virtual machine's speed may change twofold within seconds, so rounds are short and many. What does not
change with it is printed as well: the share of a round in which the engine's computing thread ran. Where both
sides compute as long, nothing but the engine limits either.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp

from tests.bench.clusters import running
from tests.bench.http_client import stream_text
from tests.bench.report import report
from tests.bench.workload import Result, Round, run
from tests.e2e.bare_server import bare_server
from workers.checkpoint import prepare

SETTLE_S = 1.5
"""vLLM's processes spin for a second after their last step; that must not fall into the other's turn."""

SIDES = ("kvorum", "bare")
CASES = {"8 streams": (8, 16), "16 streams": (16, 16), "8 streams in waves": (8, 0)}
"""How many streams, and by how many tokens the length of an answer differs from the mean."""
TOKENS = 32
ANSWERS = 2
"""Of each stream in a round."""
MODEL = "smollm2"

Values = dict[str, list[float]]


async def through(url: str, plan: Round) -> Result:
    """One round as an HTTP client."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
            return stream_text(session, url, MODEL, prompt, output_tokens)

        return await run(stream, plan)


def thread_times() -> dict[tuple[str, str], float]:
    """CPU seconds of every thread of this machine, by process and thread."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/task/[0-9]*/schedstat"):
        with suppress(OSError):  # it has ended
            found[path.parts[2], path.parts[4]] = int(path.read_text().split()[0]) / 1e9
    return found


def compare(rounds: int, pairs: int) -> tuple[dict[str, Values], dict[str, Values], Values]:
    """By case and side: tokens per second, the busiest thread's share; ms to a single first token."""
    rate: dict[str, Values] = {case: {side: [] for side in SIDES} for case in CASES}
    busy: dict[str, Values] = {case: {side: [] for side in SIDES} for case in CASES}
    ttft_ms: Values = {side: [] for side in SIDES}
    flags = ["--replicas", "1", "--cores-per-shard", "1", "--max-model-len", "4096", "--kv-cache-gib", "1"]
    model = prepare("smollm2").path
    with (
        tempfile.TemporaryDirectory() as folder,
        running("bench-http", "--http-port", "0", *flags) as state,
        bare_server(model, Path(folder, "bare.log")) as bare,
    ):
        urls = {"kvorum": state.http_url, "bare": bare}

        for case, (count, spread) in CASES.items():
            for number in range(-1, rounds):  # the first one warms both sides up
                plan = Round(1000 * count + number, ANSWERS * count, count, 64, TOKENS, spread)
                for side in _order(number):
                    time.sleep(SETTLE_S)
                    before = thread_times()
                    result = asyncio.run(through(urls[side], plan))
                    if number < 0:
                        continue
                    rate[case][side].append(result.tokens / result.elapsed_s)
                    ran = max(now - before.get(key, now) for key, now in thread_times().items())
                    busy[case][side].append(ran / result.elapsed_s)
            print(f"{rounds} rounds of {case} done", file=sys.stderr)
        for number in range(pairs):
            plan = Round(90_000 + number, requests=3, concurrency=1, prompt_tokens=128, output_tokens=2)
            for side in _order(number):
                time.sleep(SETTLE_S)
                result = asyncio.run(through(urls[side], plan))
                ttft_ms[side].append(1e3 * statistics.median(result.ttft_s))
        print(f"{pairs} latency pairs done", file=sys.stderr)
    return rate, busy, ttft_ms


def _order(number: int) -> Sequence[str]:
    return SIDES if number % 2 else SIDES[::-1]


def main(rounds: int, pairs: int) -> None:
    rate, busy, ttft_ms = compare(rounds, pairs)
    ratios = {
        case: [ours / theirs for ours, theirs in zip(*(values[side] for side in SIDES), strict=True)]
        for case, values in rate.items()
    }
    added = [ours - theirs for ours, theirs in zip(*(ttft_ms[side] for side in SIDES), strict=True)]
    by_case = {case: statistics.median(values) for case, values in ratios.items()}
    figures = {
        "added_ttft_p50_ms": statistics.median(added),
        "throughput_ratio": min(by_case["8 streams"], by_case["16 streams"]),
        "ttft_p50_ms": statistics.median(ttft_ms["kvorum"]),
        "bare_ttft_p50_ms": statistics.median(ttft_ms["bare"]),
    }
    rows = []
    for case, values in ratios.items():
        name = case.replace(" ", "_")
        lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
        figures |= {
            f"throughput_ratio_{name}": by_case[case],
            f"throughput_ratio_{name}_lower_quartile": lower,
            f"throughput_ratio_{name}_upper_quartile": upper,
            **{f"computing_{name}_{side}": statistics.median(busy[case][side]) for side in SIDES},
        }
        rows.append([f"tokens/s, {case}", *_both(rate[case], ".1f"), f"x {by_case[case]:.3f}"])
        rows.append(["  of it computing", *_both(busy[case], ".1%"), ""])
    rows.append(["TTFT p50 ms, 1 stream", *_both(ttft_ms, ".2f"), f"+ {figures['added_ttft_p50_ms']:.2f} ms"])
    columns = ["", "Kvorum's HTTP face", "vLLM's server", "paired"]
    report("http", "What the HTTP face costs", columns, rows, figures)


def _both(values: Values, style: str) -> list[str]:
    return [format(statistics.median(values[side]), style) for side in SIDES]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=16, help="throughput rounds of each side and concurrency"
    )
    parser.add_argument("--pairs", type=int, default=31, help="latency turns of each side")
    main(**vars(parser.parse_args()))
