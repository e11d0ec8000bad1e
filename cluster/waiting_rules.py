"""Why requests wait, or are thrown out and computed again: rules of `cluster.diagnosis`. Pure.

They wait for want of KV space, or of places in the batch, or because arrivals outrun computing; the first of
these that the figures prove is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.evidence import Evidence, ReplicaFacts, RequestRecord, mean
from cluster.finding import (
    LEAST_SHARE,
    Finding,
    is_worth,
    most_at_once,
    most_in_batch,
    prefill_s_per_token,
    ttft_s,
)

_KV_FULL = 0.85
_NEARLY = 0.9
_MOST_SEATS = 0.7
"""In use at a time, of those that whole requests would take: they begin smaller."""


def waiting(evidence: Evidence, served: Sequence[RequestRecord]) -> Finding | None:
    """Of requests that waited in the router or in an engine's queue: for want of what?"""
    wait, ttft = mean(r.waited_s for r in served), mean(ttft_s(r) for r in served)
    replicas = {r.name: r for r in evidence.replicas}
    if not is_worth(wait, ttft):
        return _preempted(evidence, served)
    told = f"requests waited {wait:.2f} s of a TTFT of {ttft:.2f} s"
    for name, demand in most_at_once(served).items():
        facts = replicas.get(name)
        mine = [r for r in served if r.replica == name]
        footprint = mean(r.prompt + r.output for r in mine)
        if facts is None or not footprint:
            continue
        seats = facts.kv_tokens / footprint
        in_batch = most_in_batch(mine)
        short_of_seats = facts.kv_tokens > 0 and seats < min(demand, facts.max_sequences or demand)
        if short_of_seats and (facts.preemptions or _was_full(mine) or in_batch >= _MOST_SEATS * seats):
            return _kv_space(facts, footprint, demand, wait, f"{told}; ")
        if 0 < facts.max_sequences < demand and in_batch >= _NEARLY * facts.max_sequences:
            return Finding(
                "batching-limit",
                "low throughput",
                f"{told}; {name} computes {facts.max_sequences} sequences at a time and had {demand} at once",
                f"--max-num-seqs {facts.max_sequences} -> {_rounded(min(demand, seats or demand))}",
                f"up to {wait:.2f} s less TTFT, at more time per output token",
                wait,
            )
    count = max(len(evidence.replicas), 1)
    refused = sum(evidence.metrics.by("kvorum_router_refused_total", "reason").values())
    return Finding(
        "queue",
        "high TTFT",
        f"{told}, {mean(r.held_s for r in served):.2f} s of it in the router; up to "
        f"{max(most_at_once(served).values())} were at a replica at once"
        + (f"; {refused:.0f} were refused since the router's start" if refused else ""),
        f"--replicas {count} -> {count + 1} (or more cores or GPUs for each)",
        f"the wait of {wait:.2f} s to about {wait * count / (count + 1):.2f} s",
        wait,
    )


def _preempted(evidence: Evidence, served: Sequence[RequestRecord]) -> Finding | None:
    """Without a queue, too little KV space shows as sequences thrown out and computed again."""
    for facts in evidence.replicas:
        mine = [r for r in served if r.replica == facts.name]
        if not mine or facts.preemptions < LEAST_SHARE * len(mine) or not facts.kv_tokens:
            continue
        again = mean(r.prompt + r.output / 2 for r in mine) * prefill_s_per_token(mine)
        demand = most_at_once(mine).get(facts.name, 1)
        footprint = mean(r.prompt + r.output for r in mine)
        return _kv_space(facts, footprint, demand, again * facts.preemptions / len(served), "")
    return None


def _kv_space(facts: ReplicaFacts, footprint: float, demand: int, cost_s: float, waiting: str) -> Finding:
    wanted = min(demand, facts.max_sequences or demand)
    times = wanted * footprint / facts.kv_tokens
    seats = int(facts.kv_tokens / footprint)
    return Finding(
        "kv-space",
        "low throughput",
        f"{waiting}{facts.name} has KV space for {facts.kv_tokens} tokens, {seats} of these requests of "
        f"{footprint:.0f}, and had {demand} at once; {facts.preemptions} sequences were preempted",
        f"--kv-cache-gib, {times:.1f} times as much (on GPUs: gpu_memory_utilization, or kv_cache_dtype=fp8)",
        f"{wanted} requests at a time instead of {max(seats, 1)}; up to {cost_s:.2f} s less of each",
        cost_s,
    )


def _was_full(requests: Sequence[RequestRecord]) -> bool:
    """Whether a router saw their replica so when it sent one there."""
    return any(r.candidates[0].kv_usage >= _KV_FULL for r in requests if r.candidates)


def _rounded(count: float) -> int:
    """Up to the next multiple of 8."""
    return -(-int(count) // 8) * 8
