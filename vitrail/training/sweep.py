"""The paper's protocol (section 4.1, appendix B.1.1): choose on a held-out part of train, retrain
on all of it with several seeds, and touch test once per seed.

With a list in `data.source` the protocol spans several data sets, such as the tasks of VTAB-1k: one
setting is chosen for all of them, by their mean score.
"""

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail import runs
from vitrail.config import Config, shown
from vitrail.console import is_main, optional, say
from vitrail.data.opening import open_parts
from vitrail.devices import Devices, devices
from vitrail.errors import DamagedError, FailureError, VitrailError
from vitrail.files import write_text
from vitrail.runs import Run
from vitrail.settings import OWN, build, load, put, to_flat
from vitrail.training.build import apply_hyperrule
from vitrail.training.hooks import score
from vitrail.training.loop import DivergedError
from vitrail.training.multi_dataset import several, summary
from vitrail.training.resolve import Settings, comparison_folder, resolve_config
from vitrail.training.train import inspect_run, train_config

SOURCE = "data.source"


def sweep(
    what: str | Path,
    settings: Settings = (),
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Grid on a held-out part of train, retrain on all of train, test once; mean and std."""
    resolved = resolve_config(what, settings, lists=True)
    if resolved.folder is not None and out is None:
        raise VitrailError(f"{what} is a run folder; name a folder for the sweep with --out")
    folder, numbered = resolved.sweep_folder(out)
    options: dict[str, Any] = {"seeds": seeds, "device": device, "facts": resolved.facts()}
    result = run_sweep(resolved.config, folder, numbered=numbered, **options)
    folder = Path(result["out"])
    if is_main():
        _write_pages(result, folder, device)
    return {"name": resolved.title, **result, "report": str(folder / "report.html")}


def _write_pages(result: Mapping[str, Any], folder: Path, device: str) -> None:
    """The pages of all tested runs, and the one that compares them."""
    page = optional("reporting.page", "pages of runs are")
    for path in final_runs(result):
        if not Run(path).inspected():
            inspect_run(Run(path), device)
        if page:
            page.write(path)
    _write_comparison([result], folder / "report.html")


def _write_comparison(results: Sequence[Mapping[str, Any]], target: Path) -> None:
    """One page about the tested runs of some sweeps."""
    comparison = optional("reporting.comparison", "the comparison is")
    sweeps = optional("reporting.sweeps", "the comparison is") if comparison else None
    if comparison and sweeps:
        tables = [table for one in results for table in sweeps.tables(one, one.get("name", ""))]
        finals = [run for one in results for run in final_runs(one)]
        comparison.compare(finals, target, tables)


def final_runs(result: Mapping[str, Any]) -> list[Path]:
    """The runs that a sweep tested: every seed, on every data set."""
    rows = result.get("tasks", [result])
    return [Path(seed["run"]) for row in rows for seed in row["seeds"]]


def compare(
    recipes: Sequence[str | Path],
    settings: Settings = (),
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """The same sweep for several recipes, and one page with all of them side by side.

    Without `out`, runs/comparison, or the next number; the same comparison is continued.
    """
    names = {str(recipe): runs.name_of(str(recipe).removesuffix(".toml"), ()) for recipe in recipes}
    resolved = {names[recipe]: resolve_config(recipe, settings, lists=True) for recipe in names}
    place = Path(out) if out else comparison_folder(resolved)
    results = [
        sweep(recipe, settings, seeds=seeds, out=place / names[str(recipe)], device=device)
        for recipe in recipes
    ]
    target = place / "report.html"
    if is_main():
        _write_comparison(results, target)
    return {"sweeps": results, "report": str(target)}


@dataclass(frozen=True)
class Trial:
    """One point of the grid, on every data set."""

    settings: Mapping[str, Any]
    runs: Mapping[str, Run]
    """By data set."""
    balanced: bool = False
    """Whether all classes count alike."""

    @cached_property
    def vals(self) -> dict[str, dict[str, Any]]:
        """What was measured on val, by data set."""
        return {source: best_val(run) for source, run in self.runs.items()}

    def mean(self, name: str) -> float | None:
        """Of a figure on val over all data sets; None where a run never came so far."""
        found = [val.get(name) for val in self.vals.values()]
        return None if None in found else statistics.fmean(x for x in found if x is not None)

    def rank(self) -> tuple[float, float]:
        """What the best trial has most of; a few held-out images often tie on top-1."""
        worst = (-1.0, -math.inf)
        scores = [score(val, self.balanced) if val else worst for val in self.vals.values()]
        accuracies, losses = zip(*scores, strict=True)
        return statistics.fmean(accuracies), statistics.fmean(losses)

    def title(self) -> str:
        return ", ".join(f"{name}={shown(value)}" for name, value in self.settings.items())


def best_val(run: Run) -> dict[str, Any]:
    """A run's evaluation on val with the weights it kept; empty if it never came so far.

    A run that diverged may have had its best evaluation before, and would win with it.
    """
    events = [event for event in run.events() if event.get("event") == "val"]
    if not events or run.info().get("status") != "finished":
        return {}
    train = load(run.folder / "config.toml").train
    if train.keep == "last":
        return events[-1]
    return max(events, key=lambda event: score(event, train.class_weights == "balanced"))


@dataclass(frozen=True)
class Sweep:
    """The protocol while it goes on; under torchrun, in each of the processes."""

    config: Config
    out: Path
    device: str
    facts: Mapping[str, Any]
    where: Devices

    def try_point(self, point: Mapping[str, Any], sources: Sequence[str]) -> Trial:
        """Trains with one point of the grid on each data set, without looking at test."""
        name = named("trial", point)
        trial = {}
        for source in sources:
            told = ", ".join(f"{k}={shown(v)}" for k, v in point.items())
            trial[source] = self.go(source, Path("trials") / name, point, f"trial    {told}")
        train = with_point(self.config, point).train
        return Trial(point, trial, train.class_weights == "balanced")

    def retrain(self, best: Trial, source: str, seed: int) -> Run:
        """The chosen settings on all of train, then test, once."""
        chosen = {**best.settings, "seed": seed, "data.train_on": "train+val", "train.keep": "last"}
        name = Path(f"seed{seed}")
        # Another choice, made when a grid grows or an absent data set comes, needs its own place.
        folder, config = self.folder(source) / name, self.config_for(source, chosen)
        taken = runs.is_run(folder) and not self.holds(folder, config)
        if taken or SOURCE in self.config.sweep:
            name = Path(named(f"seed{seed}", best.settings))
        return self.go(source, name, chosen, f"retrain  seed {seed} on train and val")

    def go(self, source: str, name: Path, point: Mapping[str, Any], told: str) -> Run:
        """One run on one data set, unless it is finished already; a retrained one is tested."""
        config = self.config_for(source, point)
        folder = self.place(self.folder(source) / name, config)
        run = finished(folder, config)
        self.where.wait()  # or a fast process would begin what a slow one has yet to look for
        final = config.data.train_on == "train+val"
        if run is not None:
            if final and run.info().get("status") == "failed":
                raise FailureError(f"{folder}: {run.info()['message']}")
            return run
        say(f"{told}{self.told_of(source)}")
        try:
            train_config(
                config, folder, resume=True, device=self.device, facts=self.facts, test=final
            )
        except DivergedError as error:
            if final:
                raise
            say(f"failed   {error}")  # a learning rate too high is an answer too
        self.where.wait()
        refuse_stopped(Run(folder))
        return Run(folder)

    def place(self, folder: Path, config: Config) -> Path:
        """Where a run with these settings is, whatever grid it was begun for, else a new folder."""
        beside = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []
        return next((one for one in (folder, *beside) if self.holds(one, config)), folder)

    def holds(self, folder: Path, config: Config) -> bool:
        """Whether a folder has a run with these settings; how the machine is used counts only
        where that is tried."""
        if not runs.is_run(folder):
            return False
        began, wanted = to_flat(load(folder / "config.toml")), to_flat(config)
        tried = self.config.sweep
        counts = (name for name in wanted if name in tried or not name.startswith("system."))
        return all(began[name] == wanted[name] for name in counts)

    def folder(self, source: str) -> Path:
        """Where the runs on a data set are: below its name, where there are several."""
        return self.out / runs.name_of(source, ()) if SOURCE in self.config.sweep else self.out

    def told_of(self, source: str) -> str:
        """The data set, where there are several, and what is set for it alone."""
        own = ", ".join(f"{name}={shown(value)}" for name, value in OWN.get(source, {}).items())
        if SOURCE not in self.config.sweep:
            return ""
        return f"  on {source}" + (f" ({own})" if own else "")

    def config_for(self, source: str, point: Mapping[str, Any]) -> Config:
        """The run that a point of the grid stands for, on one data set."""
        own = {SOURCE: source, **OWN.get(source, {})} if SOURCE in self.config.sweep else {}
        config = with_point(self.config, {**own, **point})
        return apply_hyperrule(config, open_parts(config)) if config.train.hyperrule else config


def named(name: str, point: Mapping[str, Any]) -> str:
    """A folder's name that carries a point of the grid."""
    # The names of folders leave system settings out, which may be what is tried here.
    told = [f"{k.replace('system.', 'system-')}={shown(value)}" for k, value in point.items()]
    return runs.name_of(name, told)


def run_sweep(
    config: Config,
    out: Path,
    *,
    numbered: bool = False,
    seeds: int = 3,
    device: str = "auto",
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole protocol, in folders below `out`; what is finished there is not done again.

    `numbered` takes OUT-2, OUT-3, … where `out` is taken.
    """
    grid = points(config)
    if config.train.objective == "masked":
        raise VitrailError("a sweep chooses by val top-1, which train.objective=masked has not")
    if seeds < 1:
        raise VitrailError(f"--seeds {seeds}: expected at least one")
    system = config.system
    # Joined here and not run by run: processes that parted could not find each other again.
    with devices(device, system.precision, system.deterministic) as where, ExitStack() as stack:
        sources, absent = present(config, where, facts.get("changed", ()))
        if where.main:
            out = stack.enter_context((runs.claimed if numbered else runs.held)(out))
        out = where.shared(out)
        going = Sweep(config, out, device, facts, where)
        trials = [going.try_point(point, sources) for point in grid]
        best = chosen(trials)
        finals = {
            source: [going.retrain(best, source, seed) for seed in range(seeds)]
            for source in sources
        }
        many = SOURCE in config.sweep
        result = {
            "trials": [described(trial, best, many) for trial in trials],
            "chosen": dict(best.settings),
            "out": str(out),
        }
        if many:
            result |= several(config.sweep[SOURCE], finals, absent)
        else:
            result |= summary(finals[sources[0]])
        if where.main:
            write_text(out / "sweep.json", json.dumps(result, indent=2) + "\n")
    return result


def points(config: Config) -> list[dict[str, Any]]:
    """Every combination of the grid's values; data sets are no part of the grid."""
    names = [name for name in config.sweep if name != SOURCE]
    if not config.sweep:
        raise VitrailError(
            "nothing to try: give a list, as optim.lr=[0.003,0.01,0.03], or a recipe with [sweep]"
        )
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(config.sweep[name] for name in names))
    ]


def present(
    config: Config, where: Devices, changed: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The data sets that are there for every process, and why the others are not."""
    if SOURCE not in config.sweep:
        check_parts(config, changed)
        return [config.data.source], {}
    found: dict[str, str] = {}
    for source in config.sweep[SOURCE]:
        try:
            check_parts(with_point(config, {SOURCE: source}), changed)
        except DamagedError:
            raise  # a task must not drop out of the means because its file broke
        except FailureError as error:
            found[source] = str(error)
    found = where.union(found)  # processes with other lists of runs would wait for ever
    absent = {source: found[source] for source in config.sweep[SOURCE] if source in found}
    for source, reason in absent.items():
        say(f"absent   {source}: {reason}")
    there = [source for source in config.sweep[SOURCE] if source not in absent]
    if not there:
        raise FailureError(
            f"none of {len(absent)} data sets is there; {next(iter(absent.values()))}"
        )
    return there, absent


def check_parts(config: Config, changed: Sequence[str]) -> None:
    """Something to choose on and something to test on."""
    parts = open_parts(config, changed)
    if parts.val is None or not config.train.evaluations:
        raise VitrailError("a sweep chooses on held-out images; set data.val and train.evaluations")
    if parts.test is None:
        raise VitrailError("a sweep ends with a test; set data.test, such as data.test=0.1")


def with_point(config: Config, settings: Mapping[str, Any]) -> Config:
    """The run that some settings stand for."""
    values = {k: v for k, v in to_flat(config).items() if not k.startswith("sweep.")}
    for name, value in settings.items():
        put(values, name, list(value) if isinstance(value, tuple) else value)
    return build(values)


def finished(folder: Path, config: Config) -> Run | None:
    """The run in a folder, if it is complete, or diverged, as it would again.

    One with other settings is an error, not an answer.
    """
    run = Run(folder)
    if runs.is_run(folder):
        runs.refuse_other(folder, config)
    info = run.info()
    diverged = info.get("status") == "failed" and info.get("message", "").startswith("loss is ")
    return run if info.get("status") == "finished" or diverged else None


def refuse_stopped(run: Run) -> None:
    """A sweep whose run was interrupted ends with it."""
    if run.info().get("status") == "stopped":
        raise FailureError(f"{run.info().get('message')}; the same command goes on from there")


def chosen(trials: Sequence[Trial]) -> Trial:
    """The best trial on val."""
    best = max(trials, key=Trial.rank)
    if not any(best.vals.values()):
        last = list(trials[-1].runs.values())[-1]
        raise FailureError(f"every trial failed; the last: {last.info().get('message')}")
    if (top1 := best.mean("top1")) is not None:
        among = f", the mean of {len(best.runs)} data sets" if len(best.runs) > 1 else ""
        say(f"chosen   {best.title()}  val {100 * top1:.2f} %{among}")
    return best


def described(trial: Trial, best: Trial, many: bool) -> dict[str, Any]:
    """A trial as plain values; with `many` data sets, what became of it on each."""
    found = {
        "settings": dict(trial.settings),
        "val_top1": trial.mean("top1"),
        "val_loss": trial.mean("loss"),
        "chosen": trial is best,
    }
    if not many:
        return found | {"run": str(next(iter(trial.runs.values())).folder)}
    return found | {
        "data": {
            source: {"val_top1": trial.vals[source].get("top1"), "run": str(run.folder)}
            for source, run in trial.runs.items()
        }
    }
