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

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        """`rank` within the group."""
        self._group, self.rank = group, rank

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
        return self._from(0, value)

    def any(self, own: str) -> tuple[int, str] | None:
        """The first rank, within the group, whose `own` text is not empty, and that text."""
        told = torch.zeros(self._group.size())
        told[self.rank] = bool(own)
        distributed.all_reduce(told, group=self._group)
        ranks = told.nonzero().flatten().tolist()
        return (ranks[0], str(self._from(ranks[0], own))) if ranks else None

    def _from(self, rank: int, value: Any) -> Any:
        source = distributed.get_global_rank(self._group, rank)
        text = json.dumps(value).encode() if self.rank == rank else b""
        length = torch.tensor([len(text)], dtype=torch.int64)
        distributed.broadcast(length, source, group=self._group)
        payload = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == rank:
            payload.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        distributed.broadcast(payload, source, group=self._group)
        return json.loads(bytes(payload.tolist()))
