"""The replicas of one model, and all that sending requests to them needs: decision, queue, leases.

A request's way: `place` waits in the queue until some replica has room, decides, and takes a lease in the
same step, so that the next decision already sees it. Whoever has the placement releases it, once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from protos import common_pb2
from protos.blockkeys import Keys
from protos.errors import GAVE_UP, KvorumError
from router.admission import AdmissionQueue, Item, ServiceClass
from router.config import RouterConfig
from router.cost import CostSettings
from router.decide import Decider, Decision, Explanation
from router.fleet import Fleet
from router.gather import Gather
from router.leases import Lease, LeasedLoad, LeaseTable
from router.picker import RouteRequest
from router.policies import make_policy
from router.turnstile import Turnstile

Bytes = grpc.aio.UnaryStreamCall[bytes, bytes]

_COME_BACK_S = 0.5


class Link(Protocol):
    """A replica that requests can be sent to; see `router.replica_link.ReplicaLink`."""

    @property
    def key(self) -> str: ...

    @property
    def address(self) -> str: ...

    def doubt(self) -> None: ...

    def resync(self) -> None: ...

    @property
    def why_ended(self) -> str:
        """What befell it ("was withdrawn ..."), when it cancelled a call itself."""
        ...

    def generate(
        self, request: bytes, *, timeout_s: float, metadata: tuple[tuple[str, str], ...]
    ) -> Bytes: ...

    def answered(self, call: Bytes) -> None: ...


class Placement:
    """A decision, the replica's link, and the load it holds there. `release` is idempotent."""

    __slots__ = ("_flight", "_group", "decided_in_s", "decision", "lease", "link", "started_ns", "waited_s")

    def __init__(
        self,
        group: ReplicaGroup,
        decision: Decision,
        link: Link,
        lease: Lease,
        *,
        started_ns: int,
        decided_in_s: float,
    ) -> None:
        self._group, self.decision, self.link, self.lease = group, decision, link, lease
        self.started_ns, self.decided_in_s, self.waited_s = started_ns, decided_in_s, 0.0
        if decision.pull is not None:
            group.fleet.pools.begin(decision.pull, group.clock(), group.fleet.routers)
        # While the request runs its prompt's blocks stay, whatever the replica has told of them yet.
        self._flight = group.fleet.begin(decision.row, decision.key, decision.keys)

    def first_token(self) -> None:
        """The prompt is computed: that much room is free again."""
        self._group.turnstile.kick()

    def fetched(self, fetch: common_pb2.KvFetch) -> None:
        """What asking another host for blocks brought."""
        pull = self.decision.pull
        if pull is not None:
            self._group.fleet.pools.end(
                pull, fetch.bytes, fetch.seconds * 1e3, self._group.clock(), failed=bool(fetch.failed)
            )

    def learn(
        self,
        times: common_pb2.EngineTimes,
        *,
        cached: int,
        ttft_s: float,
        pull_s: float,
        generated: float | None,
    ) -> None:
        """Prediction against outcome. `generated` is tokens per sequence, of a request that finished."""
        found = self.decision.outcome(
            cached_tokens=cached,
            queue_ms=times.queue * 1e3,
            prefill_ms=times.prefill * 1e3,
            ttft_ms=ttft_s * 1e3,
            pull_ms=pull_s * 1e3,
            generated_tokens=generated,
        )
        self._group.fleet.learn(self.decision.key, found, self._group.clock())

    def release(self) -> None:
        """The request is over here."""
        self.lease.release()
        self._group.fleet.end(self._flight)
        self._group.turnstile.kick()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `place` has to know of a request. Times are the event loop's."""

    route: RouteRequest
    arrived: float
    deadline: float


class ReplicaGroup:
    """One model's replicas that share a tokenizer.

    Args:
        no_replica: the error while none of them can take requests.
    """

    def __init__(
        self,
        model: str,
        config: RouterConfig,
        no_replica: Callable[[], KvorumError],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = CostSettings(
            harm_weight=config.harm_weight,
            near_tie_ms=config.near_tie_ms,
            near_tie_percent=config.near_tie_percent,
            affinity_ms=config.affinity_ms,
            replica_queue_ms=config.replica_queue_ms,
        )
        self.model, self.clock = model, clock
        self.fleet = Fleet(settings=settings)
        self.decider = Decider(self.fleet, make_policy(config.policy, settings))
        self.leases = LeaseTable(on_change=self._leased)
        self.queue = AdmissionQueue(config.max_queue)
        self.turnstile: Turnstile[Placement] = Turnstile(
            self.queue,
            nothing_serves=lambda: None if len(self.fleet.ready()) else no_replica(),
            give_back=Placement.release,
            predicted_tokens_per_s=self._tokens_per_s,
        )
        self.gather = Gather(config.max_wait_ms, config.max_batch_tokens if config.max_wait_ms else 0)
        self._links: dict[str, Link] = {}
        self._block_sizes: dict[str, int] = {}

    # Replicas

    def attach(self, key: str, link: Link) -> None:
        """Requests for the engine `key` go over this link."""
        self._links[key] = link
        held = self.leases.load(key)
        if held.requests:
            self._leased(key, held)

    def detach(self, key: str) -> None:
        """No more of them do."""
        self._links.pop(key, None)
        self._block_sizes.pop(key, None)
        self.gather.let_go(key)
        self._settle_block_size()
        self.turnstile.kick()

    def changed(self) -> None:
        """A replica reported, or its standing changed."""
        self.turnstile.kick()

    def offer_block_size(self, key: str, tokens: int) -> None:
        """What `key` says of its blocks. Most replicas decide; when that changes all are read anew."""
        if tokens > 0 and self._block_sizes.get(key) != tokens:
            self._block_sizes[key] = tokens
            self._settle_block_size()

    @property
    def unused(self) -> bool:
        """No replica, no request."""
        return not (self._links or self.leases.held() or len(self.turnstile))

    # Requests

    async def place(self, wanted: Wanted, *, exclude: Collection[str] = (), lost: str = "") -> Placement:
        """A replica with room, in the request's turn; the caller must release it.

        `exclude` has the keys of replicas that lost it before, `lost` says how.

        Raises:
            KvorumError: nothing could serve it in time, or it is refused early; see `Turnstile.admit`.
        """
        route = wanted.route
        item = Item(
            tenant=route.tenant,
            tokens=len(route.prompt_token_ids) + round(self._expected(route)),
            arrived=wanted.arrived,
            deadline=wanted.deadline,
            service_class=ServiceClass(route.service_class),
            priority=route.priority,
            narrow=bool(exclude),
        )
        prompt = _Prompt(self.decider, route)
        admitted = await self.turnstile.admit(
            item, lambda: self._try_place(prompt, exclude, lost), ttft_s=self._ttft_s(prompt)
        )
        placement = admitted.placement
        placement.waited_s = admitted.waited_s
        if not self.gather.off:
            try:
                decision = placement.decision
                placement.waited_s += await self.gather.wait(decision.key, decision.uncached_tokens)
            except BaseException:
                placement.release()
                raise
        return placement

    def drain_s(self) -> float:
        """When all that waits now will have been released, as predicted."""
        return self.queue.predicted_drain_s(self._tokens_per_s()) or 0.0

    def explain(self, route: RouteRequest) -> Explanation:
        """What would be decided now, and all that it would be decided by."""
        return self.decider.explain(route, self.clock())

    def close(self, error: Callable[[], KvorumError]) -> None:
        """End every request that waits for a replica; those held for their replica go now."""
        self.turnstile.close(error)
        for key in self._links:
            self.gather.let_go(key)

    def _try_place(self, prompt: _Prompt, exclude: Collection[str], lost: str) -> Placement | None:
        now, started_ns, route = self.clock(), time.time_ns(), prompt.route
        if self.fleet.saturated(now):
            return None
        decision = self.decider.decide(route, now, exclude=exclude, keys=prompt.keys())
        if decision is None:
            if exclude and len(self.fleet.ready()):
                raise gave_up(len(exclude), lost)
            return None
        link = self._links[decision.key]
        lease = self.leases.take(
            decision.key,
            prefill_tokens=decision.uncached_tokens,
            prefill_pairs=decision.uncached_pairs,
            decode_tokens=round(self._expected(route)),
            sequences=route.sequences,
        )
        return Placement(
            self,
            decision,
            link,
            lease,
            started_ns=started_ns,
            decided_in_s=self.clock() - now,
        )

    def _ttft_s(self, prompt: _Prompt) -> float:
        """Predicted time to first token once placed; 0 where it is not asked for, as nobody waits."""
        if not len(self.turnstile):
            return 0.0
        decision = self.decider.decide(prompt.route, self.clock(), keys=prompt.keys())
        return decision.service_ms / 1e3 if decision is not None else 0.0

    def _expected(self, route: RouteRequest) -> float:
        return route.sequences * self.fleet.expected_tokens(route.max_tokens)

    def _leased(self, key: str, load: LeasedLoad) -> None:
        self.fleet.leased(key, load, self.clock())

    def _tokens_per_s(self) -> float | None:
        """Prompt tokens that the replicas compute: more than they serve, so it refuses nobody too early."""
        return self.fleet.prefill_tokens_per_s() or None

    def _settle_block_size(self) -> None:
        sizes = Counter(self._block_sizes.values())
        most = max(sizes.values(), default=0)
        now = self.fleet.block_size
        if not most or sizes[now] == most:
            return
        self.fleet.block_size = min(size for size, count in sizes.items() if count == most)
        if now:
            for link in list(self._links.values()):
                link.resync()


class _Prompt:
    """A request that may be tried many times and hashed once, or again when the block size has changed."""

    __slots__ = ("_block_size", "_decider", "_keys", "route")

    def __init__(self, decider: Decider, route: RouteRequest) -> None:
        self._decider, self.route = decider, route
        self._block_size = decider.fleet.block_size
        self._keys = decider.keys(route)

    def keys(self) -> Keys:
        """Of its full blocks."""
        size = self._decider.fleet.block_size
        if size != self._block_size:
            self._block_size, self._keys = size, self._decider.keys(self.route)
        return self._keys


def gave_up(attempts: int, lost: str) -> KvorumError:
    """Every replica that was tried was lost before the first token."""
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.REPLICA_LOST,
        f"gave up after {attempts} attempt(s); {lost}",
        retry_after_s=_COME_BACK_S,
        metadata={GAVE_UP: str(attempts)},
    )


def loop_time() -> float:
    """The running event loop's clock, for `Wanted`."""
    return asyncio.get_running_loop().time()
