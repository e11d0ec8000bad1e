"""Requests that wait for a place: bounded, in a fair order, refused early rather than late.

Order. Interactive requests go before batch ones, except that while both wait, batch requests are
owed `batch_share` of the released tokens. Within a class tenants share by deficit round robin
(`router.lanes`); within a tenant lower priority goes first, then earlier arrival.

Full queue. A tenant that holds more of the queue than others gives way: an arrival displaces the
last request of the tenant with most (McKenney, "Stochastic Fairness Queueing", 1990, drops from the
longest queue). Batch requests give way to interactive ones down to `batch_share` of the queue, and
interactive ones to batch requests up to it.

    queue = AdmissionQueue(max_queue=256)
    displaced = queue.offer(item, now)     # raises KvorumError when it is refused
    head = queue.peek()
    if head is not None and place(head):
        queue.pop(now)
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from protos.errors import KvorumError
from router import refusals
from router.drain import DrainRate
from router.lanes import Item, Lanes, ServiceClass

__all__ = ["AdmissionQueue", "Count", "Item", "ServiceClass"]

Count = Literal["admitted", "cancelled", "failed", "closed", "full", "late", "displaced", "expired"]

_STALE_DEADLINES_ALLOWED = 16


class _Entry(NamedTuple):
    number: int
    since: float


class AdmissionQueue:
    """The requests of one model that wait for a place. Pure: `now` comes in, in seconds.

    Costs: O(log n) amortised per operation, n items waiting, for the few priorities that one tenant
    uses. Invariants: at most `max_queue` items; memory follows what waits now.

    Raises:
        ValueError: `max_queue` is negative or `batch_share` not between 0 and 1.
    """

    def __init__(self, max_queue: int, *, batch_share: float = 0.1) -> None:
        if max_queue < 0:
            raise ValueError(f"max_queue is {max_queue}: expected 0 or more")
        if not 0 < batch_share < 1:
            raise ValueError(f"batch_share is {batch_share}: expected a share between 0 and 1")
        self.max_queue, self._share = max_queue, batch_share
        self._batch_places = int(batch_share * max_queue)
        self._interactive, self._batch = Lanes(), Lanes()
        self._waiting: OrderedDict[Item, _Entry] = OrderedDict()
        self._aside: dict[Item, int] = {}  # item: what its tenant had spent
        self._expiries: list[tuple[float, int, Item]] = []  # a heap; items that have left are stale
        self._owed_to_batch = 0.0  # tokens
        self._next_number = 0
        self._tokens = 0
        self._drain = DrainRate()
        self._totals: dict[Count, int] = {
            "admitted": 0,
            "cancelled": 0,
            "failed": 0,
            "closed": 0,
            "full": 0,
            "late": 0,
            "displaced": 0,
            "expired": 0,
        }

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: Item) -> bool:
        return item in self._waiting

    @property
    def queued_tokens(self) -> int:
        """Expected tokens of all that wait."""
        return self._tokens

    @property
    def totals(self) -> Mapping[Count, int]:
        """Counts since the start: `admitted`, `cancelled`, `failed`, `closed`, and the refusals at the
        door (`full`, `late`) and while waiting (`displaced`, `expired`)."""
        return MappingProxyType(self._totals)

    def oldest_wait_s(self, now: float) -> float:
        """How long the one that came first has waited here; 0 when none waits."""
        if not self._waiting:
            return 0.0
        return max(0.0, now - next(iter(self._waiting.values())).since)

    def lengths(self) -> Mapping[ServiceClass, int]:
        """Requests waiting by class."""
        batch = sum(1 for item in self._aside if item.service_class is ServiceClass.BATCH) + len(self._batch)
        return {ServiceClass.INTERACTIVE: len(self) - batch, ServiceClass.BATCH: batch}

    def predicted_drain_s(self, predicted_tokens_per_s: float | None = None) -> float | None:
        """When all that waits now will have been released; None when the rate is unknown."""
        return self._seconds(self._tokens, predicted_tokens_per_s)

    def predicted_wait_s(self, item: Item, predicted_tokens_per_s: float | None = None) -> float | None:
        """How long a new item would wait at most, if no more came; None when the rate is unknown.

        Errs by the time to the next release, which the queue cannot know.
        """
        return self._seconds(self._ahead(item), predicted_tokens_per_s)

    def offer(
        self,
        item: Item,
        now: float,
        *,
        predicted_tokens_per_s: float | None = None,
        ttft_s: float = 0.0,
        stalled: bool = False,
    ) -> Item | None:
        """Let it wait.

        `predicted_tokens_per_s` is the fleet's rate as predicted, used until one has been measured;
        `ttft_s` the predicted time to the first token once placed; `stalled` says that nothing can
        serve now, so that no wait can be predicted from the rate.

        Returns:
            The item that had to leave for it, if any: refuse it with `displaced_error`.

        Raises:
            KvorumError: RESOURCE_EXHAUSTED, with the time after which to retry: the queue is full,
                or the item's deadline would pass before it is served.
            ValueError: it waits already.
        """
        if item in self._waiting:
            raise ValueError("this item waits already")
        self.observe(now, stalled=stalled)
        wait_s = 0.0
        if stalled:
            ttft_s = 0.0
        else:
            wait_s = self.predicted_wait_s(item, predicted_tokens_per_s) or 0.0
        if now + wait_s >= item.answer_by or now + wait_s + ttft_s > item.deadline:
            self._totals["late"] += 1
            raise refusals.late(item, now, len(self), wait_s, ttft_s)
        displaced = None
        if len(self._waiting) >= self.max_queue:
            displaced = self._displaceable(item)
            if displaced is None:
                self._totals["full"] += 1
                raise refusals.full(len(self), self.predicted_drain_s(predicted_tokens_per_s))
            self._leave(displaced, now, "displaced")
        self._enter(item, now)
        self.observe(now, stalled=stalled)
        return displaced

    def peek(self) -> Item | None:
        """The one that goes next; the same until something changes."""
        batch, interactive = self._batch.head(), self._interactive.head()
        if batch is not None and (interactive is None or self._owed_to_batch >= batch.tokens):
            return batch
        return interactive

    def pop(self, now: float) -> Item | None:
        """Release the one that `peek` shows; None when none waits."""
        item = self.peek()
        if item is None:
            return None
        if item.service_class is ServiceClass.BATCH:
            if len(self._interactive):
                self._owed_to_batch -= item.tokens
        elif len(self._batch):
            self._owed_to_batch += item.tokens * self._share / (1 - self._share)
        self._lanes(item).release(item)
        for other in self._aside:  # its tenant may come back with them, and has spent this
            if (other.tenant, other.service_class) == (item.tenant, item.service_class):
                self._aside[other] += item.tokens
        self._drain.released(item.tokens, now)
        self._forget(item, now, "admitted")
        return item

    def set_aside(self) -> None:
        """Let those behind the head be seen: it keeps its turn, which `put_back` restores."""
        item = self.peek()
        if item is not None:
            self._aside[item] = self._lanes(item).take(item)

    def put_back(self) -> None:
        """Return what was set aside to where it was."""
        while self._aside:
            item, spent = self._aside.popitem()
            self._lanes(item).put_back(item, self._waiting[item].number, spent)

    def remove(self, item: Item, now: float, count: Count = "cancelled") -> bool:
        """It no longer waits; False when it did not."""
        if item not in self._waiting:
            return False
        self._leave(item, now, count)
        return True

    def next_expiry(self) -> float | None:
        """When `expire` will have something to return."""
        while self._expiries and self._expiries[0][2] not in self._waiting:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def expire(self, now: float) -> list[Item]:
        """Remove and return those whose `answer_by` has come: refuse them with `expired_error`."""
        expired = []
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            item = self._expiries[0][2]
            self._leave(item, now, "expired")
            expired.append(item)
        return expired

    def clear(self, now: float) -> list[Item]:
        """Remove and return all, in order of arrival; counted as `closed`."""
        items = list(self._waiting)
        for item in items:
            self._leave(item, now, "closed")
        return items

    def observe(self, now: float, *, stalled: bool) -> None:
        """Time has passed; `stalled` as in `offer`. Keeps the measured rate true between releases."""
        if stalled or not self._waiting:
            self._drain.pause(now)
        else:
            self._drain.waiting(now)

    def displaced_error(self, predicted_tokens_per_s: float | None = None) -> KvorumError:
        """For an item that left for another."""
        return refusals.displaced(len(self), self.predicted_drain_s(predicted_tokens_per_s))

    def expired_error(
        self, item: Item, now: float, predicted_tokens_per_s: float | None = None
    ) -> KvorumError:
        """For an item that found no place in time although there are replicas."""
        return refusals.expired(item, now, len(self), self.predicted_drain_s(predicted_tokens_per_s))

    def _ahead(self, item: Item) -> float:
        """Tokens that go before a new item, by its fair share and by that of its class."""
        own = self._lanes(item).ahead(item.tenant, item.priority, item.tokens)
        if item.service_class is ServiceClass.BATCH:
            return min(own + self._interactive.tokens, (own + item.tokens) / self._share)
        return min(own + self._batch.tokens, own / (1 - self._share))

    def _seconds(self, tokens: float, predicted_tokens_per_s: float | None) -> float | None:
        if tokens <= 0:
            return 0.0
        rate = self._drain.tokens_per_s(predicted_tokens_per_s)
        return tokens / rate if rate else None

    def _displaceable(self, item: Item) -> Item | None:
        """Who must leave the full queue for `item`, if its claim is better."""
        own, other = self._lanes(item), self._batch
        over = len(self._batch) > self._batch_places
        if item.service_class is ServiceClass.BATCH:
            other, over = self._interactive, len(self._batch) < self._batch_places
        if over and len(other):
            return other.last(other.longest()[0])
        if not len(own):
            return None
        tenant, most = own.longest()
        if most > own.held(item.tenant) + 1:
            return own.last(tenant)
        if own.held(item.tenant):
            last = own.last(item.tenant)
            return last if last.priority > item.priority else None
        return None

    def _enter(self, item: Item, now: float) -> None:
        number = self._next_number
        self._next_number += 1
        self._waiting[item] = _Entry(number, now)
        self._tokens += item.tokens
        self._lanes(item).add(item, number)
        heapq.heappush(self._expiries, (item.answer_by, number, item))

    def _leave(self, item: Item, now: float, count: Count) -> None:
        if self._aside.pop(item, None) is None:
            self._lanes(item).take(item)
        self._forget(item, now, count)

    def _forget(self, item: Item, now: float, count: Count) -> None:
        del self._waiting[item]
        self._tokens -= item.tokens
        self._totals[count] += 1
        if not len(self._batch) and not self._aside:
            self._owed_to_batch = 0.0
        if not self._waiting:
            self._drain.pause(now)
            self._expiries.clear()
        elif len(self._expiries) > 2 * len(self._waiting) + _STALE_DEADLINES_ALLOWED:
            self._expiries = [(i.answer_by, entry.number, i) for i, entry in self._waiting.items()]
            heapq.heapify(self._expiries)

    def _lanes(self, item: Item) -> Lanes:
        return self._batch if item.service_class is ServiceClass.BATCH else self._interactive
