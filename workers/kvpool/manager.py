"""The scheduler's side of the pool, in the EngineCore: which blocks are there, and which slots to copy."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from protos import blockkeys
from workers.kvpool.arena import Arena
from workers.kvpool.index import Lease, Slot
from workers.kvpool.keys import arena_keys
from workers.kvpool.layout import State
from workers.kvpool.patience import Patience
from workers.kvpool.router_keys import UNNAMED, RouterKeys
from workers.kvpool.slots import ArenaSlots
from workers.kvpool.stats import metric

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

LOADS_PER_REQUEST: Final = 2
"""After as many a request computes: loads that fail at its first block, for whatever reason, must not repeat
for ever. The second is for a request that was preempted after the first."""

_GAUGES_EVERY_S: Final = 1.0


@dataclass
class _Demand:
    """What the pool knows of one request, kept in its context."""

    router_keys: RouterKeys | None = None
    step: int = -1
    """In which `ready` was looked up."""
    ready: set[OffloadKey] = field(default_factory=set)
    covered: set[OffloadKey] = field(default_factory=set)
    """By that lookup."""
    asked: set[OffloadKey] = field(default_factory=set)
    """By any: they do not count as demand again."""
    loads: int = 0
    leases: dict[OffloadKey, Lease] = field(default_factory=dict)
    slots: dict[OffloadKey, Slot] = field(default_factory=dict)


class ArenaManager(OffloadingManager):
    """Answers vLLM's offloading connector from an arena. vLLM calls it from one thread.

    It emits no KV events: what other replicas have stored is not this engine's, and its own blocks are told
    by vLLM's prefix cache. Followers of the pool read the arena's changes.

    Whatever goes wrong in the arena is a miss, or a block not stored (see `Patience`).
    """

    def __init__(self, arena: Arena) -> None:
        """`arena`: attached; closed by `shutdown`."""
        self._arena = arena
        self._path = str(arena.path)
        self._patience = Patience()
        self._step = 0
        self._announced: dict[str, RouterKeys | None] = {}
        self._open: dict[str, _Demand] = {}  # requests with leases or slots
        self._to_release: list[Lease] = []
        self._to_commit: list[Slot] = []
        self._to_abandon: list[Slot] = []
        self._counts: Counter[str] = Counter()
        self._busy_told = 0
        self._gauges_at = 0.0

    def announce(self, request_id: str, router_keys: RouterKeys | None) -> None:
        """How the router names the blocks of a request, if it does; before its `on_new_request`."""
        self._announced[request_id] = router_keys

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_context.set_state(_Demand(self._announced.pop(req_context.req_id, None)))
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT for a block that is ready. One that is being written is a MISS: its writer may never finish.

        The first question about a request in each step asks for all its blocks from this one on.
        """
        demand = _demand(req_context)
        if demand.loads >= LOADS_PER_REQUEST:
            return LookupResult.MISS
        if demand.step != self._step or key not in demand.covered:
            keys = _keys(req_context)
            self._look_up(keys[keys.index(key) :] if key in keys else [key], demand)
        return LookupResult.HIT if key in demand.ready else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ArenaSlots:
        """Lease these blocks until `complete_load`. One that is gone by now gets no slot: its load fails."""
        wanted, demand = list(keys), _demand(req_context)
        demand.loads += 1
        none: list[Lease | None] = [None] * len(wanted)
        leases = self._patience.ask(lambda: self._arena.lease(arena_keys(wanted)), none)
        demand.leases |= {key: lease for key, lease in zip(wanted, leases, strict=True) if lease is not None}
        self._open[req_context.req_id] = demand
        return ArenaSlots.of(self._path, leases)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        demand = _demand(req_context)
        done = [key for key in demand.leases if key in keys]  # in the prefix's order
        self._to_release += [demand.leases.pop(key) for key in done]
        self._counts["loaded"] += len(keys)
        self._close(req_context.req_id, demand)
        self._settle()

    def failed(self, blocks: int) -> None:
        """So many of the blocks that were to be loaded could not be, by what the ranks say."""
        self._counts["lost"] += blocks

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """A slot for each block that the arena lacks and lets in; those that it has count as used."""
        wanted, demand = list(keys), _demand(req_context)
        names = demand.router_keys
        extras = [
            names.ending_at(req_context.get_offload_key_position(key)) if names else UNNAMED for key in wanted
        ]
        none: list[Slot | None] = [None] * len(wanted)
        slots = self._patience.ask(lambda: self._arena.allocate(arena_keys(wanted), extras), none)
        taken = {key: slot for key, slot in zip(wanted, slots, strict=True) if slot is not None}
        self._counts["refused"] += len(wanted) - len(taken)
        if taken:
            demand.slots |= taken
            self._open[req_context.req_id] = demand
        return PrepareStoreOutput(
            list(taken), ArenaSlots.of(self._path, list(taken.values())), evicted_keys=[]
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        demand = _demand(req_context)
        done = [key for key in demand.slots if key in keys]
        (self._to_commit if success else self._to_abandon).extend(demand.slots.pop(key) for key in done)
        self._close(req_context.req_id, demand)
        self._settle()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        wanted = list(keys)
        self._patience.ask(lambda: self._arena.touch(arena_keys(wanted)), None)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """All its blocks were used, those too that the engine had itself: a neighbour may want them."""
        if keys := _keys(req_context):
            self.touch(keys, req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._step += 1
        if self._to_commit or self._to_abandon or self._to_release:
            self._settle()

    def reset_cache(self) -> None:
        """Give back all that this engine holds, whatever its ranks still copy.

        Blocks that are ready stay: they are the host's, and true as long as their namespace is. A rank that
        goes on reading finds out by the checksum, one that goes on writing by the slot's generation.
        """
        for demand in self._open.values():
            self._to_release += demand.leases.values()
            self._to_abandon += demand.slots.values()
            demand.leases.clear()
            demand.slots.clear()
        self._open.clear()
        self._step += 1
        self._settle()

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        self._counts["busy"] = self._patience.given_up - self._busy_told
        self._busy_told = self._patience.given_up
        for name, count in self._counts.items():
            if count:
                stats.increase_counter(metric(name), count)
        self._counts.clear()
        if (now := time.monotonic()) >= self._gauges_at:
            self._gauges_at = now + _GAUGES_EVERY_S
            nothing: dict[str, int] = {}
            for name, value in self._patience.ask(self._gauges, nothing).items():
                stats.set_gauge(metric(name), value)
        return stats

    def shutdown(self) -> None:
        self._patience.ask(self._arena.close, None)

    def _look_up(self, keys: Sequence[OffloadKey], demand: _Demand) -> None:
        demand.step, demand.covered = self._step, set(keys)
        fresh = not demand.asked.issuperset(keys)
        none = [State.FREE] * len(keys)
        states = self._patience.ask(lambda: self._arena.lookup(arena_keys(keys), asked=fresh), none)
        demand.ready = {key for key, state in zip(keys, states, strict=True) if state is State.READY}
        new = demand.covered - demand.asked
        self._counts["hits"] += (hits := len(new & demand.ready))
        self._counts["misses"] += len(new) - hits
        demand.asked |= new

    def _settle(self) -> None:
        """Commit and release what is done, or else at the end of a later step."""
        self._patience.ask(self._commit, None)
        self._patience.ask(self._give_back, None)

    def _commit(self) -> None:
        if self._to_commit:
            kept = self._arena.commit(self._to_commit)
            self._to_commit.clear()
            self._counts["stored"] += sum(kept)
            self._counts["dropped"] += len(kept) - sum(kept)

    def _give_back(self) -> None:
        """Never busy, and may be repeated."""
        if self._to_abandon:
            self._arena.abandon(self._to_abandon)
            self._counts["dropped"] += len(self._to_abandon)
            self._to_abandon.clear()
        if self._to_release:
            self._arena.release(self._to_release)
            self._to_release.clear()

    def _close(self, request_id: str, demand: _Demand) -> None:
        if not demand.leases and not demand.slots:
            self._open.pop(request_id, None)

    def _gauges(self) -> dict[str, int]:
        usage, counters = self._arena.usage(), self._arena.counters()
        return {
            "slots": usage.slots,
            "ready": usage.ready,
            "evicted": counters.evicted,
            "corrupt": counters.corrupt,
            "reclaimed": counters.reclaimed,
        }


def _demand(req_context: ReqContext) -> _Demand:
    demand: _Demand | None = req_context.get_state(_Demand)
    if demand is None:
        req_context.set_state(demand := _Demand())
    return demand


def _keys(req_context: ReqContext) -> list[OffloadKey]:
    """All that the request has, in the prefix's order."""
    return list(req_context._offload_key_positions)  # vLLM has no public way to see them all


def router_keys_of(request: Request, revision: str, block_tokens: int) -> RouterKeys | None:
    """How the router names a request's blocks; None when its tokens do not tell what is in them."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    lora = request.lora_request.lora_name if request.lora_request is not None else ""
    root = blockkeys.root(revision, lora, request.cache_salt or "")
    return RouterKeys(request.all_token_ids, block_tokens, root)
