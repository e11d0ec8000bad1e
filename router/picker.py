"""Which replica serves a request: one small policy per name.

A policy sees plain values and returns one of the candidates it was given; it holds no load of
its own. To add one, write a `Policy` and name it in `POLICIES` and in `config.PolicyName`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_MOST_ROUTERS_ASSUMED = 16.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may serve the request. Loads are sequences (n per request)."""

    replica: str
    epoch: str
    reported: int = 0  # running and waiting, as the replica last said
    leased: int = 0  # held by this router now
    leased_at_report: int = 0  # held by this router when the replica said so
    kv_usage: float = 0.0  # 0 .. 1, as last said
    suspect: bool = False  # silent for longer than its heartbeat allows

    @property
    def key(self) -> str:
        """Names one engine's life: a restarted replica is another target."""
        return f"{self.replica}@{self.epoch}"


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may know of a request."""

    model: str
    prompt_token_ids: Sequence[int]
    sequences: int = 1
    max_tokens: int = 1  # per sequence, as predicted
    lora: str = ""
    cache_salt: str = ""


class Policy(Protocol):
    """Chooses among at least one candidate, sorted by replica name."""

    def pick(self, candidates: Sequence[Candidate], request: RouteRequest) -> Candidate: ...


class RoundRobin:
    """Each in turn, from a random start so that several routers do not march in step."""

    def __init__(self, rng: random.Random) -> None:
        self._turn = rng.randrange(1 << 16)

    def pick(self, candidates: Sequence[Candidate], request: RouteRequest) -> Candidate:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class Uniform:
    """Any, with equal chances."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[Candidate], request: RouteRequest) -> Candidate:
        return self._rng.choice(candidates)


class LeastLoaded:
    """The replica with the fewest sequences; ties are broken uniformly at random.

    Between two reports a router sees its own leases but not those of other routers. It assumes
    that they do as it does: with a share s of the reported load, each lease taken or given back
    since the report stands for 1/s. When it is not alone it also looks at two random candidates
    only (drawn with replacement), so that routers with equal, stale views do not all choose the
    same replica: Mitzenmacher, "How Useful Is Old Information?", 2000.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[Candidate], request: RouteRequest) -> Candidate:
        routers = routers_seen(candidates)
        alone = routers < 1.5
        drawn = candidates if alone else [self._rng.choice(candidates) for _ in range(2)]
        loads = [estimated_load(candidate, routers) for candidate in drawn]
        least = min(loads)
        return self._rng.choice([c for c, load in zip(drawn, loads, strict=True) if load == least])


def routers_seen(candidates: Sequence[Candidate]) -> float:
    """How many routers like this one would explain the reported load; 1 to 16."""
    reported = sum(candidate.reported for candidate in candidates)
    own = sum(min(candidate.leased_at_report, candidate.reported) for candidate in candidates)
    if reported == 0:
        return 1.0
    return min(reported / own, _MOST_ROUTERS_ASSUMED) if own else _MOST_ROUTERS_ASSUMED


def estimated_load(candidate: Candidate, routers: float) -> float:
    """Sequences on a replica now: its report, and what changed since, over all routers."""
    since = (candidate.leased - candidate.leased_at_report) * routers
    return max(candidate.reported + since, float(candidate.leased))


POLICIES: Mapping[str, Callable[[random.Random], Policy]] = {
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "random": Uniform,
}


def make_policy(name: str, rng: random.Random | None = None) -> Policy:
    """The policy of that name.

    Raises:
        KeyError: there is none of that name.
    """
    return POLICIES[name](rng or random.Random())  # noqa: S311 (load balancing, no secret)
