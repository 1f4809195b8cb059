"""Student's t for a handful of seeds: intervals, verdicts, and how many seeds a verdict would need.

Settings are compared seed by seed: with the same seed, two runs draw the same subset of the data
and the same order of images, and what they share cancels in the difference.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["held", "not held", "undecided"]
ALPHA = 0.05
"""Intervals cover 95%; a verdict is wrong in at most one of 20 studies."""
_MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of some values, one per seed, and what follows from it."""

    verdict: Verdict
    mean: float
    low: float | None
    """Ends of the interval; None for a single seed, and for what has no seeds."""
    high: float | None
    n: int
    coverage: float = 1 - ALPHA
    needed: int | None = None
    """Seeds after which a mean and deviation like these would decide; None if decided, if there is
    no deviation yet, or if even a thousand would not."""


def is_above(values: Sequence[float], bound: float = 0.0) -> Estimate:
    """Whether the expected value is above a bound."""
    return _decide(values, lambda low, high: low > bound, lambda low, high: high < bound)


def is_within(values: Sequence[float], margin: float) -> Estimate:
    """Whether the expected value is within ±margin: two one-sided tests, so the interval covers
    90%. To find that it is not, the 95% interval must be outside."""
    return _decide(
        values,
        lambda low, high: -margin < low and high < margin,
        lambda low, high: low > margin or high < -margin,
        coverage=1 - 2 * ALPHA,
    )


def exact(value: float, holds: bool) -> Estimate:
    """What is counted or does not depend on a seed."""
    return Estimate(verdict="held" if holds else "not held", mean=value, low=None, high=None, n=1)


def interval(values: Sequence[float], coverage: float = 1 - ALPHA) -> tuple[float, float] | None:
    """The confidence interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    return _interval(fmean(values), stdev(values), len(values), coverage)


def _interval(mean: float, std: float, n: int, coverage: float) -> tuple[float, float]:
    half = t_quantile((1 + coverage) / 2, n - 1) * std / math.sqrt(n)
    return mean - half, mean + half


def _decide(
    values: Sequence[float],
    holds: Callable[[float, float], bool],
    fails: Callable[[float, float], bool],
    coverage: float = 1 - ALPHA,
) -> Estimate:
    """`holds` and `fails` take the ends of an interval: of this coverage, and of 95%."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Estimate(verdict="undecided", mean=mean, low=None, high=None, n=n)
    std = stdev(values)

    def verdict(count: int) -> Verdict:
        if holds(*_interval(mean, std, count, coverage)):
            return "held"
        return "not held" if fails(*_interval(mean, std, count, 1 - ALPHA)) else "undecided"

    found = verdict(n)
    low, high = _interval(mean, std, n, coverage)
    needed = None
    if found == "undecided":
        counts = range(n + 1, _MOST_SEEDS + 1)  # the interval shrinks with each of them
        first = bisect_left(counts, True, key=lambda count: verdict(count) != "undecided")
        needed = counts[first] if first < len(counts) else None
    return Estimate(
        verdict=found, mean=mean, low=low, high=high, n=n, coverage=coverage, needed=needed
    )


def combine(estimates: Sequence[Estimate]) -> Verdict:
    """A claim of several parts: all of them must hold, and one that does not is enough."""
    verdicts = {estimate.verdict for estimate in estimates}
    if "not held" in verdicts:
        return "not held"
    return "undecided" if "undecided" in verdicts else "held"


@cache
def t_quantile(p: float, freedom: int) -> float:
    """The p-quantile of Student's t, by bisection of its distribution."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        if t_probability(middle, freedom) < p:
            low = middle
        else:
            high = middle
    return high


def t_probability(t: float, freedom: int) -> float:
    """P(T ≤ t) for t ≥ 0 and a whole number of degrees of freedom: the finite series in
    θ = arctan(t / √ν) (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan2(t, math.sqrt(freedom))
    sine, squared = math.sin(theta), math.cos(theta) ** 2
    odd = freedom % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= squared * (k - 1) / k
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return 0.5 + inside / 2
