"""Several runs on one page: overlaid curves, results, and the settings that differ."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev

from vitrail.errors import VitrailError
from vitrail.reporting.charts import RUN_COLOURS, Frame, curves
from vitrail.reporting.curves import MOST_POINTS, Line, line
from vitrail.reporting.fields import as_text
from vitrail.reporting.folder import Run, read_run
from vitrail.reporting.progress import Chart
from vitrail.reporting.rendering import put, render
from vitrail.reporting.results import HEADLINES, Evaluation
from vitrail.reporting.sweeps import Table
from vitrail.reporting.words import NONE, SPACE, between, duration, fixed, percent

MOST_CLASSES = 60
MOST_DRAWN = 6000
"""Points of all runs together in one drawing."""
SIZE = (290, 205)
DASHES = ("-", "--", ":", "-.")
COSTS = ("exaflops", "images_seen", "device_days", "energy_joules", "peak_memory_bytes")
CURVES = (
    ("Top-1 on val", "val", "top1", 100.0, " %"),
    ("Loss on val", "val", "loss", 1.0, ""),
    ("Loss in training", "train", "loss", 1.0, ""),
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in nothing but their seed; mostly a single one."""

    letter: str
    colour: str
    dashes: str
    name: str
    runs: tuple[Run, ...]
    split: str
    """What all runs of the comparison were measured on; empty where that differs."""

    def result(self, run: Run) -> Evaluation | None:
        """What was measured of one of them."""
        return run.evaluations.get(self.split) if self.split else run.result

    @property
    def results(self) -> list[Evaluation]:
        """What was measured of them."""
        found = [self.result(run) for run in self.runs]
        return [result for result in found if result is not None]


def compare(runs: list[Path], target: Path, tables: Sequence[Table] = ()) -> Path:
    """Write one page that holds several runs against each other, and say where it is.

    `tables` stand before all else: what a sweep tried and found.
    """
    folders = list({folder.resolve(): folder for folder in runs}.values())
    if not folders:
        raise VitrailError("no runs to compare; name two or more run folders")
    return put(page([read_run(folder) for folder in folders], tables), target)


def page(runs: Sequence[Run], tables: Sequence[Table] = ()) -> str:
    """The page as text."""
    groups = group(runs)
    return render(
        "comparison.html",
        tables=tables,
        groups=groups,
        n_runs=len(runs),
        charts={against: charts(groups, against) for against in ("step", "seconds")},
        results=[result_row(one) for one in groups],
        with_top5=any(result.has_top5 for one in groups for result in one.results),
        costs=costs(groups),
        cautions=cautions(groups),
        settings=differing(groups),
        per_class=per_class(groups),
    )


def group(runs: Sequence[Run]) -> list[Group]:
    """Runs with the same settings but for the seed together, in the order given."""
    found: dict[object, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "seed"}
        # Without settings nobody knows whether two runs are alike.
        alike = tuple(sorted(settings.items())) if settings else run.path.resolve()
        found.setdefault(alike, []).append(run)
    split = shared_split(runs)
    names = [common_name(members) for members in found.values()]
    return [
        Group(
            letter=letter(index),
            colour=RUN_COLOURS[index % len(RUN_COLOURS)],
            dashes=DASHES[index // len(RUN_COLOURS) % len(DASHES)],
            name=names[index] if names.count(names[index]) == 1 else as_text(str(members[0].path)),
            runs=tuple(members),
            split=split,
        )
        for index, members in enumerate(found.values())
    ]


def shared_split(runs: Sequence[Run]) -> str:
    """Test where every run that was measured has it, else val, else nothing."""
    measured = [run.evaluations for run in runs if run.evaluations]
    return next((name for name in HEADLINES if all(name in found for found in measured)), "")


def common_name(runs: Sequence[Run]) -> str:
    """The words that the names of runs that differ in the seed begin with, or all their names.

    A sweep's seed0, seed1, … are named after the sweep.
    """
    if len(runs) == 1:
        return runs[0].name
    # Each word with what stands before it; the number of a seed is a word of its own.
    names = (re.findall(r"[+_.= -]*(?:\d+|[^\d+_.= -]+)", run.name) for run in runs)
    words = zip(*names, strict=False)
    start = "".join(same[0] for same in takewhile(lambda found: len(set(found)) == 1, words))
    if start == "seed":
        return as_text(runs[0].path.resolve().parent.name)
    return start.removesuffix("seed").rstrip("+-_.= ") or ", ".join(run.name for run in runs)


def letter(index: int) -> str:
    """A to Z, then AA."""
    last = chr(ord("A") + index % 26)
    return last if index < 26 else letter(index // 26 - 1) + last


def charts(groups: Sequence[Group], against: str) -> list[Chart]:
    """The overlaid curves, each group in its colour."""
    drawn = []
    for number, (title, event, name, scale, unit) in enumerate(CURVES):
        lines = overlaid(groups, event, name, against, scale)
        frame = Frame(title=title, against=against, unit=unit, size=SIZE)
        svg = curves(f"{against}{number}", frame, lines)
        drawn.append(Chart(title=title, keys=(), size=SIZE, svg=svg))
    return [chart for chart in drawn if chart.svg]


def overlaid(
    groups: Sequence[Group], event: str, name: str, against: str, scale: float
) -> list[Line]:
    """One line per run."""
    n_runs = sum(len(one.runs) for one in groups)
    most = max(20, min(MOST_POINTS, MOST_DRAWN // n_runs))
    return [
        line(
            run.train if event == "train" else run.val,
            name,
            against=against,
            colour=one.colour,
            scale=scale,
            dashes=one.dashes,
            most=most,
        )
        for one in groups
        for run in one.runs
    ]


def result_row(one: Group) -> dict[str, object]:
    """A group's line in the table of results; several seeds as mean and standard deviation."""
    results = one.results
    n = min((result.n for result in results), default=0)
    return {
        "group": one,
        "measured": len(results),
        "splits": sorted({result.split for result in results}),
        "ns": sorted({result.n for result in results}),
        "top1": spread([result.scores["top1"] for result in results], n),
        "interval": between(results[0].intervals["top1"], n)
        if len(one.runs) == len(results) == 1
        else "",
        "top5": spread([result.scores["top5"] for result in results if result.has_top5], n),
        "macro_f1": plain_spread([result.scores["macro_f1"] for result in results]),
        "ece": plain_spread([result.scores["ece"] for result in results]),
        "time": duration(average([run.info.number("seconds") for run in one.runs])),
        "parameters": one.runs[0].info.fields("model").number("parameters"),
        "gmacs": one.runs[0].info.fields("model").number("gmacs"),
    }


def costs(groups: Sequence[Group]) -> list[tuple[Group, dict[str, float]]]:
    """What a run of each group cost, NaN where none of its runs says; empty where no run does."""
    told = [[run.info.fields("cost") for run in one.runs] for one in groups]
    if not any(cost for runs in told for cost in runs):
        return []
    return [
        (one, {name: average(cost.number(name) for cost in runs) for name in COSTS})
        for one, runs in zip(groups, told, strict=True)
    ]


def average(values: Iterable[float]) -> float:
    """The mean of the numbers that are there; NaN where none is."""
    known = [value for value in values if math.isfinite(value)]
    return mean(known) if known else math.nan


def spread(values: Sequence[float], n: int) -> str:
    """`97.1 %`, or `97.1 ± 0.3 %` of several."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return percent(average(known), n)
    share = f"{SPACE}%"
    middle, off = percent(mean(known), n), percent(stdev(known), n)
    return f"{middle.removesuffix(share)}{SPACE}±{SPACE}{off}"


def plain_spread(values: Sequence[float]) -> str:
    """`0.971`, or `0.971 ± 0.003` of several."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return fixed(average(known))
    return f"{fixed(mean(known))}{SPACE}±{SPACE}{fixed(stdev(known))}"


def cautions(groups: Sequence[Group]) -> list[str]:
    """Why some of these numbers may not be held against each other."""
    runs = [run for one in groups for run in one.runs]
    results = [result for one in groups for result in one.results]
    found = []
    if len(results) < len(runs):
        found.append(f"{len(runs) - len(results)} of {len(runs)} runs have no results yet.")
    if len({result.split for result in results}) > 1:
        found.append("Not all runs were measured on the same split.")
    elif results and results[0].split != "test":
        found.append(f"Measured on {results[0].split}, not on a test split.")
    if len({result.n for result in results}) > 1:
        found.append("Not all runs were measured on the same number of images.")
    if len({run.info.fields("data").text("name") for run in runs}) > 1:
        found.append("The runs learned from different data.")
    unfinished = [run for run in runs if run.info.text("status") != "finished"]
    if unfinished:
        found.append(f"{len(unfinished)} of {len(runs)} runs did not finish.")
    return found


def differing(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Settings on which the runs do not agree, with what each group has."""
    runs = [run for one in groups for run in one.runs if run.settings]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in keys:
        if len({run.settings.get(key) for run in runs}) > 1:
            rows.append((key, [values_of(one, key) for one in groups]))
    return rows


def values_of(one: Group, key: str) -> str:
    """What a group has for a setting; several seeds are listed."""
    found = dict.fromkeys(run.settings.get(key, NONE) for run in one.runs)
    return ", ".join(value or NONE for value in found)


@dataclass(frozen=True, kw_only=True)
class ClassTable:
    """Precision, recall and F1 of every class, group beside group."""

    groups: list[Group]
    n_columns: bool
    """Whether the groups were measured on different numbers of images."""
    rows: list[tuple[str, list[tuple[int, list[str]]]]]
    accuracy: list[tuple[int, str]]
    left_out: int


def per_class(groups: Sequence[Group]) -> ClassTable | None:
    """The table by class, where all that was measured shares its classes."""
    measured = [one for one in groups if one.results and all(e.per_class for e in one.results)]
    names = {tuple(s.name for s in e.per_class) for one in measured for e in one.results}
    if len(measured) < 2 or len(names) != 1:
        return None
    (classes,) = names
    shown = list(range(len(classes)))
    if len(classes) > MOST_CLASSES:
        apart = [disagreement(measured, index) for index in shown]
        shown = sorted(shown, key=lambda index: -apart[index])[:MOST_CLASSES]
    rows = [(classes[index], [class_cells(one, index) for one in measured]) for index in shown]
    sizes = {tuple(s.n for s in e.per_class) for one in measured for e in one.results}
    return ClassTable(
        groups=measured,
        n_columns=len(sizes) > 1,
        rows=rows,
        accuracy=[
            (one.results[0].n, plain_spread([e.scores["top1"] for e in one.results]))
            for one in measured
        ],
        left_out=len(classes) - len(shown),
    )


def disagreement(groups: Sequence[Group], index: int) -> float:
    """How far apart the groups are on a class."""
    f1 = [average(e.per_class[index].f1 for e in one.results) for one in groups]
    known = [value for value in f1 if math.isfinite(value)]
    return max(known) - min(known) if known else 0.0


def class_cells(one: Group, index: int) -> tuple[int, list[str]]:
    """The images of a class, and a group's three numbers for it; means over seeds."""
    scores = [result.per_class[index] for result in one.results]
    means = [
        average(getattr(score, name) for score in scores) for name in ("precision", "recall", "f1")
    ]
    return scores[0].n, [fixed(value) for value in means]
