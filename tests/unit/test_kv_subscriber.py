"""The subscriber hands over every batch once and in order, or says that it could not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fakes_kv import FakePublisher, removed, stored

from workers import kv_events
from workers.journal import Journal
from workers.kv_events import KvEvents
from workers.resident import ResidentBlocks

A, B, C = list(range(4)), list(range(10, 14)), list(range(20, 24))


@dataclass
class Line:
    """A publisher, a subscriber and what it feeds."""

    publisher: FakePublisher
    events: KvEvents
    resident: ResidentBlocks
    resets: int = 0

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(1000):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("did not come about within 10 s")


@pytest.fixture
async def line(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    monkeypatch.setattr(kv_events, "_CHECK_S", 0.1)
    monkeypatch.setattr(kv_events, "_MEND_S", 0.1)
    monkeypatch.setattr(kv_events, "_REPLAY_TIMEOUT_S", 0.5)
    resident = ResidentBlocks("revision", Journal())

    async def mend() -> bool:
        before = resident.resets
        opened.resets += 1
        resident.reset_done(before)
        return True

    events = KvEvents(resident, lambda: None, mend)
    publisher = FakePublisher(events.open())
    opened = Line(publisher, events, resident)
    running = asyncio.create_task(events.run())
    await events.catch_up()  # both sockets are connected once a replay was answered and a batch has come
    while not resident.blocks():
        await publisher.publish(stored([9] * 4))
        await asyncio.sleep(0.05)
    yield opened
    running.cancel()
    await asyncio.wait([running])
    events.close()
    await publisher.stop()


async def test_live_events_arrive(line: Line) -> None:
    event = stored(A)
    await line.publisher.publish(event)
    await line.until(lambda: line.resident.blocks() == 2)
    await line.publisher.publish(removed(*event.block_hashes))
    await line.until(lambda: line.resident.blocks() == 1)
    assert line.resident.degraded == ""


async def test_a_gap_is_filled_by_a_replay(line: Line) -> None:
    event = stored(A)
    await line.publisher.publish(event)
    await line.publisher.publish(removed(*event.block_hashes), lost=True)
    await line.publisher.publish(stored(B), lost=True)
    await line.publisher.publish(stored(C))
    await line.until(lambda: line.resident.blocks() == 3)  # 9, B, C: the removal was not overtaken
    assert line.resident.degraded == ""


async def test_a_loss_at_the_end_of_a_burst_is_found_without_a_next_event(line: Line) -> None:
    await line.publisher.publish(stored(A))
    await line.publisher.publish(stored(B), lost=True)
    await line.until(lambda: line.resident.blocks() == 3)
    assert line.resident.degraded == ""


async def test_batches_that_come_twice_are_applied_once(line: Line) -> None:
    event = stored(A)
    await line.publisher.publish(event)
    number = line.publisher.next - 1
    await line.publisher.publish(removed(*event.block_hashes))
    await line.publisher.again(number)
    await line.publisher.publish(stored(B))
    await line.until(lambda: line.resident.blocks() == 2)
    assert line.resident.prefix(line.resident.prompt_keys(np.array(A))) == 0


async def test_a_gap_that_no_replay_fills_empties_the_view_until_the_cache_is_reset(line: Line) -> None:
    await line.publisher.publish(stored(A), lost=True, forgotten=True)
    await line.publisher.publish(stored(B))
    await line.until(lambda: line.resets == 1)
    assert line.resident.blocks() == 0
    assert line.resident.degraded == ""


async def test_while_events_keep_coming_a_lossy_view_says_so_and_goes_on(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MEND_S", 30)
    await line.publisher.publish(stored(A), lost=True, forgotten=True)
    await line.publisher.publish(stored(B))
    await line.until(lambda: "1 batches of KV events from number" in line.resident.degraded)
    await line.publisher.publish(stored(C))
    await line.until(lambda: line.resident.blocks() == 2)


async def test_a_publisher_that_died_silently_is_noticed(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MEND_S", 30)
    await line.publisher.publish(stored(A))
    line.publisher.die_silently()
    await line.until(lambda: "does not answer" in line.resident.degraded)
    assert line.resident.blocks() == 0


@pytest.mark.parametrize("frames", [(b"x",), (b"", b"short", b""), (b"", b"", b"", b"")])
async def test_what_is_no_batch_is_not_trusted(
    line: Line, frames: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MEND_S", 30)
    await line.publisher.raw(*frames)
    await line.until(lambda: line.resident.degraded != "")
    assert line.resident.blocks() == 0


async def test_an_unreadable_batch_is_a_loss_and_the_next_ones_are_followed(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MEND_S", 30)
    await line.publisher.raw(b"", line.publisher.next.to_bytes(8, "big"), b"\xc1")
    line.publisher.next += 1
    await line.publisher.publish(stored(B))
    await line.until(lambda: "unreadable" in line.resident.degraded)
    await line.until(lambda: line.resident.blocks() == 1)


async def test_a_fault_of_the_subscriber_shows_as_degraded(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(events: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(line.resident, "apply", broken)
    await line.publisher.publish(stored(A))
    await line.until(lambda: "failed: a bug" in line.resident.degraded)
    assert line.resident.blocks() == 0
    assert not line.resident.can_mend


def test_a_folder_too_deep_for_a_socket_is_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    events = KvEvents(ResidentBlocks("revision", Journal()), lambda: None, lambda: asyncio.sleep(0, False))
    with pytest.raises(OSError, match="TMPDIR"):
        events.open()
    assert list(deep.iterdir()) == []


def test_the_sockets_leave_no_folder_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    events = KvEvents(ResidentBlocks("revision", Journal()), lambda: None, lambda: asyncio.sleep(0, False))
    events.open()
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o700]
    events.close()
    assert list(tmp_path.iterdir()) == []
