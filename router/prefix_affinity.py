"""Policy prefix-affinity: the longest prefix wins unless its replica is overloaded; what peers do."""

from __future__ import annotations

import random

import numpy as np

from router.picker import RouteRequest, View

_OVERLOAD_SEQUENCES = 8
_OVERLOAD_RATIO = 1.5


class PrefixAffinity:
    """The replica with the longest prefix in its cache or in flight; of equal ones the least loaded.

    A replica is overloaded when it has both 8 sequences and half as many again more than the least loaded:
    the two thresholds of SGLang's cache-aware router. When the best is, the least loaded of all is taken.
    It serves as the yardstick for predicted-time, which needs no thresholds.
    """

    name = "prefix-affinity"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, view: View, request: RouteRequest) -> int:
        load = view.sequences
        least = float(load.min())
        longest = np.flatnonzero(view.cached == view.cached.max())
        fittest = longest[load[longest] == load[longest].min()]
        held = float(load[fittest[0]])
        if held - least > _OVERLOAD_SEQUENCES and held > _OVERLOAD_RATIO * least:
            fittest = np.flatnonzero(load == least)
        return int(fittest[self._rng.randrange(len(fittest))])
