"""How the ranks of a replica agree on figures and on a plan, so that none is applied on one rank only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup


class Agreement:
    """Collective calls over a CPU group: every rank makes the same ones in the same order.

    Raises RuntimeError from any of them when a rank or its link is gone.
    """

    def __init__(self, group: ProcessGroup, rank: int, first: int) -> None:
        """`rank` within the group; `first`: the global rank of the group's rank 0."""
        self._group, self.rank, self._first = group, rank, first

    def barrier(self) -> None:
        """Return once every rank is here."""
        distributed.all_reduce(torch.zeros(1), group=self._group)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Each figure's largest value over the ranks: all wait for the slowest."""
        values = torch.tensor(seconds, dtype=torch.float64)
        distributed.all_reduce(values, op=distributed.ReduceOp.MAX, group=self._group)
        return [float(value) for value in values]

    def from_first(self, value: Any) -> Any:
        """Rank 0's JSON-able value, on every rank; the others' own is ignored."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor([len(text)], dtype=torch.int64)
        distributed.broadcast(length, self._first, group=self._group)
        payload = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == 0:
            payload.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        distributed.broadcast(payload, self._first, group=self._group)
        return json.loads(bytes(payload.tolist()))
