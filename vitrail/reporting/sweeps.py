"""The results of a sweep as tables, for the console and the comparison page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.reporting.rendering import NONE


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows and columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    strong: frozenset[int] = frozenset()
    """The rows to emphasize."""


def tables(result: Mapping[str, Any], name: str = "") -> list[Table]:
    """The trials, below the tasks if there are several."""
    of = f" of {name}" if name else ""
    shown = [_trials(result, f"Trials{of}")]
    return [tasks(result, f"Tasks{of}"), *shown] if "tasks" in result else shown


def _trials(result: Mapping[str, Any], title: str) -> Table:
    """Every point of the grid with its score on val; the chosen one is marked."""
    rows = result["trials"]
    names = list(result["chosen"])
    many = "tasks" in result
    return Table(
        title=title,
        columns=(*names, "val top-1", "val loss", ""),
        rows=[
            (
                *(str(trial["settings"][name]) for name in names),
                _score(trial["val_top1"]),
                NONE if trial["val_loss"] is None else f"{trial['val_loss']:.4f}",
                "chosen" if trial["chosen"] else "diverged" if trial["val_top1"] is None else "",
            )
            for trial in rows
        ],
        note=f"val is the mean over {_counted(result['present'], 'dataset')}." if many else "",
        strong=frozenset(i for i, trial in enumerate(rows) if trial["chosen"]),
    )


def tasks(result: Mapping[str, Any], title: str) -> Table:
    """As in the paper's Table 9: every task, the means of groups, the mean."""
    rows = [_task_row(task) for task in result["tasks"]]
    first_mean = len(rows)
    for group in result["groups"]:
        count = f"{group['present']} of {group['tasks']} tasks"
        rows.append((f"{group['group']} mean", "", _score(group["mean"]), "", count))
    count = f"{result['present']} of {len(result['tasks'])} tasks"
    rows.append(("mean", "", _score(result["mean"], result["std"]), f"{result['n']:,}", count))
    note = f"Top-1 on test in percent, mean over {_counted(len(result['seeds']), 'seed')}."
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
    return title, group, _score(task["mean"], task["std"]), f"{task['n']:,}", task["images"]


def _score(mean: float | None, std: float | None = None) -> str:
    """`97.10 ± 0.32`, in percent."""
    if mean is None:
        return NONE
    return f"{100 * mean:.2f}" + ("" if std is None else f" ± {100 * std:.2f}")


def _counted(number: int, thing: str) -> str:
    """`1 seed`, `2 seeds`; with a plain space, unlike on pages."""
    return f"{number} {thing}{'s' * (number != 1)}"
