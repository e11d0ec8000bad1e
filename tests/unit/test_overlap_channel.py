"""The channel on an accelerator: right sums in right memory, whatever order the streams take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fakes_streams import FakeDevice, FakeEvent, FakeStream, RaceError
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.overlap import decoder as decoders
from workers.overlap.channel import Reduction, StreamChannel
from workers.overlap.decoder import Heads

HIDDEN = 8
LAYERS = 2
SEEDS = st.integers(0, 2**32 - 1)

simulated = settings(deadline=None, max_examples=15)


class SmallLayer:
    """A decoder layer in miniature that, as vLLM's fused kernels, overwrites what it is given."""

    def __init__(self, seed: int, reduce: Callable[[torch.Tensor], None] | None = None) -> None:
        chance = torch.Generator().manual_seed(seed)
        self._weights = [torch.randn(HIDDEN, HIDDEN, generator=chance, dtype=torch.float64) for _ in range(5)]
        self._reduce = reduce

    def qkv(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Heads, torch.Tensor]:
        if residual is None:
            residual, normed = hidden, norm(hidden)
        else:
            normed, residual = add_norm(hidden, residual)
        query, key, value = (normed @ weight for weight in self._weights[:3])
        return (query + positions[:, None] / 10, key - positions[:, None] / 10, value), residual

    def attention(self, heads: Heads) -> torch.Tensor:
        query, key, value = heads
        return torch.softmax(query @ key.T, dim=-1) @ value

    def o_proj(self, attended: torch.Tensor) -> torch.Tensor:
        return attended @ self._weights[3]

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = add_norm(hidden, residual)
        rows = torch.tanh(normed) @ self._weights[4]
        if self._reduce is not None:
            self._reduce(rows)
        return rows, residual


class SmallDecoder:
    def __init__(self, *, mlp_chunked: bool) -> None:
        self.mlp_chunked = mlp_chunked
        self.layers = [SmallLayer(seed, None if mlp_chunked else add_peer) for seed in range(LAYERS)]

    def norm(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return add_norm(hidden, residual)[0]


def norm(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + 1e-6)


def add_norm(rows: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    residual.add_(rows)
    rows.copy_(norm(residual))
    return rows, residual


def add_peer(tensor: torch.Tensor) -> None:
    """In place and in several operations, as if another rank's share were added."""
    tensor.mul_(1.5)
    tensor.add_(torch.roll(tensor, 1, -1))


class Blocking:
    """A channel for one stream: the sum is there at once."""

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        add_peer(tensor)
        return self

    def wait(self) -> None:
        pass


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, HIDDEN, generator=chance, dtype=torch.float64), torch.arange(tokens)


def on_one_stream(decoder: SmallDecoder, tokens: int, chunks: int) -> torch.Tensor:
    with torch.no_grad():
        return decoders.run(decoder, Blocking(), *inputs(tokens), chunks)


def streamed(decoder: SmallDecoder, device: FakeDevice, channel: StreamChannel, *shape: int) -> torch.Tensor:
    """The result of (tokens, chunks) once the device is done."""
    tokens, chunks = shape
    hidden, positions = inputs(tokens)
    with torch.no_grad(), device:
        result = decoders.run(decoder, channel, hidden, positions, chunks)
    device.finish()
    return result


def a_channel(device: FakeDevice) -> StreamChannel:
    return StreamChannel(add_peer, device.new_stream(), device)


@simulated
@given(SEEDS, st.integers(2, 12), st.integers(1, 4), st.booleans())
def test_any_interleaving_of_the_streams_gives_the_result_of_one_stream(
    seed: int, tokens: int, chunks: int, mlp_chunked: bool
) -> None:
    decoder, device = SmallDecoder(mlp_chunked=mlp_chunked), FakeDevice(seed)
    found = streamed(decoder, device, a_channel(device), tokens, chunks)
    assert torch.equal(found, on_one_stream(decoder, tokens, chunks))


@simulated
@given(st.integers(2, 24), st.integers(2, 6), st.booleans())
def test_chunks_give_the_result_of_the_whole(tokens: int, chunks: int, mlp_chunked: bool) -> None:
    decoder = SmallDecoder(mlp_chunked=mlp_chunked)
    torch.testing.assert_close(on_one_stream(decoder, tokens, chunks), on_one_stream(decoder, tokens, 1))


@simulated
@given(SEEDS)
def test_second_pass_on_the_events_of_the_first_is_right(seed: int) -> None:
    decoder, device = SmallDecoder(mlp_chunked=True), FakeDevice(seed)
    channel = a_channel(device)
    hidden, positions = inputs(12)
    with torch.no_grad(), device:
        first = decoders.run(decoder, channel, hidden.clone(), positions, 2)
        made = len(device.events)
        second = decoders.run(decoder, channel, hidden.clone(), positions, 2)
    device.finish()
    assert torch.equal(first, on_one_stream(decoder, 12, 2))
    assert torch.equal(second, first)
    assert len(device.events) == made == 2


class Deaf(FakeStream):
    """Does not wait for what it is told to wait for."""

    def wait_event(self, event: FakeEvent) -> None:
        pass


def races_on_some_seed(device_of: Callable[[int], tuple[FakeDevice, StreamChannel]]) -> bool:
    decoder = SmallDecoder(mlp_chunked=True)
    right = on_one_stream(decoder, 12, 3)

    def races(seed: int) -> bool:
        try:
            return not torch.equal(streamed(decoder, *device_of(seed), 12, 3), right)
        except RaceError:
            return True

    return any(races(seed) for seed in range(20))


def test_simulation_notices_a_channel_that_does_not_wait_for_the_computation() -> None:
    def device_of(seed: int) -> tuple[FakeDevice, StreamChannel]:
        device = FakeDevice(seed)
        device.streams.append(Deaf(device))
        return device, StreamChannel(add_peer, device.streams[-1], device)

    assert races_on_some_seed(device_of)


def test_simulation_notices_a_computation_that_does_not_wait_for_the_channel() -> None:
    def device_of(seed: int) -> tuple[FakeDevice, StreamChannel]:
        device = FakeDevice(seed)
        device.streams[0] = device.computing = device._current = Deaf(device)
        return device, a_channel(device)

    assert races_on_some_seed(device_of)


@simulated
@given(SEEDS)
def test_memory_of_a_sum_that_nobody_reads_is_given_away_after_the_sum(seed: int) -> None:
    device = FakeDevice(seed)
    channel = a_channel(device)
    with torch.no_grad(), device:
        reduction = channel.all_reduce(torch.ones(4, 4) + 1)
        torch.zeros(4) + 1
        reduction.wait()
    device.finish()


@simulated
@given(SEEDS)
def test_memory_of_a_sum_that_nobody_awaits_is_given_away_after_the_sum(seed: int) -> None:
    device = FakeDevice(seed)
    channel = a_channel(device)
    with torch.no_grad(), device:
        channel.all_reduce(torch.ones(4, 4) + 1)
    device.finish()


def test_memory_of_awaited_sums_is_free_again_in_the_order_of_the_computing_stream() -> None:
    device = FakeDevice(0)
    kept = len(device.streams) + 1
    streamed(SmallDecoder(mlp_chunked=True), device, a_channel(device), 12, 3)
    assert len(device.streams) == kept  # one more per piece of memory kept for the channel's stream


@simulated
@given(SEEDS, st.integers(1, 8))
def test_pass_after_one_that_failed_amid_its_reductions_is_right(seed: int, fails_at: int) -> None:
    decoder, device = SmallDecoder(mlp_chunked=True), FakeDevice(seed)
    calls = 0

    def collective(tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        tensor.mul_(1.5)
        if calls == fails_at:
            raise RuntimeError("a link is gone")
        tensor.add_(torch.roll(tensor, 1, -1))

    channel = StreamChannel(collective, device.new_stream(), device)
    hidden, positions = inputs(12)
    with torch.no_grad(), device:
        with pytest.raises(RuntimeError, match="a link is gone"):
            decoders.run(decoder, channel, hidden.clone(), positions, 2)
        after = decoders.run(decoder, channel, hidden.clone(), positions, 2)
    device.finish()
    assert torch.equal(after, on_one_stream(decoder, 12, 2))


def test_reduction_waited_for_twice_gives_its_event_back_once() -> None:
    device = FakeDevice()
    channel = a_channel(device)
    with torch.no_grad(), device:
        first = channel.all_reduce(torch.ones(2))
        first.wait()
        first.wait()
        channel.all_reduce(torch.ones(2))
        channel.all_reduce(torch.ones(2))
    assert len(device.events) == 2
