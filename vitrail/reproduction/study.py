"""Runs the experiments of a study; every number is measured once.

A study is a folder:

results/KEY.json   one run: its recipe, what was measured, cost and conditions; KEY is a hash of
                   the settings
runs/KEY/          the run folder, without its checkpoints
NAME.html          a page for each experiment; index.html and README.md are the scoreboard

Any number of processes, on any number of hosts, can work on the same folder: each takes runs that
are neither done nor locked. An interrupted run is resumed by the next process that comes to it.
"""

import io
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from vitrail import runs
from vitrail.config import (
    Config,
    changed_settings,
    grid_points,
    has_effect,
    load_config,
    with_settings,
)
from vitrail.console import duration, percent, say
from vitrail.errors import FailureError, VitrailError
from vitrail.files import read_json, write_text
from vitrail.reproduction.claims import Results
from vitrail.reproduction.experiment import WITHOUT_VIT, Cell, Design, Experiment, Stage
from vitrail.reproduction.measures import measure_model, measure_run
from vitrail.runs import BusyError, Run, lock_folder
from vitrail.training.hooks import score
from vitrail.training.loop import DivergedError
from vitrail.training.resolve import resolve_config
from vitrail.training.train import train_config

_POLL = 0.5
"""Seconds between two looks at what other processes have finished."""
_OF_WEIGHTS: Mapping[str, Any] = {
    **WITHOUT_VIT,
    **dict.fromkeys(("model.variant", "model.root"), ""),
    "model.hidden": False,
    "model.layer_scale": 0.0,
}
"""Settings that weights determine; a stage that starts from some has no use for its recipe's."""


class StoppedError(FailureError):
    """A signal stopped the process."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training run, or one model that is measured as it is built."""

    title: str
    recipe: str
    config: Config
    """`model.init` is the key of the parent, if there is one."""
    measures: tuple[str, ...] = ()
    train: bool = True
    trial: bool = False
    """Evaluated on val alone."""
    parent: "Task | None" = None
    quiet: bool = False
    benchmark_seconds: float = 0.0

    @cached_property
    def settings(self) -> list[str]:
        """What the result depends on: all settings but the defaults and those under system."""
        changed = changed_settings(self.config)
        return [one for one in changed if not one.startswith("system.")]

    @cached_property
    def key(self) -> str:
        facts = [self.settings, self.train, self.trial]
        return sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def command(self) -> str:
        """What would train the same by itself, from the weights that the stage before it left."""
        changes = changed_settings(self.config, load_config(self.recipe))
        unset = ("sweep.", "train.steps=0", "train.epochs=0.0", "train.minutes=0.0")
        given = [
            one
            for one in changes
            if not one.startswith(unset) and has_effect(self.config, one.partition("=")[0])
        ]
        if self.parent is not None:
            path = {f"model.init={self.parent.key}": f"model.init=runs/{self.parent.key}"}
            given = [path.get(one, one) for one in given]
        return shlex.join(["vitrail", "train", self.recipe, *given])

    @property
    def commands(self) -> list[str]:
        """Those of all its stages; empty if nothing is trained."""
        if not self.train:
            return []
        before = [f"{task.command} --out runs/{task.key}" for task in self.lineage()[:-1]]
        return [*before, self.command]

    def lineage(self) -> list["Task"]:
        """The tasks before it, the first one first, and itself."""
        return [*(self.parent.lineage() if self.parent else ()), self]


@dataclass
class Study:
    """The results of some experiments at one scale, in a folder."""

    designs: Sequence[Design]
    folder: Path
    device: str = "auto"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings on top of those of each first stage."""
    jobs: int = 1
    """Processes that share the device, and so the time and energy of their runs."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why tasks failed, by key."""
    _results: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _tasks: dict[Any, Task] = field(default_factory=dict)
    _open_data: dict[str, bool] = field(default_factory=dict)
    _last_stages: dict[Any, list[Stage]] = field(default_factory=dict)

    # What is done

    def result(self, task: Task) -> Mapping[str, Any] | None:
        """What this or another process measured; None if something is missing."""
        found = self._results.get(task.key)
        if found is None or not set(task.measures) <= set(found["measured"]):
            found = self._read(task)
        if not found or not set(task.measures) <= set(found["measured"]):
            return None
        self._results[task.key] = found
        return found

    def _read(self, task: Task) -> dict[str, Any]:
        """The file of a result; empty if it is missing or damaged."""
        found = read_json(self._path(task))
        return found if "status" in found and isinstance(found.get("measured"), list) else {}

    def _path(self, task: Task) -> Path:
        return self.folder / "results" / f"{task.key}.json"

    def run(self, task: Task) -> Run:
        """The run folder of a task."""
        return Run(self.folder / "runs" / task.key)

    def results(self, design: Design) -> Results:
        """The results of an experiment by cell and seed, as far as they are there."""
        by_cell: dict[str, dict[int, Mapping[str, Any]]] = {}
        for cell in design.cells:
            tasks = self.final_tasks(design, cell)
            by_cell[cell.name] = {
                seed: {**found, "commands": task.commands}
                for seed, task in enumerate(tasks)
                if (found := self.result(task)) is not None
            }
        return Results(design, by_cell)

    # What there is to do

    def trials(self, design: Design, cell: Cell) -> dict[int, Task]:
        """The runs that a cell's settings are chosen by, one for each point of its grid."""
        choices = self._choices(design, cell)
        if not design.experiment.train or len(choices) == 1:
            return {}
        return {i: self._task(design, cell, 0, last, trial=True) for i, last in enumerate(choices)}

    def final_tasks(self, design: Design, cell: Cell, expected: bool = False) -> list[Task]:
        """The last stage of a cell with every seed.

        Before its settings are chosen there are none, or, if `expected`, those of the first trial.
        """
        choices = self._choices(design, cell)
        last = choices[0]
        if not design.experiment.train:
            return [self._task(design, cell, 0, last)]
        if trials := self.trials(design, cell):
            done = {i: found for i, task in trials.items() if (found := self.result(task))}
            if len(done) < len(trials) and not expected:
                return []
            best = max(done, key=lambda i: _rank(done[i]), default=0)
            whole = {"data.train_on": "train+val", "train.keep": "last"}
            last = replace(choices[best], settings={**choices[best].settings, **whole})
        return [self._task(design, cell, seed, last) for seed in range(design.scale.seeds)]

    def tasks_of(self, design: Design, expected: bool = False) -> list[Task]:
        """Every task of an experiment that is known, once, in the order in which they are done."""
        found: dict[str, Task] = {}
        for cell in design.cells:
            trials = self.trials(design, cell).values()
            for last in (*trials, *self.final_tasks(design, cell, expected)):
                for task in last.lineage():
                    # A cell may also be the stage before another one, where nothing is measured.
                    if task.measures or task.key not in found:
                        found[task.key] = task
        return list(found.values())

    def ready_tasks(self) -> list[Task]:
        """Those that are not done and whose parents are."""
        tasks = [task for design in self.designs for task in self.tasks_of(design)]
        waiting = [task for task in tasks if self.result(task) is None]
        parents = [task.parent for task in waiting if task.parent is not None]
        # Results may be there without the weights, as in a repository.
        again = [one for one in parents if self.result(one) and not self._is_final(one)]
        ready = [*again, *(task for task in waiting if self._can_start(task))]
        return list({task.key: task for task in ready}.values())

    def _can_start(self, task: Task) -> bool:
        return task.parent is None or self._is_final(task.parent)

    def _is_final(self, task: Task) -> bool:
        """Whether a later stage can start from it, or never will."""
        done = self.result(task) is not None
        return done and (self.run(task).weights.exists() or self._diverged(task))

    def _diverged(self, task: Task) -> bool:
        return (self.result(task) or {}).get("status") == "diverged"

    def _overrides(self, design: Design, stage: Stage) -> Mapping[str, Any]:
        """The user's settings for a first stage.

        Where recipes leave their data open, `data.source` is meant for them alone; the options of
        ViTs are not meant for ResNets.
        """
        name = design.experiment.name
        if name not in self._open_data:
            firsts = (design.stages(cell)[0] for cell in design.cells)
            self._open_data[name] = any(
                not _config(first.recipe, first.settings).data.source for first in firsts
            )
        config = _config(stage.recipe, stage.settings)
        others = {"data.source"} if self._open_data[name] and config.data.source else set()
        if config.model.variant and "/" not in config.model.variant:
            others |= WITHOUT_VIT.keys()
        return {key: value for key, value in self.overrides.items() if key not in others}

    def _choices(self, design: Design, cell: Cell) -> list[Stage]:
        """What is tried as the last stage: a grid of the experiment or of the recipe, and the
        alternatives to that recipe."""
        identity = (design.experiment.name, cell.name)
        if identity not in self._last_stages:
            self._last_stages[identity] = _last_stages(design, cell)
        return self._last_stages[identity]

    def tried(self, design: Design, cell: Cell) -> set[str]:
        """The settings of the first stage that are chosen on val."""
        if len(design.stages(cell)) > 1:
            return set()
        choices = [stage.settings for stage in self._choices(design, cell)]
        return {
            key
            for one in choices
            for key, value in one.items()
            if any(other.get(key) != value for other in choices)
        }

    def _task(
        self, design: Design, cell: Cell, seed: int, last: Stage, trial: bool = False
    ) -> Task:
        identity = (design.experiment.name, cell.name, seed, repr(last), trial)
        if identity not in self._tasks:
            self._tasks[identity] = self._build_task(design, cell, seed, last, trial)
        return self._tasks[identity]

    def _build_task(self, design: Design, cell: Cell, seed: int, last: Stage, trial: bool) -> Task:
        stages = [*design.stages(cell)[:-1], last]
        experiment, parent = design.experiment, None
        for number, stage in enumerate(stages):
            is_last = number == len(stages) - 1
            settings = {**stage.settings, **({} if parent else self._overrides(design, stage))}
            if trial:  # earlier stages see no val either
                settings["data.train_on"] = "train"
            settings["seed"] = 0 if design.scale.pretrain_once and not is_last else seed
            config = _config(stage.recipe, settings)
            known = {} if parent is None else {**_OF_WEIGHTS, "model.init": parent.key}
            stage_name = f"  stage {number + 1}" if len(stages) > 1 else ""
            is_trial = trial and is_last
            parent = Task(
                title=f"{experiment.name}  {cell.name}{stage_name}{'  trial' * is_trial}",
                recipe=stage.recipe,
                config=with_settings(config, known),
                measures=_measures(experiment, seed) if is_last and not trial else (),
                train=experiment.train,
                trial=is_trial,
                parent=parent,
                quiet=design.scale.quiet,
                benchmark_seconds=design.scale.benchmark_seconds,
            )
        assert parent is not None
        return parent

    # Doing it

    def work(self, deadline: float = math.inf) -> bool:
        """Does tasks until none is left, or until none could end before the deadline.

        Returns whether it got to the end. What fails is recorded and does not stop the others.
        """
        longest = 0.0
        while ready := [task for task in self.ready_tasks() if task.key not in self.failures]:
            for task in ready:
                began = time.monotonic()
                if began + longest > deadline:
                    return False
                if self._do(task):
                    longest = max(longest, time.monotonic() - began)
                    break
            else:
                time.sleep(_POLL)  # other processes are at all of them
        return True

    def _do(self, task: Task) -> bool:
        """One task, unless another process is at it."""
        try:
            with lock_folder(self.folder / "locks" / task.key):
                # Another process may have done it since.
                if self.result(task) is None or not self._is_final(task):
                    self._measure(task)
        except BusyError:
            return False
        except StoppedError:
            raise
        except VitrailError as error:
            say(f"failed   {task.title}: {error}")
            self.failures[task.key] = f"{task.title}: {error}"
        return True

    def _measure(self, task: Task) -> None:
        """Trains and measures, and writes the result."""
        began = time.monotonic()
        title = task.title + (f"  seed {task.config.seed}" if task.train else "")
        if not task.quiet:
            say(title)
        with redirect_stderr(io.StringIO()) if task.quiet else nullcontext():
            found = self._train(task) if task.train else self._measure_untrained(task)
        before = self._read(task)  # perhaps without some of the measures
        result = before | {
            "recipe": task.recipe,
            "settings": task.settings,
            "command": task.command if task.train else "",
            "parent": task.parent.key if task.parent else None,
            "trial": task.trial,
            "seed": task.config.seed,
            "jobs": self.jobs,
            "measured": sorted({*task.measures, *before.get("measured", ())}),
            **found,
        }
        write_text(self._path(task), json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        self._results.pop(task.key, None)
        top1 = found.get("val_top1" if task.trial else "top1")
        figure = found["message"] if top1 is None else percent(top1)
        say(f"{title}  {figure}  {duration(time.monotonic() - began)}")

    def _train(self, task: Task) -> dict[str, Any]:
        run, parent = self.run(task), task.parent
        config = task.config
        if parent is not None and self._diverged(parent):
            return {"status": "diverged", "message": "the stage before it diverged"}
        if parent is not None:
            weights = str(self.run(parent).weights.resolve())
            config = with_settings(config, {"model.init": weights})
        facts = runs.provenance(runs.command_line()) | {"recipe": task.recipe}
        if run.info().get("status") != "finished" or not run.weights.exists():
            try:
                train_config(
                    config,
                    run.folder,
                    resume=True,
                    device=self.device,
                    facts=facts,
                    test=not task.trial,
                )
            except DivergedError as error:
                return {"status": "diverged", "message": str(error)}
        if run.info().get("status") == "stopped":
            raise StoppedError(f"{run.info()['message']}; the same command continues from there")
        found = measure_run(run, task.measures, self.device, task.benchmark_seconds)
        for checkpoint in (run.checkpoint, run.previous_checkpoint):
            checkpoint.unlink(missing_ok=True)
        return found

    def _measure_untrained(self, task: Task) -> dict[str, Any]:
        facts = runs.provenance(runs.command_line())
        del facts["command"]
        return (
            facts
            | {"message": ""}
            | measure_model(task.config, task.measures, self.device, task.benchmark_seconds)
        )


def _measures(experiment: Experiment, seed: int) -> tuple[str, ...]:
    """Speed does not depend on the seed."""
    return tuple(name for name in experiment.measures if name != "speed" or seed == 0)


def _last_stages(design: Design, cell: Cell) -> list[Stage]:
    last = design.stages(cell)[-1]
    if not design.experiment.train:
        return [last]
    own = {**design.scale.grid, **cell.row.grid, **cell.column.grid}
    data = _config(last.recipe, last.settings).data
    same_data = {"data.source": data.source, "data.val": data.val}
    recipes = (*cell.row.alternatives, *cell.column.alternatives)
    others = (_points(Stage(recipe=recipe, settings=same_data)) for recipe in recipes)
    return [*_points(last, own), *chain(*others)]


def _points(stage: Stage, grid: Mapping[str, Sequence[Any]] | None = None) -> list[Stage]:
    """A stage with each point of a grid, by default that of its recipe."""
    points = grid_points(grid or _config(stage.recipe, stage.settings).sweep)
    return [replace(stage, settings={**stage.settings, **point}) for point in points]


def _config(recipe: str, settings: Mapping[str, Any]) -> Config:
    # A scale may hold settings that have no effect on some of its models.
    return resolve_config(recipe, settings, strict=False).config


def _rank(result: Mapping[str, Any]) -> tuple[float, float]:
    """Trials are compared by accuracy on val, then by loss; one that diverged comes last."""
    if result.get("val_top1") is None:
        return -1.0, 0.0
    return score({"top1": result["val_top1"], "loss": result["val_loss"]})
