"""How fast blocks travel between hosts, learned from what pulls took. Pure; bounded.

For each pair of arenas, from one to the other: a latency (ms) and ms per byte. The last `_WINDOW` pulls of a
pair are fitted again with each that comes (`router.robust_fit`), so that a wild one moves nothing. While they
are too few or too much alike to tell the two apart, they keep the proportions of the first guess, and the
median of measured over guessed scales both: the first pull already convicts a slow pair.

The first guess is the median of what other pairs turned out to be, the hosts of a cluster being linked alike,
or 1 Gbit/s and 5 ms while there are none.

Failing. A pair whose pull brought nothing is left alone for 1 s, then 2, 4 ... 60 s: each try costs a request
the time until its replica gives up.

Doubt. Who predicts from outcomes and pulls by prediction never hears again of a pair that once was slow. So
one without pulls moves to the guess, if that is quicker, from `_FRESH_S` on and wholly at `_FORGOTTEN_S`;
what was known before then counts for less than the next pull.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from router.robust_fit import fit, weighted_median

Floats = npt.NDArray[np.float64]

PRIOR_LATENCY_MS = 5.0
PRIOR_MS_PER_BYTE = 1e3 / 125e6  # 1 Gbit/s

_WINDOW = 16  # pulls per pair
_GUESS_VOTE = 0.5  # of a pull's weight: what the guess of the level counts against the first ones
_GUESS_PAIRS = 256  # the pairs heard of last, of which the guess is the median
_MEMORY_S = 120.0
_MOST_FORGOTTEN = 0.2  # of the weight of old pulls, at each new one
_KEPT = 0.9  # of it, once in doubt: less than that of the next pull
_FRESH_S = 30.0
_FORGOTTEN_S = 180.0
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 1.0, 60.0
_MOST_DOUBLINGS = 10

_LEAST_SHARE = 1e-3  # of the guess, for a coefficient to be unlearned from
_LEAST_MS = 1e-3
_LEAST_MS_PER_BYTE = 1e-12
_MOST_MS = 3_600_000.0
_MOST_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one pull brought, and how long it took from asking to the last block."""

    bytes: int
    ms: float

    def sane(self) -> bool:
        """Whether it may be learned from: something came, in a time that can be."""
        return 0 < self.bytes <= _MOST_BYTES and math.isfinite(self.ms) and 0 <= self.ms <= _MOST_MS


@dataclass(frozen=True, slots=True)
class PairSpeed:
    """From one arena to another: `latency_ms + bytes * ms_per_byte`."""

    latency_ms: float = PRIOR_LATENCY_MS
    ms_per_byte: float = PRIOR_MS_PER_BYTE
    avoided_until: float = -math.inf  # s; the last pulls brought nothing


class FetchSpeeds:
    """Speeds by names of arenas, over restarts; the pairs heard of least lately beyond `most` are forgotten.

    `now` is seconds of one clock that does not go back.
    """

    def __init__(self, most: int = 4096) -> None:
        self.guess = PairSpeed()  # of pairs that nothing is known of
        self._most = most
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pairs)

    def of(self, source: str, target: str, now: float) -> PairSpeed:
        """What is to be expected now."""
        pair = self._pairs.get((source, target))
        return self.guess if pair is None else pair.at(now, self.guess)

    def learn(self, source: str, target: str, pulled: Pulled, now: float) -> bool:
        """Take one pull, also one that brought only some of its blocks; false when it cannot be true."""
        if not pulled.sane():
            return False
        self._pair(source, target).learn(pulled, now)
        recent = [p.fitted for p in islice(reversed(self._pairs.values()), _GUESS_PAIRS) if p.fitted]
        known = np.array([(speed.latency_ms, speed.ms_per_byte) for speed in recent])
        latency, per_byte = np.median(known, axis=0).tolist()
        self.guess = PairSpeed(latency, per_byte)
        return True

    def failed(self, source: str, target: str, now: float) -> None:
        """A pull brought nothing: the pair is avoided for a while, longer each time in a row."""
        self._pair(source, target).fail(now)

    def forgive(self, arena: str) -> None:
        """Pairs with this arena are avoided no more: what failed there is not what will be asked next."""
        for names, pair in self._pairs.items():
            if arena in names:
                pair.forgive()

    def _pair(self, source: str, target: str) -> _Pair:
        names = (source, target)
        found = self._pairs.get(names)
        if found is None:
            found = self._pairs[names] = _Pair(self.guess)
            while len(self._pairs) > self._most:
                self._pairs.popitem(last=False)
        else:
            self._pairs.move_to_end(names)
        return found


class _Pair:
    """Its window of pulls, and their fit."""

    def __init__(self, guess: PairSpeed) -> None:
        self.fitted: PairSpeed | None = None  # until there is a pull
        self._first = np.array([max(guess.latency_ms, _LEAST_MS), max(guess.ms_per_byte, _LEAST_MS_PER_BYTE)])
        self._rows: Floats = np.zeros((_WINDOW, 3))  # 1, bytes, ms
        self._weights: Floats = np.zeros(_WINDOW)
        self._count = self._failures = 0
        self._heard_at = 0.0
        self._avoided_until = -math.inf

    def at(self, now: float, guess: PairSpeed) -> PairSpeed:
        known = self.fitted
        if known is None:
            return PairSpeed(guess.latency_ms, guess.ms_per_byte, self._avoided_until)
        doubt = self._doubt(now)
        return PairSpeed(
            _towards(known.latency_ms, guess.latency_ms, doubt),
            _towards(known.ms_per_byte, guess.ms_per_byte, doubt),
            self._avoided_until,
        )

    def learn(self, pulled: Pulled, now: float) -> None:
        if self._count:
            aged = math.exp(-max(now - self._heard_at, 0.0) / _MEMORY_S)
            self._weights *= max(aged, 1.0 - _MOST_FORGOTTEN)
            if self._doubt(now) > 0:
                self._weights *= min(_KEPT / float(self._weights.sum()), 1.0)
        place = self._count % _WINDOW
        self._rows[place] = (1.0, pulled.bytes, max(pulled.ms, _LEAST_MS))
        self._weights[place] = 1.0
        self._count += 1
        self._heard_at, self._failures, self._avoided_until = now, 0, -math.inf
        held = min(self._count, _WINDOW)
        x, y, weights = self._rows[:held, :2], self._rows[:held, 2], self._weights[:held]
        ratios, votes = np.append(y / (x @ self._first), 1.0), np.append(weights, _GUESS_VOTE)
        center = self._first * weighted_median(ratios, votes)
        # Twice: a guess that is far off, as its proportions are on a quick network, holds the first back.
        theta, _noise = fit(x, y, weights, center)
        theta, _noise = fit(x, y, weights, np.maximum(theta, center * _LEAST_SHARE))
        latency, per_byte = theta.tolist()
        self.fitted = PairSpeed(latency, per_byte)

    def fail(self, now: float) -> None:
        pause_s = min(_LEAST_BACKOFF_S * 2.0 ** min(self._failures, _MOST_DOUBLINGS), _MOST_BACKOFF_S)
        self._failures += 1
        self._avoided_until = now + pause_s

    def forgive(self) -> None:
        self._failures, self._avoided_until = 0, -math.inf

    def _doubt(self, now: float) -> float:
        """0 .. 1: how little it is worth for want of pulls."""
        return max(min((now - self._heard_at - _FRESH_S) / (_FORGOTTEN_S - _FRESH_S), 1.0), 0.0)


def _towards(known: float, guess: float, share: float) -> float:
    """That share of the way from what is known to the guess, if that is quicker, by ratio."""
    if guess >= known or share <= 0:
        return known
    return known * float((max(guess, _LEAST_MS_PER_BYTE) / known) ** share)
