"""One run of the simulator: a trace, replicas, routers, and a heap of events in virtual time."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from router.cost import CostSettings
from router.picker import RouteRequest
from router.policies import make_policy
from tests.bench.simulated_pool import PoolShape, SimulatedHosts
from tests.bench.simulated_replica import Job, SimulatedReplica, Speed
from tests.bench.traces import BLOCK, Trace
from tests.bench.virtual_router import Asked, VirtualRouter

Floats = npt.NDArray[np.float64]
_MODEL = "simulated"


@dataclass(frozen=True)
class Scenario:
    """What does not depend on the policy."""

    trace: Trace
    replicas: int
    load: float  # share of what the replicas serve together without any cache
    speed: Speed = field(default_factory=Speed)
    spread: float = 0.0  # replica speeds are lognormal with this sigma
    routers: int = 1
    report_s: float = 0.1
    max_queue: int = 1024
    deadline_s: float = 600.0
    sessions: bool = False  # tell the router whose request it is
    pool: PoolShape | None = None  # None: replicas share no blocks
    seed: int = 1

    def check(self) -> None:
        """ValueError says what cannot be simulated."""
        if not 0 < self.load < float("inf"):
            raise ValueError(f"load is {self.load}: expected more than 0, 1 is the fleet's capacity")
        if self.report_s <= 0 or self.deadline_s <= 0 or self.max_queue < 0 or self.spread < 0:
            raise ValueError("report_s and deadline_s must be above 0, max_queue and spread not below")
        if self.pool is not None:
            self.pool.check()
        longest = int((self.trace.input_tokens + self.trace.output_tokens).max())
        if -(-longest // BLOCK) > self.speed.kv_tokens // BLOCK:
            raise ValueError(
                f"the longest request has {longest} tokens, but a replica's KV space holds "
                f"{self.speed.kv_tokens}: give it more, or cut the trace"
            )

    def arrivals(self) -> Floats:
        """The trace's, stretched or squeezed to the load, s."""
        factors = self.factors()
        capacity = self.speed.requests_per_s(self.trace) * float((1.0 / factors).sum())
        span = float(self.trace.arrival_s[-1])
        rate = (len(self.trace) - 1) / span if span > 0 else 1.0
        arrivals: Floats = self.trace.arrival_s * (rate / (capacity * self.load))
        return arrivals

    def factors(self) -> Floats:
        """How many times longer each replica takes."""
        normal = np.random.default_rng(self.seed).normal(size=self.replicas)
        factors: Floats = np.exp(self.spread * normal)
        return factors


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of it. Arrays over the requests that were served, unless it is said."""

    ttft_ms: Floats
    tpot_ms: Floats  # of requests with more than one token
    wait_ms: Floats  # of it, in the router's queue
    error_ms: Floats  # predicted less measured, from the decision
    hit_rate: float  # of prompt tokens, when first scheduled ...
    pooled_rate: float  # ... of them, from the memory of the host
    pulls: int  # from other hosts
    pulled_bytes: int
    computed_tokens: int  # of prompts, again after a preemption
    refused: int
    preemptions: int
    busy_cv: float  # coefficient of variation over replicas of busy time ...
    tokens_cv: float  # ... of prompt tokens computed ...
    requests_cv: float  # ... and of requests
    most_requests: int  # on one replica
    span_s: float  # virtual
    decisions_per_s: float  # wall
    wall_s: float


@dataclass(slots=True)
class _Measured:
    """What is kept of requests that have ended: a decision over 1,000 replicas would be 200 kB."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)
    error_ms: list[float] = field(default_factory=list)
    cached: int = 0
    pooled: int = 0
    prompts: int = 0

    def add(self, asked: Asked) -> None:
        job, decision = asked.job, asked.decision
        assert job is not None
        assert decision is not None
        self.ttft_ms.append((job.first_at - asked.arrived) * 1e3)
        if job.output > 1:
            self.tpot_ms.append((job.ended_at - job.first_at) * 1e3 / (job.output - 1))
        self.wait_ms.append((asked.placed - asked.arrived) * 1e3)
        self.error_ms.append(decision.ttft_ms - (job.first_at - asked.placed) * 1e3)
        self.cached += job.cached
        self.pooled += job.pooled
        self.prompts += job.prompt


Progress = Callable[[int, float], None]
"""(requests ended, virtual s)"""


class Simulation:
    """All requests of a scenario under one policy. `run` once."""

    def __init__(
        self, scenario: Scenario, policy: str, settings: CostSettings, progress: Progress | None = None
    ) -> None:
        self._scenario, self._progress = scenario, progress
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = 0
        self._ended = 0
        self._refused = 0
        self._measured = _Measured()
        self._rng = random.Random(scenario.seed)
        self._hosts = None if scenario.pool is None else SimulatedHosts(scenario.pool, scenario.replicas)
        self.replicas = [
            self._make_replica(row, float(factor)) for row, factor in enumerate(scenario.factors())
        ]
        self.routers = [self._make_router(number, policy, settings) for number in range(scenario.routers)]
        self._router_of: dict[int, VirtualRouter] = {}
        self._asked: dict[int, Asked] = {}
        self._reported_at = [-scenario.report_s] * scenario.replicas
        self._to_report = [False] * scenario.replicas

    def run(self) -> Outcome:
        """Until the last request has ended."""
        began = time.perf_counter()
        for row in range(len(self.replicas)):
            self._report(row)
        for number, at in enumerate(self._scenario.arrivals().tolist()):
            self._run_until(at)
            self.now = at
            self._arrive(number)
        self._run_until(float("inf"))
        self.assert_over()
        return self._outcome(time.perf_counter() - began)

    def assert_over(self) -> None:
        """Every request has ended, and nobody holds anything for one."""
        assert self._ended == len(self._scenario.trace), f"{self._ended} of {len(self._scenario.trace)} ended"
        for router in self.routers:
            assert not router.leases.held(), "a lease leaked"
            assert not len(router.queue)
            assert not len(router.fleet.inflight)
        for replica in self.replicas:
            assert replica.idle
            replica.assert_whole()

    def _make_replica(self, row: int, factor: float) -> SimulatedReplica:
        def wake(at: float, version: int) -> None:
            self._at(at, self._step_ended, row, version)

        def later(at: float) -> None:
            self._at(at, self._loads_ended, row)

        speed, hosts = self._scenario.speed.times(factor), self._hosts
        return SimulatedReplica(
            speed,
            wake=wake,
            on_first=self._first_token,
            on_finish=self._finished,
            arena=None if hosts is None else hosts.arena_of(row),
            load_ms=0.0 if hosts is None else hosts.shape.load_ms_per_block,
            later=later,
        )

    def _make_router(self, number: int, policy: str, settings: CostSettings) -> VirtualRouter:
        def poll(at: float) -> None:
            self._at(at, self._polled, number)

        scenario = self._scenario
        return VirtualRouter(
            scenario.replicas,
            policy=make_policy(policy, settings, random.Random(f"{scenario.seed} {number}")),
            settings=settings,
            max_queue=scenario.max_queue,
            clock=lambda: self.now,
            send=self._send,
            refuse=self._refuse,
            poll=poll,
            pool=scenario.pool,
        )

    # Events

    def _at(self, when: float, what: Callable[..., None], *arguments: object) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (when, self._numbers, what, arguments))

    def _run_until(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            when, _, what, arguments = heapq.heappop(events)
            self.now = when
            what(*arguments)

    def _arrive(self, number: int) -> None:
        scenario, trace = self._scenario, self._scenario.trace
        session = int(trace.sessions[number])
        route = RouteRequest(
            _MODEL,
            range(int(trace.input_tokens[number])),  # only counted: the keys are given
            max_tokens=max(int(trace.output_tokens.max()), 1),
            session=str(session) if scenario.sessions and session >= 0 else "",
        )
        asked = Asked(number, route, trace.keys_of(number), int(trace.output_tokens[number]), self.now)
        router = self._rng.choice(self.routers)
        self._router_of[number], self._asked[number] = router, asked
        router.arrive(asked, scenario.deadline_s)

    def _send(self, asked: Asked, row: int) -> None:
        prompt = len(asked.route.prompt_token_ids)
        job = asked.job = Job(asked.number, asked.keys, prompt, asked.output)
        assert asked.decision is not None
        pull = asked.decision.pull
        if self._hosts is None or pull is None:
            self._submit(job, row)
            return
        source, target = self._hosts.host_of(pull.source), self._hosts.shape.host_of(row)
        here, there = self._hosts.arenas[target], self._hosts.arenas[source]
        wanted = job.keys[: pull.blocks]
        here.asked(job.keys)
        job.asked = True
        known = here.hits(wanted, self.replicas[row].cache.hits(wanted))
        held = there.hits(wanted, known)
        there.asked(wanted[known:held])
        keys = here.admit(wanted[known:held])
        self.replicas[row].expect(job)
        self._touch(row)
        over = self._hosts.pull(source, target, keys, self.now)
        self._at(over, self._pulled, asked, row, keys, self.now, known + len(keys) < len(wanted))

    def _pulled(self, asked: Asked, row: int, keys: list[int], began: float, failed: bool) -> None:
        assert self._hosts is not None
        assert asked.job is not None
        self._hosts.arena_of(row).put(keys)
        size = len(keys) * self._hosts.shape.block_bytes
        self._router_of[asked.number].pulled(asked, size, self.now - began, failed=failed)
        self._submit(asked.job, row)

    def _submit(self, job: Job, row: int) -> None:
        self.replicas[row].submit(job, self.now)
        self._touch(row)

    def _loads_ended(self, row: int) -> None:
        self.replicas[row].loads_ended(self.now)
        self._touch(row)

    def _step_ended(self, row: int, version: int) -> None:
        if self.replicas[row].step_ended(self.now, version):
            self._touch(row)

    def _touch(self, row: int) -> None:
        """Something changed: routers hear of it, but not more often than every `report_s`."""
        if not self._to_report[row]:
            self._to_report[row] = True
            self._at(max(self.now, self._reported_at[row] + self._scenario.report_s), self._report, row)

    def _report(self, row: int) -> None:
        self._to_report[row], self._reported_at[row] = False, self.now
        replica = self.replicas[row]
        report, changes = replica.report(), [replica.cache.changes()]
        if self._hosts is not None:
            changes.append(self._hosts.changes(row))
        for router in self.routers:
            router.report(row, report, *changes)

    def _first_token(self, job: Job, now: float) -> None:
        self._router_of[job.number].first_token(self._asked[job.number])

    def _finished(self, job: Job, now: float) -> None:
        asked = self._asked.pop(job.number)
        self._measured.add(asked)
        self._router_of.pop(job.number).finished(asked)
        self._count()

    def _refuse(self, asked: Asked) -> None:
        self._refused += 1
        del self._asked[asked.number], self._router_of[asked.number]
        self._count()

    def _polled(self, number: int) -> None:
        self.routers[number].polled()

    def _count(self) -> None:
        self._ended += 1
        if self._progress is not None and self._ended % 1000 == 0:
            self._progress(self._ended, self.now)

    # Results

    def _outcome(self, wall_s: float) -> Outcome:
        measured = self._measured
        busy = np.array([replica.busy_s for replica in self.replicas])
        requests = np.array([replica.jobs for replica in self.replicas], np.float64)
        decided_in_s = sum(router.decided_in_s for router in self.routers)
        return Outcome(
            ttft_ms=np.array(measured.ttft_ms),
            tpot_ms=np.array(measured.tpot_ms),
            wait_ms=np.array(measured.wait_ms),
            error_ms=np.array(measured.error_ms),
            hit_rate=measured.cached / max(measured.prompts, 1),
            pooled_rate=measured.pooled / max(measured.prompts, 1),
            pulls=0 if self._hosts is None else self._hosts.pulls,
            pulled_bytes=0 if self._hosts is None else self._hosts.pulled_bytes,
            computed_tokens=sum(replica.computed_tokens for replica in self.replicas),
            refused=self._refused,
            preemptions=sum(replica.preemptions for replica in self.replicas),
            busy_cv=_cv(busy),
            tokens_cv=_cv(np.array([replica.computed_tokens for replica in self.replicas], np.float64)),
            requests_cv=_cv(requests),
            most_requests=int(requests.max()),
            span_s=self.now,
            decisions_per_s=sum(r.decisions for r in self.routers) / max(decided_in_s, 1e-9),
            wall_s=wall_s,
        )


def _cv(values: Floats) -> float:
    mean = float(values.mean())
    return float(values.std()) / mean if mean else 0.0
