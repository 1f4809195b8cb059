"""The tests of claims: from results to held, not held, undecided or not measured.

Cells are compared seed by seed. Accuracies are fractions, so a margin of 0.01 is one point. Where a
claim names a row or a line of several cells, the cell with the best accuracy on val stands for it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from vitrail.errors import VitrailError
from vitrail.reproduction.experiment import Arm, Cell, Claim, Design, Point
from vitrail.reproduction.significance import (
    Estimate,
    Verdict,
    combine,
    exact,
    is_above,
    is_within,
)

Values = Mapping[int, float]
"""A figure of a cell by seed."""
_WITHOUT_SEED = ("gmacs", "parameters", "largest_batch", "images_per_second")
"""Measures that do not depend on the seed, or are not repeated."""


@dataclass(frozen=True)
class Results:
    """The results of an experiment, as far as they are there."""

    design: Design
    by_cell: Mapping[str, Mapping[int, Mapping[str, Any]]]
    """By the name of the cell and the seed."""

    def of(self, cell: Cell) -> Mapping[int, Mapping[str, Any]]:
        return self.by_cell.get(cell.name, {})

    def values(self, point: Point, measure: str = "") -> dict[int, float]:
        """A figure by seed, the mean of the cells; a run that diverged has none."""
        name = measure or self.design.experiment.measure
        cells = point.cells
        if self.design.experiment.average:
            cells = tuple(cell for cell in cells if cell.column in self.columns)
        found: dict[int, list[float]] = {}
        for cell in cells:
            for seed, result in self.of(cell).items():
                if (value := result.get(name)) is not None:
                    found.setdefault(seed, []).append(value)
        whole = {seed: values for seed, values in found.items() if len(values) == len(cells)}
        return {seed: fmean(values) for seed, values in whole.items()}

    @cached_property
    def columns(self) -> list[Arm]:
        """The columns that every row has results in: datasets may be missing."""
        design = self.design
        return [
            column
            for column in design.columns
            if all(self.of(cell) for cell in design.cells if cell.column is column)
        ]

    def mean(self, point: Point, measure: str = "") -> float | None:
        """Over the seeds; None if there are no results."""
        return fmean(values) if (values := self.values(point, measure).values()) else None

    def best(self, name: str) -> Point:
        """The point of a name; of several, the one with the best mean accuracy on val."""
        points = self.design.select(name)
        return max(points, key=lambda point: self.mean(point, "val_top1") or -math.inf)

    def line(self, name: str, seed: int, measure: str) -> tuple[list[float], list[float]]:
        """The points of a line by increasing x; the axis is logarithmic."""
        places = []
        for point in self.design.select(name):
            x, y = self.x(point), self.values(point, measure).get(seed)
            if x is not None and y is not None:
                places.append((math.log(x), y))
        places.sort()
        return [x for x, _ in places], [y for _, y in places]

    def x(self, point: Point) -> float | None:
        """Where a point is on the axis of the chart."""
        axis = self.design.experiment.x
        return self.mean(point, axis) if axis else point.cells[0].column.x

    def seeds(self) -> range:
        return range(self.design.scale.seeds)


@dataclass(frozen=True)
class Part:
    """One of the tests that a claim consists of."""

    name: str
    estimate: Estimate | None
    """None if there is nothing to compare yet."""


@dataclass(frozen=True)
class Decision:
    """What the results say about a claim."""

    claim: Claim
    verdict: Verdict | None
    """None if something is not measured yet."""
    parts: tuple[Part, ...]


def decide(claim: Claim, results: Results) -> Decision:
    """Of several parts, all must hold."""
    if claim.test not in _TESTS:
        raise VitrailError(f"unknown test '{claim.test}' of a claim; one of {', '.join(_TESTS)}")
    parts = tuple(_TESTS[claim.test](claim, results))
    found = [part.estimate for part in parts if part.estimate is not None]
    verdict = combine(found) if found and len(found) == len(parts) else None
    return Decision(claim, verdict, parts)


def _decided(
    values: Values, claim: Claim, decide_by: Callable[[list[float]], Estimate]
) -> Estimate | None:
    """A test of values; of those that do not depend on the seed, their sign decides."""
    if not values:
        return None
    if claim.measure in _WITHOUT_SEED:
        value = fmean(values.values())
        return exact(value, value > claim.margin)
    return decide_by(list(values.values()))


def _differences(results: Results, first: Point, second: Point, measure: str) -> Values:
    one, other = results.values(first, measure), results.values(second, measure)
    return {seed: one[seed] - other[seed] for seed in one.keys() & other.keys()}


def _above(claim: Claim, results: Results) -> Iterator[Part]:
    """The first cell of each pair exceeds the second by more than the margin."""
    for pair in claim.pairs:
        first, second = map(results.best, pair)
        values = _differences(results, first, second, claim.measure)
        estimate = _decided(values, claim, lambda found: is_above(found, claim.margin))
        yield Part(f"{first.name} − {second.name}", estimate)


def _within(claim: Claim, results: Results) -> Iterator[Part]:
    """The cells of each pair differ by less than the margin."""
    for pair in claim.pairs:
        first, second = map(results.best, pair)
        values = _differences(results, first, second, claim.measure)
        estimate = is_within(list(values.values()), claim.margin) if values else None
        yield Part(f"{first.name} − {second.name}", estimate)


def _turns(claim: Claim, results: Results) -> Iterator[Part]:
    """The first row of each pair is below the second in the first column, above it in the last."""
    design = results.design
    for lower, upper in claim.pairs:
        for column, (a, b) in ((0, (upper, lower)), (-1, (lower, upper))):
            first, second = design.select(a)[column], design.select(b)[column]
            values = _differences(results, first, second, claim.measure)
            estimate = is_above(list(values.values())) if values else None
            yield Part(f"{first.name} − {second.name}", estimate)


def _less_x(claim: Claim, results: Results) -> Iterator[Part]:
    """The first line of each pair needs a smaller x than the second for the same value: by how many
    doublings, on average over the values that both reach."""
    for first, second in claim.pairs:
        doublings = {}
        for seed in results.seeds():
            lines = (results.line(name, seed, claim.measure) for name in (first, second))
            if (gap := _gap(*(_inverse(x, y) for x, y in lines))) is not None:
                doublings[seed] = -fmean(gap) / math.log(2)
        estimate = is_above(list(doublings.values()), claim.margin) if doublings else None
        yield Part(f"doublings of x that {first} saves over {second}", estimate)


def _inverse(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """The least x that reaches each value, by increasing value: more compute may be worse."""
    reached: list[tuple[float, float]] = []
    for x, y in zip(xs, ys, strict=True):
        if not reached or y > reached[-1][0]:
            reached.append((y, x))
    return [y for y, _ in reached], [x for _, x in reached]


def _closes(claim: Claim, results: Results) -> Iterator[Part]:
    """The lead of the first line of each pair over the second shrinks from the lowest x that both
    have to the highest."""
    for first, second in claim.pairs:
        shrinks = {}
        for seed in results.seeds():
            lines = (results.line(name, seed, claim.measure) for name in (first, second))
            if (gap := _gap(*lines)) is not None and len(gap) > 1:
                shrinks[seed] = gap[0] - gap[-1]
        estimate = is_above(list(shrinks.values()), claim.margin) if shrinks else None
        yield Part(f"lead of {first} over {second} at the lowest x − at the highest", estimate)


def _gains_more(claim: Claim, results: Results) -> Iterator[Part]:
    """From the first column to the last, the first row of each pair gains more than the second."""
    for pair in claim.pairs:
        gains = []
        for name in pair:
            points = results.design.select(name)
            gains.append(_differences(results, points[-1], points[0], claim.measure))
        values = [gains[0][seed] - gains[1][seed] for seed in gains[0].keys() & gains[1].keys()]
        estimate = is_above(values, claim.margin) if values else None
        yield Part(f"gain of {pair[0]} − gain of {pair[1]}", estimate)


def _positive(claim: Claim, results: Results) -> Iterator[Part]:
    """A measure of a cell is above the margin."""
    names = claim.of or tuple(point.name for point in results.design.points)
    for name in names:
        values = results.values(results.best(name), claim.measure)
        yield Part(name, _decided(values, claim, lambda v: is_above(v, claim.margin)))


def _near(claim: Claim, results: Results) -> Iterator[Part]:
    """Figures are those of the paper, up to a relative margin."""
    for name, expected in claim.expected.items():
        value = results.mean(results.best(name), claim.measure)
        ratio = None if value is None else value / expected - 1
        estimate = None if ratio is None else exact(ratio, abs(ratio) <= claim.margin)
        yield Part(name, estimate)


def _above_along(claim: Claim, results: Results, lowest: bool) -> Iterator[Part]:
    """The first line of each pair is above the second at equal x, where both are: on average, or
    at the lowest x."""
    for first, second in claim.pairs:
        gaps = {}
        for seed in results.seeds():
            gap = _gap(
                results.line(first, seed, claim.measure), results.line(second, seed, claim.measure)
            )
            if gap is not None:
                gaps[seed] = gap[0] if lowest else fmean(gap)
        estimate = is_above(list(gaps.values()), claim.margin) if gaps else None
        yield Part(f"{first} − {second}", estimate)


def _gap(
    first: tuple[list[float], list[float]], second: tuple[list[float], list[float]]
) -> list[float] | None:
    """The differences of two lines, interpolated, at all points within the range of both."""
    (x1, y1), (x2, y2) = first, second
    if not x1 or not x2:
        return None
    low, high = max(x1[0], x2[0]), min(x1[-1], x2[-1])
    shared = sorted({low, high, *(x for x in (*x1, *x2) if low < x < high)})
    if low > high:
        return None
    return (np.interp(shared, x1, y1) - np.interp(shared, x2, y2)).tolist()


_TESTS: Mapping[str, Callable[[Claim, Results], Iterator[Part]]] = {
    "above": _above,
    "within": _within,
    "turns": _turns,
    "gains more": _gains_more,
    "positive": _positive,
    "near": _near,
    "less x": _less_x,
    "closes": _closes,
    "above at equal x": lambda claim, results: _above_along(claim, results, lowest=False),
    "above at the lowest x": lambda claim, results: _above_along(claim, results, lowest=True),
}
