"""What a decoder layer costs stock and in chunks, from measured samples, and the plan that follows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from workers.overlap.plan import CHUNK_COUNTS, CHUNK_ROWS, Plan, PlanRow
from workers.overlap.schedule import Action, Op, bounds, forward
from workers.overlap.timeline import ALONE, Contention, simulate

__all__ = ["LEAST_GAIN", "AllReduceCost", "Contention", "CostModel", "Sample", "build_plan"]

LEAST_GAIN = 0.03
"""Share of a layer's time below which splitting is not worth its risk of being slower."""


@dataclass(frozen=True)
class Sample:
    """One layer's parts on `tokens` rows, each measured alone, norms with the matmul they precede."""

    tokens: int
    qkv_s: float
    o_proj_s: float
    mlp_s: float
    all_reduce_s: float

    def __post_init__(self) -> None:
        times = (self.qkv_s, self.o_proj_s, self.mlp_s, self.all_reduce_s)
        if self.tokens < 1 or not all(0 < time < math.inf for time in times):
            raise ValueError(f"a sample has one token or more and finite times above 0 s, not {self}")

    @property
    def compute_s(self) -> float:
        return self.qkv_s + self.o_proj_s + self.mlp_s


@dataclass(frozen=True)
class AllReduceCost:
    """latency + tokens × time per token: the usual α-β model of a collective."""

    latency_s: float
    per_token_s: float

    @classmethod
    def fit(cls, samples: Iterable[Sample]) -> AllReduceCost:
        """The least squares with neither term below 0, each square over its time.

        Equal weights would lose the latency in the scatter of the longest samples; weights by relative error
        would let the smallest ones, which a link's burst allowance flatters, set the time per token.
        Raises ValueError on no samples.
        """
        points = [(s.tokens, s.all_reduce_s, 1 / s.all_reduce_s) for s in samples]
        if not points:
            raise ValueError("an AllReduce's cost is fitted to one sample or more, not to none")
        w = sum(weight for _, _, weight in points)
        wn = sum(weight * n for n, _, weight in points)
        wnn = sum(weight * n * n for n, _, weight in points)
        wt = sum(weight * t for _, t, weight in points)
        wnt = sum(weight * n * t for n, t, weight in points)
        determinant = w * wnn - wn * wn
        if len(points) == 1 or determinant <= 0:
            return cls(0.0, wnt / wnn)
        slope = (w * wnt - wn * wt) / determinant
        latency = (wt - slope * wn) / w
        if latency < 0:
            return cls(0.0, wnt / wnn)
        return cls(latency, slope) if slope >= 0 else cls(wt / w, 0.0)

    def seconds(self, tokens: int) -> float:
        return self.latency_s + self.per_token_s * tokens


class CostModel:
    """Predicts one decoder layer without its attention, which overlapping leaves as it is.

    Matmuls are piecewise linear through the samples. Below the smallest one they shrink in proportion, down
    to what a call costs however few its rows (the line through the two smallest samples, at 0 rows); above
    the largest they go on as between the two largest.

    `mlp_chunked` False: only o_proj is cut (mixture of experts).
    Raises ValueError on no samples or two of the same size.
    """

    def __init__(
        self, samples: Sequence[Sample], contention: Contention = ALONE, mlp_chunked: bool = True
    ) -> None:
        self._samples = sorted(samples, key=lambda sample: sample.tokens)
        if not samples or any(a.tokens == b.tokens for a, b in pairwise(self._samples)):
            sizes = [sample.tokens for sample in self._samples]
            raise ValueError(f"a cost model needs samples of one or more different sizes, not of {sizes}")
        self._contention = contention
        self._mlp_chunked = mlp_chunked
        self._all_reduce = AllReduceCost.fit(self._samples)
        self._curves = {
            Action.QKV: [(s.tokens, s.qkv_s) for s in self._samples],
            Action.O_PROJ: [(s.tokens, s.o_proj_s) for s in self._samples],
            Action.MLP: [(s.tokens, s.mlp_s) for s in self._samples],
        }

    def op_s(self, action: Action, rows: int) -> float:
        """Seconds of one operation alone; 0 for attention, the final norm and waits, which are left out."""
        if action in (Action.REDUCE_ATTENTION, Action.REDUCE_MLP):
            return self._all_reduce.seconds(rows)
        curve = self._curves.get(action)
        return _interpolate(curve, rows) if curve else 0.0

    def compute_s(self, tokens: int) -> float:
        """The layer's matmuls and norms, uncut."""
        return sum(self.op_s(action, tokens) for action in self._curves)

    def stock_s(self, tokens: int) -> float:
        """The layer with two blocking AllReduces."""
        return self.compute_s(tokens) + 2 * self._all_reduce.seconds(tokens)

    def overlapped_s(self, tokens: int, chunks: int) -> float:
        """The layer in the midst of many others; equals `stock_s` for one chunk."""
        cuts = bounds(tokens, chunks)

        def seconds(op: Op) -> float:
            start, end = (0, tokens) if op.chunk is None else cuts[op.chunk]
            return self.op_s(op.action, end - start)

        def total_s(layers: int) -> float:
            ops = _with_blocking_reduce(forward(layers, len(cuts), self._mlp_chunked))
            return simulate(ops, seconds, self._contention).total_s

        # Attention empties the channel, so layers repeat: one more layer adds exactly what any of them takes.
        return total_s(3) - total_s(2)

    def gain(self, tokens: int, chunks: int) -> float:
        """Share of `stock_s` that `chunks` chunks are predicted to save; negative when they lose."""
        return 1.0 - self.overlapped_s(tokens, chunks) / self.stock_s(tokens)

    def ranked(self, tokens: int, least_gain: float = 0.0) -> tuple[int, ...]:
        """The numbers of chunks above 1 that are predicted to gain more than that, the fastest first.

        Without those that would leave a chunk fewer than `CHUNK_ROWS` rows.
        """
        gains = {c: self.gain(tokens, c) for c in CHUNK_COUNTS if 1 < c <= tokens // CHUNK_ROWS}
        return tuple(sorted((c for c in gains if gains[c] > least_gain), key=lambda c: (-gains[c], c)))


def build_plan(
    model: CostModel,
    sizes: Iterable[int],
    tried: Mapping[int, tuple[float, float, int]],
    least_gain: float = LEAST_GAIN,
) -> Plan:
    """A row for each of `sizes` (tokens), split where a trial has gained by it.

    `tried` holds (stock seconds, overlapped seconds, chunks) of one layer as measured whole, by size; a
    size that is not in it is not split. The gain has to be `least_gain` at the row's own size, and is not
    predicted to have turned into a loss where the row's reach ends, just below the next one.
    Raises ValueError on sizes below 1 and on chunks that no plan may have.
    """
    wanted = sorted(set(sizes))
    rows: list[PlanRow] = []
    for size, following in zip_longest(wanted, wanted[1:]):
        predicted_s = model.stock_s(size)
        stock_s, overlapped_s, chunks = tried.get(size, (predicted_s, predicted_s, 1))
        gains = stock_s - overlapped_s >= least_gain * stock_s
        if gains and chunks > 1 and following is not None:
            # A measured gain against the prediction proves the model too pessimistic for this size.
            gains = model.gain(following - 1, chunks) >= min(0.0, model.gain(size, chunks))
        if chunks == 1 or not gains:
            chunks, overlapped_s = 1, stock_s
        rows.append(
            PlanRow(
                tokens=size,
                chunks=chunks,
                stock_ms=stock_s * 1e3,
                overlapped_ms=overlapped_s * 1e3,
                compute_ms=model.compute_s(size) * 1e3,
                all_reduce_ms=model.op_s(Action.REDUCE_MLP, size) * 1e3,
            )
        )
    return Plan(tuple(rows), "measured")


def _interpolate(curve: Sequence[tuple[int, float]], rows: int) -> float:
    if len(curve) == 1:
        tokens, time = curve[0]
        return time * rows / tokens
    (first, first_time), (last, last_time) = curve[0], curve[-1]
    if rows < first:
        return max(first_time * rows / first, min(first_time, _line(curve[0], curve[1], 0)))
    if rows > last:
        return max(last_time, _line(curve[-2], curve[-1], rows))
    return next(_line(a, b, rows) for a, b in pairwise(curve) if rows <= b[0])


def _line(a: tuple[int, float], b: tuple[int, float], at: int) -> float:
    return a[1] + (b[1] - a[1]) * (at - a[0]) / (b[0] - a[0])


def _with_blocking_reduce(ops: Iterable[Op]) -> Iterator[Op]:
    """The AllReduce inside an MLP on all tokens, written out."""
    for op in ops:
        yield op
        if op == Op(Action.MLP):
            yield from (Op(Action.REDUCE_MLP), Op(Action.AWAIT_MLP))
