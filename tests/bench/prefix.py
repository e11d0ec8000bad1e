"""Many tenants, more prefixes than one replica can keep: `make bench NAME=prefix`.

Two real replicas whose KV space holds the system prompts of about 24 tenants each, 40 tenants, Poisson
arrivals. One router process per policy watches the same two replicas; the policies take turns, with two
rounds or more there and back, because the machine's own speed may double within minutes. Each turn has
tenants of its own, so that nothing cached by the turn before helps it, and begins with requests that are not
measured.

The oracle knows the whole future: every tenant lives on one replica, half of them on each, and each cache
evicts what is needed again latest (Belady, 1966). It runs nothing, and says which share of the prompt tokens
could have been cached.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from cluster.state import ClusterState
from router.client import KvorumClient
from tests.bench.clusters import running
from tests.bench.report import ROOT, report

POLICIES = ("predicted-time", "round-robin", "power-of-two", "prefix-affinity", "least-loaded")
BLOCK = 128  # tokens, vLLM's default on CPU
VOCABULARY = 49_000
KV_TOKEN_BYTES = 23_040  # SmolLM2-135M in bfloat16: 30 layers x 2 x 3 heads x 64 x 2 bytes
NAME = "bench-prefix"
START_S = 60.0


@dataclass(frozen=True)
class Plan:
    """One turn's arrivals. Times are seconds, lengths tokens."""

    tenants: int
    system_tokens: int
    user_tokens: int
    output_tokens: int
    rate_per_s: float
    warm_up: int
    measured: int
    kv_gib: float

    @property
    def requests(self) -> int:
        return self.warm_up + self.measured

    @property
    def kv_blocks(self) -> int:
        """Blocks that one replica's KV space holds."""
        return int(self.kv_gib * 2**30 / KV_TOKEN_BYTES / BLOCK)


@dataclass
class Turn:
    """What the measured requests of one turn took."""

    ttft_s: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    served: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    oracle: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0

    @property
    def load_cv(self) -> float:
        counts = [self.served[replica] for replica in ("replica-0", "replica-1")]
        return statistics.pstdev(counts) / statistics.mean(counts) if sum(counts) else 0.0


def arrivals(plan: Plan, seed: int) -> list[tuple[float, int]]:
    """(seconds, tenant) of every request of a turn."""
    rng, at = random.Random(seed), 0.0
    found = []
    for _ in range(plan.requests):
        at += rng.expovariate(plan.rate_per_s)
        found.append((at, rng.randrange(plan.tenants)))
    return found


async def run_turn(address: str, plan: Plan, schedule: Sequence[tuple[float, int]], seed: int) -> Turn:
    """Send every request when it is due, whatever became of those before."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, VOCABULARY, plan.system_tokens).tolist() for _ in range(plan.tenants)]
    turn, loop = Turn(), asyncio.get_running_loop()
    began = loop.time()

    async def one(number: int, at: float, tenant: int) -> None:
        prompt = systems[tenant] + rng.integers(0, VOCABULARY, plan.user_tokens).tolist()
        await asyncio.sleep(began + at - loop.time())
        sent = loop.time()
        first: float | None = None
        async for message in client.generate(
            prompt, temperature=0, max_tokens=plan.output_tokens, ignore_eos=True, tenant=f"t{tenant}"
        ):
            if first is None:
                first = loop.time() - sent
                if number >= plan.warm_up:
                    turn.ttft_s.append(first)
                    turn.cached += message.usage.cached_tokens
                    turn.prompt += len(prompt)
                    turn.served[message.served.replica] += 1

    async with KvorumClient(address) as client:
        ended = await asyncio.gather(
            *(one(number, at, tenant) for number, (at, tenant) in enumerate(schedule)), return_exceptions=True
        )
    turn.errors = sum(isinstance(result, BaseException) for result in ended)
    turn.oracle = oracle_hit_rate(plan, [tenant for _at, tenant in schedule])
    return turn


def oracle_hit_rate(plan: Plan, tenants: Sequence[int]) -> float:
    """Share of the measured prompt tokens that a perfect placement and eviction would have found cached."""
    blocks = (plan.system_tokens + plan.user_tokens - 1) // BLOCK
    shared = plan.system_tokens // BLOCK  # the block that begins the user's own text is never shared
    counts = Counter(tenants)
    homes: dict[int, int] = {}
    load = [0, 0]
    for tenant, count in counts.most_common():
        home = load.index(min(load))
        homes[tenant], load[home] = home, load[home] + count
    hits = total = 0
    for home in (0, 1):
        mine = [(number, tenant) for number, tenant in enumerate(tenants) if homes[tenant] == home]
        cached: set[int] = set()
        room = (plan.kv_blocks - blocks) // shared
        uses: dict[int, list[int]] = defaultdict(list)
        for number, tenant in mine:
            uses[tenant].append(number)
        for number, tenant in mine:
            uses[tenant].pop(0)
            if number >= plan.warm_up:
                total += plan.system_tokens + plan.user_tokens
                hits += shared * BLOCK if tenant in cached else 0
            cached.add(tenant)
            while len(cached) > room:
                latest = max(cached, key=lambda each: uses[each][0] if uses[each] else len(tenants))
                cached.remove(latest)
    return hits / total


@contextmanager
def router(policy: str, state: ClusterState) -> Iterator[str]:
    """`kvorum router` with this policy in front of the running cluster; its address."""
    assert state.admin_address is not None
    environ = dict(os.environ) | {"KVORUM_CLUSTER_TOKEN": state.token}
    command = [
        sys.executable, "-m", "cluster.cli", "router", "--controller", state.admin_address,
        "--port", "0", "--policy", policy,
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    too_late = threading.Timer(START_S, process.kill)
    too_late.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        too_late.cancel()
        if "listens on" not in line:
            raise RuntimeError(f"the router with policy {policy} did not start: {line!r}")
        yield line.split("listens on ")[1].split(";")[0].strip()
    finally:
        too_late.cancel()
        process.terminate()
        process.wait(timeout=60)


def measure(plan: Plan, policies: Sequence[str], rounds: int, seed: int) -> dict[str, list[Turn]]:
    """Turns of every policy, on the same arrivals within a round."""
    flags = [
        "--replicas", "2", "--cores-per-shard", "1", "--max-model-len", "4096",
        "--kv-cache-gib", str(plan.kv_gib),
    ]  # fmt: skip
    turns: dict[str, list[Turn]] = {policy: [] for policy in policies}
    with running(NAME, *flags) as state, ExitStack() as stack:
        addresses = {policy: stack.enter_context(router(policy, state)) for policy in policies}
        for number in range(rounds):
            schedule = arrivals(plan, seed + number)
            for policy in policies if number % 2 == 0 else policies[::-1]:
                prompts = 10_000 * seed + 100 * number + policies.index(policy)
                turn = asyncio.run(run_turn(addresses[policy], plan, schedule, prompts))
                turns[policy].append(turn)
                print(
                    f"round {number + 1}/{rounds} {policy}: mean TTFT {statistics.mean(turn.ttft_s):.3f} s, "
                    f"hit rate {turn.hit_rate:.1%} (oracle {turn.oracle:.1%}), {dict(turn.served)}, "
                    f"{turn.errors} errors",
                    file=sys.stderr,
                )
    return turns


def main(plan: Plan, policies: Sequence[str], rounds: int, seed: int) -> None:
    turns = measure(plan, policies, rounds, seed)

    def mean(policy: str) -> float:
        return statistics.mean(value for turn in turns[policy] for value in turn.ttft_s)

    def p90(policy: str) -> float:
        return float(np.percentile([value for turn in turns[policy] for value in turn.ttft_s], 90))

    def hits(policy: str) -> float:
        return statistics.mean(turn.hit_rate for turn in turns[policy])

    def balance(policy: str) -> float:
        return statistics.mean(turn.load_cv for turn in turns[policy])

    ours = policies[0]
    oracle = statistics.mean(turn.oracle for turn in turns[ours])
    rows = [
        [
            policy,
            f"{mean(policy) * 1e3:.0f}",
            f"{p90(policy) * 1e3:.0f}",
            f"{hits(policy):.1%}",
            f"{balance(policy):.2f}",
            str(sum(turn.errors for turn in turns[policy])),
            f"x {mean(policy) / mean(ours):.2f}",
        ]
        for policy in policies
    ]
    rows.append(["oracle (not run)", "", "", f"{oracle:.1%}", "", "", ""])
    figures = {
        "load_cv": balance(ours),
        "hit_gap_to_oracle_points": (oracle - hits(ours)) * 100,
        "hit_rate": hits(ours),
        "ttft_mean_s": mean(ours),
        "errors": float(sum(turn.errors for each in turns.values() for turn in each)),
    }
    if "round-robin" in turns:
        figures["ttft_mean_rr_over_ours"] = mean("round-robin") / mean(ours)
        figures["ttft_p90_rr_over_ours"] = p90("round-robin") / p90(ours)
    report(
        "prefix",
        f"{plan.tenants} tenants x {plan.system_tokens} tokens, {plan.rate_per_s} requests/s, 2 replicas of "
        f"{plan.kv_blocks * BLOCK} KV tokens",
        ["policy", "TTFT mean ms", "p90 ms", "hit rate", "load CV", "errors", "mean over ours"],
        rows,
        figures,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tenants", type=int, default=40)
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--user-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second, Poisson")
    parser.add_argument("--warm-up", type=int, default=60, help="requests of a turn that are not measured")
    parser.add_argument("--measured", type=int, default=80, help="requests of a turn that are")
    parser.add_argument("--kv-gib", type=float, default=0.8, help="KV space of a replica")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each policy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", default=",".join(POLICIES), help="the first is ours")
    given = parser.parse_args()
    main(
        Plan(
            given.tenants, given.system_tokens, given.user_tokens, given.output_tokens, given.rate,
            given.warm_up, given.measured, given.kv_gib,
        ),
        given.policies.split(","),
        given.rounds,
        given.seed,
    )  # fmt: skip
