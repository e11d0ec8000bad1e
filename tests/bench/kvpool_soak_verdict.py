"""What the soak has shown: a table, figures, and what speaks against it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from tests.bench.kvpool_soak_answers import Answer
from tests.bench.kvpool_soak_plan import KILLS, Made
from workers.kvpool.usage import Counters

ENDS_REPLICA = (*KILLS, "host killed")
FAR = 5e-3
"""Between the logprobs of one token: more than other batches make of it in float32."""
_TURNED_AWAY = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
_BEFORE_S, _AFTER_S = 2.0, 10.0
"""Around a replica's absence: a request that ends then may have been hit by it."""


@dataclass
class Verdict:
    rows: list[list[str]] = field(default_factory=list)
    """What, how much, and what was seen of it."""
    figures: dict[str, float] = field(default_factory=dict)
    against: list[str] = field(default_factory=list)
    """Why the soak has failed; empty: it has not."""


@dataclass(frozen=True)
class Shown:
    """All that a soak leaves."""

    answers: Sequence[Answer]
    faults: Sequence[Made]
    leaks: Mapping[str, int]
    """In the end."""
    counters: Mapping[str, Counters]
    """Of each host's arena, by its name."""
    restarts: Mapping[str, int]
    began: float
    full: Mapping[str, float]
    """Mean share of each host's slots that were in use."""


def verdict(shown: Shown) -> Verdict:
    found = Verdict()
    _faults(shown, found)
    _answers(shown, found)
    _leaks(shown, found)
    _pool(shown, found)
    return found


def _faults(shown: Shown, found: Verdict) -> None:
    for number, made in enumerate(shown.faults):
        what = f"{made.at - shown.began:.0f} s, {made.in_flight} in flight: {made.seen}"
        if made.fault.kind == "agent stalled" and made.done:
            vain = _asked_in_vain(shown.answers, made)
            what += f"; {vain} requests got no blocks meanwhile, and were computed"
        found.rows.append([made.fault.name, "made" if made.done else "NOT MADE", what])
        found.figures[f"fault_{number}_{made.fault.name.replace(', ', ' ').replace(' ', '_')}_at_s"] = (
            made.at - shown.began
        )
        if not made.done:
            found.against.append(f"not made: {made.fault.name} ({made.seen})")
        if not made.back:
            found.against.append(f"what it took did not come back: {made.fault.name} ({made.seen})")
    found.figures["faults_made"] = sum(made.done for made in shown.faults)
    found.figures["faults_not_made"] = sum(not made.done for made in shown.faults)


def _answers(shown: Shown, found: Verdict) -> None:
    answers = shown.answers
    wrong = [answer for answer in answers if answer.wrong]
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(_group(answer, shown.faults), []).append(answer)
    long = [a.seconds for a in answers if a.end == "whole" and a.kind != "short"]
    took = f"median {median(long):.2f} s, longest {max(long):.1f} s" if long else ""
    kinds = Counter(answer.kind for answer in answers)
    _row(found, "requests", len(answers), ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    _row(found, "answered whole", len(groups.pop("whole", ())), took)
    _row(found, "cancelled by the client midway", len(groups.pop("cancelled", ())))
    _row(found, "wrong_tokens", len(wrong), _some([f"{a.number} ({a.kind}): {a.wrong}" for a in wrong]))
    off = max((answer.off for answer in answers), default=0.0)
    far = [answer for answer in answers if answer.off > FAR]
    told = _some([f"{a.number} ({a.kind}), by {a.off:.2g}" for a in far])
    _row(found, "wrong_logprobs", len(far), told or f"the farthest is off by {off:.1g}")
    found.figures["farthest_logprob"] = off
    for name in (
        "hung",
        "broken by a killed replica",
        "ended by a short deadline",
        "refused for a short deadline",
        "turned away meanwhile",
    ):
        some = groups.pop(name, [])
        _row(found, name, len(some), _said(some))
    others = [answer for some in groups.values() for answer in some]
    _row(found, "other errors", len(others), _said(others))
    again = sum(answer.attempt > 1 for answer in answers)
    _row(found, "answered by a second replica", again, "since the first was lost before its first token")
    for name in ("wrong_tokens", "wrong_logprobs", "hung", "other errors"):
        if count := found.figures[_name(name)]:
            found.against.append(f"{name}: {count:.0f}")


def _leaks(shown: Shown, found: Verdict) -> None:
    paused = {f"in the pause: {name}": count for made in shown.faults for name, count in made.leaks.items()}
    all_leaks = {**paused, **{f"at the end: {name}": count for name, count in shown.leaks.items()}}
    leaked = {name: count for name, count in all_leaks.items() if count}
    looked = f"nothing of {len(all_leaks)} counts"
    seen = _some([f"{name}: {count}" for name, count in leaked.items()]) or looked
    _row(found, "leaked_leases", sum(leaked.values()), seen)
    if leaked:
        found.against.append(f"leaked: {leaked}")
    if not shown.leaks:
        found.against.append("nobody looked for leaks at the end")


def _pool(shown: Shown, found: Verdict) -> None:
    answers = shown.answers
    hits = sum(counters.hits for counters in shown.counters.values())
    _row(found, "hits", hits, "blocks looked up in the arenas that were ready")
    loaded = [answer.pooled for answer in answers if answer.pooled]
    _row(found, "loaded", sum(loaded), f"tokens, by {len(loaded)} requests, from their host's arena")
    pulled = [answer.pulled for answer in answers if answer.pulled]
    asked = sum(bool(answer.asked_agent) for answer in answers)
    _row(found, "pulled", sum(pulled), f"blocks of the other host, by {len(pulled)} of {asked} that asked")
    full = ", ".join(f"{host}: {share:.0%}" for host, share in shown.full.items())
    _row(found, "percent of slots in use", 100 * min(shown.full.values()), full)
    for name in ("corrupt", "evicted", "full", "abandoned", "reclaimed", "owners_lost", "recovered"):
        each = {host: asdict(counters)[name] for host, counters in shown.counters.items()}
        _row(found, name, sum(each.values()), ", ".join(f"{host}: {count}" for host, count in each.items()))
    restarts = ", ".join(f"{name}: {count}" for name, count in shown.restarts.items())
    _row(found, "restarts", sum(shown.restarts.values()), restarts)
    flipped = any(made.fault.kind == "flips" for made in shown.faults)
    for name in ("loaded", "pulled", "evicted", *(("corrupt",) if flipped else ())):
        if not found.figures[name]:
            found.against.append(f"{name} is 0: so nothing was shown")


def _group(answer: Answer, faults: Sequence[Made]) -> str:
    if answer.end in {"whole", "cancelled"}:
        return answer.end
    late = answer.code == "DEADLINE_EXCEEDED"
    if answer.kind == "short" and (late or answer.reason == "OVERLOADED"):
        return "ended by a short deadline" if late else "refused for a short deadline"
    if answer.end == "hung" or late:  # a deadline that no request should need
        return "hung"
    if answer.tokens and answer.reason == "REPLICA_LOST" and _absent(answer, faults):
        return "broken by a killed replica"
    turned_away = not answer.tokens and answer.code in _TURNED_AWAY and _absent(answer, faults)
    return "turned away meanwhile" if turned_away else "other"


def _absent(answer: Answer, faults: Sequence[Made]) -> bool:
    """Whether a replica that was killed was not there while the request ran."""
    return any(
        made.at - _BEFORE_S < answer.ended and (not made.until or answer.began < made.until + _AFTER_S)
        for made in faults
        if made.done and made.fault.kind in ENDS_REPLICA
    )


def _asked_in_vain(answers: Sequence[Answer], stall: Made) -> int:
    return sum(
        bool(answer.not_pulled) and answer.began < stall.until and answer.ended > stall.at
        for answer in answers
    )


def _row(found: Verdict, name: str, count: float, seen: str = "") -> None:
    found.rows.append([name, f"{count:.0f}", seen])
    found.figures[_name(name)] = count


def _name(row: str) -> str:
    return row.replace(" ", "_")


def _said(answers: Sequence[Answer]) -> str:
    told = Counter(f"{a.code or a.end} {a.reason}: {a.said[:90]}" for a in answers)
    return _some([f"{count}× {what}" for what, count in told.most_common()])


def _some(texts: Sequence[str]) -> str:
    return "\n".join(texts[:6]) + ("\n…" if len(texts) > 6 else "")
