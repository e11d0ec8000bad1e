"""Where requests wait for a place on a replica: the asyncio shell of `router.admission`.

    turnstile = Turnstile(AdmissionQueue(256), nothing_serves=..., give_back=lambda lease: lease.release())
    admitted = await turnstile.admit(item, try_place)     # try_place() -> a lease, or None when all are full
    with admitted.placement: ...

One pump tries the heads. It runs in the event loop on `kick` (at most once per turn of the loop), when
the first waiter must be answered, and every `poll_s` while anything waits, because predicted loads
also fall with time. There is no task that could die and no wake-up that could be missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from protos.errors import KvorumError
from router.admission import AdmissionQueue, Count, Item

P = TypeVar("P")

_MOST_TRIED_PER_TURN = 16
_MOST_PASSED_OVER = 8


@dataclass(frozen=True, slots=True)
class Admitted(Generic[P]):
    """A place, and how long the request waited for it."""

    placement: P
    waited_s: float


@dataclass(slots=True, eq=False)
class _Waiter(Generic[P]):
    try_place: Callable[[], P | None]
    future: asyncio.Future[Admitted[P]]
    since: float


def _unknown() -> None:
    return None


class Turnstile(Generic[P]):
    """Lets the requests of one model through as places become free. Not thread-safe.

    Args:
        nothing_serves: the error for requests when no replica can take any, however idle; None while
            there are replicas.
        give_back: ends a placement whose request was cancelled before it learned of it.
        predicted_tokens_per_s: the fleet's rate as predicted, None when unknown.
        poll_s: how often the heads are tried without a kick.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        *,
        nothing_serves: Callable[[], KvorumError | None],
        give_back: Callable[[P], None],
        predicted_tokens_per_s: Callable[[], float | None] = _unknown,
        poll_s: float = 0.25,
    ) -> None:
        if poll_s <= 0:
            raise ValueError(f"poll_s is {poll_s}: expected more than 0")
        self._queue, self._nothing_serves, self._give_back = queue, nothing_serves, give_back
        self._rate, self._poll_s = predicted_tokens_per_s, poll_s
        self._waiters: dict[Item, _Waiter[P]] = {}
        self._pump_soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._placing = False
        self._closed: Callable[[], KvorumError] | None = None

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Expected tokens of the requests waiting."""
        return self._queue.queued_tokens

    @property
    def totals(self) -> Mapping[Count, int]:
        """See `AdmissionQueue.totals`; requests that never waited are not in it."""
        return self._queue.totals

    def oldest_wait_s(self) -> float:
        """How long the one that came first has waited; 0 when none waits."""
        return self._queue.oldest_wait_s(asyncio.get_running_loop().time())

    async def admit(
        self, item: Item, try_place: Callable[[], P | None], *, ttft_s: float = 0.0
    ) -> Admitted[P]:
        """A place for `item`: at once when none waits and there is one, else in its turn.

        `try_place` takes a place and returns it, or None when all that could serve are full; it is
        called again until it has one, from the event loop, and must not block. `ttft_s` is the
        predicted time to first token once placed. The item's times are the event loop's.

        Raises:
            KvorumError: RESOURCE_EXHAUSTED when it is refused, displaced or finds no place by
                `item.answer_by`; what `nothing_serves` says when that is the reason; what `close` was
                given.
            Exception: what `try_place` raised.
        """
        if self._closed is not None:
            raise self._closed()
        first = not len(self._queue)
        if first and (placement := try_place()) is not None:
            return Admitted(placement, 0.0)
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._offer(item, now, ttft_s)
        waiter = self._waiters[item] = _Waiter(try_place, loop.create_future(), now)
        head = self._queue.peek()
        if not first and head is not None and (head is item or head.narrow):
            self.kick()
        self._arm(loop, now)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._cancelled(item, waiter, loop.time())
            raise

    def kick(self) -> None:
        """Something changed: a lease ended, a replica reported, came or went. Cheap; call it freely.

        What `try_place` itself changes while the heads are tried is seen without a kick.
        """
        if self._pump_soon is None and not self._placing and len(self._queue):
            self._pump_soon = asyncio.get_running_loop().call_soon(self._pump)

    def close(self, error: Callable[[], KvorumError]) -> None:
        """End all waiters, and every later `admit`, with what `error()` returns. Idempotent."""
        self._closed = error
        for item in self._queue.clear(asyncio.get_running_loop().time()):
            self._end(item, error())
        self._stop_timer()

    def _offer(self, item: Item, now: float, ttft_s: float) -> None:
        nothing, rate = self._nothing_serves(), self._rate()
        try:
            displaced = self._queue.offer(
                item,
                now,
                predicted_tokens_per_s=rate,
                ttft_s=ttft_s,
                stalled=nothing is not None,
            )
        except KvorumError as refusal:
            if nothing is not None:
                raise nothing from refusal
            raise
        if displaced is not None:
            self._end(displaced, self._queue.displaced_error(rate))

    def _pump(self) -> None:
        """End what has waited long enough, and place heads until one finds no place."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._pump_soon = None
        try:
            for item in self._queue.expire(now):
                self._end(item, self._too_late(item, now))
            self._queue.observe(now, stalled=self._nothing_serves() is not None)
            if self._place_heads(now):
                self.kick()  # the loop's other work goes first
        finally:
            self._arm(loop, now)

    def _place_heads(self, now: float) -> bool:
        """Whether there may be more to place."""
        passed_over = 0
        self._placing = True
        try:
            for _ in range(_MOST_TRIED_PER_TURN):
                item = self._queue.peek()
                if item is None:
                    return False
                if self._settled(item, now):
                    continue
                passed_over += 1
                if not item.narrow or passed_over > _MOST_PASSED_OVER:
                    return False
                self._queue.set_aside()
            return True
        finally:
            self._placing = False
            self._queue.put_back()

    def _settled(self, item: Item, now: float) -> bool:
        """Try to place the head; False when it must wait on."""
        waiter = self._waiters[item]
        if waiter.future.done():  # cancelled, and its task has not run since
            self._queue.remove(item, now)
            return True
        try:
            placement = waiter.try_place()
        except Exception as error:
            self._queue.remove(item, now, "failed")
            self._end(item, error)
            return True
        if placement is None:
            return False
        self._queue.pop(now)
        del self._waiters[item]
        waiter.future.set_result(Admitted(placement, now - waiter.since))
        return True

    def _end(self, item: Item, error: Exception) -> None:
        """For an item that has left the queue."""
        waiter = self._waiters.pop(item)
        if not waiter.future.done():  # else it was cancelled
            waiter.future.set_exception(error)

    def _too_late(self, item: Item, now: float) -> Exception:
        try:
            return self._nothing_serves() or self._queue.expired_error(item, now, self._rate())
        except Exception as error:  # it has left the queue: nobody else would end it
            return error

    def _cancelled(self, item: Item, waiter: _Waiter[P], now: float) -> None:
        self._waiters.pop(item, None)
        self._queue.remove(item, now)
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self._give_back(future.result().placement)
        self.kick()  # those behind it may fit where it did not
        if not len(self._queue):
            self._stop_timer()

    def _arm(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        """See that the pump runs when the first waiter must be answered, and in `poll_s` at the latest."""
        expiry = self._queue.next_expiry()
        if expiry is None:
            self._stop_timer()
            return
        when = min(expiry, now + self._poll_s)
        if self._timer is not None and self._timer.when() <= when:
            return
        self._stop_timer()
        self._timer = loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pump()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
