"""What telemetry costs: `make bench NAME=telemetry`.

Two clusters with the same settings on the same core take turns: one as it comes, with traces, metrics and
the viewer, one without any of them. In the first, each request brings a trace whose flag says whether it is
recorded: all of them, one in ten, or none. Rounds are short and paired, for the machine's own speed may
double within a minute. Then every recorded trace is looked up in the store: spans not there are lost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from cluster.state import ClusterState
from router.client import KvorumClient
from telemetry import spans
from telemetry.store import SpanStore
from tests.bench.clusters import running
from tests.bench.report import report
from tests.bench.workload import Result, Round, run

SETTLE_S = 1.0
"""What the turn before left to do must not fall into this one."""
ARRIVE_S = 10.0
"""A span that is not in the store by then will not come."""
SHARES = {"all": 1.0, "sampled": 0.1, "none": 0.0}
"""Of requests that are recorded, by side; the side without telemetry is "off"."""
SIDES = (*SHARES, "off")
WHOLE = frozenset(
    {
        spans.ROUTER_REQUEST, spans.ROUTER_TOKENIZE, spans.ROUTER_ROUTE, spans.ROUTER_FORWARD,
        spans.REPLICA_GENERATE, spans.REPLICA_QUEUE, spans.REPLICA_PREFILL, spans.REPLICA_DECODE,
    }
)  # fmt: skip
"""Names of a request's spans."""

Values = dict[str, list[float]]


@dataclass
class Side:
    """One way of asking, and the traces it had recorded."""

    address: str
    share: float
    recorded: list[str] = field(default_factory=list)

    async def through(self, plan: Round) -> Result:
        """One round as a gRPC client that brings its own traces."""
        chance = random.Random(plan.seed)

        async with KvorumClient(self.address) as client:

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                metadata = [("traceparent", self._trace(chance))]
                async for message in client.generate(
                    prompt, temperature=0, max_tokens=output_tokens, ignore_eos=True, metadata=metadata
                ):
                    yield sum(len(choice.token_ids) for choice in message.choices)

            return await run(stream, plan)

    def _trace(self, chance: random.Random) -> str:
        trace_id, span_id = f"{random.getrandbits(128) | 1:032x}", f"{random.getrandbits(64) | 1:016x}"
        recorded = chance.random() < self.share
        if recorded:
            self.recorded.append(trace_id)
        return f"00-{trace_id}-{span_id}-{'01' if recorded else '00'}"


def measure(rounds: int, pairs: int) -> tuple[Values, Values, int, int]:
    """Tokens per second and ms to the first token, by side; spans expected, and of these lost."""
    flags = ["--replicas", "1", "--cores-per-shard", "1", "--max-model-len", "4096", "--kv-cache-gib", "0.5"]
    bare = ["--no-telemetry-enabled", "--no-viewer"]
    rate: Values = {side: [] for side in SIDES}
    ttft_ms: Values = {side: [] for side in SIDES}
    with (
        running("bench-traced", "--viewer-port", "0", *flags) as traced,
        running("bench-off", *flags, *bare) as off,
    ):
        sides = {name: Side(traced.router_addresses[0], share) for name, share in SHARES.items()}
        sides["off"] = Side(off.router_addresses[0], 0.0)

        def turn(side: str, plan: Round) -> Result:
            time.sleep(SETTLE_S)
            return asyncio.run(sides[side].through(plan))

        for number in range(-2, rounds):  # the first two warm both clusters up
            for place, side in enumerate(_order(number)):
                plan = Round(10_000 + 10 * number + place, 8, 8, prompt_tokens=64, output_tokens=32)
                result = turn(side, plan)
                if number >= 0:
                    rate[side].append(result.tokens / result.elapsed_s)
        print(f"{rounds} throughput rounds done", file=sys.stderr)
        for number in range(pairs):
            for place, side in enumerate(_order(number)):
                plan = Round(50_000 + 10 * number + place, 3, 1, prompt_tokens=128, output_tokens=2)
                ttft_ms[side].append(1e3 * statistics.median(turn(side, plan).ttft_s))
        print(f"{pairs} latency rounds done", file=sys.stderr)
        expected = [trace_id for side in sides.values() for trace_id in side.recorded]
        return rate, ttft_ms, len(expected) * len(WHOLE), lost(traced, expected)


def lost(state: ClusterState, trace_ids: Sequence[str]) -> int:
    """Spans of these traces that are not in the cluster's store, after the last ones had time to come."""
    assert state.span_store is not None
    store, deadline = SpanStore(state.span_store), time.monotonic() + ARRIVE_S
    while True:
        missing = sum(len(WHOLE - {span.name for span in store.trace(each)}) for each in trace_ids)
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.5)


def _order(number: int) -> Sequence[str]:
    """Each side comes first, second and so on equally often."""
    first = number % len(SIDES)
    turned = (*SIDES[first:], *SIDES[:first])
    return turned if number // len(SIDES) % 2 == 0 else turned[::-1]


def main(rounds: int, pairs: int) -> None:
    rate, ttft_ms, expected, missing = measure(rounds, pairs)

    def over_off(values: Values, side: str) -> float:
        """The median of paired ratios."""
        return statistics.median(ours / off for ours, off in zip(values[side], values["off"], strict=True))

    figures = {
        "throughput_all_over_off": over_off(rate, "all"),
        "ttft_all_over_off": over_off(ttft_ms, "all"),
        "spans_lost": float(missing),
        "spans_expected": float(expected),
        "throughput_sampled_over_off": over_off(rate, "sampled"),
        "ttft_sampled_over_off": over_off(ttft_ms, "sampled"),
        "throughput_none_over_off": over_off(rate, "none"),
        "ttft_none_over_off": over_off(ttft_ms, "none"),
    }
    rows = [
        [
            label,
            *(format(statistics.median(values[side]), style) for side in SIDES),
            f"x {over_off(values, 'all'):.3f}",
        ]
        for label, values, style in (
            ("tokens/s, 8 streams", rate, ".1f"),
            ("TTFT p50 ms, 1 stream", ttft_ms, ".2f"),
        )
    ]
    columns = ["", "all recorded", "one in ten", "none", "no telemetry", "all over off, paired"]
    report("telemetry", f"What telemetry costs; {missing} of {expected} spans lost", columns, rows, figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24, help="throughput rounds of each side")
    parser.add_argument("--pairs", type=int, default=16, help="latency rounds of each side")
    main(**vars(parser.parse_args()))
