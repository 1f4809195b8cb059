"""`vitrail paper`: the paper's tables and figures, run again at a chosen scale."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.config import parse_setting
from vitrail.console import byte_size, duration, echo, plural, rounded, say
from vitrail.devices import cores, limited_threads
from vitrail.errors import VitrailError
from vitrail.files import make_folder
from vitrail.reporting.rendering import operations, significant
from vitrail.reproduction.claims import Decision, Results, names_of_best
from vitrail.reproduction.experiment import (
    Design,
    experiment_names,
    load_experiment,
    shared_scales,
)
from vitrail.reproduction.pages import (
    NOT_MEASURED,
    decisions,
    evidence,
    write_experiment,
    write_scoreboard,
)
from vitrail.reproduction.plan import PlannedRun, plan
from vitrail.reproduction.study import Study
from vitrail.training.resolve import RUNS, Settings

ALL = "all"


def paper(
    names: Sequence[str],
    settings: Settings = (),
    *,
    scale: str = "small",
    out: str | Path | None = None,
    jobs: int = 1,
    minutes: float = 0.0,
    device: str = "auto",
) -> dict[str, Any]:
    """Runs experiments of the paper at a scale, and writes their pages and the scoreboard.

    What is done is not run again: the same command continues where it stopped. Several processes,
    also on several hosts, can share the folder `out`. After `minutes`, no further run is started.
    """
    if jobs < 1 or not minutes >= 0:
        raise VitrailError("--jobs and --minutes: expected numbers above zero")
    study = _open_study(names, settings, scale, out, device)
    study.jobs = jobs
    _check_data(study)
    make_folder(study.folder / "results")
    _announce(study, scale)
    try:
        _run(study, jobs, minutes)
    finally:
        _write_pages(study, scale)
    return {
        "scale": scale,
        "out": str(study.folder),
        "experiments": [_summary(study, design) for design in study.designs],
        "failures": list(study.failures.values()),
        "report": str(study.folder / "index.html"),
    }


def plan_paper(
    names: Sequence[str], settings: Settings = (), *, scale: str = "small"
) -> dict[str, Any]:
    """What experiments would cost at a scale: runs, data, exaFLOPs, GPU-hours and memory."""
    study = _open_study(names, settings, scale)
    return {design.experiment.name: _plan_row(plan(study, design)) for design in study.designs}


def _open_study(
    names: Sequence[str],
    settings: Settings,
    scale: str,
    out: str | Path | None = None,
    device: str = "auto",
) -> Study:
    if scale not in shared_scales():
        raise VitrailError(f"no scale '{scale}'; expected one of {', '.join(shared_scales())}")
    folder = Path(out) if out else RUNS / f"paper-{scale}"
    pairs = settings.items() if isinstance(settings, Mapping) else map(parse_setting, settings)
    overrides = dict(pairs)
    designs = [_with_note(design, overrides) for design in _designs(names, scale)]
    study = Study(designs, folder, device, overrides)
    for design in designs:
        _check(study, design)
    return study


def _with_note(design: Design, overrides: Mapping[str, Any]) -> Design:
    """A page says which settings were given, but for those that change no result."""
    kept = {key: value for key, value in overrides.items() if not key.startswith("system.")}
    given = ", ".join(f"{key}={value}" for key, value in kept.items())
    note = f"{design.scale.note} With {given}.".strip() if given else design.scale.note
    return replace(design, scale=replace(design.scale, note=note))


def _check(study: Study, design: Design) -> None:
    """Mistakes that would only show once everything has run."""
    name = design.experiment.name
    arms = (*design.rows, *design.columns)
    varied = {"seed"}.union(*(study.tried(design, cell) for cell in design.cells))
    varied |= {key for arm in arms for key, value in arm.settings.items() if value != ""}
    for key in study.overrides:
        if key in varied:
            raise VitrailError(f"{key} cannot be set: {name} sets it for each of its runs")
    try:
        decisions(Results(design, {}))
    except VitrailError as error:
        raise VitrailError(f"{name}: {error}") from None
    for row in {row for claim in design.claims for row in names_of_best(claim, design)}:
        for point in design.select(row):
            tasks = study.final_tasks(design, point.cells[0], expected=True)
            if not tasks[0].train or tasks[0].config.data.train_on == "train+val":
                raise VitrailError(
                    f"{name}: '{row}' in a claim stands for several cells, without accuracy on val "
                    "to choose by; name a cell, or set data.train_on=train"
                )


def _designs(names: Sequence[str], scale: str) -> list[Design]:
    """The experiments of these names at a scale, each once; `all` are those that have it."""
    found: dict[str, Design] = {}
    for name in names:
        if name == ALL:
            every = map(load_experiment, experiment_names())
            found |= {one.name: one.at(scale) for one in every if scale in one.scales}
        else:
            design = load_experiment(name).at(scale)
            if found.setdefault(design.experiment.name, design) != design:
                raise VitrailError(f"two experiments are named '{design.experiment.name}'")
    return list(found.values())


def _check_data(study: Study) -> None:
    """Refuses to start where a recipe leaves its data open, as those for JFT-300M do."""
    for design in study.designs:
        for task in study.tasks_of(design, expected=True):
            if task.train and not task.config.data.source:
                raise VitrailError(
                    f"{design.experiment.name} trains on data that is not public ({task.recipe}); "
                    "name a substitute, as in data.source=my_data"
                )


def _run(study: Study, jobs: int, minutes: float) -> None:
    """Does the tasks of a study in so many processes."""
    began = time.monotonic()
    deadline = began + 60 * minutes if minutes else float("inf")
    context = multiprocessing.get_context("spawn")
    options = (study.designs, study.folder, study.device, study.overrides, jobs, minutes)
    helpers = [context.Process(target=_help, args=options) for _ in range(jobs - 1)]
    for helper in helpers:
        helper.start()
    try:
        with limited_threads(cores() // jobs):
            finished = study.work(deadline)
            for helper in helpers:
                helper.join()
            # Another process may have ended before its run did.
            finished = finished and study.work(deadline)
    finally:
        for helper in helpers:
            helper.terminate()
    if not finished:
        say(f"stopped after {duration(time.monotonic() - began)}; the same command continues")


def _help(
    designs: Sequence[Design],
    folder: Path,
    device: str,
    overrides: Mapping[str, Any],
    jobs: int,
    minutes: float,
) -> None:
    """Another process of the same study."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    with limited_threads(cores() // jobs):
        Study(designs, folder, device, overrides, jobs).work(deadline)


def _end_with_parent() -> None:
    """Stops this process, as by a signal, once the one that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _write_pages(study: Study, scale: str) -> None:
    """The pages of the study's experiments, and the scoreboard of all that have the scale."""
    found = {design.experiment.name: study.results(design) for design in study.designs}
    for results in found.values():
        write_experiment(study.folder, results)
    others = [one for one in _designs((ALL,), scale) if one.experiment.name not in found]
    rest = Study(others, study.folder)
    found |= {design.experiment.name: rest.results(design) for design in others}
    order = [name for name in experiment_names() if name in found]
    order += [name for name in found if name not in order]
    write_scoreboard(study.folder, scale, [found[name] for name in order])


# What is printed


def _plan_row(runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """The cost of an experiment: in total, and of each kind of run."""
    kinds: dict[tuple[Any, ...], list[PlannedRun]] = {}
    for run in runs:
        kind = (run.task.recipe, run.data, run.images, run.parameters, run.gmacs, run.seen)
        kinds.setdefault(kind, []).append(run)
    return {
        "runs": len(runs),
        "exaflops": sum(run.exaflops for run in runs),
        "gpu_hours": sum(run.gpu_hours for run in runs),
        "kinds": [
            {
                "recipe": same[0].task.recipe,
                "title": same[0].task.title,
                "trained": same[0].task.train,
                "data": same[0].data,
                "images": same[0].images,
                "images_seen": same[0].seen,
                "parameters": same[0].parameters,
                "gmacs": same[0].gmacs,
                "exaflops": same[0].exaflops,
                "gpu_hours": same[0].gpu_hours,
                "state_bytes": same[0].state_bytes,
                "runs": len(same),
            }
            for same in kinds.values()
        ],
    }


def _announce(study: Study, scale: str) -> None:
    """What is about to run: in detail where it takes long."""
    plans = {design.experiment.name: plan(study, design) for design in study.designs}
    if not shared_scales()[scale].quiet:
        for line in _plan_lines({name: _plan_row(runs) for name, runs in plans.items()}):
            say(line)
    # Runs that several experiments share are done once.
    every = {run.task.key: run for runs in plans.values() for run in runs}.values()
    compute = sum(run.exaflops for run in every)
    runs = plural(len(every), "run")
    say(f"{plural(len(plans), 'experiment')}, {runs}, {operations(compute)}")


def _plan_lines(plans: Mapping[str, Any]) -> list[str]:
    """Data, compute, time and memory of every kind of run."""
    lines = []
    for name, row in plans.items():
        cost = f"{operations(row['exaflops'])}, {_gpu_time(row['gpu_hours'])}"
        lines.append(
            f"{name}: {plural(row['runs'], 'run')}, {cost if row['exaflops'] else 'not trained'}"
        )
        for kind in row["kinds"]:
            size = f"{rounded(kind['parameters'] / 1e6, 1)} M parameters"
            if not kind["trained"]:
                lines.append(f"  {kind['runs']} × {kind['title']}  {size}, not trained")
                continue
            data = kind["data"] or "data.source is not set"
            images = f"{kind['images']:,} images" if kind["images"] else "number of images unknown"
            lines.append(
                f"  {kind['runs']} × {kind['recipe']}  {data} ({images})  "
                f"{size}  {operations(kind['exaflops'])}  {_gpu_time(kind['gpu_hours'])}  "
                f"{byte_size(kind['state_bytes'])} for weights and optimizer"
            )
    return lines


def _gpu_time(hours: float) -> str:
    return f"{significant(hours)} GPU-hours" if hours >= 1 else f"{duration(3600 * hours)} on a GPU"


def _summary(study: Study, design: Design) -> dict[str, Any]:
    """What is known of an experiment: how much is done, and its claims."""
    results, tasks = study.results(design), study.tasks_of(design)
    return {
        "name": design.experiment.name,
        "title": design.experiment.title,
        "done": sum(study.result(task) is not None for task in tasks),
        "tasks": len(tasks),
        "results": {point.name: results.values(point) for point in design.points},
        "claims": [_claim_row(decision) for decision in decisions(results)],
        "page": str(study.folder / f"{design.experiment.name}.html"),
    }


def _claim_row(decision: Decision) -> dict[str, Any]:
    claim = decision.claim
    return {
        "claim": claim.text,
        "verdict": decision.verdict or NOT_MEASURED,
        "evidence": [evidence(part, claim) for part in decision.parts],
    }


def show_plans(plans: Mapping[str, Any]) -> None:
    echo("\n".join(_plan_lines(plans)))


def show(result: dict[str, Any]) -> None:
    """The claims of each experiment, and what they rest on."""
    for experiment in result["experiments"]:
        echo(f"{experiment['title']}  ({experiment['done']} of {experiment['tasks']} runs)")
        for claim in experiment["claims"]:
            echo(f"  {claim['verdict']:<12}  {claim['claim']}")
            for line in claim["evidence"]:
                echo(f"                {line}")
    echo(f"report  {result['report']}")
