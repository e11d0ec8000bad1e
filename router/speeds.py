"""How fast each replica is, learned from what requests took. Pure; bounded.

Coefficients of `router.cost`: t0 (ms), a (ms per token), b (ms per token and token of context), d (ms per
step and running sequence), and the overhead (ms) that the engine's own times do not explain.

Learning. The last `_WINDOW` outcomes of a replica are fitted again as they come (`router.robust_fit`): so
which of them are outliers is judged anew, which a recursive estimate cannot. Where the window says nothing
(all prompts of one length, nothing else running) the fit keeps the proportions of the prior, not those of
the fit before: under noise (prompts that shared their steps) what is not seen would wander off from fit to
fit.

Forgetting. An outcome's weight falls to 1/e in `_MEMORY_S`, noisy neighbours and warm-ups being matters of
minutes; but the next outcome takes at most a tenth of it, so that some ten outcomes count however rare they
are. A replica that turned slow or fast at once is not waited for so long: Page's CUSUM (1954) of errors
clipped to 3 sigma finds it in six outcomes, and four wild ones in a row are none. What was learned before is
then scaled to the new level, a neighbour slowing down everything alike, and counts as `_KEPT` outcomes.

Doubt. Who predicts from outcomes and sends by prediction never hears again of a replica that once was slow:
it is avoided for ever, for a fault long gone. So a replica without outcomes is doubted more and more (see
`_Learner.doubt_at`) and its coefficients move to those of the fastest replica whose own are not in doubt,
if it is slower than that: optimism in the face of uncertainty, on the side that outcomes correct (Lai &
Robbins 1985; under change Garivier & Moulines 2011). By no more than `_PROOF` standard errors slower is not
proven to be slower: then all the way at once, else the luck of a few outcomes would decide who is used. In
the end it is a near-tie, gets a request, and that outcome tells: of what was known, what was supposed and
what came the median holds, so one outcome suffices to convict a slow replica again or to acquit it. Finding
out costs a fleet one request in `_PATIENCE` at most, and one in `_FORGOTTEN_S` for each slow replica. When
nobody has outcomes nobody is doubted: what is known, if old, is still the best guess, and an order among
replicas that nothing contradicts costs nothing. Whom hardly any outcome has come from is taken to be as fast
as the fastest from the start.

Priors, until the first outcome. The replica's own measured prefill speed is `a` when it reports one. Else the
median of the replicas that have been learned: one model on like machines. Else 0.2 ms per token, the
geometric mean of what the project measured on a 2-core CPU (1.2 ms, a 135M model) and of an 8B model on a
data-centre GPU (0.04 ms): within a factor of six of either, and the same for all, so that the choice then
follows the token counts alone. The rest in units of a: t0 a decode step when reported, else 40 a (13 and 120
on these two machines); b a/10,000, as attention costs as much as the matmuls at a context of about 4k tokens
in the small model and 27k in the 8B one (4*layers*hidden*context against 2*parameters FLOPs); d one a: one
more sequence is one more token in a step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from router.cost import attention_pairs
from router.robust_fit import fit, weighted_median

Floats = npt.NDArray[np.float64]

_COEFFICIENTS = 4
_WINDOW = 64  # outcomes per replica
_EAGER = 16  # so many are fitted one by one, later ones some at a time ...
_REFIT_S = 5.0  # ... or when the fit is this old
_PRIOR_MS_PER_TOKEN = 0.2
_LEAST_SHARE = 0.1  # of the usual proportions, for a coefficient taken from another replica
_LEAST_MS = 1e-3  # of a prefill: finer than any engine's clock
_MOST_MS = 3_600_000.0
_MOST_TOKENS = 1 << 31
_ERROR_RATE = 0.1  # of the moving means of prediction errors

_MEMORY_S = 120.0
_MOST_FORGOTTEN = 0.1  # of the weight of old outcomes, at each new one
_KEPT = 1.5  # less than the two votes against it when a first new outcome is as fast as was supposed

_FRESH_S = 30.0  # an outcome this young leaves no doubt
_FORGOTTEN_S = 180.0  # one this old says nothing, if enough has been learned elsewhere since:
_PATIENCE = 20  # outcomes for each replica
_PROOF = 2.0  # standard errors that a replica must be slower by, once it is in doubt at all
_RELIABLE = 8  # outcomes of a replica by which others are judged
_USUAL_RATE = 0.02  # of the moving mean of requests: some fifty

_LEAST_CHANGE = 0.05  # relative; smaller ones are left to the window
_CLIP = 3.0  # sigma
_SLACK = 1.0  # sigma
_ALARM = 12.0  # sigma


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
    pull_ms: float = 0.0  # of it, before the engine had it: blocks were under way from another host
    predicted_ttft_ms: float | None = None
    predicted_cached: int | None = None  # tokens
    generated_tokens: float | None = None  # per sequence, of a request that finished

    def sane(self) -> bool:
        """Whether it may be learned from: finite, not negative, below an hour."""
        times = (self.queue_ms, self.prefill_ms, self.ttft_ms, self.pull_ms)
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
    """Coefficients by replica name, over restarts; the least recently used beyond `most` are forgotten.

    `now` is seconds of one clock that does not go back.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._known: OrderedDict[str, _Learner] = OrderedDict()
        self._usual = (0.0, 0.0, 0.0, 0.0)  # the mean request of late, as a row of the fits
        self._learned = 0  # outcomes, of all replicas

    def __len__(self) -> int:
        return len(self._known)

    def of(self, replica: str) -> Coefficients:
        """Its coefficients as of the last outcome or `relax`; priors when nothing is known."""
        return self._learner(replica).served

    def errors(self, replica: str) -> Errors:
        """How far predictions for it were off."""
        return self._learner(replica).errors

    def measured(self, replica: str, prefill_ms_per_token: float, decode_step_ms: float) -> bool:
        """Take the replica's own measurements as priors; true when its coefficients changed.

        0, or what cannot be a time, means unknown. Once there are outcomes they are left alone.
        """
        return self._learner(replica).set_prior(_time(prefill_ms_per_token), _time(decode_step_ms))

    def learn(self, replica: str, outcome: Outcome, now: float) -> bool:
        """Take one outcome; true when its coefficients changed."""
        learner = self._learner(replica)
        if not outcome.sane():
            learner.reject()
            return False
        row = _row(outcome)
        self._learned += 1
        rate = max(_USUAL_RATE, 1.0 / self._learned)
        t0, a, b, d = (mean + (new - mean) * rate for mean, new in zip(self._usual, row[:4], strict=True))
        self._usual = (t0, a, b, d)
        return learner.learn(outcome, row, now, self._learned)

    def relax(self, replicas: Iterable[str], now: float) -> list[str]:
        """Move those of `replicas` that are in doubt towards the fastest that is not; who changed.

        `replicas` are those there are now. Call it every few seconds.
        """
        learners = {name: self._learner(name) for name in replicas}
        patience = _PATIENCE * len(learners)
        doubts = [learner.doubt_at(now, self._learned, patience) for learner in learners.values()]
        costs = [self._usual_ms(learner.fitted) for learner in learners.values()]
        reliable = [
            (cost, learner.error, learner.fitted)
            for learner, doubt, cost in zip(learners.values(), doubts, costs, strict=True)
            if doubt < 0.5 and learner.errors.outcomes >= _RELIABLE
        ]
        if not reliable:
            return []
        least, error, fastest = min(reliable, key=lambda known: known[0])
        changed = []
        for (name, learner), doubt, cost in zip(learners.items(), doubts, costs, strict=True):
            before = learner.served
            slower = cost > least
            if slower and learner.errors.outcomes < _COEFFICIENTS:
                learner.adopt(fastest, now)
            if doubt > 0:
                proven = cost > least * (1.0 + _PROOF * math.hypot(error, learner.error))
                learner.relax(doubt, doubt if proven else 1.0, fastest if slower else learner.fitted)
            if learner.served != before:
                changed.append(name)
        return changed

    def _usual_ms(self, speed: Coefficients) -> float:
        """What the mean request of late would take there, beyond its queue."""
        one, u, pairs, steps = self._usual
        return speed.t0 * one + speed.a * u + speed.b * pairs + speed.d * steps + speed.overhead

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
        learned = [learner.fitted.a for learner in self._known.values() if learner.errors.outcomes >= _EAGER]
        typical = float(np.median(learned)) if learned else 0.0
        return typical or _PRIOR_MS_PER_TOKEN


class _Learner:
    """One replica's window of outcomes, their fit, and how much of it is still believed."""

    def __init__(self, a: float) -> None:
        self.errors = Errors()
        self._fallback_a = a
        self._measured = (0.0, 0.0)
        self._adopted: Coefficients | None = None  # another replica's, as prior
        self._count = 0
        self._rows = np.zeros((_WINDOW, 6))  # 1, u, u*(c + u/2), steps*running, prefill ms, overhead ms
        self._weights = np.zeros(_WINDOW)
        self._heard_at = self._fitted_at = 0.0
        self._heard_of = 0  # outcomes of all replicas until its last
        self._doubt = 0.0
        self._noise = self.error = 1.0  # relative: of one outcome, of the level
        self._drift = [0.0, 0.0]  # CUSUM, sigma: slower, faster
        self._drifting = [0, 0]  # outcomes since it was more than one may add
        self._prior = self._theta = _prior(a, 0.0)
        self.fitted = self.served = _coefficients(self._prior, 0.0)  # what outcomes say; less what is doubted

    def set_prior(self, a: float, step: float) -> bool:
        if self._count or self._adopted is not None or (a, step) == self._measured:
            return False
        self._measured = (a, step)
        self._prior = self._theta = _prior(a or self._fallback_a, step)
        self.fitted = self.served = _coefficients(self._prior, 0.0)
        return True

    def adopt(self, fastest: Coefficients, now: float) -> None:
        """Take `fastest` as the prior: while outcomes are too few for a fit, its level decides."""
        if fastest == self._adopted:
            return
        self._adopted = fastest
        # The fit scales its prior, so a 0 in it could never be unlearned.
        least = _LEAST_SHARE * _prior(max(fastest.a, _LEAST_MS), 0.0)
        self._prior = self._theta = np.maximum(np.array(astuple(fastest)[:4]), least)
        if self._count:
            self._fit(now)
        else:
            self.fitted = self.served = fastest

    def reject(self) -> None:
        e = self.errors
        self.errors = Errors(e.ttft_ms, e.cached_tokens, e.outcomes, e.rejected + 1)

    def doubt_at(self, now: float, learned: int, patience: int) -> float:
        """0 .. 1: how little its coefficients are worth for want of outcomes.

        The lesser of two: what the age of the last one says, and how much has been `learned` since of all
        replicas, compared with `patience`. So little traffic does not go to finding out in large part.
        """
        if not self._count:
            return 0.0  # a prior needs no support
        age = (now - self._heard_at - _FRESH_S) / (_FORGOTTEN_S - _FRESH_S)
        return max(min(age, (learned - self._heard_of) / patience, 1.0), 0.0)

    def relax(self, doubt: float, share: float, fastest: Coefficients) -> None:
        """Be in doubt; go this share of the way from what outcomes say to `fastest`."""
        self._doubt = doubt
        own, other, rest = self.fitted, fastest, 1.0 - share
        self.served = Coefficients(
            own.t0 * rest + other.t0 * share,
            own.a * rest + other.a * share,
            own.b * rest + other.b * share,
            own.d * rest + other.d * share,
            own.overhead * rest + other.overhead * share,
        )

    def learn(self, outcome: Outcome, row: Row, now: float, learned: int) -> bool:
        doubted = self._doubt > 0
        if self._count:
            aged = math.exp(-max(now - self._heard_at, 0.0) / _MEMORY_S)
            self._weights *= max(aged, 1.0 - _MOST_FORGOTTEN)
            if doubted:
                self._reconsider(row)
        self._doubt, self._heard_at, self._heard_of = 0.0, now, learned
        place = self._count % _WINDOW
        self._rows[place], self._weights[place] = row, 1.0
        self._count += 1
        self._note_errors(outcome)
        turned = self._count > _EAGER and self._turned(row)
        stride = 1 if self._count <= _EAGER else 4 if self._count <= _WINDOW else 16
        if not (turned or doubted or self._count % stride == 0 or now - self._fitted_at >= _REFIT_S):
            return False
        self._fit(now)
        return True

    def _reconsider(self, row: Row) -> None:
        """The first outcome after a time of doubt: let old ones say the median of three voices.

        They are what they said, what was supposed instead, and what came.
        """
        fitted, served = _prefill_ms(self.fitted, row), _prefill_ms(self.served, row)
        level = _middle(1.0, served / fitted, row[4] / fitted)
        overhead = _middle(self.fitted.overhead, self.served.overhead, row[5])
        believed = (1.0 - self._doubt) * float(self._weights.sum())
        self._restate(slice(None), level, overhead, kept=believed + _KEPT)

    def _turned(self, row: Row) -> bool:
        """Whether the last outcomes, `row` the newest, are off to one side too far and too long for noise."""
        expected = _prefill_ms(self.fitted, row)
        off = row[4] / expected - 1.0 if row[4] >= expected else 1.0 - expected / row[4]
        sigmas = min(max(off / max(self._noise, _LEAST_CHANGE), -_CLIP), _CLIP)
        for side, sign in enumerate((1.0, -1.0)):
            self._drift[side] = max(self._drift[side] + sign * sigmas - _SLACK, 0.0)
            self._drifting[side] = self._drifting[side] + 1 if self._drift[side] > _CLIP else 0
            if self._drift[side] >= _ALARM:
                self._start_anew(self._drifting[side])
                return True
        return False

    def _start_anew(self, since: int) -> None:
        """The last `since` outcomes are of another time than those before."""
        self._drift, self._drifting = [0.0, 0.0], [0, 0]
        held = min(self._count, _WINDOW)
        old = np.zeros(_WINDOW, bool)
        old[[place % _WINDOW for place in range(self._count - held, self._count - min(since, held))]] = True
        recent = ~old
        recent[held:] = False
        expected = np.maximum(self._rows[recent, :4] @ self._theta, _LEAST_MS)
        level = float(np.median(self._rows[recent, 4] / expected))
        self._restate(old, level, self.fitted.overhead, kept=_KEPT)

    def _restate(
        self, old: slice | npt.NDArray[np.bool_], level: float, overhead: float, *, kept: float
    ) -> None:
        """Let old outcomes have taken `level` times as long, and count as `kept` at most."""
        rows = self._rows[old]
        rows[:, 4] = np.clip(rows[:, 4] * level, _LEAST_MS, _MOST_MS)
        rows[:, 5] = np.clip(rows[:, 5] + overhead - self.fitted.overhead, 0.0, _MOST_MS)
        self._rows[old] = rows
        weight = float(self._weights[old].sum())
        if weight > kept:
            self._weights[old] *= kept / weight

    def _fit(self, now: float) -> None:
        held = min(self._count, _WINDOW)
        rows, weights = self._rows[:held], self._weights[:held]
        self._theta, self._noise = fit(rows[:, :4], rows[:, 4], weights, self._prior)
        self.fitted = self.served = _coefficients(self._theta, weighted_median(rows[:, 5], weights))
        self.error = self._noise / math.sqrt(max(float(weights.sum()), 1.0))
        self._fitted_at = now

    def _note_errors(self, outcome: Outcome) -> None:
        before = self.errors
        ttft, cached = before.ttft_ms, before.cached_tokens
        if outcome.predicted_ttft_ms is not None and math.isfinite(outcome.predicted_ttft_ms):
            ttft = _moved(ttft, abs(outcome.predicted_ttft_ms - outcome.ttft_ms), before.outcomes)
        if outcome.predicted_cached is not None:
            cached = _moved(cached, abs(outcome.predicted_cached - outcome.cached), before.outcomes)
        self.errors = Errors(ttft, cached, before.outcomes + 1, before.rejected)


Row = tuple[float, float, float, float, float, float]


def _row(outcome: Outcome) -> Row:
    u, c = float(outcome.uncached), float(outcome.cached)
    beyond = max(outcome.ttft_ms - outcome.pull_ms - outcome.queue_ms - outcome.prefill_ms, 0.0)
    prefill = max(outcome.prefill_ms, _LEAST_MS)
    return 1.0, u, attention_pairs(u, c), outcome.steps * outcome.running, prefill, beyond


def _prefill_ms(speed: Coefficients, row: Row) -> float:
    ms = speed.t0 + speed.a * row[1] + speed.b * row[2] + speed.d * row[3]
    return max(ms, _LEAST_MS)


def _coefficients(theta: Floats, overhead: float) -> Coefficients:
    t0, a, b, d = theta.tolist()
    return Coefficients(t0, a, b, d, overhead)


def _prior(a: float, step: float) -> Floats:
    priors = Coefficients(t0=step or 40.0 * a, a=a, b=a / 10_000.0, d=a)
    return np.array(astuple(priors)[:4])


def _middle(one: float, two: float, three: float) -> float:
    return sorted((one, two, three))[1]


def _moved(mean: float, value: float, count: int) -> float:
    """A moving mean whose first values count in full."""
    return mean + (value - mean) * max(_ERROR_RATE, 1.0 / (count + 1))


def _time(value: float) -> float:
    return value if math.isfinite(value) and 0 < value <= _MOST_MS else 0.0
