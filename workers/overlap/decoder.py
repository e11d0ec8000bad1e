"""One forward pass by a schedule: the parts of each layer on chunks of tokens, AllReduces in between.

Knows torch and nothing of vLLM: the parts come from `families`, the order from `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch

from workers.overlap import schedule
from workers.overlap.channel import Channel, Reduction
from workers.overlap.schedule import Action, Op

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, [rows, heads × head size] each, ready for attention."""


class DecoderLayer(Protocol):
    """One layer of one rank. Row-parallel parts return this rank's share of a sum over the ranks."""

    def qkv(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Heads, torch.Tensor]:
        """Input norm, projection and rotation of rows; also returns the new residual."""

    def attention(self, heads: Heads) -> torch.Tensor:
        """All tokens of the step at once: [tokens, heads × head size]."""

    def o_proj(self, attended: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], not yet summed."""

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Post-attention norm and feed-forward; where MLPs are cut, the sum is left to the caller."""


class Decoder(Protocol):
    """The layers of a model between its embedding and its head."""

    @property
    def layers(self) -> Sequence[DecoderLayer]: ...

    @property
    def mlp_chunked(self) -> bool:
        """False: the layers' `mlp` takes all tokens and returns the sum over the ranks."""

    def norm(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The final norm."""


def run(
    decoder: Decoder, channel: Channel, hidden: torch.Tensor, positions: torch.Tensor, chunks: int
) -> torch.Tensor:
    """The decoder over `hidden` [tokens, hidden size], split into `chunks`; [tokens, hidden size].

    `positions` are [tokens], or [n, tokens] for multi-dimensional rotary embeddings.

    Raises:
        RuntimeError: an AllReduce failed; the engine cannot go on.
    """
    state = _Pass(decoder, channel, hidden, positions, chunks)
    count = len(state.bounds)
    for number, layer in enumerate(decoder.layers):
        for op in _layer(count, number == 0, decoder.mlp_chunked):
            state.execute(op, layer)
    for op in _tail(count, decoder.mlp_chunked):
        state.execute(op, decoder.layers[-1])
    return state.result


_layer = lru_cache(maxsize=64)(
    lambda chunks, first, mlp_chunked: schedule.layer(chunks, first=first, mlp_chunked=mlp_chunked)
)
_tail = lru_cache(maxsize=32)(schedule.tail)


class _Pass:
    """What is in flight: rows of the hidden states and residuals, and the AllReduces on them."""

    def __init__(
        self, decoder: Decoder, channel: Channel, hidden: torch.Tensor, positions: torch.Tensor, chunks: int
    ) -> None:
        self.bounds = schedule.bounds(hidden.shape[0], chunks)
        self._decoder, self._channel = decoder, channel
        self._positions = [positions[..., start:end] for start, end in self.bounds]
        self._all_positions = positions
        self._hidden = [hidden[start:end] for start, end in self.bounds]
        self._residual: list[torch.Tensor | None] = [None] * len(self.bounds)
        self._reducing: list[Reduction | None] = [None] * len(self.bounds)
        self._heads: Heads | None = None
        self._attended: torch.Tensor | None = None
        self._done: list[torch.Tensor | None] = [None] * len(self.bounds)

    @property
    def result(self) -> torch.Tensor:
        """Rows of the final norm, put together."""
        rows = [rows for rows in self._done if rows is not None]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def execute(self, op: Op, layer: DecoderLayer) -> None:
        """Carry out one operation of the schedule."""
        chunk = op.chunk
        if chunk is None:
            self._execute_on_all(op.action, layer)
            return
        hidden, residual = self._hidden[chunk], self._residual[chunk]
        match op.action:
            case Action.QKV:
                heads, self._residual[chunk] = layer.qkv(self._positions[chunk], hidden, residual)
                self._collect(chunk, heads)
            case Action.O_PROJ:
                assert self._attended is not None
                start, end = self.bounds[chunk]
                self._hidden[chunk] = layer.o_proj(self._attended[start:end])
            case Action.REDUCE_ATTENTION | Action.REDUCE_MLP:
                self._reducing[chunk] = self._channel.all_reduce(hidden)
            case Action.AWAIT_ATTENTION | Action.AWAIT_MLP:
                reduction, self._reducing[chunk] = self._reducing[chunk], None
                assert reduction is not None
                reduction.wait()
            case Action.MLP:
                assert residual is not None
                self._hidden[chunk], self._residual[chunk] = layer.mlp(hidden, residual)
            case Action.NORM:
                assert residual is not None
                self._done[chunk] = self._decoder.norm(hidden, residual)
            case _:
                raise AssertionError(f"{op} is not an operation on a chunk")

    def _execute_on_all(self, action: Action, layer: DecoderLayer) -> None:
        match action:
            case Action.ATTENTION:
                assert self._heads is not None
                self._attended = layer.attention(self._heads)
            case Action.QKV:
                hidden, residual = self._joined()
                self._heads, residual = layer.qkv(self._all_positions, hidden, residual)
                self._split(hidden, residual)
            case Action.MLP:
                hidden, residual = self._joined()
                assert residual is not None
                self._split(*layer.mlp(hidden, residual))
            case Action.NORM:
                hidden, residual = self._joined()
                assert residual is not None
                self._done[0] = self._decoder.norm(hidden, residual)
            case _:
                raise AssertionError(f"{action} is not an operation on all tokens")

    def _collect(self, chunk: int, heads: Heads) -> None:
        """Attention reads one tensor each of query, key and value, whose rows the chunks fill."""
        if len(self.bounds) == 1:
            self._heads = heads
            return
        start, end = self.bounds[chunk]
        if self._heads is None:
            tokens = self.bounds[-1][1]
            query, key, value = (part.new_empty((tokens, *part.shape[1:])) for part in heads)
            self._heads = query, key, value
        for whole, part in zip(self._heads, heads, strict=True):
            whole[start:end].copy_(part)

    def _joined(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if len(self.bounds) == 1:
            return self._hidden[0], self._residual[0]
        residual = [rows for rows in self._residual if rows is not None]
        return torch.cat(self._hidden), torch.cat(residual) if residual else None

    def _split(self, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        self._hidden = [hidden[start:end] for start, end in self.bounds]
        self._residual = [residual[start:end] for start, end in self.bounds]
