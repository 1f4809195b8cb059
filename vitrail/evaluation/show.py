"""Results of `evaluate` and `fewshot` on a terminal."""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from vitrail.console import echo, print_table

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
    """The averages, each with its 95 % interval."""
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
    return [*found, f"{'calibration error':<17}  {percent(result['ece']):>8}"]


def classes(result: dict[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Columns and rows of the table of classes with images: all of them, or the worst of many."""
    shown = with_images(result)
    if len(shown) > _MANY:
        shown = sorted(shown, key=lambda row: row["f1"])[:_WORST]
    columns = ("class", "n", "precision", "recall", "F1", "95 % interval of recall")
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


def percent(share: float) -> str:
    """With two decimals, as accuracies are published."""
    return f"{100 * share:.2f} %"


def between(interval: Sequence[float]) -> str:
    """Both ends in per cent."""
    low, high = (100 * end for end in interval)
    return f"{low:.1f} – {high:.1f} %"


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
                *(over_seeds([row[key] for row in group]) for key in ("accuracy", "knn")),
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


def over_seeds(values: Sequence[float]) -> str:
    """`91.20 ± 0.31 %`."""
    spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.2f}{spread} %"
