"""The policies by name, and those that fit in a few lines.

To add one: a class with `name` and `choose` (`router.picker.Policy`), a line in `_MAKERS`, a name in the
configuration.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from router.cost import CostSettings
from router.picker import Policy, RouteRequest, View
from router.predicted_time import PredictedTime
from router.prefix_affinity import PrefixAffinity


class RoundRobin:
    """Each in turn, from a random start so that several routers do not march in step."""

    name = "round-robin"

    def __init__(self, rng: random.Random) -> None:
        self._turn = rng.randrange(1 << 16)

    def choose(self, view: View, request: RouteRequest) -> int:
        self._turn += 1
        return self._turn % len(view.rows)


class Uniform:
    """Any, with equal chances."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, view: View, request: RouteRequest) -> int:
        return self._rng.randrange(len(view.rows))


class LeastLoaded:
    """The replica with the fewest sequences, as estimated by the fleet; ties are broken uniformly at random.

    When the router is not alone it looks at two random replicas only (drawn with replacement), so that
    routers with equal, stale views do not all choose the same one: Mitzenmacher, "How Useful Is Old
    Information?", 2000.
    """

    name = "least-loaded"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, view: View, request: RouteRequest) -> int:
        if view.routers >= 1.5:
            return fewer_of_two(view, self._rng)
        ties = np.flatnonzero(view.sequences == view.sequences.min())
        return int(ties[self._rng.randrange(len(ties))])


class PowerOfTwo:
    """The less loaded of two random replicas: Mitzenmacher, "The Power of Two Choices", 2001."""

    name = "power-of-two"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, view: View, request: RouteRequest) -> int:
        return fewer_of_two(view, self._rng)


def fewer_of_two(view: View, rng: random.Random) -> int:
    """Of two positions drawn with replacement, that with fewer sequences; the first when equal."""
    first, second = rng.randrange(len(view.rows)), rng.randrange(len(view.rows))
    return second if view.sequences[second] < view.sequences[first] else first


_MAKERS: dict[str, Callable[[CostSettings, random.Random], Policy]] = {
    PredictedTime.name: PredictedTime,
    PrefixAffinity.name: lambda _settings, rng: PrefixAffinity(rng),
    PowerOfTwo.name: lambda _settings, rng: PowerOfTwo(rng),
    LeastLoaded.name: lambda _settings, rng: LeastLoaded(rng),
    RoundRobin.name: lambda _settings, rng: RoundRobin(rng),
    Uniform.name: lambda _settings, rng: Uniform(rng),
}

POLICY_NAMES = tuple(_MAKERS)


def make_policy(name: str, settings: CostSettings | None = None, rng: random.Random | None = None) -> Policy:
    """The policy of that name.

    Raises:
        KeyError: there is none of that name; the message lists those there are.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise KeyError(f"there is no policy '{name}'; choose one of: {', '.join(POLICY_NAMES)}")
    return maker(settings or CostSettings(), rng or random.Random())  # noqa: S311 (balancing, no secret)
