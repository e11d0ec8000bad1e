"""Measures what a layer's matmuls and AllReduces take on these ranks and this link, and makes the plan.

A model predicts which numbers of chunks are worth a try; only what then was faster in a measurement of
the real thing, side by side with the stock order, goes into the plan.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Any

import torch

from workers.overlap import decoder as decoders
from workers.overlap.agreement import Agreement
from workers.overlap.channel import Channel
from workers.overlap.cost_model import Contention, CostModel, Sample, build_plan
from workers.overlap.decoder import Decoder, DecoderLayer, Heads
from workers.overlap.plan import CHUNK_ROWS, Plan, PlanRow

BUDGET_S = 60.0
"""What is expected to go beyond is not begun; sizes that were not tried are not split."""
_SMALLEST = 2 * CHUNK_ROWS
_PROBE_LAYERS = 4
_WARM_UPS = 1
_REPEATS = 5
_TRIALS = 7
_LEAST_TRIALS = 3
_TRIED = 2
_UNSTEADY = 0.15
_HOPELESS = -0.10
"""A prediction this bad is believed without a trial."""


@dataclass(frozen=True)
class Inputs:
    """Tensors of one size to measure with; their values do not matter."""

    hidden: torch.Tensor
    positions: torch.Tensor
    attended: torch.Tensor


@dataclass(frozen=True)
class Measurable:
    """What a planner measures. `stock_reduce` is the engine's blocking AllReduce."""

    decoder: Decoder
    channel: Channel
    stock_reduce: Callable[[torch.Tensor], torch.Tensor]
    make_inputs: Callable[[int], Inputs]
    synchronize: Callable[[], None]
    """Returns once the device has done all that was asked of it."""
    smallest: int = 1
    """Fewest tokens of a step that may be split."""
    compiled: Callable[[Inputs, int], object] | None = None
    """A pass of the whole model in so many chunks; given where the stock path is not what these layers
    do when they are called, because it was compiled."""


def sizes(max_tokens: int, smallest: int = _SMALLEST) -> tuple[int, ...]:
    """Numbers of tokens to measure: powers of two from `smallest` on, and the largest step there is."""
    found = []
    tokens = _SMALLEST
    while tokens < max_tokens:
        found.append(tokens)
        tokens *= 2
    return tuple(n for n in (*found, max_tokens) if n >= max(smallest, _SMALLEST))


class Planner:
    """Every rank runs the same measurements in step; the figures are those of the slowest."""

    def __init__(self, measured: Measurable, agreement: Agreement) -> None:
        self._it, self._agree = measured, agreement
        self._layers = list(measured.decoder.layers[:_PROBE_LAYERS])
        self._pass_layers = len(measured.decoder.layers) if measured.compiled else len(self._layers)
        self._ends = 0.0
        self._spreads: list[float] = []

    def all_reduces(self, tokens: Sequence[int]) -> dict[int, float]:
        """Seconds of one AllReduce alone, by tokens."""
        return {n: self._all_reduce(self._it.make_inputs(n)) for n in tokens}

    def plan(
        self, max_tokens: int, say: Callable[[str], None] = lambda _line: None
    ) -> tuple[Plan, tuple[Sample, ...]]:
        """The plan of all ranks, and the samples it rests on.

        Raises:
            RuntimeError: a rank or its link is gone.
        """
        self._ends = time.monotonic() + BUDGET_S
        samples: list[Sample] = []
        unmeasured: list[PlanRow] = []
        for tokens in sizes(max_tokens, self._it.smallest):
            if samples and not self._fits(self._sampling_s(samples[-1], tokens), share=0.5):
                unmeasured = [PlanRow(tokens, 1)]
                break
            samples.append(self._sample(tokens))
        if not samples:
            return Plan((), "measured"), ()
        contention = self._contention(samples[-1])
        model = CostModel(samples, contention, self._it.decoder.mlp_chunked)
        tried: dict[int, tuple[float, float, int]] = {}
        for tokens in (sample.tokens for sample in samples):
            counts = self._agree.from_first(model.ranked(tokens, _HOPELESS)[:_TRIED])
            trials = self._trials(model.stock_s(tokens), counts)
            if counts and trials >= _LEAST_TRIALS:
                tried[tokens] = stock_s, overlapped_s, chunks = self._try(tokens, counts, trials)
                say(
                    f"overlap at {tokens} tokens: stock {stock_s * 1e3:.2f} ms a layer, "
                    f"{chunks} chunks {overlapped_s * 1e3:.2f} ms"
                )
        plan = build_plan(model, [sample.tokens for sample in samples], tried)
        plan = Plan((*plan.rows, *unmeasured), plan.origin)
        return Plan.from_json(self._agree.from_first(plan.to_json())), tuple(samples)

    def _left_s(self) -> float:
        """Of the budget, by rank 0's clock: all ranks must go on, or not, together."""
        return float(self._agree.from_first(self._ends - time.monotonic()))

    def _fits(self, seconds: float, share: float) -> bool:
        return self._left_s() - seconds > BUDGET_S * (1 - share)

    def _sampling_s(self, last: Sample, tokens: int) -> float:
        """What sampling a size will take, from the size before."""
        once = len(self._layers) * last.compute_s + last.all_reduce_s
        return (_WARM_UPS + _REPEATS) * once * tokens / last.tokens

    def _trials(self, stock_s: float, counts: Sequence[int]) -> int:
        """How many there is time for, of the stock pass and of one for each number of chunks."""
        turn_s = (1 + len(counts)) * stock_s * self._pass_layers
        return max(0, min(_TRIALS, int(self._left_s() / turn_s) - _WARM_UPS))

    def _sample(self, tokens: int) -> Sample:
        inputs = self._it.make_inputs(tokens)
        rows, residual = inputs.hidden, inputs.hidden.clone()
        mlp_reduces = not self._it.decoder.mlp_chunked
        qkv = self._seconds(lambda layer: layer.qkv(inputs.positions, rows, residual.clone()))
        o_proj = self._seconds(lambda layer: layer.o_proj(inputs.attended))
        mlp = self._seconds(lambda layer: layer.mlp(rows.clone(), residual.clone()))
        copying = self._seconds(lambda _layer: (rows.clone(), residual.clone()))
        all_reduce = self._all_reduce(inputs)
        own = [qkv - copying / 2, o_proj, mlp - copying - (all_reduce if mlp_reduces else 0.0)]
        qkv_s, o_proj_s, mlp_s, all_reduce_s = self._agree.slowest([max(1e-7, s) for s in own] + [all_reduce])
        return Sample(tokens, qkv_s, o_proj_s, mlp_s, all_reduce_s)

    def _seconds(self, part: Callable[[DecoderLayer], Any]) -> float:
        """Median seconds of one layer's part, over the probe layers as a pass meets them."""
        found = []
        for repeat in range(_WARM_UPS + _REPEATS):
            self._agree.barrier()
            before = self._now()
            for layer in self._layers:
                part(layer)
            if repeat >= _WARM_UPS:
                found.append((self._now() - before) / len(self._layers))
        return statistics.median(found)

    def _all_reduce(self, inputs: Inputs) -> float:
        found = []
        rows = torch.zeros_like(inputs.hidden)
        for repeat in range(_WARM_UPS + _REPEATS):
            self._agree.barrier()
            before = self._now()
            self._it.channel.all_reduce(rows).wait()
            if repeat >= _WARM_UPS:
                found.append(self._now() - before)
        return self._agree.slowest([statistics.median(found)])[0]

    def _contention(self, sample: Sample) -> Contention:
        """Both at once: an AllReduce while an MLP computes."""
        inputs = self._it.make_inputs(sample.tokens)
        if not self._it.decoder.mlp_chunked:  # its MLP has an AllReduce of its own
            return Contention()
        layer, rows = self._layers[0], torch.zeros_like(inputs.hidden)
        # As long as each other, so that both are busy nearly all the time.
        mlps = max(1, round(sample.all_reduce_s / sample.mlp_s))
        reduces = max(1, round(sample.mlp_s / sample.all_reduce_s))
        hidden, residual = inputs.hidden.clone(), inputs.hidden.clone()
        compute, channel = [], []
        for _ in range(_REPEATS):
            self._agree.barrier()
            before = self._now()
            reducing = [self._it.channel.all_reduce(rows) for _ in range(reduces)]
            for _ in range(mlps):
                layer.mlp(hidden, residual)
            self._it.synchronize()
            compute.append((time.perf_counter() - before) / (mlps * sample.mlp_s))
            for one in reducing:
                one.wait()
            channel.append((self._now() - before) / max(reduces * sample.all_reduce_s, mlps * sample.mlp_s))
        slow = self._agree.slowest([statistics.median(compute), statistics.median(channel)])
        return Contention(max(1.0, min(slow[0], 3.0)), max(1.0, min(slow[1], 3.0)))

    def _try(self, tokens: int, counts: Sequence[int], trials: int) -> tuple[float, float, int]:
        """Seconds of a layer without attention: stock, and in the best of `counts` chunks, taken in turns."""
        inputs = self._it.make_inputs(tokens)
        found: dict[int, list[float]] = {count: [] for count in (1, *counts)}
        for trial in range(_WARM_UPS + trials):
            for count, seconds in found.items():
                self._agree.barrier()
                before = self._now()
                self._pass(inputs, count)
                if trial >= _WARM_UPS:
                    seconds.append((self._now() - before) / self._pass_layers)
        stock = found[1]
        # Turn by turn, so that a machine that slows down for a while slows both sides of a ratio.
        ratios = [statistics.median(map(truediv, found[count], stock)) for count in counts]
        stock_s, spread, *agreed = self._agree.slowest([statistics.median(stock), _spread(stock), *ratios])
        self._spreads.append(spread)
        ratio, best = min(zip(agreed, counts, strict=True))
        return stock_s, stock_s * ratio, best

    @property
    def steady(self) -> bool:
        """Whether the machine was quiet enough for the plan to be worth keeping."""
        return not self._spreads or statistics.median(self._spreads) < _UNSTEADY

    def _pass(self, inputs: Inputs, count: int) -> None:
        """Some layers without their attention, or the whole model where it is compiled."""
        if self._it.compiled is not None:
            self._it.compiled(inputs, count)
            return
        if count > 1:
            probe = _WithoutAttention(self._it.decoder, self._layers, inputs.attended)
            decoders.run(probe, self._it.channel, inputs.hidden.clone(), inputs.positions, count)
            return
        hidden, residual = inputs.hidden.clone(), None
        for layer in self._layers:
            _heads, residual = layer.qkv(inputs.positions, hidden, residual)
            hidden = self._it.stock_reduce(layer.o_proj(inputs.attended))
            hidden, residual = layer.mlp(hidden, residual)
            if self._it.decoder.mlp_chunked:
                hidden = self._it.stock_reduce(hidden)
        assert residual is not None
        self._it.decoder.norm(hidden, residual)

    def _now(self) -> float:
        self._it.synchronize()
        return time.perf_counter()


class _WithoutAttention:
    """A decoder of a few layers whose attention is given."""

    def __init__(self, decoder: Decoder, layers: Sequence[DecoderLayer], attended: torch.Tensor) -> None:
        self.layers = [_LayerWithoutAttention(layer, attended) for layer in layers]
        self.mlp_chunked, self._decoder = decoder.mlp_chunked, decoder

    def norm(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._decoder.norm(hidden, residual)


class _LayerWithoutAttention:
    def __init__(self, layer: DecoderLayer, attended: torch.Tensor) -> None:
        self.qkv, self.o_proj, self.mlp, self._attended = layer.qkv, layer.o_proj, layer.mlp, attended

    def attention(self, heads: Heads) -> torch.Tensor:
        return self._attended


def _spread(seconds: Sequence[float]) -> float:
    """The middle half's width over the median."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle
