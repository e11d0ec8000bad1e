"""How fast each replica is, learned from what requests took. Pure; bounded.

Coefficients of `router.cost`: t0 (ms), a (ms per token), b (ms per token and token of context), d (ms per
step and running sequence), and the overhead (ms) that the engine's own times do not explain.

Method. The last `_WINDOW` outcomes of a replica are fitted again as they come: so old ones are forgotten,
and which of them are outliers is judged anew, which a recursive estimate cannot. It is a regression of
relative errors by iteratively reweighted least squares, scale by the median absolute deviation: first with
Huber's weights (1964), whose loss is convex, then from there with the bisquare (Beaton & Tukey 1974), which
gives a request that took 100 times too long (first of its shape, garbage collection, a paused machine) no
weight at all. Coefficients stay >= 0 by an active set, as in Lawson & Hanson 1974. Where the window says
nothing (all prompts of one length, nothing else running), a weak ridge keeps the proportions of the prior;
its strength is the noise of the data, so it yields to a few informative outcomes. Not the proportions of the
fit before: under noise (prompts that shared their steps) what is not seen would wander off from fit to fit,
and a replica that seems slow by such a fault is avoided, so never corrected.

Priors, until then. The replica's own measured prefill speed is `a` when it reports one. Else the median of
the replicas that have been learned: one model on like machines. Else 0.2 ms per token, the geometric mean of
what the project measured on a 2-core CPU (1.2 ms, a 135M model) and of an 8B model on a data-centre GPU
(0.04 ms): within a factor of six of either, and the same for all, so that the choice then follows the token
counts alone. The rest in units of a: t0 a decode step when reported, else 40 a (13 and 120 on these two
machines); b a/10,000, as attention costs as much as the matmuls at a context of about 4k tokens in the
small model and 27k in the 8B one (4*layers*hidden*context against 2*parameters FLOPs); d one a: one more
sequence is one more token in a step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_WINDOW = 64  # outcomes per replica
_EAGER = 16  # so many are fitted one by one, later ones some at a time
_PRIOR_MS_PER_TOKEN = 0.2
_HUBER = 1.345  # 95 % efficient on normal errors (Huber 1964)
_BISQUARE = 4.685  # likewise (Beaton & Tukey 1974)
_ROUNDS = 6  # half with Huber's weights, half with the bisquare's
_LEAST_NOISE = 0.02  # relative; nobody's clock and batch are steadier
_TRUST = 3.0  # a prior knows the order of magnitude: its standard deviation is so many times itself
_SUPPORT = 2  # outcomes that the first guess of the level is worth against wild first ones
_MOST_MS = 3_600_000.0
_MOST_TOKENS = 1 << 31
_ERROR_RATE = 0.1  # of the moving means of prediction errors


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request took, and what had been predicted of it. Times are ms."""

    uncached: int  # prompt tokens that were computed
    cached: int  # prompt tokens that were not
    running: float  # sequences in the batch when it was routed
    steps: float  # engine steps that its prefill took, predicted
    queue_ms: float  # the engine's clock
    prefill_ms: float  # the engine's clock
    ttft_ms: float  # from the router's call to the first message, or as a lookaside client measured it
    predicted_ttft_ms: float | None = None
    predicted_cached: int | None = None  # tokens
    generated_tokens: float | None = None  # per sequence, of a request that finished

    def sane(self) -> bool:
        """Whether it may be learned from: finite, not negative, below an hour."""
        times = (self.queue_ms, self.prefill_ms, self.ttft_ms)
        counts = (self.uncached, self.cached, self.running, self.steps)
        return (
            all(math.isfinite(ms) and 0 <= ms <= _MOST_MS for ms in times)
            and all(math.isfinite(count) and 0 <= count <= _MOST_TOKENS for count in counts)
            and self.prefill_ms > 0
        )


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Speed of one replica; see the module."""

    t0: float
    a: float
    b: float
    d: float
    overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Moving means of |predicted - measured|; 0 until there is one."""

    ttft_ms: float = 0.0
    cached_tokens: float = 0.0
    outcomes: int = 0  # learned from
    rejected: int = 0  # refused as absurd


class Speeds:
    """Coefficients by replica name, over restarts; the least recently used beyond `most` are forgotten."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._known: OrderedDict[str, _Learner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, replica: str) -> Coefficients:
        """Its coefficients now; priors when nothing is known."""
        return self._learner(replica).coefficients()

    def errors(self, replica: str) -> Errors:
        """How far predictions for it were off."""
        return self._learner(replica).errors

    def measured(self, replica: str, prefill_ms_per_token: float, decode_step_ms: float) -> bool:
        """Take the replica's own measurements as priors; true when its coefficients changed.

        0, or what cannot be a time, means unknown. Once there are outcomes they are left alone.
        """
        return self._learner(replica).set_prior(_time(prefill_ms_per_token), _time(decode_step_ms))

    def learn(self, replica: str, outcome: Outcome) -> bool:
        """Take one outcome; true when its coefficients changed."""
        return self._learner(replica).learn(outcome)

    def _learner(self, replica: str) -> _Learner:
        found = self._known.get(replica)
        if found is None:
            found = self._known[replica] = _Learner(self._typical())
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(replica)
        return found

    def _typical(self) -> float:
        learned = [learner.theta[1] for learner in self._known.values() if learner.errors.outcomes >= _EAGER]
        typical = float(np.median(learned)) if learned else 0.0
        return typical or _PRIOR_MS_PER_TOKEN


class _Learner:
    """One replica's window of outcomes and their fit."""

    def __init__(self, a: float) -> None:
        self.errors = Errors()
        self._fallback_a = a
        self._measured = (0.0, 0.0)
        self._overhead = 0.0
        self._count = 0
        self._rows = np.zeros((_WINDOW, 6))  # 1, u, u*(c + u/2), steps*running, prefill ms, overhead ms
        self.prior = self.theta = _prior(a, 0.0)

    def coefficients(self) -> Coefficients:
        t0, a, b, d = (float(value) for value in self.theta)
        return Coefficients(t0, a, b, d, self._overhead)

    def set_prior(self, a: float, step: float) -> bool:
        if self._count or (a, step) == self._measured:
            return False
        self._measured = (a, step)
        self.prior = self.theta = _prior(a or self._fallback_a, step)
        return True

    def learn(self, outcome: Outcome) -> bool:
        errors = self.errors
        if not outcome.sane():
            self.errors = Errors(errors.ttft_ms, errors.cached_tokens, errors.outcomes, errors.rejected + 1)
            return False
        u, c = float(outcome.uncached), float(outcome.cached)
        beyond = max(outcome.ttft_ms - outcome.queue_ms - outcome.prefill_ms, 0.0)
        row = (1.0, u, u * (c + u * 0.5), outcome.steps * outcome.running, outcome.prefill_ms, beyond)
        self._rows[self._count % _WINDOW] = row
        self._count += 1
        self._note_errors(outcome)
        stride = 1 if self._count <= _EAGER else 4 if self._count <= _WINDOW else 16
        if self._count % stride:
            return False
        rows = self._rows[: min(self._count, _WINDOW)]
        self.theta = _fit(rows[:, :4], rows[:, 4], self.prior)
        self._overhead = float(np.median(rows[:, 5]))
        return True

    def _note_errors(self, outcome: Outcome) -> None:
        before = self.errors
        ttft, cached = before.ttft_ms, before.cached_tokens
        if outcome.predicted_ttft_ms is not None and math.isfinite(outcome.predicted_ttft_ms):
            ttft = _moved(ttft, abs(outcome.predicted_ttft_ms - outcome.ttft_ms), before.outcomes)
        if outcome.predicted_cached is not None:
            cached = _moved(cached, abs(outcome.predicted_cached - outcome.cached), before.outcomes)
        self.errors = Errors(ttft, cached, before.outcomes + 1, before.rejected)


def _fit(x: Floats, y: Floats, prior: Floats) -> Floats:
    """Coefficients [4] >= 0 of y ~ x @ theta, robustly, in the proportions of `prior` where x says nothing.

    The level is set first, all coefficients by one factor: the median of measured over predicted, in which
    the guess itself counts as `_SUPPORT` outcomes. No minority of outliers moves it far, so the reweighting
    starts near the truth whatever the prior was worth.
    """
    guessed = np.maximum(x @ prior, 1e-6)
    factor = float(np.median(np.concatenate([y / guessed, np.ones(_SUPPORT)])))
    center = prior * factor
    theta = center
    if len(y) < len(center):
        return center  # fewer outcomes than coefficients: whatever they say can be fitted exactly
    width = _TRUST * center
    for round_ in range(_ROUNDS):
        scale = np.maximum(x @ theta, 1e-6)
        relative = x / scale[:, None]
        residual = y / scale - 1.0
        size = np.abs(residual)
        noise = max(1.4826 * float(np.median(size)), _LEAST_NOISE)
        if round_ < _ROUNDS // 2:
            weight = np.minimum(1.0, _HUBER * noise / np.maximum(size, 1e-12))
        else:
            weight = np.maximum(1.0 - (residual / (_BISQUARE * noise)) ** 2, 0.0) ** 2
        weighted = relative * weight[:, None]
        normal = weighted.T @ relative
        right = weighted.T @ (y / scale)
        ridge = min(noise, 1.0) ** 2 / width**2
        theta = _solve_not_negative(normal + np.diag(ridge), right + ridge * center)
    return theta


def _solve_not_negative(normal: Floats, right: Floats) -> Floats:
    """Least squares in normal form with theta >= 0: drop the most negative, solve the rest again."""
    theta = np.asarray(np.linalg.solve(normal, right), np.float64)
    free = np.ones(len(right), bool)
    while theta.min() < 0:
        free[int(theta.argmin())] = False
        theta = np.zeros(len(right))
        if free.any():
            theta[free] = np.linalg.solve(normal[np.ix_(free, free)], right[free])
    return theta


def _prior(a: float, step: float) -> Floats:
    priors = Coefficients(t0=step or 40.0 * a, a=a, b=a / 10_000.0, d=a)
    return np.array(astuple(priors)[:4])


def _moved(mean: float, value: float, count: int) -> float:
    """A moving mean whose first values count in full."""
    return mean + (value - mean) * max(_ERROR_RATE, 1.0 / (count + 1))


def _time(value: float) -> float:
    return value if math.isfinite(value) and 0 < value <= _MOST_MS else 0.0
