"""What slows a cluster down, and which setting changes it: rules over recent requests. Pure.

Each rule knows one symptom. It answers with the seconds of a mean request that the cause explains, or not at
all; `diagnose` puts the costliest first.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.evidence import Evidence, RequestRecord, mean
from cluster.finding import LEAST_S, Finding, is_worth, prefill_s_per_token, ttft_s
from cluster.speed_rules import decoding, exposed_communication, slow_replica
from cluster.waiting_rules import waiting

_FAILING = 0.05
_PREFIX_BLIND = {"round-robin", "random", "least-loaded", "power-of-two"}


def diagnose(evidence: Evidence) -> list[Finding]:
    """Findings by cost, failures first; empty when nothing stands out."""
    served = [request for request in evidence.requests if not request.error and request.ttft_s is not None]
    found = [_down(evidence), _failing(evidence)]
    if served:
        slow = slow_replica(served)
        found += [waiting(evidence, served), _cold_cache(served), exposed_communication(evidence, served)]
        # One slow replica bends what is fitted over all.
        found += [slow] if slow is not None else decoding(evidence, served)
        if not any(finding is not None and finding.symptom == "high TTFT" for finding in found):
            found.append(_prefill(served))
    kept = [finding for finding in found if finding is not None]
    return sorted(kept, key=lambda finding: (finding.symptom != "failures", -finding.cost_s))


def _down(evidence: Evidence) -> Finding | None:
    down = [r for r in evidence.replicas if r.state not in ("ready", "draining")]
    if not down:
        return None
    why = "; ".join(f"{r.name} is {r.state}" + (f": {r.last_error}" if r.last_error else "") for r in down)
    return Finding(
        "replica-down",
        "failures",
        why,
        "see its log (worker-*.err below the work folder); `kvorum status --watch` shows when it is back",
        f"{len(evidence.replicas)} replicas instead of {len(evidence.replicas) - len(down)}",
        0.0,
    )


def _failing(evidence: Evidence) -> Finding | None:
    """By traces, which are recent, and by counters, which are whole: failures are traced more often."""
    failed = [r.error for r in evidence.requests if r.error not in ("", "cancelled")]
    counted = evidence.metrics.by("kvorum_router_requests_total", "outcome")
    share = len(failed) / max(len(evidence.requests), 1)
    if total := sum(counted.values()):
        share = min(share, (counted.get("error", 0.0) + counted.get("refused", 0.0)) / total)
    if share < _FAILING:
        return None
    kinds = ", ".join(f"{failed.count(kind)} {kind}" for kind in sorted(set(failed)))
    return Finding(
        "failing-requests",
        "failures",
        f"{len(failed)} of {len(evidence.requests)} traced requests failed or were refused: {kinds}",
        "`kvorum trace --errors --list` lists them",
        f"{share:.0%} more requests answered",
        0.0,
    )


def _cold_cache(served: Sequence[RequestRecord]) -> Finding | None:
    missed = sum(max(r.missed, 0) for r in served)
    computed, prompts = sum(r.computed for r in served), sum(r.prompt for r in served)
    cost = missed * prefill_s_per_token(served) / len(served)
    policy, degraded = served[-1].policy, next((r.degraded for r in reversed(served) if r.degraded), "")
    blind = policy in _PREFIX_BLIND
    if not is_worth(cost, mean(ttft_s(r) for r in served)) or not (blind or degraded):
        return None  # a policy that knows the caches had its reasons
    hits = sum(r.cached for r in served) / max(prompts, 1)
    return Finding(
        "cold-cache",
        "high TTFT",
        f"{missed} of {computed} computed prompt tokens were cached on another replica; {hits:.0%} of all "
        f"prompt tokens were hits, {(sum(r.cached for r in served) + missed) / max(prompts, 1):.0%} could be",
        f"--policy {policy} -> predicted-time" if blind else f"--kv-events: the index is blind ({degraded})",
        f"about {cost:.2f} s less TTFT",
        cost,
    )


def _prefill(served: Sequence[RequestRecord]) -> Finding | None:
    """Where the rest of a long TTFT goes when nothing is wrong."""
    prefill, ttft = mean(r.prefill_s for r in served), mean(ttft_s(r) for r in served)
    if prefill < 0.5 * ttft or ttft < 10 * LEAST_S:
        return None
    if not (each := prefill_s_per_token(served)):
        return None  # prompts so short that they say nothing of a speed
    return Finding(
        "prefill",
        "high TTFT",
        f"{prefill:.2f} s of a TTFT of {ttft:.2f} s compute {mean(r.computed for r in served):.0f} prompt "
        f"tokens at {each * 1e3:.2f} ms each; no replica had them cached",
        "prompts that begin alike (the fixed part first), --tensor-parallel-size larger, or --compile",
        f"{each * 1e3:.2f} ms less TTFT for each prompt token that is cached",
        0.0,
    )
