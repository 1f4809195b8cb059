"""The results of a sweep as tables of the comparison page."""

from collections.abc import Mapping
from typing import Any

from vitrail.console import NONE, mean_std, plural
from vitrail.evaluation.show import Table, task_table


def tables(result: Mapping[str, Any], name: str = "") -> list[Table]:
    """The trials, below the tasks if there are several."""
    of = f" of {name}" if name else ""
    shown = [_trials(result, f"Trials{of}")]
    return [task_table(result, f"Tasks{of}"), *shown] if "tasks" in result else shown


def _trials(result: Mapping[str, Any], title: str) -> Table:
    """Every point of the grid with its score on val; the chosen one is marked."""
    rows = result["trials"]
    names = list(rows[0]["settings"])
    many = "tasks" in result
    return Table(
        title=title,
        columns=(*(names or ["settings"]), "val top-1", "val loss", ""),
        rows=[
            (
                *([str(trial["settings"][name]) for name in names] or ["the recipe's"]),
                mean_std(trial["val_top1"]),
                NONE if trial["val_loss"] is None else f"{trial['val_loss']:.4f}",
                "chosen" if trial["chosen"] else "diverged" if trial["val_top1"] is None else "",
            )
            for trial in rows
        ],
        note=f"val is the mean over {plural(result['present'], 'dataset')}." if many else "",
        strong=frozenset(i for i, trial in enumerate(rows) if trial["chosen"]),
    )
