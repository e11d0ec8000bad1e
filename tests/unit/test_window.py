"""Requests to one replica are held to go together, never longer than they were promised."""

from __future__ import annotations

import asyncio

import pytest
from fakes_clock import run_in_virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st

from router.gather import Gather
from router.window import Window


def test_window_that_is_off_holds_nothing() -> None:
    window: Window[str] = Window()
    assert window.off
    assert window.add("r0", "a", 10_000, now=0.0) == ["a"]
    assert (len(window), window.next_due()) == (0, None)


def test_token_limit_alone_leaves_the_window_off() -> None:
    window: Window[str] = Window(max_wait_ms=0, max_batch_tokens=4096)
    assert window.off
    assert window.add("r0", "a", 1, now=0.0) == ["a"]


@pytest.mark.parametrize("limits", [(-1, 0), (0, -1), (float("nan"), 0), (float("inf"), 0)])
def test_limits_that_make_no_sense_are_refused_with_their_value(limits: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="expected 0"):
        Window(*limits)


def test_batch_goes_when_its_first_request_has_waited_long_enough() -> None:
    window: Window[str] = Window(max_wait_ms=20)
    assert window.add("r0", "a", 5, now=1.0) == []
    assert window.add("r0", "b", 5, now=1.015) == []
    assert window.due(1.019) == []
    assert window.due(1.02) == [("r0", ["a", "b"])]
    assert len(window) == 0


def test_batch_goes_at_once_when_its_tokens_are_gathered() -> None:
    window: Window[str] = Window(max_wait_ms=20, max_batch_tokens=100)
    assert window.add("r0", "a", 60, now=1.0) == []
    assert window.add("r1", "x", 60, now=1.0) == []
    assert window.add("r0", "b", 40, now=1.0) == ["a", "b"]
    assert len(window) == 1


def test_request_that_comes_after_the_batch_was_due_takes_it_along() -> None:
    window: Window[str] = Window(max_wait_ms=20)
    window.add("r0", "a", 5, now=1.0)
    assert window.add("r0", "b", 5, now=1.5) == ["a", "b"]


def test_cancelled_request_frees_its_tokens_but_not_the_others_time() -> None:
    window: Window[str] = Window(max_wait_ms=20, max_batch_tokens=100)
    window.add("r0", "a", 60, now=1.0)
    window.add("r0", "b", 30, now=1.01)
    assert window.discard("r0", "a")
    assert not window.discard("r0", "a")
    assert window.add("r0", "c", 60, now=1.011) == []
    assert window.due(1.02) == [("r0", ["b", "c"])]


def test_replica_that_goes_hands_back_what_was_held_for_it() -> None:
    window: Window[str] = Window(max_wait_ms=20)
    window.add("r0", "a", 5, now=1.0)
    window.add("r1", "b", 5, now=1.0)
    assert window.take("r0") == ["a"]
    assert window.take("r0") == []
    assert len(window) == 1


_steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "discard", "take"]),
        st.sampled_from(["r0", "r1", "r2"]),
        st.integers(1, 80),
        st.floats(0, 0.03),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(_steps, st.sampled_from([0, 100]))
def test_every_request_leaves_once_and_in_time_whatever_happens(
    steps: list[tuple[str, str, int, float]], max_tokens: int
) -> None:
    window: Window[int] = Window(max_wait_ms=20, max_batch_tokens=max_tokens)
    held: dict[int, tuple[str, float]] = {}
    now = 0.0

    def leave(items: list[int]) -> None:
        for item in items:
            del held[item]  # KeyError: left twice

    def pass_time(until: float) -> None:
        """As a timer does: `due` is called at every `next_due`."""
        while (due := window.next_due()) is not None and due <= until:
            for _, items in window.due(due):
                assert all(due <= held[item][1] + 0.02 for item in items)
                leave(items)

    for number, (step, replica, tokens, elapsed) in enumerate(steps):
        now += elapsed
        pass_time(now)
        if step == "add":
            held[number] = (replica, now)
            leave(window.add(replica, number, tokens, now))
        elif step == "take":
            leave(window.take(replica))
        elif mine := [item for item, (where, _) in held.items() if where == replica]:
            assert window.discard(replica, mine[0])
            leave(mine[:1])
        assert len(window) == len(held)
    pass_time(now + 1)
    assert held == {}
    assert (len(window), window.next_due()) == (0, None)


def test_gathered_requests_go_together_after_the_wait_of_the_first() -> None:
    async def scenario() -> list[float]:
        gather = Gather(max_wait_ms=20)
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def request(after_s: float) -> float:
            await asyncio.sleep(after_s)
            await gather.wait("r0", 10)
            return round(loop.time() - start, 6)

        went = await asyncio.gather(request(0.0), request(0.015), request(0.03))
        assert len(gather) == 0
        return list(went)

    assert run_in_virtual_time(scenario()) == [0.02, 0.02, 0.05]


def test_gather_that_is_off_does_not_suspend() -> None:
    wait = Gather().wait("r0", 10)
    with pytest.raises(StopIteration) as end:
        wait.send(None)
    assert end.value.value == 0.0


def test_cancelled_request_leaves_the_gathering_and_the_others_go_on() -> None:
    async def scenario() -> None:
        gather = Gather(max_wait_ms=20, max_batch_tokens=100)
        first = asyncio.create_task(gather.wait("r0", 60))
        second = asyncio.create_task(gather.wait("r0", 10))
        await asyncio.sleep(0)
        assert len(gather) == 2
        first.cancel()
        await asyncio.sleep(0)
        assert len(gather) == 1
        assert await second > 0
        assert first.cancelled()
        assert len(gather) == 0

    run_in_virtual_time(scenario())


def test_requests_held_for_a_replica_that_goes_wait_no_longer() -> None:
    async def scenario() -> float:
        gather = Gather(max_wait_ms=1e6)
        held = asyncio.create_task(gather.wait("r0", 60))
        await asyncio.sleep(0)
        gather.let_go("r0")
        return await held

    assert run_in_virtual_time(scenario()) == 0.0
