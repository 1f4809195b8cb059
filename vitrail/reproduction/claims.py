"""The tests of claims: from results to held, not held, undecided or not measured.

Cells are compared seed by seed. Accuracies are fractions, so a margin of 0.01 is one point. Where a
claim names a row of several cells, the one with the best accuracy on val stands for it, and what is
compared is its accuracy on test, which had no part in the choice.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
Line = tuple[list[float], list[float]]
"""x, increasing, and y."""
_WITHOUT_SEED = ("gmacs", "parameters", "largest_batch", "images_per_second")
"""Measures of trained models that do not depend on the seed, or are not repeated."""


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
        accuracy = {point.name: self.mean(point, "val_top1") for point in points}
        return max(points, key=lambda point: -1.0 if (y := accuracy[point.name]) is None else y)

    def complete(self, *names: str) -> bool:
        """Whether all cells of these names have a result with every seed.

        A dataset without any result is taken to be missing, if a row is the mean over datasets.
        """
        points = [point for name in names for point in self.design.select(name)]
        cells = [cell for point in points for cell in point.cells]
        if self.design.experiment.average:
            known = [c.column for c in self.design.cells if self.of(c)]
            cells = [cell for cell in cells if cell.column in known]
        return bool(cells) and all(len(self.of(cell)) == self.design.seeds for cell in cells)

    def line(self, name: str, seed: int, measure: str) -> Line:
        """The points of a line by increasing logarithm of x; those at the same x are averaged."""
        places: dict[float, list[float]] = {}
        for point in self.design.select(name):
            x, y = self.x(point), self.values(point, measure).get(seed)
            if x is not None and y is not None:
                places.setdefault(math.log(x), []).append(y)
        xs = sorted(places)
        return xs, [fmean(places[x]) for x in xs]

    def x(self, point: Point, axis: str = "") -> float | None:
        """Where a point is on an axis, by default that of the first chart."""
        cell = point.cells[0]
        if measures := self.design.experiment.x:
            return self.mean(point, axis or measures[0])
        is_first = cell.column is self.design.columns[0]
        return cell.row.x if cell.column.x is None and is_first else cell.column.x


@dataclass(frozen=True)
class Part:
    """One of the tests that a claim consists of."""

    name: str
    estimate: Estimate | None
    """None if there is nothing to compare yet."""
    complete: bool = True
    """Whether all runs that it rests on are done. Before that it decides nothing: a study that
    ends when it likes its interval would be wrong more often than the interval says."""
    diverged: int = 0
    """Seeds that are left out of the estimate, since a run diverged."""
    apart: bool = False
    """Whether there is nothing to compare because two lines have no common range."""


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
    parts = tuple(_with_diverged(part, results) for part in _TESTS[claim.test](claim, results))
    if not parts:
        given = "expected" if claim.test == "near" else "pairs"
        raise VitrailError(f"the claim '{claim.text}' compares nothing: it has no {given}")
    found = [part.estimate for part in parts if part.complete and part.estimate is not None]
    verdict = combine(found) if len(found) == len(parts) else None
    return Decision(claim, verdict, parts)


def _with_diverged(part: Part, results: Results) -> Part:
    """With how many seeds are missing from an interval though all runs are done; then it decides
    nothing."""
    if part.estimate is None or part.estimate.low is None or not part.complete:
        return part
    diverged = results.design.seeds - part.estimate.n
    # Those that did not diverge would not be a random choice.
    undecided = replace(part.estimate, verdict="undecided", needed=None)
    return replace(part, estimate=undecided, diverged=diverged) if diverged else part


def names_of_best(claim: Claim, design: Design) -> list[str]:
    """Names in a claim for which the best of several cells stands."""
    if claim.test not in _TESTS_OF_BEST:
        return []
    names = [*(name for pair in claim.pairs for name in pair), *claim.of, *claim.expected]
    return [name for name in names if len(design.select(name)) > 1]


def _decided(
    values: Iterable[float],
    claim: Claim,
    results: Results,
    decide_by: Callable[[list[float]], Estimate],
) -> Estimate | None:
    """A test of values, one per seed; where they do not depend on a seed, one value decides."""
    found = list(values)
    if not found:
        return None
    if not results.design.experiment.train or claim.measure in _WITHOUT_SEED:
        value = fmean(found)
        return exact(value, decide_by([value, value]).verdict == "held")
    return decide_by(found)


def _difference(
    claim: Claim,
    results: Results,
    pair: tuple[str, str],
    decide_by: Callable[[list[float]], Estimate],
) -> Part:
    """The test of a paired difference."""
    first, second = map(results.best, pair)
    values = _differences(results, first, second, claim.measure).values()
    estimate = _decided(values, claim, results, decide_by)
    return Part(f"{first.name} − {second.name}", estimate, results.complete(*pair))


def _differences(results: Results, first: Point, second: Point, measure: str) -> Values:
    one, other = results.values(first, measure), results.values(second, measure)
    return {seed: one[seed] - other[seed] for seed in one.keys() & other.keys()}


def _above(claim: Claim, results: Results) -> Iterator[Part]:
    """The first cell of each pair exceeds the second by more than the margin."""
    for pair in claim.pairs:
        yield _difference(claim, results, pair, lambda found: is_above(found, claim.margin))


def _within(claim: Claim, results: Results) -> Iterator[Part]:
    """The cells of each pair differ by less than the margin."""
    if claim.margin <= 0:
        raise VitrailError(f"the claim '{claim.text}' needs a margin above zero")
    for pair in claim.pairs:
        yield _difference(claim, results, pair, lambda found: is_within(found, claim.margin))


def _turns(claim: Claim, results: Results) -> Iterator[Part]:
    """The first row of each pair is below the second in the first column, above it in the last."""
    for one, other in claim.pairs:
        (first, last), (other_first, other_last) = (
            _ends(claim, results, name) for name in (one, other)
        )
        for pair in ((other_first.name, first.name), (last.name, other_last.name)):
            yield _difference(claim, results, pair, lambda found: is_above(found, claim.margin))


def _less_x(claim: Claim, results: Results) -> Iterator[Part]:
    """The first line of each pair needs a smaller x than the second for the same value: by how many
    doublings, on average over the values that both reach."""

    def doublings(first: Line, second: Line) -> float | None:
        gaps = _gaps(_inverse(first), _inverse(second))
        return None if gaps is None else -gaps.mean / math.log(2)

    for pair in claim.pairs:
        yield _along(claim, results, pair, "x that {} saves over {}", doublings)


def _inverse(line: Line) -> Line:
    """The least x that reaches each value, by increasing value: more compute may be worse."""
    reached: list[tuple[float, float]] = []
    for x, y in zip(*line, strict=True):
        if not reached or y > reached[-1][0]:
            reached.append((y, x))
    return [y for y, _ in reached], [x for _, x in reached]


def _closes(claim: Claim, results: Results) -> Iterator[Part]:
    """The lead of the first line of each pair over the second shrinks from the lowest x that both
    have to the highest."""

    def shrinks(first: Line, second: Line) -> float | None:
        gaps = _gaps(first, second)
        return None if gaps is None or gaps.width == 0 else gaps.low - gaps.high

    for pair in claim.pairs:
        yield _along(claim, results, pair, "lead of {} over {}, low x − high x", shrinks)


def _gains_more(claim: Claim, results: Results) -> Iterator[Part]:
    """From the first column to the last, the first row of each pair gains more than the second."""
    for pair in claim.pairs:
        ends = [_ends(claim, results, name) for name in pair]
        gains = [_differences(results, last, first, claim.measure) for first, last in ends]
        values = [gains[0][seed] - gains[1][seed] for seed in gains[0].keys() & gains[1].keys()]
        estimate = _decided(values, claim, results, lambda found: is_above(found, claim.margin))
        names = (point.name for pair in ends for point in pair)
        yield Part(f"gain of {pair[0]} − gain of {pair[1]}", estimate, results.complete(*names))


def _ends(claim: Claim, results: Results, name: str) -> tuple[Point, Point]:
    """The cells of a row in the first and in the last column."""
    points = results.design.select(name)
    if len(points) < 2:
        raise VitrailError(f"the claim '{claim.text}' needs several columns; '{name}' has one")
    return points[0], points[-1]


def _positive(claim: Claim, results: Results) -> Iterator[Part]:
    """A measure of a cell is above the margin."""
    for name in claim.of or tuple(point.name for point in results.design.points):
        values = results.values(results.best(name), claim.measure).values()
        estimate = _decided(values, claim, results, lambda found: is_above(found, claim.margin))
        yield Part(name, estimate, results.complete(name))


def _near(claim: Claim, results: Results) -> Iterator[Part]:
    """Figures are those of the paper, up to a relative margin."""
    for name, expected in claim.expected.items():
        if not expected:
            raise VitrailError(f"the claim '{claim.text}' expects 0 for '{name}'")
        value = results.mean(results.best(name), claim.measure)
        ratio = None if value is None else value / expected - 1
        estimate = None if ratio is None else exact(ratio, abs(ratio) <= claim.margin)
        yield Part(name, estimate, results.complete(name))


def _above_along(claim: Claim, results: Results, lowest: bool) -> Iterator[Part]:
    """The first line of each pair is above the second at equal x, where both are: on average, or
    at the lowest x."""

    def gap(first: Line, second: Line) -> float | None:
        gaps = _gaps(first, second)
        return None if gaps is None else gaps.low if lowest else gaps.mean

    for pair in claim.pairs:
        yield _along(claim, results, pair, "{} − {}", gap)


def _along(
    claim: Claim,
    results: Results,
    pair: tuple[str, str],
    name: str,
    compare: Callable[[Line, Line], float | None],
) -> Part:
    """The test of a figure that compares two lines, seed by seed.

    Seeds whose lines have no common range are those where they are furthest apart: to leave out
    these alone would decide by the others.
    """
    complete, values = results.complete(*pair), []
    points = [point for line in pair for point in results.design.select(line)]
    for seed in range(results.design.seeds):
        # Once all runs are done, a point that is missing diverged, and its line is another one.
        whole = all(seed in results.values(point, claim.measure) for point in points)
        lines = [results.line(line, seed, claim.measure) for line in pair]
        if all(xs for xs, _ in lines) and (whole or not complete):
            values.append(compare(*lines))
    known = [value for value in values if value is not None]
    if complete and len(known) < len(values):
        return Part(name.format(*pair), None, complete, apart=True)
    estimate = _decided(known, claim, results, lambda found: is_above(found, claim.margin))
    return Part(name.format(*pair), estimate, complete)


@dataclass(frozen=True)
class _Gaps:
    """The difference of two interpolated lines over the range of both."""

    mean: float
    low: float
    """At the low end,"""
    high: float
    """and at the high end."""
    width: float


def _gaps(first: Line, second: Line) -> _Gaps | None:
    """None where the lines have no common range."""
    (x1, y1), (x2, y2) = first, second
    if not x1 or not x2 or len(x1) == len(x2) == 1:  # points make no line, as in a study just begun
        return None
    low, high = max(x1[0], x2[0]), min(x1[-1], x2[-1])
    if low > high:
        return None
    shared = sorted({low, high, *(x for x in (*x1, *x2) if low < x < high)})
    gaps = np.interp(shared, x1, y1) - np.interp(shared, x2, y2)
    ends = float(gaps[0]), float(gaps[-1])
    mean = float(np.trapezoid(gaps, shared)) / (high - low) if high > low else ends[0]
    return _Gaps(mean, *ends, high - low)


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
_TESTS_OF_BEST = ("above", "within", "positive", "near")
"""Tests that compare one cell for each name."""
