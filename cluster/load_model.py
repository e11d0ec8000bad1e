"""How the time per output token follows from what else a replica does meanwhile, fitted to requests. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.evidence import RequestRecord

Floats = npt.NDArray[np.float64]

_LEAST_REQUESTS = 8
_LEAST_SPREAD = 1.5
"""Of the batch, largest to smallest: below, its effect cannot be told from the rest."""
_CLEARLY = 0.1
"""Of the residual, so much must be gained before the context is blamed instead of the number ..."""
_AT_LEAST = 0.01
"""... and so much of the whole variance."""


@dataclass(frozen=True, slots=True)
class Company:
    """What shared the replica with each request while it decoded; arrays by request, itself included."""

    requests: Sequence[RequestRecord]
    batch: Floats
    """Mean number of requests decoding."""
    context: Floats
    """Mean of their prompt and output tokens, all together."""
    prefill: Floats
    """Prompt tokens of others computed, for each output token."""
    tpot_s: Floats

    @property
    def weight(self) -> Floats:
        """A request counts by its output tokens."""
        return np.array([request.output for request in self.requests], float)


@dataclass(frozen=True, slots=True)
class TpotModel:
    """TPOT = base + batch * (sequences) + context * (tokens) + prefill * (tokens); seconds, none negative.

    At most one of `batch` and `context` is not zero: sequences and their tokens grow together, and the
    context is named only where it explains the times clearly better than their number.
    """

    base_s: float
    batch_s: float
    context_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What a mean output token takes, and by what: seconds of each term, and how much of each load."""

    model: TpotModel
    batch: float
    context: float
    tokens: float
    """Output tokens of a mean request."""
    least_batch: float
    """The smallest that any request decoded in: below, the model only guesses."""
    by_batch_s: float
    by_context_s: float
    by_prefill_s: float

    @property
    def tpot_s(self) -> float:
        """The sum of the terms."""
        return self.model.base_s + self.by_batch_s + self.by_context_s + self.by_prefill_s


def breakdown(requests: Sequence[RequestRecord]) -> Breakdown | None:
    """Where the time of output tokens goes; None where `fit` cannot say, or nothing takes time."""
    seen = company(requests)
    if not seen.requests or (model := fit(seen)) is None:
        return None
    weight = seen.weight / seen.weight.sum()
    batch, context, prefill = (float(weight @ column) for column in (seen.batch, seen.context, seen.prefill))
    found = Breakdown(
        model=model,
        batch=batch,
        context=context,
        tokens=float(np.mean([request.output for request in seen.requests])),
        least_batch=float(seen.batch.min()),
        by_batch_s=model.batch_s * batch,
        by_context_s=model.context_s * context,
        by_prefill_s=model.prefill_s * prefill,
    )
    return found if found.tpot_s > 0 else None


def company(requests: Sequence[RequestRecord]) -> Company:
    """Who decoded beside whom, from the times of their spans; requests without a TPOT are no rows of it."""
    rows = [request for request in requests if request.tpot_s is not None]
    batch, context, prefill = (np.zeros(len(rows)) for _ in range(3))
    for replica in {request.replica for request in rows}:
        mine = [at for at, request in enumerate(rows) if request.replica == replica]
        others = [request for request in requests if request.replica == replica and request.first_token_s]
        batch[mine], context[mine], prefill[mine] = _beside([rows[at] for at in mine], others)
    return Company(rows, batch, context, prefill, np.array([request.tpot_s for request in rows], float))


def fit(seen: Company) -> TpotModel | None:
    """Least squares without negative terms; None of too few requests, or of those in the same company.

    What hardly differs from request to request gets no term.
    """
    if len(seen.requests) < _LEAST_REQUESTS:
        return None
    crowded, heavy = (loads.max() >= _LEAST_SPREAD * loads.min() for loads in (seen.batch, seen.context))
    delayed = bool(seen.prefill.max() > 0)
    if not (crowded or heavy or delayed):
        return None
    number, number_off = _nonnegative(seen, seen.batch, bool(crowded), delayed)
    context, context_off = _nonnegative(seen, seen.context, bool(heavy), delayed)
    weight, mean = seen.weight, np.average(seen.tpot_s, weights=seen.weight)
    variance = float(weight @ (seen.tpot_s - mean) ** 2)
    if number_off - context_off > max(_CLEARLY * number_off, _AT_LEAST * variance):
        return TpotModel(context[0], 0.0, context[1], context[2])
    return TpotModel(number[0], number[1], 0.0, number[2])


def _beside(rows: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> tuple[Floats, Floats, Floats]:
    def overlap(start: Floats, end: Floats) -> Floats:
        """Seconds that each row's decode shares with each other's interval, [rows, others]."""
        shared: Floats = np.maximum(np.minimum(ends[:, None], end) - np.maximum(starts[:, None], start), 0.0)
        return shared

    starts = np.array([row.first_token_s for row in rows])
    ends = starts + [row.decode_s for row in rows]
    first = np.array([other.first_token_s for other in others])
    decoding = overlap(first, first + [other.decode_s for other in others])
    prefill_s = np.array([max(other.prefill_s, 1e-9) for other in others])
    computing = overlap(first - prefill_s, first)
    held = np.array([other.prompt + other.output / 2 for other in others])
    rate = np.array([other.computed for other in others]) / prefill_s
    lasted = ends - starts
    tokens = np.array([row.output - 1 for row in rows])
    return decoding.sum(1) / lasted, decoding @ held / lasted, computing @ rate / tokens


def _nonnegative(
    seen: Company, load: Floats, loaded: bool, delayed: bool
) -> tuple[tuple[float, float, float], float]:
    """Coefficients of 1, the load and the prefill, and the residual; the best of all subsets of terms."""
    weight = np.sqrt(seen.weight)
    matrix = np.stack([np.ones(len(load)), load, seen.prefill], 1) * weight[:, None]
    wanted = seen.tpot_s * weight
    best: tuple[tuple[float, float, float], float] = (0.0, 0.0, 0.0), float(wanted @ wanted)
    for kept in itertools.product((False, True), (False, loaded), (False, delayed)):
        terms = [at for at, is_kept in enumerate(kept) if is_kept]
        if not terms:
            continue
        found = np.linalg.lstsq(matrix[:, terms], wanted, rcond=None)[0]
        rest = wanted - matrix[:, terms] @ found
        residual = float(rest @ rest)
        if (found >= 0).all() and residual < best[1] * (1 - 1e-9):
            spread = [0.0, 0.0, 0.0]
            for term, value in zip(terms, found.tolist(), strict=True):
                spread[term] = value
            best = (spread[0], spread[1], spread[2]), residual
    return best
