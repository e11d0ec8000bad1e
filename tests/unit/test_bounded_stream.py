"""A stream ends between two messages: gRPC has no status for a call whose message is being written."""

from __future__ import annotations

import asyncio

import pytest

from router.bounded_stream import BoundedStream


class FakeCall:
    """Writes end when they are let."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.written: list[bytes] = []
        self.torn = 0

    async def write(self, message: bytes) -> None:
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.torn += 1
            raise
        self.written.append(message)


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_message_being_written_is_written_whole_and_no_other_after_it() -> None:
    call = FakeCall()
    stream = BoundedStream(call.write, later(60))

    async def run() -> None:
        async with stream:
            await stream.write(b"1")
            await stream.write(b"2")

    running = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    stream.end()
    await asyncio.sleep(0.01)
    assert not running.done()
    call.free.set()
    with pytest.raises(TimeoutError):
        await running
    assert (call.written, call.torn) == ([b"1"], 0)


@pytest.mark.parametrize("told", [True, False], ids=["told to end", "deadline"])
async def test_stream_that_waits_for_something_else_ends_at_once(told: bool) -> None:
    stream = BoundedStream(FakeCall().write, later(60 if told else 0.01))

    async def run() -> None:
        async with stream:
            await asyncio.Event().wait()

    running = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    if told:
        stream.end()
        stream.end()
    with pytest.raises(TimeoutError):
        await running


async def test_client_that_never_reads_does_not_hold_a_stream_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.bounded_stream._LAST_WRITE_S", 0.02)
    call = FakeCall()
    stream = BoundedStream(call.write, later(0.01))

    async def run() -> None:
        async with stream:
            await stream.write(b"1")

    with pytest.raises(TimeoutError):
        await run()
    assert call.torn == 1


async def test_cancelling_the_task_cancels_the_write() -> None:
    call = FakeCall()
    stream = BoundedStream(call.write, later(60))

    async def run() -> None:
        async with stream:
            await stream.write(b"1")

    running = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert call.torn == 1


async def test_finished_stream_cannot_be_ended_again() -> None:
    call = FakeCall()
    call.free.set()
    stream = BoundedStream(call.write, later(0.01))
    async with stream:
        await stream.write(b"1")
    stream.end()
    await asyncio.sleep(0.02)
    assert call.written == [b"1"]
