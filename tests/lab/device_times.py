"""How much of an AllReduce the overlap hides on a GPU, what that costs, and whether the meter tells it.

The AllReduce is a sleeping kernel of one thread that lasts as long as one over a link of a given rate would:
it has no part in the GPU's memory traffic, so real ones hide less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.lab.device_checks import Results, expect
from tests.lab.device_model import Blocking, Layer, Machine, Model, Shape, random_inputs, random_layers
from workers.overlap import decoder as decoders
from workers.overlap.channel import Channel, Reduction, StreamChannel
from workers.overlap.meter import StreamMeter
from workers.overlap.plan import CHUNK_COUNTS
from workers.overlap.report import StepRecord
from workers.overlap.streams import StreamClock
from workers.overlap.timeline import bound

COUNTS = tuple(count for count in CHUNK_COUNTS if count > 1)


@dataclass(frozen=True)
class Link:
    """Two ranks each send every byte once: seconds = latency + bytes / rate."""

    name: str
    latency_s: float
    bytes_per_s: float

    def seconds(self, tensor: torch.Tensor) -> float:
        size: int = tensor.numel() * tensor.element_size()
        return self.latency_s + size / self.bytes_per_s


LINKS = (Link("25 GB/s", 20e-6, 25e9), Link("100 GB/s", 15e-6, 100e9))


class Rig:
    """A model of `repeats` times its layers on a machine, and its passes of one size over a link."""

    def __init__(self, machine: Machine, shape: Shape, repeats: int) -> None:
        self.machine, self.shape = machine, shape
        self.layers: list[Layer] = random_layers(shape, machine.name) * repeats
        self.model = Model(self.layers)
        self.clock = StreamClock(machine.device)
        self.stream = machine.new_stream()

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return random_inputs(self.shape, tokens, self.machine.name)

    def channel(self, link: Link, chunks: int, priority: int | None = None) -> Channel:
        def sleep(tensor: torch.Tensor) -> None:
            self.machine.sleep(link.seconds(tensor))

        if chunks == 1:
            return Blocking(sleep, self.clock)
        stream = self.stream if priority is None else self.machine.new_stream(priority)
        return StreamChannel(sleep, stream, self.machine.device, self.clock)

    def run(self, inputs: tuple[torch.Tensor, torch.Tensor], channel: Channel, chunks: int) -> torch.Tensor:
        return decoders.run(self.model, channel, *inputs, chunks)

    def timed(
        self, inputs: tuple[torch.Tensor, torch.Tensor], channel: Channel, chunks: int, *, marks: bool
    ) -> tuple[float, float, float, float]:
        """(pass, AllReduce, exposed; all on the device, launching on the CPU): seconds of one pass."""
        self.machine.synchronize()
        before = time.perf_counter()
        with self.machine.launching(), self.clock.timing(all_reduces=marks) as taken:
            self.run(inputs, channel, chunks)
        launched_s = time.perf_counter() - before
        self.machine.synchronize()
        times = self.clock.read(taken)
        return times.forward_s, times.all_reduce_s, times.exposed_s, launched_s

    def attention_s(self, tokens: int) -> float:
        """Seconds of one layer's."""
        hidden, positions = self.inputs(tokens)
        found = []
        for _ in range(6):
            with self.machine.launching():
                heads, _residual = self.layers[0].qkv(positions, hidden, None)
                with self.clock.timing(all_reduces=False) as taken:
                    self.layers[0].attention(heads)
            self.machine.synchronize()
            found.append(self.clock.read(taken).forward_s)
        return statistics.median(found[1:])


def hiding(machine: Machine, shape: Shape, repeats: int, sizes: tuple[int, ...], trials: int) -> Results:
    """Stock and overlapped passes in turns: medians by link, size and number of chunks."""
    rig = Rig(machine, shape, repeats)
    layers = len(rig.layers)
    rows = []
    for tokens in sizes:
        attention_s = rig.attention_s(tokens)
        inputs = rig.inputs(tokens)
        for link in LINKS:
            channels = {count: rig.channel(link, count) for count in (1, *COUNTS)}
            passes: dict[int, list[float]] = {count: [] for count in channels}
            launches: dict[int, list[float]] = {count: [] for count in channels}
            for trial in range(1 + trials):
                for count, channel in channels.items():
                    taken = rig.timed(inputs, channel, count, marks=False)
                    if trial:
                        passes[count].append(taken[0])
                        launches[count].append(taken[3])
            marked = {
                count: rig.timed(inputs, channel, count, marks=True) for count, channel in channels.items()
            }
            stock_s = statistics.median(passes[1])
            all_reduce_s = marked[1][1] / (2 * layers)
            compute_s = max(0.0, stock_s / layers - attention_s - 2 * all_reduce_s)
            best = bound(attention_s, compute_s, all_reduce_s)
            for count in channels:
                found_s = statistics.median(passes[count])
                rows.append(
                    {
                        "link": link.name,
                        "tokens": tokens,
                        "chunks": count,
                        "pass_ms": found_s * 1e3,
                        "spread_ms": (max(passes[count]) - min(passes[count])) * 1e3,
                        "speedup": stock_s / found_s if found_s else 1.0,
                        "bound": best,
                        "hidden": 1 - marked[count][2] / marked[count][1] if marked[count][1] else None,
                        "launch_ms": statistics.median(launches[count]) * 1e3,
                        "attention_ms": attention_s * 1e3,
                        "compute_ms": compute_s * 1e3,
                        "all_reduce_ms": all_reduce_s * 1e3,
                    }
                )
    return {"layers": layers, "rows": rows}


def print_hiding(found: Results) -> None:
    """The table: one line a link and size, the numbers of chunks beside one another."""
    print(f"passes of {found['layers']} layers, ms; in brackets the speed-up; AllReduces are emulated")
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["link"], row["tokens"]), []).append(row)
    for (link, tokens), rows in groups.items():
        stock, *others = rows
        best = min(others, key=lambda row: row["pass_ms"])
        cells = "  ".join(f"K={r['chunks']} {r['pass_ms']:.2f} ({r['speedup']:.2f})" for r in others)
        print(
            f"{link:>9} {tokens:5d}: stock {stock['pass_ms']:.2f}  {cells} | bound {stock['bound']:.2f}, "
            f"hidden at K={best['chunks']} {best['hidden'] or 0:.0%}; a layer: attention "
            f"{stock['attention_ms']:.3f}, other {stock['compute_ms']:.3f}, "
            f"AllReduce {stock['all_reduce_ms']:.3f}; "
            f"launch {stock['launch_ms']:.1f} -> {best['launch_ms']:.1f}"
        )


def priorities(machine: Machine, shape: Shape, repeats: int, tokens: int, trials: int) -> Results:
    """The channel's stream at high and at ordinary priority, in turns: median ms of a pass in 4 chunks."""
    rig, link = Rig(machine, shape, repeats), LINKS[0]
    inputs = rig.inputs(tokens)
    found: dict[int, list[float]] = {-1: [], 0: []}
    channels = {priority: rig.channel(link, 4, priority) for priority in found}
    for _ in range(1 + trials):
        for priority, channel in channels.items():
            found[priority].append(rig.timed(inputs, channel, 4, marks=False)[0])
    return {f"priority {key}": statistics.median(values[1:]) * 1e3 for key, values in found.items()}


_HEAD_START_S = 0.25


class Told:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def meter_agrees(machine: Machine, shape: Shape, repeats: int, tokens: int) -> Results:
    """What StreamMeter tells of a timed pass, beside the wall clock and torch's profiler."""
    rig, link, chunks = Rig(machine, shape, repeats), LINKS[0], 4
    told = Told()
    meter = StreamMeter(rig.clock, told)
    channel, inputs = rig.channel(link, chunks), rig.inputs(tokens)
    walls = []

    def step() -> None:
        machine.synchronize()
        before = time.perf_counter()
        meter.expect((("request", tokens),))
        with machine.launching(), meter.step(tokens, chunks):
            rig.run(inputs, channel, chunks)
        machine.synchronize()
        walls.append(time.perf_counter() - before)
        meter.settle()

    for _ in range(StreamMeter.FIRST + 4):
        step()
    expect(len(told.records) == len(walls), f"{len(told.records)} of {len(walls)} steps were told of")
    timed = [record for record in told.records if record.all_reduce_s is not None]
    expect(len(timed) == StreamMeter.FIRST, f"{len(timed)} steps were timed, not {StreamMeter.FIRST}")
    last = timed[-1]
    assert last.all_reduce_s is not None
    assert last.exposed_s is not None
    found: Results = {
        "timed_pass_ms": last.forward_s * 1e3,
        "untimed_pass_ms": told.records[-1].forward_s * 1e3,
        "timed_wall_ms": walls[StreamMeter.FIRST - 1] * 1e3,
        "all_reduce_ms": last.all_reduce_s * 1e3,
        "exposed_ms": last.exposed_s * 1e3,
    }
    for name, marks in (("untimed_launch_ms", False), ("timed_launch_ms", True)):
        launches = [rig.timed(inputs, channel, chunks, marks=marks)[3] for _ in range(5)]
        found[name] = statistics.median(launches) * 1e3
    if not machine.real:
        return found
    busy_s, idle_s = _profiled(machine, lambda: rig.run(inputs, channel, chunks))
    found |= {"profiled_all_reduce_ms": busy_s * 1e3, "profiled_idle_ms": idle_s * 1e3}
    wall_s = walls[StreamMeter.FIRST - 1]
    expect(0 <= wall_s - last.forward_s < 0.1 * wall_s + 1e-3, f"the pass is not its wall time: {found}")
    expect(abs(busy_s - last.all_reduce_s) < 0.1 * busy_s, f"AllReduces differ from the profiler's: {found}")
    expect(
        abs(idle_s - last.exposed_s) < 0.1 * last.forward_s,
        f"the exposed part differs from the computing stream's idle time: {found}",
    )
    return found


def _profiled(machine: Machine, run: Callable[[], object]) -> tuple[float, float]:
    """Seconds that sleeping kernels ran, and in which no other kernel did, by torch's profiler.

    The device sleeps first, while the CPU launches: a profiled launch is slow, and its gaps are no waiting.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _warm_up in range(2):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            machine.sleep(_HEAD_START_S)
            run()
            torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    sleeping = sorted((event for event in kernels if "spin" in event.name), key=_elapsed)[:-1]
    expect(bool(sleeping), f"no sleeping kernel among {sorted({event.name for event in kernels})[:8]}")
    computing = sorted(
        (event.time_range.start, event.time_range.end) for event in kernels if "spin" not in event.name
    )
    busy_us, reached, last = 0.0, computing[0][0], max(end for _start, end in computing)
    for start, end in computing:
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    idle_us = last - computing[0][0] - busy_us
    return sum(map(_elapsed, sleeping)) / 1e6, idle_us / 1e6


def _elapsed(event: Any) -> float:
    return float(event.time_range.elapsed_us())


class _Recording(StreamChannel):
    """Tells the allocator of every tensor that the channel's stream uses it."""

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        self._device.keep(tensor, self._stream)
        return super().all_reduce(tensor)


def memory(machine: Machine, shape: Shape, repeats: int, tokens: int) -> Results:
    """Peak memory of a pass beyond what lay there before, MB: stock, ours, and with record_stream instead."""
    rig, link = Rig(machine, shape, repeats), LINKS[0]
    inputs = rig.inputs(tokens)

    def sleep(tensor: torch.Tensor) -> None:
        machine.sleep(link.seconds(tensor))

    ways: dict[str, tuple[Channel, int]] = {
        "stock": (Blocking(sleep), 1),
        "overlapped": (StreamChannel(sleep, rig.stream, machine.device), 4),
        "overlapped, record_stream": (_Recording(sleep, rig.stream, machine.device), 4),
    }
    found: Results = {"layers": len(rig.layers), "tokens": tokens}
    for name, (channel, chunks) in ways.items():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        rig.run(inputs, channel, chunks)
        torch.cuda.synchronize()
        found[name] = (torch.cuda.max_memory_reserved() - before) / 1e6
    expect(
        found["overlapped"] < 1.5 * found["stock"] + 64,
        f"an overlapped pass takes much more memory than a stock one: {found}",
    )
    return found
