"""Where a step's time went: what a meter tells, on a CPU and on an accelerator's streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fakes_streams import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.overlap import decoder as decoders
from workers.overlap import schedule
from workers.overlap.channel import ChannelClock, StreamChannel
from workers.overlap.decoder import Heads
from workers.overlap.meter import CpuMeter, StreamMeter
from workers.overlap.report import PathTotals, StepRecord
from workers.overlap.schedule import Action, Op
from workers.overlap.streams import StreamClock
from workers.overlap.timeline import simulate

REQUESTS = (("a-00000000", 8),)


class Told:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


class Rig:
    """A simulated accelerator with a channel whose AllReduces take `all_reduce_s`, and its meter."""

    def __init__(self, seed: int = 0, all_reduce_s: float = 1.0) -> None:
        self.device = FakeDevice(seed)
        clock = StreamClock(self.device)
        self.told = Told()
        self.meter = StreamMeter(clock, self.told)
        self.channel = StreamChannel(
            lambda _tensor: self.device.spend(all_reduce_s), self.device.new_stream(), self.device, clock
        )

    @contextmanager
    def step(self, chunks: int = 2, tokens: int = 8) -> Iterator[None]:
        """One of the engine's, announced and launched."""
        self.meter.expect(REQUESTS)
        with self.meter.step(tokens, chunks):
            yield

    def reduce(self) -> None:
        self.channel.all_reduce(torch.zeros(1)).wait()

    def settle(self) -> list[StepRecord]:
        self.device.finish()
        self.meter.settle()
        return self.told.records


class TimedLayer:
    """Layers that compute nothing and take a given time for it."""

    def __init__(self, device: FakeDevice, seconds: dict[Action, float]) -> None:
        self._device, self._seconds = device, seconds

    def qkv(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Heads, torch.Tensor]:
        self._device.spend(self._seconds[Action.QKV])
        return (hidden, hidden, hidden), hidden

    def attention(self, heads: Heads) -> torch.Tensor:
        self._device.spend(self._seconds[Action.ATTENTION])
        return heads[0]

    def o_proj(self, attended: torch.Tensor) -> torch.Tensor:
        self._device.spend(self._seconds[Action.O_PROJ])
        return attended

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._device.spend(self._seconds[Action.MLP])
        return hidden, residual


class TimedDecoder:
    mlp_chunked = True

    def __init__(self, layers: list[TimedLayer], device: FakeDevice, norm_s: float) -> None:
        self.layers, self._device, self._norm_s = layers, device, norm_s

    def norm(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._device.spend(self._norm_s)
        return hidden


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 9), min_size=6, max_size=6), st.integers(2, 5))
def test_times_of_a_pass_are_those_of_its_schedule_on_two_resources(
    seed: int, costs: list[int], chunks: int
) -> None:
    kinds = (Action.QKV, Action.ATTENTION, Action.O_PROJ, Action.MLP, Action.NORM, Action.REDUCE_MLP)
    seconds = dict(zip(kinds, map(float, costs), strict=True))
    seconds[Action.REDUCE_ATTENTION] = seconds[Action.REDUCE_MLP]

    def cost(op: Op) -> float:
        return seconds[op.action]

    rig = Rig(seed, seconds[Action.REDUCE_MLP])
    decoder = TimedDecoder(
        [TimedLayer(rig.device, seconds) for _ in range(3)], rig.device, seconds[Action.NORM]
    )
    with torch.no_grad(), rig.device, rig.step(chunks):
        decoders.run(decoder, rig.channel, torch.zeros(10, 2), torch.arange(10), chunks)
    [record] = rig.settle()
    expected = simulate(schedule.forward(3, chunks), cost)
    assert record.forward_s == pytest.approx(expected.total_s)
    assert record.all_reduce_s == pytest.approx(expected.channel_s)
    assert record.exposed_s == pytest.approx(expected.exposed_s)


def lazy() -> Rig:
    """A rig whose device begins only when it must."""
    return next(rig for rig in map(Rig, range(50)) if rig.device.lazy)


def test_step_is_told_of_when_a_later_one_finds_it_done() -> None:
    rig = lazy()
    with rig.step():
        rig.reduce()
    rig.meter.expect(REQUESTS)
    assert rig.told.records == []
    assert rig.meter.overlapped == PathTotals()
    rig.device.finish()
    rig.meter.expect(REQUESTS)
    [record] = rig.told.records
    assert (record.number, record.tokens, record.chunks, record.requests) == (1, 8, 2, REQUESTS)
    assert rig.meter.overlapped.steps == 1


def test_steps_are_told_of_in_their_order() -> None:
    rig = lazy()
    for tokens in (5, 6, 7):
        with rig.step(tokens=tokens):
            rig.reduce()
    assert [(record.number, record.tokens) for record in rig.settle()] == [(1, 5), (2, 6), (3, 7)]


def test_all_reduces_are_timed_in_the_first_steps_and_then_in_a_sample_of_each_path() -> None:
    rig = Rig()
    rig.meter.watch(SimpleNamespace(all_reduce=None))
    for chunks in (2, 1) * 130:
        with rig.step(chunks):
            pass
    records = rig.settle()
    assert len(records) == 260
    for path in ([r for r in records if r.chunks == 1], [r for r in records if r.chunks == 2]):
        timed = [number for number, r in enumerate(path) if r.all_reduce_s is not None]
        assert timed == [0, 1, 2, 3, 64, 128]
        assert timed == [number for number, r in enumerate(path) if r.exposed_s is not None]
    assert rig.meter.overlapped.timed_steps == rig.meter.stock.timed_steps == 6


def test_step_whose_all_reduces_are_not_timed_tells_its_duration_and_no_more() -> None:
    rig = Rig(all_reduce_s=2.0)
    for _ in range(10):
        with rig.step():
            rig.device.spend(1.0)
            rig.reduce()
    records = rig.settle()
    assert [record.forward_s for record in records] == pytest.approx([3.0] * 10)
    assert [record.all_reduce_s for record in records] == [2.0] * 4 + [None] * 6
    assert rig.meter.overlapped == PathTotals(10, 80, 30.0, 8.0, 8.0, timed_steps=4)


def test_stock_step_with_nothing_to_watch_tells_no_all_reduce() -> None:
    rig = Rig()
    with rig.step(chunks=1):
        rig.device.spend(1.0)
    [record] = rig.settle()
    assert (record.forward_s, record.all_reduce_s, record.exposed_s) == (1.0, None, None)
    assert rig.meter.stock.timed_steps == 0


def test_watched_blocking_all_reduce_is_exposed_and_its_result_is_passed_on() -> None:
    rig = Rig()

    def all_reduce(tensor: str) -> str:
        rig.device.spend(2.0)
        return f"sum of {tensor}"

    communicator = SimpleNamespace(all_reduce=all_reduce)
    rig.meter.watch(communicator)
    with rig.step(chunks=1):
        rig.device.spend(1.0)
        assert communicator.all_reduce("shares") == "sum of shares"
    [record] = rig.settle()
    assert (record.forward_s, record.all_reduce_s, record.exposed_s) == (3.0, 2.0, 2.0)


def test_pass_without_requests_places_no_mark() -> None:
    rig = Rig()
    with rig.meter.step(8, 2):
        rig.reduce()
    assert rig.settle() == []
    assert not any(event.timing for event in rig.device.events)
    assert rig.meter.overlapped.steps == 0


def test_step_that_raises_is_not_counted_and_marks_nothing_after_it() -> None:
    rig = Rig()
    with pytest.raises(RuntimeError, match="a link is gone"), rig.step():
        raise RuntimeError("a link is gone")
    before = sum(event.timing for event in rig.device.events)
    rig.reduce()
    assert sum(event.timing for event in rig.device.events) == before
    with rig.step():
        rig.reduce()
    [record] = rig.settle()
    assert (record.number, record.all_reduce_s) == (1, 1.0)


def test_steps_in_flight_are_bounded_by_waiting_for_the_oldest() -> None:
    rig = lazy()
    for _ in range(StreamMeter.IN_FLIGHT):
        with rig.meter.step(8, 2):
            pass
        with rig.step():
            rig.reduce()
    assert rig.told.records == []
    with rig.step():
        rig.reduce()
    assert rig.told.records[0].number == 1


def test_events_are_used_again() -> None:
    rig = Rig()
    counts = []
    for _ in range(StreamMeter.FIRST):
        with rig.step():
            rig.reduce()
            rig.reduce()
        rig.settle()
        counts.append(len(rig.device.events))
    assert counts == counts[:1] * StreamMeter.FIRST


def test_cpu_step_tells_its_channels_times_and_counts_them() -> None:
    clock, told = ChannelClock(), Told()
    meter = CpuMeter(clock, told)
    meter.expect(REQUESTS)
    with meter.step(8, 2):
        clock.served(issued=1.0, done=3.0)
        clock.served(issued=2.0, done=4.0)
        clock.waited_s += 0.5
    [record] = told.records
    assert (record.number, record.tokens, record.chunks, record.requests) == (1, 8, 2, REQUESTS)
    assert (record.all_reduce_s, record.exposed_s) == (3.0, 0.5)
    assert record.forward_s > 0
    assert meter.overlapped == PathTotals(1, 8, record.forward_s, 3.0, 0.5, timed_steps=1)
    assert meter.stock == PathTotals()


def test_cpu_step_without_requests_or_that_raises_is_not_counted() -> None:
    told = Told()
    meter = CpuMeter(ChannelClock(), told)
    with meter.step(8, 1):
        pass
    meter.expect(REQUESTS)
    with pytest.raises(RuntimeError, match="a link is gone"), meter.step(8, 1):
        raise RuntimeError("a link is gone")
    assert told.records == []


def test_cpu_stock_step_knows_its_all_reduces_only_when_they_are_watched() -> None:
    told = Told()
    meter = CpuMeter(ChannelClock(), told)
    communicator = SimpleNamespace(all_reduce=lambda tensor: f"sum of {tensor}")
    for watched in (False, True):
        if watched:
            meter.watch(communicator)
        meter.expect(REQUESTS)
        with meter.step(8, 1):
            assert communicator.all_reduce("shares") == "sum of shares"
    unwatched, seen = told.records
    assert unwatched.all_reduce_s is unwatched.exposed_s is None
    assert seen.all_reduce_s is not None
    assert 0 < seen.all_reduce_s <= seen.forward_s
    assert seen.exposed_s == seen.all_reduce_s
    assert meter.stock.timed_steps == 1
