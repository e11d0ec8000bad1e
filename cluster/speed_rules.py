"""Why computing takes long: rules of `cluster.diagnosis`. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cluster.evidence import Evidence, RequestRecord, mean
from cluster.finding import Finding, is_worth, prefill_s_per_token
from cluster.load_model import Breakdown, breakdown, company

_SLOW = 1.5
_ENOUGH = 3
"""Requests of a replica by which it is judged."""
_FAIR_BATCH = 1.25
_EXPOSED = 0.15
_LARGE_STEP = 128
"""Tokens from which splitting a step can pay."""
_BATCH_SHARE = 0.7
_BATCH_AIM: Final = 2 / 3
"""Of a step, the share of the batch after the proposed change: most of the throughput is kept there."""
_CONTEXT_SHARE = 0.5
_PREFILL_SHARE = 0.3


def slow_replica(served: Sequence[RequestRecord]) -> Finding | None:
    """The same work takes longer on one: prompt tokens, or output tokens in no larger a batch."""
    by_name = {name: [r for r in served if r.replica == name] for name in sorted({r.replica for r in served})}
    seen = company(served)
    worst: Finding | None = None
    for name, mine in by_name.items():
        others = [r for r in served if r.replica != name]
        if min(len(mine), len(others)) < _ENOUGH:
            continue
        prefill, other_prefill = prefill_s_per_token(mine), prefill_s_per_token(others)
        here = [at for at, r in enumerate(seen.requests) if r.replica == name]
        there = [at for at, r in enumerate(seen.requests) if r.replica != name]
        fair = here and there and seen.batch[here].mean() <= seen.batch[there].mean() * _FAIR_BATCH
        decode, other_decode = (
            (float(seen.tpot_s[here].mean()), float(seen.tpot_s[there].mean())) if fair else (0.0, 0.0)
        )
        ratio = max(_ratio(prefill, other_prefill), _ratio(decode, other_decode))
        if ratio < _SLOW:
            continue
        excess = sum((r.prefill_s + r.decode_s) * (1 - 1 / ratio) for r in mine) / len(served)
        figures = [f"{name} takes {ratio:.1f} times as long as the others for the same work"]
        if prefill and other_prefill:
            figures.append(f"{prefill * 1e3:.2f} ms against {other_prefill * 1e3:.2f} ms per prompt token")
        if decode:
            figures.append(f"{decode * 1e3:.1f} ms against {other_decode * 1e3:.1f} ms per output token")
        finding = Finding(
            "slow-replica",
            "high TTFT" if _ratio(prefill, other_prefill) >= _SLOW else "high TPOT",
            "; ".join(figures),
            f"end what shares the cores or GPUs of {name} (`kvorum status` names node, cores and pids), "
            "or place it elsewhere",
            f"about {excess:.2f} s less of a mean request, {excess * len(served) / len(mine):.2f} s there",
            excess,
        )
        worst = finding if worst is None or finding.cost_s > worst.cost_s else worst
    return worst


def exposed_communication(evidence: Evidence, served: Sequence[RequestRecord]) -> Finding | None:
    """Shards wait for each other: overlap hides that in prefill steps, only the link in decode steps."""
    for facts in evidence.replicas:
        mine = [r for r in served if r.replica == facts.name]
        if not mine or facts.exposed is None:
            continue
        large = [step for step in evidence.steps if step.tokens >= _LARGE_STEP]
        in_prefill = (
            sum(s.exposed_s for s in large) / sum(s.forward_s for s in large) if large else facts.exposed
        )
        prefill, decode = mean(r.prefill_s for r in mine), mean(r.decode_s for r in mine)
        cost = in_prefill * prefill + facts.exposed * decode
        if max(in_prefill, facts.exposed) < _EXPOSED or not is_worth(cost, prefill + decode, _EXPOSED):
            continue
        figures = (
            f"shards of {facts.name} spend {in_prefill:.0%} of prefill steps and {facts.exposed:.0%} of all "
            f"steps waiting for AllReduce over {facts.collective or 'the link'}, overlap {facts.overlap}"
        )
        if facts.overlap == "off" and in_prefill >= _EXPOSED:
            hidden = min(in_prefill, 1 - in_prefill) * prefill
            return Finding(
                "exposed-communication",
                "high TTFT" if in_prefill * prefill > facts.exposed * decode else "high TPOT",
                figures,
                "--overlap off -> auto (and, if decode stays slow, a faster link or --placement pack)",
                f"at most {hidden:.2f} s less of a mean prefill of {prefill:.2f} s",
                cost,
            )
        fewer = "--tensor-parallel-size smaller, with more replicas"
        return Finding(
            "exposed-communication",
            "high TPOT",
            figures,
            fewer if facts.collective == "shm" else f"--placement pack, a faster link, or {fewer}",
            f"at most {cost:.2f} s less of a mean request",
            cost,
        )
    return None


def decoding(evidence: Evidence, served: Sequence[RequestRecord]) -> list[Finding]:
    """What output tokens take besides the model's own time. Of replicas that are equally fast."""
    parts = breakdown(served)
    if parts is None:
        return []
    found = (
        _batch_too_large(evidence, parts),
        _kv_bandwidth(parts),
        _prefills_delay_decodes(evidence, served, parts),
    )
    return [finding for finding in found if finding is not None and is_worth(finding.cost_s, 0.0)]


def _batch_too_large(evidence: Evidence, parts: Breakdown) -> Finding | None:
    """A step is a + b * sequences long: where the second term is nearly all, more sequences only wait."""
    if parts.by_batch_s < _BATCH_SHARE * parts.tpot_s:
        return None
    model, now = parts.model, parts.model.base_s + parts.by_batch_s
    ideal = _BATCH_AIM / (1 - _BATCH_AIM) * model.base_s / model.batch_s
    aim = max(round(ideal), math.ceil(parts.least_batch), 1)
    then = model.base_s + model.batch_s * aim
    limit = max((r.max_sequences for r in evidence.replicas), default=0)
    return Finding(
        "batch-too-large",
        "high TPOT",
        f"{_told(parts)}{_ms(parts.by_batch_s)} for the {parts.batch:.0f} sequences of a mean step, "
        f"{_ms(model.batch_s)} each: more of them hardly add throughput",
        f"--max-num-seqs {limit or 'as now'} -> {aim}",
        f"TPOT {_ms(parts.tpot_s)} -> {_ms(parts.tpot_s - now + then)}, "
        f"throughput x {(aim / then) / (parts.batch / now):.2f}; requests beyond wait in the queue",
        (now - then) * parts.tokens,
    )


def _kv_bandwidth(parts: Breakdown) -> Finding | None:
    if parts.by_context_s < _CONTEXT_SHARE * parts.tpot_s:
        return None
    return Finding(
        "kv-bandwidth",
        "high TPOT",
        f"{_told(parts)}{_ms(parts.by_context_s)} reading the {parts.context:.0f} cached tokens of a step",
        "--engine-arg kv_cache_dtype=fp8, --tensor-parallel-size larger, or shorter prompts",
        f"fp8 reads half of it: TPOT {_ms(parts.tpot_s)} -> {_ms(parts.tpot_s - parts.by_context_s / 2)}",
        parts.by_context_s / 2 * parts.tokens,
    )


def _prefills_delay_decodes(
    evidence: Evidence, served: Sequence[RequestRecord], parts: Breakdown
) -> Finding | None:
    step = max((r.max_batch_tokens for r in evidence.replicas), default=0)
    if parts.by_prefill_s < _PREFILL_SHARE * parts.tpot_s or not step:
        return None
    pause = min(step, max(r.computed for r in served)) * prefill_s_per_token(served)
    smaller, count = max(step // 4, 64), len(evidence.replicas)
    return Finding(
        "prefills-delay-decodes",
        "high TPOT",
        f"{_told(parts)}{_ms(parts.by_prefill_s)} for other requests' prompts; a step of up to {step} tokens "
        f"holds every stream for {pause:.2f} s",
        f"--replicas {count} -> {count + 1}; for even streams --max-num-batched-tokens {step} -> {smaller}",
        f"TPOT {_ms(parts.tpot_s)} -> {_ms(parts.tpot_s - parts.by_prefill_s / (count + 1))}; "
        f"the longest pause {pause:.2f} -> {pause * min(smaller / step, 1.0):.2f} s",
        parts.by_prefill_s / (count + 1) * parts.tokens,
    )


def _told(parts: Breakdown) -> str:
    return f"{_ms(parts.tpot_s)} per output token, {_ms(parts.model.base_s)} of it whatever else runs; "


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _ratio(one: float, other: float) -> float:
    return one / other if one > 0 and other > 0 else 0.0
