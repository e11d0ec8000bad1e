"""A Llama-like decoder in plain torch, and the machines it runs on: a GPU, or its simulation on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as f

from tests.unit.fakes_streams import FakeDevice, FakeEvent, FakeStream
from workers.overlap.channel import Reduction, StreamChannel
from workers.overlap.decoder import Heads
from workers.overlap.streams import CudaDevice, StreamClock


@dataclass(frozen=True)
class Shape:
    """One rank's part of a model."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    layers: int
    dtype: torch.dtype = torch.bfloat16

    def of_rank(self, ranks: int) -> Shape:
        """What each of `ranks` holds of this."""
        return replace(
            self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks, ffn=self.ffn // ranks
        )


_POSITIONS = 8192

HALF_8B = Shape(hidden=4096, heads=16, kv_heads=4, head=128, ffn=7168, layers=4)
"""One of two ranks of a model of 8 billion parameters; fewer layers than its 32."""
TINY = Shape(hidden=16, heads=4, kv_heads=2, head=4, ffn=24, layers=2, dtype=torch.float64)


class Layer:
    """One decoder layer of one rank; weights as [in, out]."""

    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
        self._shape, self._weights = shape, weights
        where = weights["o"].device
        rates = 1e4 ** -(torch.arange(0, shape.head, 2, device=where) / shape.head).repeat(2)
        angles = torch.arange(_POSITIONS, device=where)[:, None] * rates
        self._turns = torch.cat((angles.cos(), angles.sin()), -1).to(shape.dtype)

    @classmethod
    def random(cls, shape: Shape, make: Callable[[int, int], torch.Tensor]) -> Layer:
        width = shape.head * (shape.heads + 2 * shape.kv_heads)
        sizes = {
            "qkv": (shape.hidden, width),
            "o": (shape.heads * shape.head, shape.hidden),
            "gate_up": (shape.hidden, 2 * shape.ffn),
            "down": (shape.ffn, shape.hidden),
        }
        return cls(shape, {name: make(*size) for name, size in sizes.items()})

    def cut(self, rank: int, ranks: int) -> Layer:
        """The share of one rank."""
        own, w = self._shape.of_rank(ranks), self._weights
        query, kv = self._shape.heads * self._shape.head, self._shape.kv_heads * self._shape.head

        def part(whole: torch.Tensor, dim: int) -> torch.Tensor:
            return whole.chunk(ranks, dim)[rank]

        columns = [part(each, 1) for each in w["qkv"].split([query, kv, kv], 1)]
        halves = [part(each, 1) for each in w["gate_up"].chunk(2, 1)]
        return Layer(
            own,
            {
                "qkv": torch.cat(columns, 1),
                "o": part(w["o"], 0).contiguous(),
                "gate_up": torch.cat(halves, 1),
                "down": part(w["down"], 0).contiguous(),
            },
        )

    def qkv(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Heads, torch.Tensor]:
        residual = hidden if residual is None else residual + hidden
        s = self._shape
        qkv = _normed(residual) @ self._weights["qkv"]
        both, value = qkv.split([(s.heads + s.kv_heads) * s.head, s.kv_heads * s.head], -1)
        cos, sin = self._turns[positions][:, None].chunk(2, -1)
        rows = both.view(len(both), -1, s.head)
        first, second = rows.chunk(2, -1)
        turned = torch.addcmul(rows * cos, torch.cat((-second, first), -1), sin).flatten(1)
        query, key = turned.split([s.heads * s.head, s.kv_heads * s.head], -1)
        return (query, key, value), residual

    def attention(self, heads: Heads) -> torch.Tensor:
        query, key, value = (part.view(1, len(part), -1, self._shape.head).transpose(1, 2) for part in heads)
        out = f.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)[0]

    def o_proj(self, attended: torch.Tensor) -> torch.Tensor:
        return attended @ self._weights["o"]

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + hidden
        gate, up = (_normed(residual) @ self._weights["gate_up"]).chunk(2, -1)
        return (f.silu(gate) * up) @ self._weights["down"], residual


def _normed(rows: torch.Tensor) -> torch.Tensor:
    return f.rms_norm(rows, rows.shape[-1:], eps=1e-5)


class Model:
    """A Decoder; `before` runs ahead of every part of a layer (to put in delays)."""

    mlp_chunked = True

    def __init__(self, layers: Sequence[Layer], before: Callable[[], None] | None = None) -> None:
        self.layers: Sequence[Any] = [_Delayed(each, before) for each in layers] if before else layers

    def norm(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return _normed(residual + hidden)


class _Delayed:
    def __init__(self, layer: Layer, before: Callable[[], None]) -> None:
        self._layer, self._before = layer, before

    def __getattr__(self, name: str) -> Callable[..., Any]:
        part: Callable[..., Any] = getattr(self._layer, name)

        def delayed(*args: Any) -> Any:
            self._before()
            return part(*args)

        return delayed


def random_layers(shape: Shape, device: str, seed: int = 0) -> list[Layer]:
    """The same on every call with the same arguments."""
    chance = torch.Generator(device).manual_seed(seed)

    def make(rows: int, columns: int) -> torch.Tensor:
        return (
            torch.randn(rows, columns, generator=chance, device=device, dtype=torch.float32) * rows**-0.5
        ).to(shape.dtype)

    return [Layer.random(shape, make) for _ in range(shape.layers)]


def random_inputs(shape: Shape, tokens: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and positions of a step."""
    chance = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(tokens, shape.hidden, generator=chance, device=device).to(shape.dtype)
    return hidden, torch.arange(tokens, device=device)


def add_peer(tensor: torch.Tensor) -> None:
    """In the place of an AllReduce: adds another rank's share, made up from this one's."""
    tensor.add_(torch.roll(tensor, 1, -1), alpha=0.5)


class Blocking:
    """A channel that runs its collective at once on the computing stream."""

    def __init__(self, collective: Callable[[torch.Tensor], None], clock: StreamClock | None = None) -> None:
        self._collective, self._clock = collective, clock

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        with self._clock.blocking() if self._clock else nullcontext():
            self._collective(tensor)
        return self

    def wait(self) -> None:
        pass


class DeafChannel(StreamChannel):
    """The computation does not wait for the sums: wrong, to see that checks notice."""

    def join(self, done: Any) -> None:
        self._free.append(done)


class Gpu:
    """The real thing."""

    name, real = "cuda", True

    def __init__(self, cycles_per_s: float) -> None:
        self.device: Any = CudaDevice()
        self._cycles_per_s = cycles_per_s

    @classmethod
    def calibrated(cls) -> Gpu:
        """Cycles of torch's sleeping kernel a second, with the GPU warm."""
        square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(50):
            square @ square
        cycles = 20_000_000
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
        return cls(cycles / (begin.elapsed_time(end) / 1e3))

    def seeded(self, seed: int) -> Gpu:
        return self

    def new_stream(self, priority: int = -1) -> Any:
        return torch.cuda.Stream(priority=priority)

    def deaf_stream(self) -> Any:
        return _DeafCudaStream()

    def sleep(self, seconds: float) -> None:
        """Keep the current stream busy, with one thread of one multiprocessor."""
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def launching(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class _DeafCudaStream(torch.cuda.Stream):  # type: ignore[misc]
    def wait_event(self, event: Any) -> None:
        pass


class Simulated:
    """Streams on a CPU that interleave by the seed; only `sleep` takes time, which is simulated too."""

    name, real = "cpu", False

    def __init__(self, seed: int = 0) -> None:
        self.device: Any = FakeDevice(seed)

    def seeded(self, seed: int) -> Simulated:
        return Simulated(seed)

    def new_stream(self, priority: int = -1) -> Any:
        return self.device.new_stream()

    def deaf_stream(self) -> Any:
        self.device.streams.append(_DeafFakeStream(self.device))
        return self.device.streams[-1]

    def sleep(self, seconds: float) -> None:
        self.device.spend(seconds)

    def launching(self) -> AbstractContextManager[Any]:
        simulation: AbstractContextManager[Any] = self.device
        return simulation

    def synchronize(self) -> None:
        self.device.finish()


class _DeafFakeStream(FakeStream):
    def wait_event(self, event: FakeEvent) -> None:
        pass


Machine = Gpu | Simulated
