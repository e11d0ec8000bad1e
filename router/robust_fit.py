"""Non-negative linear regression of relative errors that outliers do not move. Pure.

Iteratively reweighted least squares, scale by the median absolute deviation: first with Huber's weights
(1964), whose loss is convex, then from there with the bisquare (Beaton & Tukey 1974), which gives a value
that is 100 times too large no weight at all. Coefficients stay >= 0 by an active set, as in Lawson & Hanson
1974. Where the data say nothing, a weak ridge keeps the proportions of the prior; its strength is the noise
of the data, so it yields to a few informative rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_HUBER = 1.345  # 95 % efficient on normal errors (Huber 1964)
_BISQUARE = 4.685  # likewise (Beaton & Tukey 1974)
_ROUNDS = 6  # half with Huber's weights, half with the bisquare's
_LEAST_NOISE = 0.02  # relative; nobody's clock and batch are steadier
_TRUST = 3.0  # a prior knows the order of magnitude: its standard deviation is so many times itself
_SUPPORT = 2.0  # rows that the first guess of the level is worth against wild first ones
_LEAST_VALUE = 1e-6


def fit(x: Floats, y: Floats, weight: Floats, prior: Floats) -> tuple[Floats, float]:
    """Coefficients [k] >= 0 of y [n] ~ x [n, k] @ theta with row weights [n], and the relative noise.

    x and y are >= 0, the prior and the weights > 0. The level is set first, all coefficients by one factor:
    the median of measured over predicted, in which the guess itself counts as `_SUPPORT` rows. No minority
    of outliers moves it far, so the reweighting starts near the truth whatever the prior was worth.
    """
    guessed = np.maximum(x @ prior, _LEAST_VALUE)
    ratios, votes = np.append(y / guessed, 1.0), np.append(weight, _SUPPORT)
    center = prior * weighted_median(ratios, votes)
    theta, noise = center, 1.0
    if len(y) < len(center):
        return center, noise  # fewer rows than coefficients: whatever they say can be fitted exactly
    for round_ in range(_ROUNDS):
        scale = np.maximum(x @ theta, _LEAST_VALUE)
        relative = x / scale[:, None]
        target = y / scale
        residual = target - 1.0
        size = np.abs(residual)
        noise = max(1.4826 * weighted_median(size, weight), _LEAST_NOISE)
        if round_ < _ROUNDS // 2:
            robust = np.minimum(1.0, _HUBER * noise / np.maximum(size, 1e-12))
        else:
            robust = np.maximum(1.0 - (residual / (_BISQUARE * noise)) ** 2, 0.0) ** 2
        shares = relative * center  # in units of the centre, the ridge keeps any rows well conditioned
        weighted = shares * (weight * robust)[:, None]
        normal = weighted.T @ shares
        right = weighted.T @ target
        ridge = (min(noise, 1.0) / _TRUST) ** 2
        theta = center * _solve_not_negative(normal + ridge * np.eye(len(center)), right + ridge)
    return theta, noise


def weighted_median(values: Floats, weight: Floats) -> float:
    """The least value with at least half of the weight at or below it."""
    order = values.argsort()
    below = weight[order].cumsum()
    return float(values[order[min(int(below.searchsorted(below[-1] * 0.5)), len(order) - 1)]])


def _solve_not_negative(normal: Floats, right: Floats) -> Floats:
    """Least squares in normal form with theta >= 0: drop the most negative, solve the rest again."""
    theta = _solve(normal, right)
    free = np.ones(len(right), bool)
    while theta.min() < 0:
        free[int(theta.argmin())] = False
        theta = np.zeros(len(right))
        if free.any():
            theta[free] = _solve(normal[np.ix_(free, free)], right[free])
    return theta


def _solve(normal: Floats, right: Floats) -> Floats:
    """Where rows are so large that the ridge drowns in rounding: the least of the equally good answers."""
    try:
        theta = np.asarray(np.linalg.solve(normal, right), np.float64)
    except np.linalg.LinAlgError:
        theta = np.full(len(right), np.nan)
    if not np.isfinite(theta).all():
        theta = np.asarray(np.linalg.lstsq(normal, right)[0], np.float64)
    return theta
