"""One router's parts in virtual time: the real fleet, index, cost, policy, decider, leases and queue.

What `router.group`, `router.turnstile` and `router.forward` do between events, without asyncio, gRPC and
retries. Nothing here decides anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.errors import KvorumError
from router.admission import AdmissionQueue, Item
from router.cost import CostSettings
from router.decide import Decider, Decision
from router.fleet import Fleet, LoadReport
from router.leases import Lease, LeasedLoad, LeaseTable
from router.picker import Policy, RouteRequest
from tests.bench.simulated_pool import PoolShape
from tests.bench.simulated_replica import Job
from tests.bench.traces import BLOCK

Keys = npt.NDArray[np.uint64]

_EPOCH = "simulated"
_POLL_S = 0.25  # as in `router.turnstile`


@dataclass(slots=True, eq=False)
class Asked:
    """A request on its way through a router."""

    number: int
    route: RouteRequest
    keys: Keys
    output: int
    arrived: float
    placed: float = -1.0
    decision: Decision | None = None
    lease: Lease | None = None
    flight: int = 0
    job: Job | None = None
    pulled_s: float = 0.0  # of its time, waiting for blocks from another host


class VirtualRouter:
    """`send(asked, row)` is called when a request has its replica, `refuse(asked)` when it gets none.

    Rows are the replicas' numbers, in every router. `clock()` is virtual.
    """

    def __init__(
        self,
        replicas: int,
        *,
        policy: Policy,
        settings: CostSettings,
        max_queue: int,
        clock: Callable[[], float],
        send: Callable[[Asked, int], None],
        refuse: Callable[[Asked], None],
        poll: Callable[[float], None],
        pool: PoolShape | None = None,
    ) -> None:
        self.fleet = Fleet(settings=settings)
        self.fleet.block_size = BLOCK
        self.decider = Decider(self.fleet, policy)
        self.leases = LeaseTable(on_change=self._leased)
        self.queue = AdmissionQueue(max_queue)
        self.decisions = 0
        self.decided_in_s = 0.0  # wall time
        self._clock, self._send, self._refuse, self._poll = clock, send, refuse, poll
        self._polling = False
        for number in range(replicas):
            row = self.fleet.join(f"replica-{number}", _EPOCH)
            assert row == number, f"replica {number} has row {row}"
            self.fleet.set_standing(row, usable=True)
            if pool is not None:
                self.fleet.set_pool(row, pool.share(pool.host_of(number)))

    # What happens

    def arrive(self, asked: Asked, deadline_s: float) -> None:
        """A request has come."""
        now = self._clock()
        if not len(self.queue) and self._place(asked, now):
            return
        route = asked.route
        item = Item(
            tenant=route.tenant,
            tokens=len(route.prompt_token_ids) + round(self._expected(route)),
            arrived=now,
            deadline=now + deadline_s,
            payload=asked,
        )
        try:
            displaced = self.queue.offer(item, now, predicted_tokens_per_s=self.fleet.prefill_tokens_per_s())
        except KvorumError:
            self._refuse(asked)
            return
        if displaced is not None:
            self._refuse(displaced.payload)
        self._arm(now)

    def report(self, row: int, report: LoadReport, *changes: tuple[Keys, Keys]) -> None:
        """A replica said how loaded it is, and what was stored and removed in its cache and in its arena."""
        for tier, (stored, removed) in enumerate(changes):
            if len(removed):
                self.fleet.index.remove(row, removed, tier)
            if len(stored):
                self.fleet.index.store(row, stored, tier)
        self.fleet.report(row, report, self._clock())
        self.fleet.relax(self._clock())
        self.pump()

    def pulled(self, asked: Asked, size: int, seconds: float, *, failed: bool) -> None:
        """Blocks have come from another host; so many bytes."""
        assert asked.decision is not None
        assert asked.decision.pull is not None
        asked.pulled_s = seconds
        self.fleet.pools.end(asked.decision.pull, size, seconds * 1e3, self._clock(), failed=failed)

    def first_token(self, asked: Asked) -> None:
        """A request's first token has come."""
        assert asked.lease is not None
        asked.lease.generated(1)
        self.pump()

    def finished(self, asked: Asked) -> None:
        """All of a request's tokens have come."""
        assert asked.lease is not None
        assert asked.decision is not None
        assert asked.job is not None
        job = asked.job
        outcome = asked.decision.outcome(
            cached_tokens=job.cached,
            queue_ms=(job.started - job.submitted) * 1e3,
            prefill_ms=(job.first_at - job.started) * 1e3,
            ttft_ms=(job.first_at - asked.placed) * 1e3,
            pull_ms=asked.pulled_s * 1e3,
            generated_tokens=job.output,
        )
        self.fleet.learn(asked.decision.key, outcome, self._clock())
        asked.lease.release()
        self.fleet.end(asked.flight)
        self.pump()

    def polled(self) -> None:
        """The time that `poll` was called for has come."""
        self._polling = False
        self.pump()

    def pump(self) -> None:
        """Refuse who has waited long enough; place heads while there is room."""
        if not len(self.queue):
            return
        now = self._clock()
        for item in self.queue.expire(now):
            self._refuse(item.payload)
        self.queue.observe(now, stalled=False)
        while (head := self.queue.peek()) is not None and self._place(head.payload, now):
            self.queue.pop(now)
        self._arm(now)

    # How

    def _place(self, asked: Asked, now: float) -> bool:
        began = time.perf_counter()
        if self.fleet.saturated(now):
            return False
        decision = self.decider.decide(asked.route, now, keys=asked.keys)
        if decision is None:
            return False
        asked.lease = self.leases.take(
            decision.key,
            prefill_tokens=decision.uncached_tokens,
            prefill_pairs=decision.uncached_pairs,
            decode_tokens=round(self._expected(asked.route)),
            sequences=asked.route.sequences,
        )
        asked.flight = self.fleet.begin(decision.row, decision.key, decision.keys)
        if decision.pull is not None:
            self.fleet.pools.begin(decision.pull, now, self.fleet.routers)
        self.decided_in_s += time.perf_counter() - began
        self.decisions += 1
        asked.decision, asked.placed = decision, now
        self._send(asked, decision.row)
        return True

    def _arm(self, now: float) -> None:
        if len(self.queue) and not self._polling:
            self._polling = True
            expiry = self.queue.next_expiry()
            self._poll(now + _POLL_S if expiry is None else min(max(expiry, now), now + _POLL_S))

    def _expected(self, route: RouteRequest) -> float:
        return route.sequences * self.fleet.expected_tokens(route.max_tokens)

    def _leased(self, key: str, load: LeasedLoad) -> None:
        self.fleet.leased(key, load, self._clock())
