"""Requests wait for a place, get it in their turn, and leak nothing however their wait ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import pytest
from fakes_clock import run_in_virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import common_pb2
from protos.errors import KvorumError
from router.admission import AdmissionQueue, Item, ServiceClass
from router.turnstile import Admitted, Turnstile


@dataclass
class FakeFleet:
    """Replicas with so many places in all; a place is its number."""

    room: int = 0
    gone: bool = False
    held: set[int] = field(default_factory=set)
    tries: int = 0
    taken: int = 0
    on_release: Callable[[], None] = lambda: None

    def try_place(self) -> int | None:
        self.tries += 1
        if self.gone or len(self.held) >= self.room:
            return None
        self.taken += 1
        self.held.add(self.taken)
        return self.taken

    def give_back(self, place: int) -> None:
        self.held.remove(place)  # KeyError: given back twice
        self.on_release()

    def nothing_serves(self) -> KvorumError | None:
        if not self.gone:
            return None
        return KvorumError(
            grpc.StatusCode.UNAVAILABLE, common_pb2.NO_REPLICA_READY, "no replica", retry_after_s=0.5
        )


def turnstile_of(fleet: FakeFleet, max_queue: int = 16, poll_s: float = 0.25) -> Turnstile[int]:
    turnstile = Turnstile(
        AdmissionQueue(max_queue),
        nothing_serves=fleet.nothing_serves,
        give_back=fleet.give_back,
        poll_s=poll_s,
    )
    fleet.on_release = turnstile.kick
    return turnstile


def item(name: str = "", *, allowed_s: float = 1000.0, narrow: bool = False) -> Item:
    now = asyncio.get_running_loop().time()
    return Item("t", 10, now, now + allowed_s, narrow=narrow, payload=name)


async def settle() -> None:
    """Let every callback and task that can run do so; no time passes."""
    for _ in range(20):
        await asyncio.sleep(0)


def assert_nothing_left(turnstile: Turnstile[int]) -> None:
    assert len(turnstile) == turnstile.queued_tokens == 0
    assert not turnstile._waiters
    assert turnstile._timer is None


def refused(task: asyncio.Task[Admitted[int]]) -> KvorumError:
    error = task.exception()
    assert isinstance(error, KvorumError)
    return error


def test_request_that_finds_a_place_does_not_suspend() -> None:
    fleet = FakeFleet(room=1)
    admission = turnstile_of(fleet).admit(Item("t", 10, 0.0, 10.0), fleet.try_place)
    with pytest.raises(StopIteration) as end:
        admission.send(None)
    assert end.value.value == Admitted(1, 0.0)


def test_waiting_request_gets_the_place_that_another_gives_back() -> None:
    async def scenario() -> None:
        fleet = FakeFleet(room=1)
        turnstile = turnstile_of(fleet, poll_s=1e6)
        first = await turnstile.admit(item(), fleet.try_place)
        second = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await asyncio.sleep(3.0)
        assert len(turnstile) == 1
        assert turnstile.oldest_wait_s() == pytest.approx(3.0)
        fleet.give_back(first.placement)
        admitted = await second
        assert admitted.placement == 2
        assert admitted.waited_s == pytest.approx(3.0)
        assert turnstile.totals["admitted"] == 1
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_newcomer_does_not_overtake_those_that_wait() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet)
        order: list[str] = []

        async def request(name: str) -> None:
            await turnstile.admit(item(name), fleet.try_place)
            order.append(name)

        waiting = asyncio.create_task(request("early"))
        await settle()
        fleet.room = 1  # without a kick: only the newcomer could have noticed
        late = asyncio.create_task(request("late"))
        await waiting
        fleet.give_back(1)
        await late
        assert order == ["early", "late"]

    run_in_virtual_time(scenario())


def test_newcomer_that_goes_before_those_that_wait_is_tried_at_once() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet, poll_s=1e6)
        now = asyncio.get_running_loop().time()
        batch = Item("t", 10, now, now + 100, ServiceClass.BATCH)
        waiting = asyncio.create_task(turnstile.admit(batch, fleet.try_place))
        await settle()
        fleet.room = 1
        assert (await turnstile.admit(item(), fleet.try_place)).waited_s == 0
        assert not waiting.done()
        fleet.give_back(1)
        await waiting

    run_in_virtual_time(scenario())


def test_place_that_frees_by_itself_is_found_without_a_kick() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet, poll_s=0.25)
        waiting = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await asyncio.sleep(10.1)
        fleet.room = 1
        assert (await waiting).waited_s == pytest.approx(10.25)
        assert fleet.tries <= 43  # no busy loop
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_many_kicks_in_one_turn_of_the_loop_try_the_head_once() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet)
        waiting = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await settle()
        before = fleet.tries
        for _ in range(1000):
            turnstile.kick()
        await settle()
        assert fleet.tries == before + 1
        waiting.cancel()

    run_in_virtual_time(scenario())


def test_try_that_itself_kicks_does_not_spin() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet, poll_s=1e6)

        def try_place() -> int | None:
            turnstile.kick()  # as a lease that is taken and given back while it is tried
            return fleet.try_place()

        waiting = asyncio.create_task(turnstile.admit(item(), try_place))
        await settle()
        turnstile.kick()
        await settle()
        assert fleet.tries == 2
        waiting.cancel()

    run_in_virtual_time(scenario())


def test_burst_of_free_places_is_filled_by_one_kick() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet, max_queue=100, poll_s=1e6)
        waiting = [asyncio.create_task(turnstile.admit(item(), fleet.try_place)) for _ in range(100)]
        await settle()
        fleet.room = 100
        turnstile.kick()
        admitted = await asyncio.gather(*waiting)
        assert sorted(each.placement for each in admitted) == list(range(1, 101))
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_request_that_only_some_replicas_may_serve_does_not_block_the_others() -> None:
    async def scenario() -> None:
        fleet, closed = FakeFleet(), FakeFleet()
        turnstile = turnstile_of(fleet, poll_s=1e6)
        retry = asyncio.create_task(turnstile.admit(item(narrow=True), closed.try_place))
        await settle()
        fleet.room = 1
        assert await turnstile.admit(item(), fleet.try_place)
        assert not retry.done()
        closed.room = 1
        turnstile.kick()
        await retry
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_request_that_any_replica_may_serve_is_not_overtaken_by_smaller_ones() -> None:
    async def scenario() -> None:
        fleet, wide = FakeFleet(room=4), FakeFleet()
        turnstile = turnstile_of(fleet)
        large = asyncio.create_task(turnstile.admit(item(), wide.try_place))
        await settle()
        small = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await asyncio.sleep(100)
        assert not small.done()
        wide.room = 1
        await asyncio.gather(large, small)

    run_in_virtual_time(scenario())


def test_cancelled_request_leaves_the_queue() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet)
        waiting = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await settle()
        waiting.cancel()
        await settle()
        assert waiting.cancelled()
        assert turnstile.totals["cancelled"] == 1
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_cancelled_head_lets_the_next_one_be_tried() -> None:
    async def scenario() -> None:
        fleet, full = FakeFleet(room=1), FakeFleet()
        turnstile = turnstile_of(fleet, poll_s=1e6)
        head = asyncio.create_task(turnstile.admit(item(), full.try_place))
        await settle()
        second = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await settle()
        head.cancel()
        assert (await second).placement == 1

    run_in_virtual_time(scenario())


def test_place_handed_to_a_request_just_cancelled_is_given_back_and_used_by_the_next() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet, poll_s=1e6)
        first = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        second = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await settle()
        fleet.room = 1
        turnstile._pump()  # the place is handed over, but the task has not run yet
        assert fleet.held == {1}
        first.cancel()
        assert (await second).placement == 2
        assert first.cancelled()
        assert fleet.held == {2}
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_request_cancelled_before_the_heads_are_tried_is_not_tried() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet)
        waiting = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await settle()
        fleet.room, before = 1, fleet.tries
        waiting.cancel()
        turnstile._pump()  # its task has not run yet
        assert fleet.tries == before
        await settle()
        assert fleet.held == set()
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_request_that_finds_no_room_is_refused_before_its_client_gives_up() -> None:
    async def scenario() -> None:
        fleet, loop = FakeFleet(), asyncio.get_running_loop()
        turnstile = turnstile_of(fleet)
        start = loop.time()
        with pytest.raises(KvorumError) as error:
            await turnstile.admit(item(allowed_s=2.0), fleet.try_place)
        assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.value.retry_after_s is not None
        assert loop.time() - start == pytest.approx(1.8)
        assert turnstile.totals["expired"] == 1
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_without_any_replica_requests_wait_up_to_their_deadline_and_then_are_told_so() -> None:
    async def scenario() -> None:
        fleet, loop = FakeFleet(gone=True), asyncio.get_running_loop()
        turnstile = turnstile_of(fleet)
        start = loop.time()
        with pytest.raises(KvorumError) as error:
            await turnstile.admit(item(allowed_s=60.0), fleet.try_place)
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
        assert error.value.retry_after_s == 0.5
        assert loop.time() - start == pytest.approx(59.5)

    run_in_virtual_time(scenario())


def test_request_that_waits_while_every_replica_is_gone_is_served_when_one_comes() -> None:
    async def scenario() -> None:
        fleet = FakeFleet(room=1, gone=True)
        turnstile = turnstile_of(fleet, poll_s=1e6)
        waiting = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await asyncio.sleep(30)
        fleet.gone = False
        turnstile.kick()
        assert (await waiting).placement == 1

    run_in_virtual_time(scenario())


def test_queue_that_is_full_because_every_replica_is_gone_says_so() -> None:
    async def scenario() -> None:
        fleet = FakeFleet(gone=True)
        turnstile = turnstile_of(fleet, max_queue=1)
        waiting = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await settle()
        with pytest.raises(KvorumError) as error:
            await turnstile.admit(item(), fleet.try_place)
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
        waiting.cancel()

    run_in_virtual_time(scenario())


def test_displaced_request_is_told_to_come_back() -> None:
    async def scenario() -> None:
        fleet, now = FakeFleet(), asyncio.get_running_loop().time()
        turnstile = turnstile_of(fleet, max_queue=2)
        flood = [asyncio.create_task(turnstile.admit(item(), fleet.try_place)) for _ in range(2)]
        await settle()
        light = Item("light", 10, now, now + 100)
        waiting = asyncio.create_task(turnstile.admit(light, fleet.try_place))
        await settle()
        assert refused(flood[1]).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        fleet.room = 2
        turnstile.kick()
        await asyncio.gather(flood[0], waiting)
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_failure_while_placing_one_request_ends_that_one_only() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet, poll_s=1e6)

        def fails() -> int | None:
            if fleet.room == 0:
                return None
            raise ZeroDivisionError("a defect in a policy")

        broken = asyncio.create_task(turnstile.admit(item(), fails))
        whole = asyncio.create_task(turnstile.admit(item(), fleet.try_place))
        await settle()
        fleet.room = 1
        turnstile.kick()
        assert (await whole).placement == 1
        assert isinstance(broken.exception(), ZeroDivisionError)
        assert turnstile.totals["failed"] == 1
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_closing_ends_those_that_wait_and_those_that_come() -> None:
    async def scenario() -> None:
        fleet = FakeFleet()
        turnstile = turnstile_of(fleet)
        waiting = [asyncio.create_task(turnstile.admit(item(), fleet.try_place)) for _ in range(3)]
        await settle()

        def going() -> KvorumError:
            return KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.ROUTER_DRAINING, "going away")

        turnstile.close(going)
        turnstile.close(going)
        await settle()
        assert {refused(task).reason for task in waiting} == {common_pb2.ROUTER_DRAINING}
        fleet.room = 1
        with pytest.raises(KvorumError, match="going away"):
            await turnstile.admit(item(), fleet.try_place)
        assert turnstile.totals["closed"] == 3
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())


def test_poll_without_a_period_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        turnstile_of(FakeFleet(), poll_s=0.0)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_any_mix_of_ends_leaves_no_place_held_and_nothing_waiting(seed: int, close: bool) -> None:
    """Served, cancelled at any moment, timed out, failed, displaced, replicas that come and go."""
    rng = random.Random(seed)

    async def scenario() -> None:
        fleet = FakeFleet(room=2)
        turnstile = turnstile_of(fleet, max_queue=6)
        loop = asyncio.get_running_loop()

        def sometimes_fails() -> int | None:
            if rng.random() < 0.05:
                raise ZeroDivisionError
            return fleet.try_place()

        async def request() -> None:
            now, kind = loop.time(), rng.choice(list(ServiceClass))
            each = Item(rng.choice("abc"), rng.randint(1, 50), now, now + rng.uniform(0.5, 8), kind)
            admitted = await turnstile.admit(each, sometimes_fails)
            try:
                await asyncio.sleep(rng.choice([0, 0, 0.3, 1.0]))
            finally:
                fleet.give_back(admitted.placement)

        tasks = []
        for _ in range(30):
            tasks.append(asyncio.create_task(request()))
            await asyncio.sleep(rng.choice([0, 0, 0.1, 0.5]))
            assert len(turnstile) <= 6
            assert len(fleet.held) <= 2
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            if rng.random() < 0.2:
                fleet.gone = not fleet.gone
        if close:
            turnstile.close(lambda: KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.ROUTER_DRAINING, ""))
        await asyncio.wait(tasks)  # every request ends by its deadline at the latest
        unexpected = [
            error
            for task in tasks
            if not task.cancelled()
            and (error := task.exception()) is not None
            and not isinstance(error, KvorumError | ZeroDivisionError)
        ]
        assert unexpected == []
        assert fleet.held == set()
        assert_nothing_left(turnstile)

    run_in_virtual_time(scenario())
