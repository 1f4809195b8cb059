"""Several datasets as one result: each one's score, the means of groups, and what is absent."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.data.catalog import data_folder, known_datasets, open_local
from vitrail.data.opening import in_catalog
from vitrail.runs import Run


def summarize_tasks(
    sources: Sequence[str], finals: Mapping[str, Sequence[Run]], absent: Mapping[str, str]
) -> dict[str, Any]:
    """The tasks in their order, means of groups and of all; each mean says of how many tasks."""
    tasks = [
        _task_row(source, finals.get(source, ()), absent.get(source, "")) for source in sources
    ]
    groups: Sequence[str] = ()
    if any(task["group"] for task in tasks):
        from vitrail.vtab.tasks import GROUPS

        groups = GROUPS
    return {
        "tasks": tasks,
        "groups": [_group_row(group, tasks) for group in groups if _of_group(group, tasks)],
        **_means(tasks),
    }


def average(results: Mapping[str, Mapping[str, Any]], absent: Mapping[str, str]) -> dict[str, Any]:
    """The average over datasets, as in the paper's Table 7 and Figure 5, from the result on each.

    The mean over datasets of each seed, then mean and standard deviation over seeds.
    """
    datasets = [
        {
            "data": source,
            "absent": absent.get(source, ""),
            **{key: result.get(key) for key in ("seeds", "mean", "std", "n")},
        }
        for source, result in results.items()
    ]
    return {"datasets": datasets, **_means(datasets)}


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over the datasets that are there: of each seed, then over seeds."""
    there = [row for row in rows if not row["absent"]]
    by_seed = list(zip(*(row["seeds"] for row in there), strict=True))
    seeds = [
        {"seed": i, "top1": statistics.fmean(row["top1"] for row in of_seed)}
        for i, of_seed in enumerate(by_seed)
    ]
    means = [row["top1"] for row in seeds]
    return {
        "seeds": seeds,
        "mean": statistics.fmean(means),
        "std": statistics.stdev(means) if len(means) > 1 else None,
        "n": sum(row["n"] for row in there),
        "present": len(there),
        "absent": [row["data"] for row in rows if row["absent"]],
    }


def _task_row(source: str, finals: Sequence[Run], absent: str) -> dict[str, Any]:
    """One dataset's name, place and scores; `absent` says why there are none."""
    task = known_datasets()[source].task if source in known_datasets() else None
    return {
        "data": source,
        "title": source if task is None else task.title,
        "group": None if task is None else task.group,
        "images": "" if task is None or absent else image_origin(source),
        "absent": absent,
        **seed_summary(finals),
    }


def image_origin(task: str) -> str:
    """Who drew the 1,000 images of a task."""
    from vitrail.vtab.tasks import has_thousand, lists_of

    place = data_folder()
    if not in_catalog(task):
        return "a folder of your own"
    if lists_of(task, place) is not None:
        return "the benchmark's 1,000"
    brought = open_local(place / task, known_datasets()[task])
    if brought is not None and has_thousand(brought):
        return "1,000 as the data has them"
    return "own draw of 1,000"


def seed_summary(finals: Sequence[Run]) -> dict[str, Any]:
    """Every seed, mean and standard deviation on test."""
    tested = [run.evaluation("test") for run in finals]
    scores = [result["top1"] for result in tested if result]
    return {
        "seeds": [
            {"seed": i, "top1": r.get("top1"), "n": r.get("n"), "run": str(run.folder)}
            for i, (run, r) in enumerate(zip(finals, tested, strict=True))
        ],
        "mean": statistics.fmean(scores) if scores else None,
        "std": statistics.stdev(scores) if len(scores) > 1 else None,
        "n": tested[0].get("n") if tested else None,
    }


def _of_group(group: str, tasks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tasks of a group."""
    return [task for task in tasks if task["group"] == group]


def _group_row(group: str, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A group's mean over the tasks that are there, and how many they are."""
    members = _of_group(group, tasks)
    scores = [task["mean"] for task in members if task["mean"] is not None]
    return {
        "group": group,
        "tasks": len(members),
        "present": len(scores),
        "mean": statistics.fmean(scores) if scores else None,
    }
