"""Fair order among tenants: deficit round robin by tokens, its empty rounds skipped.

Deficit round robin (Shreedhar & Varghese, SIGCOMM 1995) grants each waiting tenant a quantum of
tokens per round and releases a tenant's head once its unspent grants cover it. The smaller the
quantum, the fairer and the more rounds. Here the quantum is one token and no round is walked:
every waiting tenant has been granted all rounds since it came, so its head may go in round
`spent + tokens of the head`, and a heap finds the tenant whose round comes first.

Invariant: a tenant's unspent grant is at least 0 and below its largest item. So tenants that have
waited since the same moment have received tokens within one largest item of each other.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

_Turn = tuple[int, int, int]
"""The round in which a lane's head may go, the head's arrival number, and a number of its own."""

_STALE_TURNS_ALLOWED = 16

_MOST_MARGIN_S = 0.5
_MARGIN = 0.1


class ServiceClass(IntEnum):
    """As in `protos/inference.proto`. Interactive requests go before batch ones."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One request that wants a place on a replica. Items are told apart by identity.

    Times are seconds of one clock. `tokens` (>= 1) is what the request is expected to cost:
    uncached prompt tokens and generated tokens over all its sequences.
    """

    tenant: str
    tokens: int
    arrived: float
    deadline: float  # the client's
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    priority: int = 0  # lower goes first, within its tenant and class
    narrow: bool = False  # some replicas are closed to it: when it finds no place, those behind may
    payload: Any = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"an item of {self.tokens} tokens: expected at least 1")

    @property
    def answer_by(self) -> float:
        """When to stop waiting, so that the refusal reaches the client before its deadline passes:
        0.5 s or a tenth of the time it allowed before, whichever is less."""
        return self.deadline - max(0.0, min(_MOST_MARGIN_S, _MARGIN * (self.deadline - self.arrived)))


@dataclass(slots=True)
class _Level:
    """The items of one tenant and priority, in order of arrival."""

    items: OrderedDict[Item, int] = field(default_factory=OrderedDict)  # item: its arrival number
    tokens: int = 0


@dataclass(slots=True, eq=False)
class _Lane:
    """The items of one tenant."""

    tenant: str
    spent: int  # the round up to which its grants are used
    priorities: list[int] = field(default_factory=list)  # ascending; each has items in `levels`
    levels: dict[int, _Level] = field(default_factory=dict)
    count: int = 0
    tokens: int = 0
    turn: _Turn = (-1, -1, -1)
    top: Item | None = None  # the head, whose turn it is

    def head(self) -> tuple[Item, int]:
        return next(iter(self.levels[self.priorities[0]].items.items()))


class Lanes:
    """Items of many tenants in the order in which they may go.

    Costs: `head` O(1), all else O(log tenants + log priorities of the tenant), amortised. A tenant
    without items takes no memory; its unspent grant is forgotten, as in the paper.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._turns: list[tuple[_Turn, _Lane]] = []  # a heap; one that is not its lane's turn is stale
        self._scheduled = 0
        self._by_count: dict[int, OrderedDict[_Lane, None]] = {}
        self._most = 0
        self._round = 0
        self.tokens = 0
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def tenants(self) -> int:
        """Tenants with items."""
        return len(self._lanes)

    def add(self, item: Item, number: int) -> None:
        """Put it behind its tenant's items of the same priority. `number` grows with every arrival."""
        self._insert(item, number, spent=self._round, last=True)

    def put_back(self, item: Item, number: int, spent: int) -> None:
        """Undo `take`: the item goes before its tenant's others of the same priority."""
        self._insert(item, number, spent=spent, last=False)

    def take(self, item: Item) -> int:
        """Remove it without using its tenant's grant; the `spent` that `put_back` asks for.

        Raises:
            KeyError: it is not here.
        """
        lane = self._lanes[item.tenant]
        self._extract(lane, item)
        return lane.spent

    def head(self) -> Item | None:
        """The item that goes next."""
        turns = self._turns
        while turns:
            turn, lane = turns[0]
            if lane.turn == turn:
                return lane.top
            heapq.heappop(turns)
        return None

    def release(self, item: Item) -> None:
        """Remove the head, spending its tenant's grant."""
        lane = self._lanes[item.tenant]
        self._round = max(self._round, lane.turn[0])
        lane.spent += item.tokens
        self._extract(lane, item)

    def ahead(self, tenant: str, priority: int, tokens: int) -> int:
        """At most so many tokens go before a new item: its tenant's own, and of each other tenant
        no more than that and the item together, by the invariant above."""
        lane = self._lanes.get(tenant)
        own = held = 0
        if lane is not None:
            held = lane.tokens
            before = lane.priorities[: bisect_right(lane.priorities, priority)]
            own = sum(lane.levels[p].tokens for p in before)
        others = len(self._lanes) - (lane is not None)
        return own + min(self.tokens - held, (own + tokens) * others)

    def held(self, tenant: str) -> int:
        """Items of that tenant."""
        lane = self._lanes.get(tenant)
        return 0 if lane is None else lane.count

    def longest(self) -> tuple[str, int]:
        """The tenant with most items, and how many.

        Raises:
            KeyError: there are no items.
        """
        lane = next(iter(self._by_count[self._most]))
        return lane.tenant, lane.count

    def last(self, tenant: str) -> Item:
        """That tenant's item that goes last.

        Raises:
            KeyError: it has none.
        """
        lane = self._lanes[tenant]
        return next(reversed(lane.levels[lane.priorities[-1]].items))

    def _insert(self, item: Item, number: int, *, spent: int, last: bool) -> None:
        lane = self._lanes.get(item.tenant)
        if lane is None:
            lane = self._lanes[item.tenant] = _Lane(item.tenant, spent)
        level = lane.levels.get(item.priority)
        if level is None:
            level = lane.levels[item.priority] = _Level()
            insort(lane.priorities, item.priority)
        level.items[item] = number
        if not last:
            level.items.move_to_end(item, last=False)
        level.tokens += item.tokens
        self._count(lane, 1, item.tokens)
        self._schedule(lane)

    def _extract(self, lane: _Lane, item: Item) -> None:
        level = lane.levels[item.priority]
        del level.items[item]
        level.tokens -= item.tokens
        if not level.items:
            del lane.levels[item.priority]
            del lane.priorities[bisect_left(lane.priorities, item.priority)]
        self._count(lane, -1, -item.tokens)
        if lane.count:
            self._schedule(lane)
        else:
            del self._lanes[lane.tenant]
            lane.turn, lane.top = (-1, -1, -1), None
            if not self._lanes:
                self._turns.clear()

    def _schedule(self, lane: _Lane) -> None:
        """Note when the lane's head may go, if that has changed."""
        item, number = lane.head()
        round_ = lane.spent + item.tokens
        if lane.turn[:2] == (round_, number):
            return
        self._scheduled += 1
        lane.turn, lane.top = (round_, number, self._scheduled), item
        heapq.heappush(self._turns, (lane.turn, lane))
        if len(self._turns) > 2 * len(self._lanes) + _STALE_TURNS_ALLOWED:
            self._turns = [(lane.turn, lane) for lane in self._lanes.values()]
            heapq.heapify(self._turns)

    def _count(self, lane: _Lane, items: int, tokens: int) -> None:
        """Counts, and the lane's place among those of its length; `items` is 1 or -1."""
        self.count += items
        self.tokens += tokens
        lane.tokens += tokens
        if lane.count:
            peers = self._by_count[lane.count]
            del peers[lane]
            if not peers:
                del self._by_count[lane.count]
        lane.count += items
        if lane.count:
            self._by_count.setdefault(lane.count, OrderedDict())[lane] = None
        if items > 0:
            self._most = max(self._most, lane.count)
        elif self._most not in self._by_count:
            self._most = lane.count
