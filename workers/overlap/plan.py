"""How many chunks a step of so many tokens is split into; one table for all ranks of a replica. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

CHUNK_COUNTS = (1, 2, 3, 4, 6, 8)

CHUNK_ROWS = 32
"""Rows a chunk has at least, and in multiples of which chunks are cut: fewer make matmuls inefficient."""

Origin = Literal["none", "measured", "cached", "forced"]


@dataclass(frozen=True)
class PlanRow:
    """What holds from `tokens` tokens of one engine step on. Times are ms of one decoder layer.

    They leave attention out, which nothing here changes; 0.0 where nothing was measured (a forced plan).
    """

    tokens: int
    chunks: int
    stock_ms: float = 0.0
    """Matmuls, norms and two blocking AllReduces."""
    overlapped_ms: float = 0.0
    """The same in `chunks` chunks; equal to `stock_ms` for one chunk."""
    compute_ms: float = 0.0
    """Matmuls and norms alone."""
    all_reduce_ms: float = 0.0
    """One AllReduce alone."""

    @property
    def gain(self) -> float:
        """Share of `stock_ms` saved."""
        return 1.0 - self.overlapped_ms / self.stock_ms if self.stock_ms > 0 else 0.0


@dataclass(frozen=True)
class Plan:
    """Rows in increasing `tokens`; below the first one a step is not split."""

    rows: tuple[PlanRow, ...] = ()
    origin: Origin = "none"

    def __post_init__(self) -> None:
        if any(a.tokens >= b.tokens for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows of a plan must increase in tokens: {[r.tokens for r in self.rows]}")
        if wrong := [row.chunks for row in self.rows if row.chunks not in CHUNK_COUNTS]:
            raise ValueError(f"chunks must be one of {CHUNK_COUNTS}, not {wrong}")
        if any(row.tokens < 1 for row in self.rows):
            raise ValueError("a row of a plan begins at one token or more")

    def chunks(self, tokens: int) -> int:
        """Chunks for a step of `tokens`; depends on nothing else, so all ranks agree."""
        index = bisect_right(self.rows, tokens, key=lambda row: row.tokens) - 1
        return self.rows[index].chunks if index >= 0 else 1

    @property
    def threshold(self) -> int | None:
        """Fewest tokens that are split; None when no step is."""
        return next((row.tokens for row in self.rows if row.chunks > 1), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {"origin": self.origin, "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """Raises ValueError, KeyError or TypeError on anything but what `to_json` wrote."""
        rows = tuple(PlanRow(**row) for row in values["rows"])
        return cls(rows, values["origin"])


def forced(chunks: int, least_tokens: int = 1) -> Plan:
    """Split every step of `least_tokens` that gives each chunk enough rows, without measuring."""
    if chunks == 1:
        return Plan((), "forced")
    return Plan((PlanRow(tokens=max(CHUNK_ROWS * chunks, least_tokens), chunks=chunks),), "forced")
