"""From a request to the replica that serves it, with the reasons. Pure.

decider = Decider(fleet, make_policy("predicted-time", settings), settings)
decision = decider.decide(request, now)
if decision is not None:
    ...  # lease decision.uncached_tokens and .uncached_pairs on decision.key, call it
    fleet.learn(decision.key, decision.outcome(cached_tokens=..., ...), now)
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from protos import replica_pb2
from router.blockhash import prompt_keys
from router.cost import CostSettings, Floats, Ints, RowLoad, attention_pairs, predict, usable_cached
from router.fleet import Fleet, Member, name_hash
from router.picker import Candidate, Policy, RouteRequest, View
from router.pool import Pull, Supply
from router.speeds import Outcome

_NONE: frozenset[str] = frozenset()
_NO_KEYS = np.zeros(0, np.uint64)
_DEVICE: Final = (int(replica_pb2.DEVICE),)
_BOTH: Final = (int(replica_pb2.DEVICE), int(replica_pb2.HOST))


@dataclass(frozen=True, slots=True, eq=False)
class _Considered:
    """Everything a decision was made from; arrays by position in `view.rows`."""

    view: View
    load: RowLoad
    members: tuple[Member | None, ...]  # by row
    resident: Ints  # tokens, in the engine's cache
    pending: Ints  # further ones of a prompt in flight
    cached: Ints  # all that need no computing, what is fetched included
    supply: Supply | None  # None: no memory is shared that has any of it
    kv_usage: Floats
    prompt_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The chosen replica, and what is predicted of the request there."""

    row: int
    key: str
    replica: str
    epoch: str
    degraded: str  # why it got no cache credit; empty: in order
    prompt_tokens: int
    cached_tokens: int  # resident there
    pending_tokens: int  # further ones of a prompt in flight there
    pooled_tokens: int  # further ones that come from the memory of its host or another
    pull: Pull | None  # what to have pulled from another host first
    uncached_tokens: int  # to be computed: what to lease
    keys: npt.NDArray[np.uint64]  # of the prompt's full blocks; empty while the block size is unknown
    ttft_ms: float
    policy: str
    position: int
    considered: _Considered

    @property
    def expected_cached(self) -> int:
        """Prompt tokens that need no computing when its turn comes."""
        return self.prompt_tokens - self.uncached_tokens

    @property
    def uncached_pairs(self) -> float:
        """Attention of the tokens to be computed, in pairs of tokens: to lease with them."""
        return attention_pairs(self.uncached_tokens, self.expected_cached)

    @property
    def fetch_ms(self) -> float:
        """Predicted time for what is fetched, beyond the queue at the replica."""
        return float(self.considered.view.prediction.fetch[self.position])

    @property
    def service_ms(self) -> float:
        """Predicted time to first token, less the queue at the replica."""
        cost = self.considered.view.prediction
        return self.ttft_ms - float(cost.queue[self.position])

    @property
    def why(self) -> str:
        """The choice in a line."""
        view = self.considered.view
        text = (
            f"{self.policy} of {len(view.rows)}: first token in {self.ttft_ms:.0f} ms, "
            f"{self.expected_cached} of {self.prompt_tokens} prompt tokens need no computing"
        )
        if self.pooled_tokens:
            host = f"from {self.pull.agent}" if self.pull else "in its host's memory"
            text += f", {self.pooled_tokens} of them {host} (in {self.fetch_ms:.0f} ms)"
        score = view.prediction.score
        if len(score) > 1:
            others = np.delete(score, self.position)
            text += f"; score {score[self.position]:.0f} ms, best other {others.min():.0f} ms"
        return f"{text}; {self.degraded}" if self.degraded else text

    def candidates(self) -> list[Candidate]:
        """Every replica that was considered, by name. Made on demand."""
        return _candidates(self.considered, self.position)

    def outcome(
        self,
        *,
        cached_tokens: int,
        queue_ms: float,
        prefill_ms: float,
        ttft_ms: float,
        pull_ms: float = 0.0,
        generated_tokens: float | None = None,
    ) -> Outcome:
        """What came of it, for `Fleet.learn`. Times by the engine's clock, TTFT by the caller's; ms.

        `pull_ms` passed before the engine had it, with blocks under way from another host. `generated_tokens`
        is per sequence, of a request that finished.
        """
        uncached = max(self.prompt_tokens - cached_tokens, 0)
        batch = float(self.considered.load.max_batch_tokens[self.position])
        return Outcome(
            uncached=uncached,
            cached=cached_tokens,
            running=float(self.considered.view.prediction.running[self.position]),
            steps=max(math.ceil(uncached / batch), 1),
            queue_ms=queue_ms,
            prefill_ms=prefill_ms,
            ttft_ms=ttft_ms,
            pull_ms=pull_ms,
            predicted_ttft_ms=self.ttft_ms,
            predicted_cached=self.expected_cached,
            generated_tokens=generated_tokens,
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision that nobody will carry out, and every replica there is, also those not picked from."""

    decision: Decision | None
    candidates: list[Candidate]


class Decider:
    """Decides by `policy` over the replicas of `fleet`. Changes neither."""

    def __init__(self, fleet: Fleet, policy: Policy, settings: CostSettings | None = None) -> None:
        self.fleet, self.policy = fleet, policy
        self._settings = settings or fleet.settings

    def decide(
        self,
        request: RouteRequest,
        now: float,
        *,
        exclude: Collection[str] = _NONE,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> Decision | None:
        """The replica for this request, or None when none may be picked. `exclude`: keys tried before.

        `keys` are those of the prompt's full blocks, from whoever has them already.
        """
        rows = self.fleet.ready()
        if exclude:
            rows = self._without(rows, exclude)
        if not len(rows):
            return None
        if keys is None:
            keys = self.keys(request)
        considered = self._consider(request, keys, rows, now)
        view = considered.view
        at = self.policy.choose(view, request)
        row = int(view.rows[at])
        member = considered.members[row]
        assert member is not None, f"row {row} is ready but has no member"
        resident, pending = int(considered.resident[at]), int(considered.pending[at])
        prompt_tokens, cached = considered.prompt_tokens, int(considered.cached[at])
        return Decision(
            row, member.key, member.replica, member.epoch, _degraded(member), prompt_tokens, resident,
            pending, cached - resident - pending, self._pull(considered, at, now), prompt_tokens - cached,
            keys, float(view.prediction.ttft[at]), self.policy.name, at, considered,
        )  # fmt: skip

    def explain(self, request: RouteRequest, now: float) -> Explanation:
        """What would be decided now, with every joined replica; those not picked from say why."""
        keys = self.keys(request)
        decision = self.decide(request, now, keys=keys)
        listed = decision.candidates() if decision is not None else []
        seen = set() if decision is None else set(decision.considered.view.rows.tolist())
        rest = [row for row, m in enumerate(self.fleet.members) if m is not None and row not in seen]
        if rest:
            rows = np.array(rest, np.int64)
            listed += _candidates(self._consider(request, keys, rows, now), None)
        return Explanation(decision, sorted(listed, key=lambda candidate: candidate.replica))

    def _without(self, rows: Ints, exclude: Collection[str]) -> Ints:
        """`rows` that are not excluded; suspect ones when all that are better are."""
        members = self.fleet.members
        left = [(row, m) for row, m in enumerate(members) if m and m.usable and m.key not in exclude]
        sound = [row for row, member in left if not member.suspect]
        return np.array(sound or [row for row, _ in left], np.int64)

    def keys(self, request: RouteRequest) -> npt.NDArray[np.uint64]:
        """Of the prompt's full blocks; none while the block size is unknown."""
        if self.fleet.block_size <= 0:
            return _NO_KEYS
        tokens = np.asarray(request.prompt_token_ids, np.int32)
        return prompt_keys(tokens, self.fleet.block_size, request.revision, request.lora, request.cache_salt)

    def _consider(
        self, request: RouteRequest, keys: npt.NDArray[np.uint64], rows: Ints, now: float
    ) -> _Considered:
        fleet, size, prompt_tokens = self.fleet, self.fleet.block_size, len(request.prompt_token_ids)
        members = fleet.members
        blocks, held = self._blocks(keys) if len(keys) else (np.zeros((2, len(members)), np.int64), None)
        known = blocks.take(rows, axis=1)
        resident, in_flight = usable_cached(known, size, prompt_tokens)
        cached = np.maximum(resident, in_flight)
        load = fleet.load(rows, now)
        supply, served = None, cached
        if held is not None:
            most = max(prompt_tokens - 1, 0) // size
            device, pending = np.minimum(known, most)
            supply = fleet.pools.supply(
                rows, load, device=device, pending=pending, held=np.minimum(held, most),
                distrusted=fleet.distrusted(), block_size=size, salt=int(keys[-1]), now=now,
            )  # fmt: skip
            served = supply.cached
        prediction = predict(
            load,
            prompt_tokens=prompt_tokens,
            cached=served,
            sequences=request.sequences,
            expected_tokens=fleet.expected_tokens(request.max_tokens),
            affinity=self._affinity(request.session, rows),
            settings=self._settings,
            fetch=None if supply is None else supply.fetch,
        )
        own = served
        if prediction.pulls is not None:
            own, served = served[0], np.where(prediction.pulls, served[1], served[0])
        view = View(rows, load.sequences, load.backlog, own, prediction, fleet.routers)
        usage = fleet.column("kv_usage")[rows]
        return _Considered(
            view, load, members, resident, cached - resident, served, supply, usage, prompt_tokens
        )

    def _blocks(self, keys: npt.NDArray[np.uint64]) -> tuple[Ints, Ints | None]:
        """Leading blocks of the prompt by row: [2] in the engine's cache and of a prompt in flight; and in
        the row's arena, which is None when no arena has any.

        No block where the view is degraded or suspect: credit for blocks that may be gone sends requests to
        where they are slowest.
        """
        fleet = self.fleet
        count = len(fleet.members)
        planes = fleet.index.match_alone(keys, _BOTH if fleet.pools.shared else _DEVICE)
        known = min(planes.shape[1], count)
        blocks = np.zeros((2, count), np.int64)
        blocks[0, :known] = planes[0, :known]
        for row, common in fleet.inflight.match(keys).items():
            blocks[1, row] = common
        distrusted = fleet.distrusted()
        if len(distrusted):
            blocks[:, distrusted] = 0
        if not (fleet.pools.shared and planes[1].any()):
            return blocks, None
        held = np.zeros(count, np.int64)
        held[:known] = planes[1, :known]
        if len(distrusted):
            held[distrusted] = 0
        return blocks, held

    def _pull(self, considered: _Considered, at: int, now: float) -> Pull | None:
        supply, pulls = considered.supply, considered.view.prediction.pulls
        if supply is None or pulls is None or not pulls[at]:
            return None
        return self.fleet.pools.pull(supply, at, now)

    def _affinity(self, session: str, rows: Ints) -> Floats:
        """The credit of the session's preferred replica, by position, ms.

        Rendezvous hashing (Thaler & Ravishankar 1998): the replica whose name hashes highest with the
        session's. Every router finds the same one, and a replica's leaving moves only its own sessions.
        """
        credit = np.zeros(len(rows))
        if session:
            mixed = self.fleet.names[rows] ^ np.uint64(name_hash(session))
            # SplitMix64's finaliser (Steele, Lea, Flood 2014): xor alone would rank by few bits.
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            credit[int((mixed ^ (mixed >> np.uint64(31))).argmax())] = self._settings.affinity_ms
        return credit


def _degraded(member: Member) -> str:
    return member.degraded or ("suspect: silent, or a request to it just failed" if member.suspect else "")


def _candidates(considered: _Considered, chosen: int | None) -> list[Candidate]:
    view, load, cost = considered.view, considered.load, considered.view.prediction
    pooled = considered.cached - considered.resident - considered.pending
    uncached = considered.prompt_tokens - considered.cached
    supply, pulls = considered.supply, cost.pulls
    sources = [""] * len(pooled)
    if supply is not None and pulls is not None:
        for at in pulls.nonzero()[0].tolist():
            source = supply.source(at)
            sources[at] = source[0].agent if source is not None else ""
    columns = (
        considered.resident, considered.pending, pooled, uncached,
        cost.queue, cost.prefill, cost.fetch, cost.interference, cost.overhead, cost.ttft,
        cost.harm, cost.affinity, cost.score,
        load.sequences.round().astype(np.int64), load.backlog.round().astype(np.int64), considered.kv_usage,
    )  # fmt: skip
    listed = []
    lines = zip(view.rows.tolist(), *(c.tolist() for c in columns), sources, strict=True)
    for at, values in enumerate(lines):
        member = considered.members[values[0]]
        assert member is not None, f"row {values[0]} was considered but has no member"
        degraded = _degraded(member) or ("" if member.usable else "not usable now")
        listed.append(Candidate(member.replica, member.epoch, at == chosen, degraded, *values[1:]))
    return sorted(listed, key=lambda candidate: candidate.replica)
