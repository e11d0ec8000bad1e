"""The order of a forward pass split into chunks of tokens, so that AllReduces run beside matmuls. Pure.

Everything but attention treats each token alone, so a layer's tokens may be cut into chunks anywhere else:

    o_1 … o_K, mlp_1 … mlp_K, (next layer) qkv_1 … qkv_K, attention over all tokens, o_1 …

Each o_c and mlp_c leaves a partial sum whose AllReduce is issued at once and awaited by the next operation on
the same chunk, with the other K-1 chunks' matmuls in between. Attention is the only barrier. The order
depends on the arguments alone, so all ranks of a replica issue the same collectives in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from workers.overlap.plan import CHUNK_ROWS

LEAST_ROWS = 2
"""A one-row matmul takes another kernel (a matrix-vector product), which rounds differently."""


class Action(StrEnum):
    """One step of a decoder layer. REDUCE_* only begins an AllReduce; AWAIT_* waits for that chunk's."""

    QKV = "qkv"
    """Input norm and query, key, value projection."""
    ATTENTION = "attention"
    O_PROJ = "o_proj"
    REDUCE_ATTENTION = "reduce_attention"
    AWAIT_ATTENTION = "await_attention"
    MLP = "mlp"
    """Post-attention norm and feed-forward; on all tokens (mixture of experts) it holds its own AllReduce."""
    REDUCE_MLP = "reduce_mlp"
    AWAIT_MLP = "await_mlp"
    NORM = "norm"
    """The model's final norm."""


@dataclass(frozen=True, slots=True)
class Op:
    """An action on one chunk, counted from 0; `chunk` None: on all tokens."""

    action: Action
    chunk: int | None = None


def bounds(tokens: int, chunks: int, multiple: int = CHUNK_ROWS) -> tuple[tuple[int, int], ...]:
    """Half-open row ranges that cover 0..tokens in order.

    Each has two rows or more (but for a step of one token), so there are fewer than `chunks` when
    tokens < 2 × chunks. Inner bounds are multiples of `multiple` when every chunk can have so many rows;
    otherwise rows are shared out evenly.

    Raises ValueError on tokens, chunks or multiple below 1.
    """
    if tokens < 1 or chunks < 1 or multiple < 1:
        raise ValueError(f"cannot cut {tokens} tokens into {chunks} chunks of a multiple of {multiple} rows")
    count = max(1, min(chunks, tokens // LEAST_ROWS))
    unit = multiple if tokens >= count * multiple else 1
    # Each even cut, rounded to the nearest whole unit: neighbours stay at least one unit apart.
    cuts = [(2 * i * tokens + count * unit) // (2 * count * unit) * unit for i in range(count)]
    return tuple(zip(cuts, [*cuts[1:], tokens], strict=True))


def layer(chunks: int, *, first: bool, mlp_chunked: bool = True) -> tuple[Op, ...]:
    """One decoder layer; `first`: no layer before it has AllReduces in flight.

    `mlp_chunked` False (mixture of experts, whose weights each chunk would read again): only o_proj is cut;
    the MLP, and with it the next layer's QKV, works on all tokens and reduces by itself.
    Raises ValueError on chunks below 1.
    """
    if chunks < 1:
        raise ValueError(f"a layer has at least one chunk, not {chunks}")
    each = range(chunks)
    ops: list[Op] = []
    if not mlp_chunked:
        ops.append(Op(Action.QKV))
    else:
        for c in each:
            if not first:
                ops.append(Op(Action.AWAIT_MLP, c))
            ops.append(Op(Action.QKV, c))
    ops.append(Op(Action.ATTENTION))
    for c in each:
        ops += (Op(Action.O_PROJ, c), Op(Action.REDUCE_ATTENTION, c))
    if not mlp_chunked:
        ops += (Op(Action.AWAIT_ATTENTION, c) for c in each)
        ops.append(Op(Action.MLP))
    else:
        for c in each:
            ops += (Op(Action.AWAIT_ATTENTION, c), Op(Action.MLP, c), Op(Action.REDUCE_MLP, c))
    return tuple(ops)


def tail(chunks: int, mlp_chunked: bool = True) -> tuple[Op, ...]:
    """What follows the last layer: its AllReduces and the final norm. Raises ValueError on chunks below 1."""
    if chunks < 1:
        raise ValueError(f"a pass has at least one chunk, not {chunks}")
    if not mlp_chunked:
        return (Op(Action.NORM),)
    return tuple(Op(action, c) for c in range(chunks) for action in (Action.AWAIT_MLP, Action.NORM))


def forward(layers: int, chunks: int, mlp_chunked: bool = True) -> tuple[Op, ...]:
    """A whole pass of `layers` decoder layers. Raises ValueError on layers or chunks below 1."""
    if layers < 1:
        raise ValueError(f"a pass has at least one layer, not {layers}")
    body = [op for i in range(layers) for op in layer(chunks, first=i == 0, mlp_chunked=mlp_chunked)]
    return (*body, *tail(chunks, mlp_chunked))
