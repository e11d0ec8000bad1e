"""The overlapped pass of plain torch layers, against the same layers in the plain order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from workers.overlap import decoder
from workers.overlap.decoder import Heads

HIDDEN, HEADS, LAYERS = 16, 8, 3
RANKS_SUM = 4.0
"""A fake channel's ranks all have the same share, so that a sum is a product, and exact."""


class FakeReduction:
    """The sum is in the tensor after `wait`, and not before."""

    def __init__(self, tensor: torch.Tensor, log: list[str]) -> None:
        self._tensor, self._log = tensor, log
        self._share = tensor.clone()
        tensor.fill_(torch.nan)  # whoever reads it too early gets this into everything that follows

    def wait(self) -> None:
        self._log.append("wait")
        assert bool(torch.isnan(self._tensor).all()), "somebody wrote into a tensor under reduction"
        self._tensor.copy_(self._share * RANKS_SUM)


@dataclass
class FakeChannel:
    """Sums as late as it may."""

    log: list[str] = field(default_factory=list)

    def all_reduce(self, tensor: torch.Tensor) -> FakeReduction:
        assert tensor.is_contiguous()
        self.log.append(f"reduce {tensor.shape[0]}")
        return FakeReduction(tensor, self.log)


def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class FakeLayer:
    """As a decoder layer of vLLM: norms fold the residual in. Rows are independent of each other."""

    def __init__(self, seed: int, mlp_chunked: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator) - 0.5

        self._qkv, self._o = weights(HIDDEN, 3 * HEADS), weights(HEADS, HIDDEN)
        self._up, self._down = weights(HIDDEN, 2 * HIDDEN), weights(2 * HIDDEN, HIDDEN)
        self._norm, self._post = weights(HIDDEN) + 1, weights(HIDDEN) + 1
        self._mlp_chunked = mlp_chunked
        self.mlp_rows: list[int] = []

    def qkv(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Heads, torch.Tensor]:
        residual = hidden if residual is None else hidden + residual
        query, key, value = product(normed(residual, self._norm), self._qkv).split(HEADS, dim=-1)
        turn = positions.reshape(-1, positions.shape[-1])[0].unsqueeze(-1) / 100
        return (query * torch.cos(turn), key * torch.cos(turn), value), residual

    def attention(self, heads: Heads) -> torch.Tensor:
        query, key, value = heads
        scores = (query @ key.T).tril()
        return scores @ value / HEADS

    def o_proj(self, attended: torch.Tensor) -> torch.Tensor:
        return product(attended, self._o)

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.mlp_rows.append(hidden.shape[0])
        residual = hidden + residual
        share = product(torch.relu(product(normed(residual, self._post), self._up)), self._down)
        return (share if self._mlp_chunked else share * RANKS_SUM), residual


def product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A matmul whose rows do not depend on how many there are."""
    return (rows.unsqueeze(-1) * weights).sum(-2)


class FakeDecoder:
    def __init__(self, mlp_chunked: bool = True) -> None:
        self.layers: Sequence[FakeLayer] = [FakeLayer(seed, mlp_chunked) for seed in range(LAYERS)]
        self.mlp_chunked = mlp_chunked

    def norm(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return normed(hidden + residual, torch.ones(HIDDEN))


def stock(model: FakeDecoder, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The plain order: each sum before anything else."""
    residual: torch.Tensor | None = None
    for layer in model.layers:
        heads, residual = layer.qkv(positions, hidden, residual)
        hidden = layer.o_proj(layer.attention(heads)) * RANKS_SUM
        hidden, residual = layer.mlp(hidden, residual)
        if model.mlp_chunked:
            hidden = hidden * RANKS_SUM
    assert residual is not None
    return model.norm(hidden, residual)


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, HIDDEN, generator=generator) - 0.5, torch.arange(tokens)


@pytest.mark.parametrize("mlp_chunked", [True, False], ids=["dense", "experts"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 64, 65, 97, 256, 300])
def test_any_number_of_chunks_gives_what_the_plain_order_gives(
    tokens: int, chunks: int, mlp_chunked: bool
) -> None:
    model = FakeDecoder(mlp_chunked)
    hidden, positions = inputs(tokens)
    wanted = stock(model, hidden.clone(), positions)
    found = decoder.run(model, FakeChannel(), hidden.clone(), positions, chunks)
    assert torch.equal(found, wanted)
    assert bool(found.isfinite().all())


def test_a_missing_wait_would_be_seen() -> None:
    """The channel of these tests, with a pass that does not wait for it."""
    hidden = torch.ones(4, HIDDEN)
    FakeChannel().all_reduce(hidden)
    assert bool(hidden.isnan().all())


def test_every_reduction_is_awaited_and_all_of_a_layers_are_issued_before_it_waits() -> None:
    channel = FakeChannel()
    decoder.run(FakeDecoder(), channel, *inputs(128), chunks=4)
    after_attention = [*["reduce 32"] * 4, *["wait", "reduce 32"] * 4]
    assert channel.log == [*after_attention, *["wait"] * 4] * LAYERS


def test_experts_see_all_tokens_at_once_and_reduce_by_themselves() -> None:
    channel, model = FakeChannel(), FakeDecoder(mlp_chunked=False)
    decoder.run(model, channel, *inputs(96), chunks=3)
    assert channel.log == [*["reduce 32"] * 3, *["wait"] * 3] * LAYERS
    assert [layer.mlp_rows for layer in model.layers] == [[96]] * LAYERS


def test_positions_of_several_dimensions_are_cut_by_token() -> None:
    model = FakeDecoder()
    hidden, positions = inputs(96)
    wanted = stock(model, hidden.clone(), positions)
    three = positions.expand(3, -1)
    assert torch.equal(decoder.run(model, FakeChannel(), hidden.clone(), three, 3), wanted)


def test_a_lost_rank_ends_the_pass() -> None:
    class Lost:
        def wait(self) -> None:
            raise RuntimeError("connection closed by peer")

    class LostChannel:
        def all_reduce(self, tensor: torch.Tensor) -> Lost:
            return Lost()

    with pytest.raises(RuntimeError, match="closed by peer"):
        decoder.run(FakeDecoder(), LostChannel(), *inputs(64), chunks=2)
