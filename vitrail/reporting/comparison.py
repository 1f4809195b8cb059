"""Several runs on one page: overlaid curves, results, and the settings that differ."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from vitrail.console import NONE, Number, known, mean_std
from vitrail.errors import VitrailError
from vitrail.evaluation.show import Table
from vitrail.reporting.charts import (
    MOST_POINTS,
    RUN_COLORS,
    WIDE,
    Chart,
    PointSeries,
    Scatter,
    Series,
    draw_curves,
    draw_scatter,
    line,
    pareto_front,
)
from vitrail.reporting.loading import RunData, load_run
from vitrail.reporting.rendering import (
    SPACE,
    between,
    digits,
    duration,
    fixed,
    operations_unit,
    write_page,
)

_MOST_CLASSES = 60
_MOST_DRAWN = 6000
"""Points of all runs together in one chart."""
_SIZE = (290, 205)
_DASHES = ("-", "--", ":", "-.")
_COSTS = ("exaflops", "images_seen", "device_days", "energy_joules", "peak_memory_bytes")
_CHARTS = (
    Chart(title="Validation top-1", series=(Series("val", "top1"),), unit="%"),
    Chart(title="Few-shot accuracy", series=(Series("val", "fewshot"),), unit="%"),
    Chart(title="Validation loss", series=(Series("val", "loss"),)),
    Chart(title="Training loss", series=(Series("train", "loss"),)),
)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Runs that differ only in their seed; often just one."""

    letter: str
    color: str
    dashes: str
    name: str
    runs: list[RunData]
    split: str
    """What all runs of the comparison were evaluated on; empty if that differs."""

    def result(self, run: RunData) -> dict[str, Any] | None:
        return run.evaluations.get(self.split) if self.split else run.result

    @property
    def results(self) -> list[dict[str, Any]]:
        return [result for run in self.runs if (result := self.result(run))]


def compare(runs: list[Path], target: Path, tables: Sequence[Table] = ()) -> Path:
    """Writes one page that compares several runs, below `tables` such as those of a sweep."""
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
        with_pretraining=any(known(_mean_costs(one)["pretraining"]) for one in groups),
        trade_off=_trade_off(groups),
        cautions=_cautions,
        differing=_differing,
    )


def _grouped(runs: Sequence[RunData]) -> list[_Group]:
    """Groups runs whose settings differ only in the seed, in the order given."""
    groups: dict[object, list[RunData]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "seed"}
        # Runs without settings cannot be known to be the same.
        key = tuple(sorted(settings.items())) if settings else run.folder.resolve()
        groups.setdefault(key, []).append(run)
    evaluated = [run.evaluations for run in runs if run.evaluations]
    splits = [name for name in ("test", "val") if all(name in one for one in evaluated)]
    names = [_common_name(members) for members in groups.values()]
    return [
        _Group(
            letter=letter(index),
            color=RUN_COLORS[index % len(RUN_COLORS)],
            dashes=_DASHES[index // len(RUN_COLORS) % len(_DASHES)],
            name=name if names.count(name) == 1 else str(members[0].folder),
            runs=members,
            split=splits[0] if splits else "",
        )
        for index, (name, members) in enumerate(zip(names, groups.values(), strict=True))
    ]


def _common_name(runs: Sequence[RunData]) -> str:
    """The words that the names of runs begin with, or all the names.

    A sweep's seed0, seed1, … are named after the sweep.
    """
    if len(runs) == 1:
        return runs[0].name
    # Each word with the separator before it; a seed's number is a word of its own.
    names = (re.findall(r"[+_.= -]*(?:\d+|[^\d+_.= -]+)", run.name) for run in runs)
    words = zip(*names, strict=False)
    start = "".join(word[0] for word in takewhile(lambda word: len(set(word)) == 1, words))
    if start == "seed":
        return runs[0].folder.resolve().parent.name
    return start.removesuffix("seed").rstrip("+-_.= ") or ", ".join(run.name for run in runs)


def letter(index: int) -> str:
    """A to Z, then AA."""
    last = chr(ord("A") + index % 26)
    return last if index < 26 else letter(index // 26 - 1) + last


def _charts(groups: Sequence[_Group], against: str) -> list[Chart]:
    """The overlaid curves: a color for each group, a line for each run."""
    n_runs = sum(len(group.runs) for group in groups)
    most = max(20, min(MOST_POINTS, _MOST_DRAWN // n_runs))
    charts = []
    for chart in _CHARTS:
        (series,) = chart.series
        lines = [
            line(
                run.rows(series.event),
                series.name,
                against=against,
                color=group.color,
                scale=100.0 if chart.unit else 1.0,
                dashes=group.dashes,
                most=most,
            )
            for group in groups
            for run in group.runs
        ]
        if any(np.isfinite(one.y).any() for one in lines):
            charts.append((chart, lines))
    # Four narrow charts would leave a row with one.
    size = WIDE if len(charts) == 4 else _SIZE
    return [
        draw_curves(replace(chart, size=size), lines, against=against, key=f"{against}{number}")
        for number, (chart, lines) in enumerate(charts)
    ]


def _result_row(group: _Group) -> dict[str, Any]:
    """A group's row in the table of results; several seeds as mean and standard deviation."""
    results = group.results
    n = min((result["n"] for result in results), default=0)
    single = len(group.runs) == len(results) == 1
    return {
        "splits": sorted({result["split"] for result in results}),
        "ns": sorted({result["n"] for result in results}),
        "top1": _spread_percent([result["top1"] for result in results], n),
        "interval": between(results[0]["intervals"]["top1"], n) if single else "",
        "top5": _spread_percent([r["top5"] for r in results if r["has_top5"]], n),
        "macro_f1": _spread([result["macro_f1"] for result in results]),
        "ece": _spread([result["ece"] for result in results]),
        "time": duration(_mean(run.info.get("seconds") for run in group.runs)),
        "model": group.runs[0].info["model"],
    }


def _mean_costs(group: _Group) -> dict[str, Number]:
    costs = {name: _mean(run.info["cost"].get(name) for run in group.runs) for name in _COSTS}
    return costs | {"pretraining": _mean(map(_pretraining, group.runs))}


def _pretraining(run: RunData) -> Number:
    """The compute of its pre-training, if it had one and its cost is known."""
    return (run.info["cost"].get("pretraining") or {}).get("exaflops")


def _trade_off(groups: Sequence[_Group]) -> dict[str, Any]:
    """Accuracy against compute, if at least two groups have both; otherwise empty.

    The compute is that of pre-training, as in the paper's Figure 5, and for training from scratch
    that of the run. Without any pre-training of known cost, it is that of the runs.
    """
    pretrained = any(known(_mean_costs(one)["pretraining"]) for one in groups)
    compute = {one.letter: _compute(one, pretrained) for one in groups}
    measured = [one for one in groups if one.results and known(compute[one.letter])]
    if len(measured) < 2:
        return {}
    size, unit = operations_unit(max(compute[one.letter] or 0.0 for one in measured))
    points = [_point(one, (compute[one.letter] or 0.0) / size) for one in measured]
    front = pareto_front([(one.x[0], one.y[0]) for one in points])
    mixed = pretrained and any(not known(_mean_costs(one)["pretraining"]) for one in measured)
    what = "pre-training or training" if mixed else "pre-training" if pretrained else "training"
    return {
        "chart": draw_scatter(
            Scatter(
                title="Top-1 against compute",
                x_name=f"{unit} of {what}",
                series=points,
                unit="%",
                front=True,
            ),
            "compute",
        ),
        "front": [measured[index].letter for index in front],
        "pretrained": pretrained,
        "mixed": mixed,
        "left_out": [one for one in groups if one.results and one not in measured],
    }


def _compute(group: _Group, pretrained: bool) -> Number:
    """The compute to plot; None if it is not known what its pre-training cost but that of others
    is."""
    costs = _mean_costs(group)
    if known(costs["pretraining"]):
        return costs["pretraining"]
    has_init = any(run.info["model"].get("init") for run in group.runs)
    return None if pretrained and has_init else costs["exaflops"]


def _point(group: _Group, compute: float) -> PointSeries:
    """Mean top-1, and its standard deviation over several seeds."""
    top1 = [100 * result["top1"] for result in group.results]
    return PointSeries(
        x=[compute],
        y=[mean(top1)],
        error=[stdev(top1)] if len(top1) > 1 else (),
        color=group.color,
        letters=[group.letter],
    )


def _mean(values: Iterable[Number]) -> Number:
    """The mean of the known numbers; None if there are none."""
    numbers = list(filter(known, values))
    return mean(numbers) if numbers else None


def _spread(values: Sequence[Number], places: int = 3, scale: float = 1.0) -> str:
    """`0.971`, or `0.971 ± 0.003` for several."""
    numbers = list(filter(known, values))
    std = stdev(numbers) if len(numbers) > 1 else None
    return mean_std(_mean(numbers), std, digits=places, scale=scale).replace(" ", SPACE)


def _spread_percent(values: Sequence[Number], n: int) -> str:
    """`97.1%`, or `97.1 ± 0.3%`; of n images each."""
    text = _spread(values, digits(n), 100.0)
    return text if text == NONE else f"{text}%"


def _cautions(groups: Sequence[_Group]) -> list[str]:
    """Why some of these numbers cannot be compared."""
    runs = [run for group in groups for run in group.runs]
    results = [result for group in groups for result in group.results]
    cautions = []
    if len(results) < len(runs):
        cautions.append(f"{len(runs) - len(results)} of {len(runs)} runs have no results yet.")
    if len({result["split"] for result in results}) > 1:
        cautions.append("Not all runs were evaluated on the same split.")
    elif results and results[0]["split"] != "test":
        cautions.append(f"Evaluated on {results[0]['split']}, not on a test split.")
    if len({result["n"] for result in results}) > 1:
        cautions.append("Not all runs were evaluated on the same number of images.")
    if len({run.info["data"].get("name") for run in runs}) > 1:
        cautions.append("The runs were trained on different data.")
    if unfinished := sum(run.info.get("status") != "finished" for run in runs):
        cautions.append(f"{unfinished} of {len(runs)} runs did not finish.")
    return cautions


def _differing(groups: Sequence[_Group]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, with the values of each group."""
    runs = [run for group in groups for run in group.runs if run.settings]
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        if len({run.settings.get(key) for run in runs}) > 1:
            values = [dict.fromkeys(r.settings.get(key) or NONE for r in g.runs) for g in groups]
            rows.append((key, [", ".join(of_group) for of_group in values]))
    return rows


def _class_table(groups: Sequence[_Group]) -> dict[str, Any]:
    """Scores by class, if all evaluated runs have the same classes; otherwise empty."""
    groups = [one for one in groups if one.results and all(e["per_class"] for e in one.results)]
    tables = [result["per_class"] for group in groups for result in group.results]
    names = {tuple(row.get("name") for row in table) for table in tables}
    if len(groups) < 2 or len(names) != 1:
        return {}
    (classes,) = names
    shown = list(range(len(classes)))
    if len(classes) > _MOST_CLASSES:
        shown.sort(key=lambda index: -_disagreement(groups, index))
    rows = [
        (classes[index], [_class_cells(group, index) for group in groups])
        for index in shown[:_MOST_CLASSES]
    ]
    return {
        "groups": groups,
        "classes": rows,
        "accuracy": [(g.results[0]["n"], _spread([e["top1"] for e in g.results])) for g in groups],
        "left_out": len(classes) - len(rows),
        # Each group has a column for n if the groups were evaluated on different images.
        "n_columns": len({tuple(row["n"] for row in table) for table in tables}) > 1,
    }


def _disagreement(groups: Sequence[_Group], index: int) -> float:
    """How far apart the F1 scores of a class are."""
    means = (_mean(e["per_class"][index]["f1"] for e in group.results) for group in groups)
    f1 = list(filter(known, means))
    return max(f1) - min(f1) if f1 else 0.0


def _class_cells(group: _Group, index: int) -> tuple[int, list[str]]:
    """The number of images of a class, and a group's mean scores for it."""
    rows = [result["per_class"][index] for result in group.results]
    scores = [fixed(_mean(row[name] for row in rows)) for name in ("precision", "recall", "f1")]
    return rows[0]["n"], scores
