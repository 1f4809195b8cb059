"""Several runs on one page: overlaid curves, results, and the settings that differ."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitrail.errors import VitrailError
from vitrail.reporting.charts import RUN_COLORS, Frame, draw_curves
from vitrail.reporting.curves import MOST_POINTS, Chart, line
from vitrail.reporting.loading import RunData, load_run
from vitrail.reporting.rendering import (
    NONE,
    SPACE,
    Number,
    between,
    duration,
    fixed,
    percent,
    write_page,
)
from vitrail.reporting.sweeps import Table

_MOST_CLASSES = 60
_MOST_DRAWN = 6000
"""Points of all runs together in one drawing."""
_SIZE = (290, 205)
_DASHES = ("-", "--", ":", "-.")
_COSTS = ("exaflops", "images_seen", "device_days", "energy_joules", "peak_memory_bytes")
_CURVES = (
    ("Top-1 on val", "val", "top1", " %"),
    ("Loss on val", "val", "loss", ""),
    ("Loss in training", "train", "loss", ""),
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in nothing but their seed; mostly a single one."""

    letter: str
    color: str
    dashes: str
    name: str
    runs: list[RunData]
    split: str
    """What all runs of the comparison were measured on; empty where that differs."""

    def result(self, run: RunData) -> dict[str, Any] | None:
        return run.evaluations.get(self.split) if self.split else run.result

    @property
    def results(self) -> list[dict[str, Any]]:
        return [result for run in self.runs if (result := self.result(run))]


def compare(runs: list[Path], target: Path, tables: Sequence[Table] = ()) -> Path:
    """Write one page that compares several runs.

    `tables` stand before all else: what a sweep tried and found.
    """
    folders = list({folder.resolve(): folder for folder in runs}.values())
    if not folders:
        raise VitrailError("no runs to compare; name two or more run folders")
    groups = _grouped([load_run(folder) for folder in folders])
    return write_page(
        target,
        "comparison.html",
        tables=tables,
        groups=groups,
        n_runs=len(folders),
        with_top5=any(result["has_top5"] for one in groups for result in one.results),
        has_costs=any(run.info["cost"] for one in groups for run in one.runs),
        class_table=_class_table,
        charts=_charts,
        result_row=_result_row,
        mean_costs=_mean_costs,
        cautions=_cautions,
        differing=_differing,
    )


def _grouped(runs: Sequence[RunData]) -> list[Group]:
    """Runs with the same settings but for the seed together, in the order given."""
    alike: dict[object, list[RunData]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "seed"}
        # Without settings nobody knows whether two runs are alike.
        key = tuple(sorted(settings.items())) if settings else run.folder.resolve()
        alike.setdefault(key, []).append(run)
    measured = [run.evaluations for run in runs if run.evaluations]
    shared = [name for name in ("test", "val") if all(name in found for found in measured)]
    names = [_common_name(members) for members in alike.values()]
    return [
        Group(
            letter=letter(index),
            color=RUN_COLORS[index % len(RUN_COLORS)],
            dashes=_DASHES[index // len(RUN_COLORS) % len(_DASHES)],
            name=name if names.count(name) == 1 else str(members[0].folder),
            runs=members,
            split=shared[0] if shared else "",
        )
        for index, (name, members) in enumerate(zip(names, alike.values(), strict=True))
    ]


def _common_name(runs: Sequence[RunData]) -> str:
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
        return runs[0].folder.resolve().parent.name
    return start.removesuffix("seed").rstrip("+-_.= ") or ", ".join(run.name for run in runs)


def letter(index: int) -> str:
    """A to Z, then AA."""
    last = chr(ord("A") + index % 26)
    return last if index < 26 else letter(index // 26 - 1) + last


def _charts(groups: Sequence[Group], against: str) -> list[Chart]:
    """The overlaid curves, each group in its color and a line for each run."""
    n_runs = sum(len(one.runs) for one in groups)
    most = max(20, min(MOST_POINTS, _MOST_DRAWN // n_runs))
    drawn = []
    for number, (title, event, name, unit) in enumerate(_CURVES):
        lines = [
            line(
                run.train if event == "train" else run.val,
                name,
                against=against,
                color=one.color,
                scale=100.0 if unit else 1.0,
                dashes=one.dashes,
                most=most,
            )
            for one in groups
            for run in one.runs
        ]
        frame = Frame(title=title, against=against, unit=unit, size=_SIZE)
        if svg := draw_curves(f"{against}{number}", frame, lines):
            drawn.append(Chart(title=title, size=_SIZE, svg=svg))
    return drawn


def _result_row(one: Group) -> dict[str, Any]:
    """A group's line in the table of results; several seeds as mean and standard deviation."""
    results = one.results
    n = min((result["n"] for result in results), default=0)
    single = len(one.runs) == len(results) == 1

    def share(value: Number) -> str:
        return percent(value, n)

    return {
        "splits": sorted({result["split"] for result in results}),
        "ns": sorted({result["n"] for result in results}),
        "top1": _spread([result["top1"] for result in results], share),
        "interval": between(results[0]["intervals"]["top1"], n) if single else "",
        "top5": _spread([result["top5"] for result in results if result["has_top5"]], share),
        "macro_f1": _spread([result["macro_f1"] for result in results]),
        "ece": _spread([result["ece"] for result in results]),
        "time": duration(_mean(run.info.get("seconds") for run in one.runs)),
        "model": one.runs[0].info["model"],
    }


def _mean_costs(one: Group) -> dict[str, Number]:
    """What a run of a group cost, as far as its runs say."""
    return {name: _mean(run.info["cost"].get(name) for run in one.runs) for name in _COSTS}


def _mean(values: Iterable[Number]) -> Number:
    """Of the numbers that are there; None where there are none."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return mean(numbers) if numbers else None


def _spread(values: Sequence[Number], write: Callable[[Number], str] = fixed) -> str:
    """`0.971`, or `0.971 ± 0.003` of several; `97.1 ± 0.3 %` of shares."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if len(numbers) < 2:
        return write(_mean(numbers))
    middle = write(mean(numbers)).removesuffix(f"{SPACE}%")
    return f"{middle}{SPACE}±{SPACE}{write(stdev(numbers))}"


def _cautions(groups: Sequence[Group]) -> list[str]:
    """Why some of these numbers cannot be compared."""
    runs = [run for one in groups for run in one.runs]
    results = [result for one in groups for result in one.results]
    found = []
    if len(results) < len(runs):
        found.append(f"{len(runs) - len(results)} of {len(runs)} runs have no results yet.")
    if len({result["split"] for result in results}) > 1:
        found.append("Not all runs were measured on the same split.")
    elif results and results[0]["split"] != "test":
        found.append(f"Measured on {results[0]['split']}, not on a test split.")
    if len({result["n"] for result in results}) > 1:
        found.append("Not all runs were measured on the same number of images.")
    if len({run.info["data"].get("name") for run in runs}) > 1:
        found.append("The runs learned from different data.")
    if unfinished := sum(run.info.get("status") != "finished" for run in runs):
        found.append(f"{unfinished} of {len(runs)} runs did not finish.")
    return found


def _differing(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Settings on which the runs do not agree, with what each group has."""
    runs = [run for one in groups for run in one.runs if run.settings]
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        if len({run.settings.get(key) for run in runs}) > 1:
            values = [
                dict.fromkeys(run.settings.get(key) or NONE for run in one.runs) for one in groups
            ]
            rows.append((key, [", ".join(of_group) for of_group in values]))
    return rows


@dataclass(frozen=True, kw_only=True)
class _ClassTable:
    """Precision, recall and F1 of every class, group beside group."""

    groups: list[Group]
    n_columns: bool
    """Whether the groups were measured on different numbers of images."""
    rows: list[tuple[str, list[tuple[int, list[str]]]]]
    accuracy: list[tuple[int, str]]
    left_out: int


def _class_table(groups: Sequence[Group]) -> _ClassTable | None:
    """The table by class, where all that was measured shares its classes."""
    measured = [one for one in groups if one.results and all(e["per_class"] for e in one.results)]
    tables = [e["per_class"] for one in measured for e in one.results]
    names = {tuple(row.get("name") for row in table) for table in tables}
    if len(measured) < 2 or len(names) != 1:
        return None
    (classes,) = names
    shown = list(range(len(classes)))
    if len(classes) > _MOST_CLASSES:
        shown.sort(key=lambda index: -_disagreement(measured, index))
    rows = [
        (classes[index], [_class_cells(one, index) for one in measured])
        for index in shown[:_MOST_CLASSES]
    ]
    return _ClassTable(
        groups=measured,
        n_columns=len({tuple(row["n"] for row in table) for table in tables}) > 1,
        rows=rows,
        accuracy=[
            (one.results[0]["n"], _spread([e["top1"] for e in one.results])) for one in measured
        ],
        left_out=len(classes) - len(rows),
    )


def _disagreement(groups: Sequence[Group], index: int) -> float:
    """How far apart the groups are on a class."""
    f1 = [_mean(e["per_class"][index]["f1"] for e in one.results) for one in groups]
    numbers = [value for value in f1 if value is not None]
    return max(numbers) - min(numbers) if numbers else 0.0


def _class_cells(one: Group, index: int) -> tuple[int, list[str]]:
    """The images of a class, and a group's three numbers for it; means over seeds."""
    rows = [result["per_class"][index] for result in one.results]
    scores = [fixed(_mean(row[name] for row in rows)) for name in ("precision", "recall", "f1")]
    return rows[0]["n"], scores
