"""Results of `evaluate`, `fewshot` and `sweep` on a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from vitrail.console import NONE, between, echo, mean_std, percent, plural, print_table

_MANY = 30
"""Classes up to which each has its line."""
_WORST = 10
"""How many classes are shown where there are more."""
_FEW = 5
"""How many confusions and broken images are named."""


def show(result: dict[str, Any]) -> None:
    """The whole summary on stdout."""
    for line in headline(result):
        echo(line)
    echo()
    columns, rows = classes(result)
    print_table(columns, rows)
    for line in closing(result):
        echo(line)


def lines(result: dict[str, Any]) -> list[str]:
    """All of the summary but the table of classes."""
    return headline(result) + closing(result)


def headline(result: dict[str, Any]) -> list[str]:
    """The averages, each with its 95% interval."""
    names = {
        "top1": "top-1",
        "top5": "top-5",
        "balanced_accuracy": "balanced accuracy",
        "macro_f1": "macro-F1",
    }
    found = [
        f"{name:<17}  {percent(result[key]):>8}  {between(result['intervals'][key])}"
        for key, name in names.items()
        if key != "top5" or len(result["per_class"]) > 5  # of five, one is always right
    ]
    part = f"{result['labels']} labels" if result.get("labels") else result["split"]
    found[0] += f"  n = {result['n']:,}, {result['data']} ({part})"
    found.append(f"{'calibration error':<17}  {percent(result['ece']):>8}")
    if preprocessing := result.get("preprocessing"):
        note = " (as in BiT)" if result["labels"].startswith("objectnet") else ""
        found.append(f"{'preprocessing':<17}  {_resizing(preprocessing)}{note}")
    return found


def _resizing(preprocessing: Mapping[str, Any]) -> str:
    """`short side 256, center crop 224 × 224 pixels`."""
    rows, columns = preprocessing["size"]
    short = preprocessing["short_side"]
    return f"{f'short side {short}, center crop ' if short else ''}{rows} × {columns} pixels"


def classes(result: dict[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Columns and rows of the table of classes with images: all of them, or the worst of many."""
    shown = with_images(result)
    if len(shown) > _MANY:
        shown = sorted(shown, key=lambda row: row["f1"])[:_WORST]
    columns = ("class", "n", "precision", "recall", "F1", "95% interval of recall")
    return columns, [
        (
            row["name"],
            f"{row['n']:,}",
            percent(row["precision"]),
            percent(row["recall"]),
            percent(row["f1"]),
            between(row["interval"]),
        )
        for row in shown
    ]


def closing(result: dict[str, Any]) -> list[str]:
    """The lines below the table: confusions, and images that were excluded or skipped."""
    found = []
    n, there = len(result["per_class"]), len(with_images(result))
    if there > _MANY:
        found.append(f"the {_WORST} worst of {there:,} classes, by F1; --json lists all")
    if there < n and not result.get("absent"):
        found.append(f"no images  for {n - there:,} of {n:,} classes")
    for pair in result["confused"][:_FEW]:
        found.append(f"confused  {pair['truth']} predicted as {pair['guess']}: {pair['n']:,}")
    if left_out := result.get("left_out", 0):
        why = "without a valid label" if result.get("labels") else "that the model was trained on"
        found.append(f"excluded  {left_out:,} images {why}")
    if broken := result["broken"]:
        rest = "; --json lists all" if len(broken) > _FEW else ""
        found.append(f"skipped   {len(broken):,} images that could not be read{rest}")
        found += [f"          {name}: {reason}" for name, reason in broken[:_FEW]]
    return found


def with_images(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The classes that occur in the data."""
    return [row for row in result["per_class"] if row["n"]]


def show_fewshot(result: dict[str, Any]) -> None:
    """Mean and deviation over the seeds for each number of shots, on stdout."""
    rows = result["results"]
    groups: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["shots"], row["ridge"]), []).append(row)
    echo(f"{result['data']} ({result['split']}), n = {rows[0]['n']:,}\n")
    print_table(
        ("shots", "ridge", "train images", "linear", "k-NN", "seeds"),
        [
            (
                *(str(shots), f"{ridge:g}", f"{group[0]['shown']:,}"),
                *(_over_seeds([row[key] for row in group]) for key in ("accuracy", "knn")),
                str(len(group)),
            )
            for (shots, ridge), group in groups.items()
        ],
    )
    for shots, fewest in {(row["shots"], row["fewest"]): None for row in rows}:
        if fewest < shots:
            echo(f"{shots} shots  some classes have only {fewest:,} training images; all are used")
    broken = result["broken"]
    for name, reason in broken[:_FEW]:
        echo(f"skipped  {name}: {reason}")
    if len(broken) > _FEW:
        echo(f"skipped  {len(broken):,} in all; --json lists them")


def _over_seeds(values: Sequence[float]) -> str:
    return f"{mean_std(fmean(values), stdev(values) if len(values) > 1 else None)}%"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows and columns, for the terminal and for pages."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    strong: frozenset[int] = frozenset()
    """The rows to emphasize."""


def task_table(result: Mapping[str, Any], title: str) -> Table:
    """As in the paper's Table 9: every task, the means of groups, the mean."""
    rows = [_task_row(task) for task in result["tasks"]]
    first_mean = len(rows)
    for group in result["groups"]:
        count = f"{group['present']} of {group['tasks']} tasks"
        rows.append((f"{group['group']} mean", "", mean_std(group["mean"]), "", count))
    count = f"{result['present']} of {len(result['tasks'])} tasks"
    rows.append(("mean", "", mean_std(result["mean"], result["std"]), f"{result['n']:,}", count))
    note = f"Top-1 on test in percent, mean over {plural(len(result['seeds']), 'seed')}."
    if result["absent"]:
        note += f" Absent, excluded from all means: {', '.join(result['absent'])}."
    return Table(
        title=title,
        columns=("task", "group", "top-1", "n", ""),
        rows=rows,
        note=note,
        strong=frozenset(range(first_mean, len(rows))),
    )


def _task_row(task: Mapping[str, Any]) -> tuple[str, ...]:
    title, group = task["title"], task["group"] or ""
    if task["absent"]:
        return title, group, NONE, "", "absent"
    return title, group, mean_std(task["mean"], task["std"]), f"{task['n']:,}", task["images"]


def average_table(result: Mapping[str, Any]) -> Table:
    """As the last row of the paper's Table 7: every dataset and their average, by seed."""
    names = [f"seed {row['seed']}" for row in result["seeds"]]
    note = (
        f"Top-1 on test in percent; ± is the standard deviation over {plural(len(names), 'seed')}."
    )
    if result["absent"]:
        note += f" Absent, excluded from the average: {', '.join(result['absent'])}."
    count = f"{result['present']} of {plural(len(result['datasets']), 'dataset')}"
    return Table(
        title="Average over datasets",
        columns=("dataset", *names, "mean", "n", ""),
        rows=[
            *(
                (row["data"], *(NONE for _ in names), NONE, "", "absent")
                if row["absent"]
                else _average_row(row["data"], row, "")
                for row in result["datasets"]
            ),
            _average_row("average", result, count),
        ],
        note=note,
        strong=frozenset({len(result["datasets"])}),
    )


def _average_row(name: str, row: Mapping[str, Any], count: str) -> tuple[str, ...]:
    seeds = (mean_std(seed["top1"]) for seed in row["seeds"])
    return (name, *seeds, mean_std(row["mean"], row["std"]), f"{row['n']:,}", count)
