"""Which replicas share memory, and from where a prompt's blocks could come. Pure arrays.

An *arena* is the memory of a host in which its replicas keep finished blocks (protos `KvPool`). Blocks go
from one arena to another when both have an agent and the same namespace.

What a replica's own arena holds beyond its engine's cache, the engine loads: that is no choice of ours. To
have further blocks pulled from another arena first is one, which `router.cost` makes. One arena of each
namespace can be asked: of those with about the longest prefix of the prompt, the one that is free to send.

A pull that this router has asked for keeps one arena sending and the other receiving until it should be over:
a burst is not predicted to travel from one host at the speed that a single pull has.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from router.cost import Fetch, Flags, Floats, Ints, RowLoad
from router.fetch_speeds import FetchSpeeds, Pulled

PRIOR_BYTES_PER_MS = 2e6
"""From an arena into an engine, until its replica has measured: 2 GB/s."""

_SLACK = 0.05
"""A source may hold so much less of a prompt than another, if it is the one that is free."""

_LATENCY, _PER_BYTE, _UNTIL = range(3)
_SENDS, _RECEIVES = range(2)


@dataclass(frozen=True, slots=True)
class Share:
    """A replica's part in an arena, as protos `KvPool` has it."""

    arena: str
    namespace: str
    agent: str  # empty: exchanges nothing
    block_bytes: int

    @property
    def key(self) -> str:
        """Names the arena; one name may be used in several namespaces."""
        return f"{self.arena}/{self.namespace}"


@dataclass(frozen=True, slots=True)
class Source:
    """An arena that a prompt's blocks can be pulled from."""

    number: int
    key: str
    agent: str
    blocks: int  # leading ones of the prompt, that it holds


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks that a replica is to have its host's agent bring from another arena before it computes."""

    source: str  # arena's key
    target: str  # likewise
    agent: str  # of the source
    blocks: int  # leading ones of the prompt, that the source holds
    bytes: int  # of those that the target lacks
    ms: float  # predicted, once both are free
    wait_ms: float = 0.0  # predicted, until they are

    @property
    def total_ms(self) -> float:
        """From asking to the last block."""
        return self.wait_ms + self.ms


@dataclass(frozen=True, slots=True, eq=False)
class Supply:
    """What n rows need not compute of a prompt. Arrays as in `router.cost.Fetch`."""

    cached: Ints  # tokens
    fetch: Fetch
    targets: Ints  # [n]: their arenas, -1 none
    offers: tuple[
        tuple[Source, Flags, Floats], ...
    ] = ()  # to whom [n], and how many bytes of it they lack [n]

    def source(self, at: int) -> tuple[Source, int] | None:
        """Whom position `at` can ask, for how many bytes."""
        for source, able, lacking in self.offers:
            if able[at]:
                return source, int(lacking[at])
        return None


@dataclass(slots=True)
class _Arena:
    key: str
    agents: dict[int, str]  # by row that shares it, the one that told last at the end

    def agent(self) -> str:
        return next((agent for agent in reversed(self.agents.values()) if agent), "")


class Pools:
    """The arenas of one model's replicas, by row of the fleet. `now` is seconds of one clock."""

    def __init__(self, speeds: FetchSpeeds | None = None) -> None:
        self.speeds = speeds if speeds is not None else FetchSpeeds()
        self.shared = False  # whether any row has an arena
        self._shares: dict[int, Share] = {}  # by row
        self._arenas: dict[int, _Arena] = {}  # by number
        self._numbers: dict[str, int] = {}  # by key
        self._spaces: dict[str, int] = {}  # by namespace
        self._next_space = 0
        self._free: deque[int] = deque()
        self._exchanging = False  # whether two arenas have agents
        self._arena: Ints = np.full(8, -1)  # by row
        self._pulls: Flags = np.zeros(8, bool)  # by row: has an agent to pull
        self._load_ms: Floats = np.zeros(8)  # by row: a block from its arena
        self._space: Ints = np.full(8, -1)  # by arena: its namespace
        self._offering: Flags = np.zeros(8, bool)  # by row: its arena has an agent
        self._shunned: Floats = np.full(8, -math.inf)  # by arena, s: until when others are asked first
        self._block_bytes: Floats = np.zeros(8)  # by arena
        self._busy: Floats = np.full((2, 8), -math.inf)  # by arena, s: until when it sends, receives
        self._busy_until = -math.inf  # the latest of them
        self._routes: dict[int, Floats] = {}  # by source: [3, arenas], made when wanted

    # Who shares what

    def share(self, row: int, share: Share | None) -> None:
        """What this row has said of its arena; None: it has none, or is gone."""
        before = self._shares.get(row)
        if before == share:
            return
        self._withdraw(row)
        if share is not None:
            self._enter(row, share)
            if before is not None and before.key == share.key and before.agent != share.agent:
                self.speeds.forgive(share.key)  # it was avoided at an address that is no more
                self._shunned[self._numbers[share.key]] = -math.inf
        self.shared = bool(self._shares)
        self._offering[:] = False
        senders = 0
        for arena in self._arenas.values():
            if arena.agent():
                self._offering[list(arena.agents)] = True
                senders += 1
        self._exchanging = senders > 1
        self._routes.clear()

    def share_of(self, row: int) -> Share | None:
        """What it said last."""
        return self._shares.get(row)

    def loads(self, row: int, ms_per_block: float) -> None:
        """What the row measured of loads from its arena; 0, or what cannot be a time: unknown."""
        share = self._shares.get(row)
        if share is not None:
            known = math.isfinite(ms_per_block) and ms_per_block > 0
            self._load_ms[row] = ms_per_block if known else share.block_bytes / PRIOR_BYTES_PER_MS

    # What can be had

    def supply(
        self,
        rows: Ints,
        load: RowLoad,
        *,
        device: Ints,
        pending: Ints,
        held: Ints,
        distrusted: Ints,
        block_size: int,
        salt: int,
        now: float,
    ) -> Supply:
        """What these rows [n] need not compute. Depths are leading blocks of the prompt that count.

        Args:
            device: [n] in the engine's cache.
            pending: [n] of a prompt in flight there.
            held: by row of the fleet, in the arena of the row; 0 where the row is distrusted.
            distrusted: rows of the fleet for which nothing is pulled.
            salt: any number of the prompt's; chooses between equal sources.
        """
        self._cover(len(held) - 1)
        targets, load_ms = self._arena[rows], self._load_ms[rows]
        known = np.maximum(device, pending)
        own = np.maximum(device, held[rows] * (targets >= 0))
        served = np.maximum(known, own)
        step = np.where(load.decode_step_ms > 0, load.decode_step_ms, load.t0)
        loads = (served - known) * load_ms + step * (served > known)
        offers = self._offers(held, salt, now)
        able = self._pulls
        if offers and len(distrusted):
            able = able.copy()
            able[distrusted] = False
        pull, depth, found = np.full(len(rows), np.inf), served, []
        for source in offers:
            routes = self._routes_from(source.number, now)[:, targets]
            can = able[rows] & (served < source.blocks) & (routes[_UNTIL] <= now)
            if can.any():
                lacking = (source.blocks - own) * self._block_bytes[source.number]
                ms = routes[_LATENCY] + lacking * routes[_PER_BYTE]
                if self._busy_until > now:
                    free_at = np.maximum(self._busy[_RECEIVES, targets], self._busy[_SENDS, source.number])
                    ms += np.maximum(free_at - now, 0.0) * 1e3
                pull, depth = np.where(can, ms, pull), np.where(can, source.blocks, depth)
                found.append((source, can, lacking))
        if not found:
            return Supply(served * block_size, Fetch(loads), targets)
        cached, both = np.empty((2, len(rows)), np.int64), np.empty((2, len(rows)))
        cached[0], cached[1] = served, depth
        both[0], both[1] = loads, (depth - known) * load_ms + step
        return Supply(cached * block_size, Fetch(both, pull), targets, tuple(found))

    def pull(self, supply: Supply, at: int, now: float) -> Pull | None:
        """What to have pulled for position `at`; right after `supply`."""
        found = supply.source(at)
        if found is None:
            return None
        source, size = found
        number = int(supply.targets[at])
        target = self._arenas[number].key
        speed = self.speeds.of(source.key, target, now)
        ms = speed.latency_ms + size * speed.ms_per_byte
        wait_ms = (self._free_at(source.number, number, now) - now) * 1e3
        return Pull(source.key, target, source.agent, source.blocks, size, ms, wait_ms)

    # What happens

    def begin(self, pull: Pull, now: float, routers: float = 1.0) -> None:
        """It has been asked for. So many routers like this one do the same."""
        source, target = self._numbers.get(pull.source), self._numbers.get(pull.target)
        if source is None or target is None:
            return
        over = self._free_at(source, target, now) + pull.ms * routers / 1e3
        self._busy[_SENDS, source] = self._busy[_RECEIVES, target] = over
        self._busy_until = max(self._busy_until, over)

    def end(self, pull: Pull, size: int, ms: float, now: float, *, failed: bool) -> None:
        """It is over: so many bytes came in that time. `failed`: fewer than were asked for.

        A pull that brought some tells how quick the pair is, whatever ended it: what it was to wait for
        others is not the pair's fault, but no more than half of its time. One that brought nothing and failed
        at nothing found all blocks there already.
        """
        if size > 0:
            own = Pulled(size, max(ms - pull.wait_ms, ms / 2))
            self.speeds.learn(pull.source, pull.target, own, now)
        elif failed:
            self.speeds.failed(pull.source, pull.target, now)
        source, target = self._numbers.get(pull.source, -1), self._numbers.get(pull.target)
        if source >= 0 and not size and failed:
            self._shunned[source] = self.speeds.of(pull.source, pull.target, now).avoided_until
        routes = self._routes.get(source)
        if routes is not None and target is not None:
            routes[:, target] = self._route(pull.source, pull.target, now)

    def relax(self) -> None:
        """Time has passed: pairs that nothing was heard of are worth another try."""
        self._routes.clear()

    # How

    def _enter(self, row: int, share: Share) -> None:
        self._shares[row] = share
        self._cover(row)
        number = self._numbers.get(share.key)
        if number is None:
            number = self._numbers[share.key] = self._number()
            self._arenas[number] = _Arena(share.key, {})
            self._space[number] = self._space_of(share.namespace)
            self._busy[:, number] = self._shunned[number] = -math.inf
        self._arenas[number].agents[row] = share.agent
        self._arena[row], self._pulls[row] = number, bool(share.agent)
        self._block_bytes[number] = share.block_bytes
        self.loads(row, 0.0)

    def _cover(self, row: int) -> None:
        while row >= len(self._arena):
            self._arena = np.concatenate((self._arena, np.full_like(self._arena, -1)))
            self._pulls = np.concatenate((self._pulls, np.zeros_like(self._pulls)))
            self._offering = np.concatenate((self._offering, np.zeros_like(self._offering)))
            self._load_ms = np.concatenate((self._load_ms, np.zeros_like(self._load_ms)))

    def _withdraw(self, row: int) -> None:
        share = self._shares.pop(row, None)
        if share is None:
            return
        number = self._numbers[share.key]
        agents = self._arenas[number].agents
        del agents[row]
        self._arena[row], self._pulls[row] = -1, False
        if not agents:
            del self._arenas[number], self._numbers[share.key]
            self._space[number] = -1
            self._free.append(number)
            if all(other.namespace != share.namespace for other in self._shares.values()):
                del self._spaces[share.namespace]

    def _space_of(self, namespace: str) -> int:
        if namespace not in self._spaces:
            self._spaces[namespace] = self._next_space
            self._next_space += 1
        return self._spaces[namespace]

    def _number(self) -> int:
        if self._free:
            return self._free.popleft()
        number = len(self._arenas)
        if number == len(self._space):
            self._space = np.concatenate((self._space, np.full_like(self._space, -1)))
            self._shunned = np.concatenate((self._shunned, np.full_like(self._shunned, -math.inf)))
            self._block_bytes = np.concatenate((self._block_bytes, np.zeros_like(self._block_bytes)))
            self._busy = np.concatenate((self._busy, np.full_like(self._busy, -math.inf)), axis=1)
        return number

    def _offers(self, held: Ints, salt: int, now: float) -> list[Source]:
        """Of each namespace the arena to ask."""
        if not self._exchanging:
            return []
        offered = held * self._offering[: len(held)]
        found = []
        for space in self._spaces.values():
            depths = (
                offered
                if len(self._spaces) == 1
                else offered * (self._space[self._arena[: len(held)]] == space)
            )
            most = int(depths.max())
            if not most:
                continue
            rows = (depths >= most * (1.0 - _SLACK)).nonzero()[0]
            numbers = self._arena[rows]
            if len(numbers) > 1:
                free_at = np.maximum(self._busy[_SENDS, numbers], self._shunned[numbers]).clip(now)
                free = free_at == free_at.min()
                rows, numbers = rows[free], numbers[free]
            number = int(numbers[salt % len(numbers)])
            arena = self._arenas[number]
            found.append(Source(number, arena.key, arena.agent(), int(depths[rows[numbers == number]].max())))
        return found

    def _routes_from(self, source: int, now: float) -> Floats:
        """To every arena: latency, ms per byte, until when it is avoided: for ever if it takes nothing."""
        routes = self._routes.get(source)
        if routes is None:
            routes = self._routes[source] = np.zeros((3, len(self._space)))
            routes[_UNTIL] = math.inf
            key = self._arenas[source].key
            for number, arena in self._arenas.items():
                if self._space[number] == self._space[source] and number != source:
                    routes[:, number] = self._route(key, arena.key, now)
        return routes

    def _free_at(self, source: int, target: int, now: float) -> float:
        """When the one is free to send and the other to receive."""
        return max(now, float(self._busy[_SENDS, source]), float(self._busy[_RECEIVES, target]))

    def _route(self, source: str, target: str, now: float) -> tuple[float, float, float]:
        speed = self.speeds.of(source, target, now)
        return speed.latency_ms, speed.ms_per_byte, speed.avoided_until
