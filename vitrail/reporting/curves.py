"""Measurements over time, ready to draw: few enough points, and gaps where a number was none."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from vitrail.reporting.folder import Events

Numbers = Float[np.ndarray, " n"]
Points = Float[np.ndarray, " points"]

MOST_POINTS = 500
UNITS = (("h", 3600.0, 3 * 3600.0), ("min", 60.0, 180.0), ("s", 1.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: where many measurements fall on a point, their mean and their range."""

    x: Points
    y: Points
    low: Points
    high: Points
    colour: str
    """A colour of the page, by name."""
    dashes: str = "-"

    @property
    def thinned(self) -> bool:
        return not np.array_equal(self.low, self.high, equal_nan=True)


def line(
    events: Events,
    name: str,
    *,
    against: str,
    colour: str,
    scale: float = 1.0,
    dashes: str = "-",
    most: int = MOST_POINTS,
) -> Line:
    """The values called `name`, times `scale`, against `step` or `seconds`."""
    x, y = events.column(against), events.column(name) * scale
    placed = np.isfinite(x)
    x, y, low, high = thin(x[placed], y[placed], most)
    return Line(x=x, y=y, low=low, high=high, colour=colour, dashes=dashes)


def thin(x: Numbers, y: Numbers, most: int) -> tuple[Points, Points, Points, Points]:
    """At most so many points: the middle of each bucket, its mean, lowest and highest."""
    if len(x) <= most:
        return x, y, y, y
    starts = np.linspace(0, len(x), most, endpoint=False).astype(int)
    finite = np.isfinite(y)
    counts = np.add.reduceat(finite.astype(float), starts)
    known = counts > 0  # else a gap
    sums = np.add.reduceat(np.where(finite, y, 0.0), starts)
    middles = np.add.reduceat(x, starts) / np.diff([*starts, len(x)])
    means = np.where(known, sums / np.maximum(counts, 1), np.nan)
    low = np.where(known, np.minimum.reduceat(np.where(finite, y, np.inf), starts), np.nan)
    high = np.where(known, np.maximum.reduceat(np.where(finite, y, -np.inf), starts), np.nan)
    return middles, means, low, high


def not_a_number(events: Events, name: str) -> str:
    """In words, where a measurement that should be there was not finite."""
    values, steps = events.column(name), events.column("step")
    odd = ~np.isfinite(values)
    if not odd.any() or odd.all():
        return ""
    return (
        f"{odd.sum():,} of {len(values):,} lines have no finite {name.replace('_', ' ')}, "
        f"the first at step {steps[odd][0]:,.0f}."
    )


def steps_per_epoch(events: Events) -> float:
    """How many updates see every picture once; zero where the lines do not tell."""
    steps, epochs = events.column("step"), events.column("epoch")
    known = np.isfinite(epochs) & (epochs > 0) & (steps > 0)
    return float(steps[known][-1] / epochs[known][-1]) if known.any() else 0.0


def time_unit(longest: float) -> tuple[str, float]:
    """Seconds, minutes or hours, and how many seconds that is."""
    return next((unit, size) for unit, size, least in UNITS if longest >= least)
