"""Policy predicted-time: the least predicted cost in ms. The default."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from router.cost import CostSettings
from router.picker import RouteRequest, View

_ALONE = 1.5  # routers
_LEAST_WORK_MS = 1e-3


class PredictedTime:
    """The least score (`router.cost`); uniformly random among near-ties, mixed when it is not alone.

    Near-ties are scores within max(near_tie_ms, near_tie_percent of the least TTFT) of the least: no
    prediction is better than that, and always taking the first would pile requests on it. The session's
    preferred replica wins among them.
    """

    name = "predicted-time"

    def __init__(self, settings: CostSettings, rng: random.Random) -> None:
        self._settings, self._rng = settings, rng

    def choose(self, view: View, request: RouteRequest) -> int:
        prediction, settings = view.prediction, self._settings
        score = prediction.score
        best = int(score.argmin())
        least = float(score[best])
        window = max(settings.near_tie_ms, settings.near_tie_percent / 100.0 * float(prediction.ttft[best]))
        near = score <= least + window
        ties = np.flatnonzero(near)
        if request.session:
            preferred = ties[prediction.affinity[ties] > 0]
            if len(preferred):
                return int(preferred[0])
        if view.routers < _ALONE:
            return int(ties[self._rng.randrange(len(ties))])
        work = (view.routers - 1.0) * np.maximum(prediction.prefill, _LEAST_WORK_MS)
        chances = equilibrium(np.where(near, least, score), work)
        edges = chances.cumsum()
        drawn = int(edges.searchsorted(self._rng.random() * edges[-1], side="right"))
        return min(drawn, len(edges) - 1)


def equilibrium(score: npt.NDArray[np.float64], work: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Chances [n] with which each of several like-minded routers should choose each replica.

    All see the same stale scores; were each to take the least, that replica would get all of their
    requests at once. When the others choose replica i with chance p_i, it will be slower by work_i * p_i ms
    (`work` [n] > 0: ms of engine time that the requests of all others add when they all come here). Nobody
    gains by changing when score_i + work_i * p_i is one level L wherever p_i > 0 and score_i >= L elsewhere:
    the symmetric equilibrium of a congestion game (Rosenthal 1973), Wardrop's principle (1952). So
    p_i = max(0, L - score_i) / work_i with L such that they sum to 1, found by filling from the least.
    """
    order = score.argsort()
    ascending, inverse = score[order], 1.0 / work[order]
    # Shifted by the least score: differences keep their digits.
    low = ascending[0]
    ascending = ascending - low
    levels = (1.0 + np.cumsum(ascending * inverse)) / np.cumsum(inverse)
    level = levels[int(np.flatnonzero(levels > ascending)[-1])]
    shares = np.maximum(level + low - score, 0.0) / work
    chances: npt.NDArray[np.float64] = shares / shares.sum()
    return chances
