"""`vitrail sweep`: the paper's protocol (section 4.1, appendix B.1.1). Choose settings on a
held-out part of train, retrain on all of train with several seeds, evaluate on test once per seed.

With a list in `data.source` the protocol spans several datasets, such as the tasks of VTAB-1k: one
setting is chosen for all of them, by their mean score.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail import runs
from vitrail.config import (
    DATASET_SETTINGS,
    Config,
    build_config,
    grid_points,
    load_config,
    to_flat,
    toml_value,
    with_settings,
)
from vitrail.console import import_optional, is_main, say
from vitrail.data.opening import open_run_data
from vitrail.devices import Devices, setup_devices
from vitrail.errors import DamagedError, FailureError, VitrailError
from vitrail.evaluation.show import average_table
from vitrail.files import write_text
from vitrail.runs import Run
from vitrail.training.build import apply_hyperrule
from vitrail.training.hooks import score
from vitrail.training.loop import DivergedError
from vitrail.training.multi_dataset import average, seed_summary, summarize_tasks
from vitrail.training.resolve import Resolved, Settings, comparison_folder, resolve_config
from vitrail.training.train import inspect_run, train_config

_SOURCE = "data.source"
_COMPARED = (_SOURCE, f"sweep.{_SOURCE}", "train.class_weights")
"""Settings that recipes must share if the best of all their trials is chosen."""
_SPLIT = ("data.val", "data.test", "data.split", "data.subset", "data.only")
"""Settings that decide which images are held out."""


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
    return _sweep(resolved, folder, numbered=numbered, seeds=seeds, device=device)


def _sweep(
    resolved: Resolved, out: Path, *, seeds: int, device: str, numbered: bool = False
) -> dict[str, Any]:
    """The whole protocol, in folders below `out`; finished runs are not repeated.

    `numbered` takes OUT-2, OUT-3, … where `out` is taken.
    """
    _check(resolved.config, seeds)
    with _open_sweep(resolved, out, device, numbered=numbered) as protocol:
        trials = protocol.try_grid()
        result = protocol.finish(trials, chosen(trials), seeds)
    return _with_report(resolved, result, device)


def _with_report(resolved: Resolved, result: dict[str, Any], device: str) -> dict[str, Any]:
    """A result with its page, if anything was tested."""
    if not _final_runs(result):
        return {"name": resolved.title, **result}
    folder = Path(result["out"])
    if is_main():
        _write_pages(result, folder, device)
    return {"name": resolved.title, **result, "report": str(folder / "report.html")}


def _write_pages(result: Mapping[str, Any], folder: Path, device: str) -> None:
    """The reports of all tested runs, and the page that compares them."""
    page = import_optional("reporting.page", "pages of runs are")
    for path in _final_runs(result):
        if not Run(path).has_inspection():
            inspect_run(Run(path), device)
        if page:
            page.write(path)
    _write_comparison([result], folder / "report.html")


def _write_comparison(
    results: Sequence[Mapping[str, Any]], target: Path, mean: Mapping[str, Any] | None = None
) -> None:
    """One page with the tested runs of some sweeps, below their average if there is one."""
    comparison = import_optional("reporting.comparison", "the comparison is")
    sweeps = import_optional("reporting.sweeps", "the comparison is") if comparison else None
    if comparison and sweeps:
        tables = [table for one in results for table in sweeps.tables(one, one.get("name", ""))]
        finals = [run for one in results for run in _final_runs(one)]
        comparison.compare(finals, target, [average_table(mean), *tables] if mean else tables)


def _final_runs(result: Mapping[str, Any]) -> list[Path]:
    """The runs that were evaluated on test: every seed, on every dataset."""
    rows = result.get("tasks", [result])
    return [Path(seed["run"]) for row in rows for seed in row.get("seeds", ())]


def compare(
    recipes: Sequence[str | Path],
    settings: Settings = (),
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    device: str = "auto",
    best: bool = False,
) -> dict[str, Any]:
    """The same sweep for several recipes, and one page with all of them side by side.

    With `best`, all their trials are compared on val, and only the best of them is retrained and
    tested. One model on different data also gets the average over these. Without `out`,
    runs/comparison, or the next number; the same comparison is continued.
    """
    resolved = {
        runs.run_name(str(recipe).removesuffix(".toml"), ()): resolve_config(
            recipe, settings, lists=True
        )
        for recipe in recipes
    }
    if best:
        resolved = _on_the_same_images(resolved)
    folder = Path(out) if out else comparison_folder(resolved)
    # One process group for all sweeps, as for all runs of one.
    with setup_devices(device) as devices:
        folder = devices.broadcast(folder)
        result = (_best if best else _each)(resolved, folder, seeds, devices, device)
    result["report"] = str(folder / "report.html")
    if is_main():
        _write_comparison(result["sweeps"], folder / "report.html", result.get("average"))
        write_text(folder / "sweep.json", json.dumps(result, indent=2) + "\n")
    return result


def _each(
    resolved: Mapping[str, Resolved], folder: Path, seeds: int, devices: Devices, device: str
) -> dict[str, Any]:
    """Every recipe with its own choice; one model on several datasets also gets their average."""
    averaged = _on_several_datasets([one.config for one in resolved.values()])
    data = {name: one.config.data.source for name, one in resolved.items()}
    configs = {data[name]: one.config for name, one in resolved.items()}
    absent = find_absent(configs, devices) if averaged else {}
    sweeps = {
        name: _sweep(one, folder / name, seeds=seeds, device=device)
        for name, one in resolved.items()
        if data[name] not in absent
    }
    result: dict[str, Any] = {"sweeps": list(sweeps.values())}
    if averaged:
        result["average"] = average({data[name]: sweeps.get(name, {}) for name in data}, absent)
    return result


def _on_several_datasets(configs: Sequence[Config]) -> bool:
    """Whether these train the same model, each on a dataset of its own."""
    sources = {config.data.source for config in configs}
    models = {(config.model.init, config.model.variant) for config in configs}
    lists = any(_SOURCE in config.sweep for config in configs)
    return len(sources) == len(configs) > 1 and len(models) == 1 and not lists


def _best(
    resolved: Mapping[str, Resolved], folder: Path, seeds: int, devices: Devices, device: str
) -> dict[str, Any]:
    """The trials of all recipes as one grid; recipes need not have several settings to try."""
    for one in resolved.values():
        _check(one.config, seeds)
    with ExitStack() as stack:
        sweeps = {
            name: stack.enter_context(_open_sweep(one, folder / name, device, recipe=one.title))
            for name, one in resolved.items()
        }
        trials = {name: one.try_grid() for name, one in sweeps.items()}
        best = chosen([trial for of_one in trials.values() for trial in of_one])
        results = {name: one.finish(trials[name], best, seeds) for name, one in sweeps.items()}
    named = [_with_report(resolved[name], result, device) for name, result in results.items()]
    return {"sweeps": named, "best": best.recipe}


def _on_the_same_images(resolved: Mapping[str, Resolved]) -> dict[str, Resolved]:
    """The recipes with the splits of the first one, so that all trials have the same val images."""
    first = next(iter(resolved.values()))
    wanted, found = to_flat(first.config), {}
    for name, one in resolved.items():
        values = to_flat(one.config)
        for key in _COMPARED:
            if values.get(key) != wanted.get(key):
                raise VitrailError(
                    f"--best compares recipes on the same data and by the same measure: {key} of "
                    f"{one.title} is not that of {first.title}; set {key.removeprefix('sweep.')}"
                )
        changes = {key: wanted[key] for key in _SPLIT if values[key] != wanted[key]}
        for key, value in changes.items():
            say(f"data     {one.title} with {key}={toml_value(value)}, as {first.title}")
        found[name] = replace(one, config=build_config(values | changes))
    return found


@dataclass(frozen=True)
class Trial:
    """One point of the grid, on every dataset."""

    settings: Mapping[str, Any]
    runs: Mapping[str, Run]
    """By dataset."""
    balanced: bool = False
    """Whether trials are compared by balanced accuracy."""
    recipe: str = ""
    """Its title, where trials of several are compared."""

    @cached_property
    def vals(self) -> dict[str, dict[str, Any]]:
        """What was measured on val, by dataset."""
        return {source: best_val(run) for source, run in self.runs.items()}

    def mean(self, name: str) -> float | None:
        """The mean of a metric on val over all datasets; None if a run does not have it."""
        values = [val.get(name) for val in self.vals.values()]
        return None if None in values else statistics.fmean(x for x in values if x is not None)

    def rank(self) -> tuple[float, float]:
        """Trials are compared by accuracy, then by loss: a few held-out images often tie."""
        worst = (-1.0, -math.inf)
        scores = [score(val, self.balanced) if val else worst for val in self.vals.values()]
        accuracies, losses = zip(*scores, strict=True)
        return statistics.fmean(accuracies), statistics.fmean(losses)

    def title(self) -> str:
        return _title(self.recipe, self.settings)


def _title(recipe: str, point: Mapping[str, Any]) -> str:
    settings = (f"{name}={toml_value(value)}" for name, value in point.items())
    return ", ".join(filter(None, (recipe, *settings))) or "the settings of the recipe"


def best_val(run: Run) -> dict[str, Any]:
    """The evaluation on val of the weights that a run saved; empty unless it finished: a run that
    diverged may have had the best evaluation before.
    """
    events = [event for event in run.events() if event.get("event") == "val"]
    if not events or run.info().get("status") != "finished":
        return {}
    train = load_config(run.folder / "config.toml").train
    if train.keep == "last":
        return events[-1]
    return max(events, key=lambda event: score(event, train.class_weights == "balanced"))


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep; under torchrun, in each of the processes."""

    config: Config
    out: Path
    device: str
    facts: Mapping[str, Any]
    devices: Devices
    sources: Sequence[str]
    absent: Mapping[str, str]
    """Datasets that cannot be opened, and why."""
    recipe: str = ""
    """Its title, where trials of several are compared."""

    def try_grid(self) -> list[Trial]:
        """Trains with every point of the grid."""
        return [self.try_point(point) for point in points(self.config)]

    def try_point(self, point: Mapping[str, Any]) -> Trial:
        """Trains with one point of the grid on each dataset, without touching test."""
        name = Path("trials") / _folder_name("trial", point)
        title = f"trial    {_title(self.recipe, point)}"
        trial = {source: self.train(source, name, point, title) for source in self.sources}
        train = with_settings(self.config, point).train
        return Trial(point, trial, train.class_weights == "balanced", self.recipe)

    def finish(self, trials: Sequence[Trial], best: Trial, seeds: int) -> dict[str, Any]:
        """The result, also as sweep.json; the best trial is retrained and tested if it is one of
        these."""
        many, won = _SOURCE in self.config.sweep, best in trials
        result = {
            "trials": [_trial_row(trial, best, many) for trial in trials],
            "chosen": dict(best.settings) if won else None,
            "out": str(self.out),
        }
        if won:
            finals = {
                source: [self.retrain(best, source, seed) for seed in range(seeds)]
                for source in self.sources
            }
            if many:
                result |= summarize_tasks(self.config.sweep[_SOURCE], finals, self.absent)
            else:
                result |= seed_summary(finals[self.sources[0]])
        if self.devices.main:
            write_text(self.out / "sweep.json", json.dumps(result, indent=2) + "\n")
        return result

    def retrain(self, best: Trial, source: str, seed: int) -> Run:
        """Trains with the chosen settings on all of train and evaluates on test once."""
        chosen = {**best.settings, "seed": seed, "data.train_on": "train+val", "train.keep": "last"}
        name = Path(f"seed{seed}")
        # Another choice, made when a grid grows or a dataset is added, needs its own folder.
        folder, config = self._folder(source) / name, self._config(source, chosen)
        taken = runs.is_run(folder) and not self._holds(folder, config)
        if taken or _SOURCE in self.config.sweep:
            name = Path(_folder_name(f"seed{seed}", best.settings))
        return self.train(source, name, chosen, f"retrain  seed {seed} on train and val")

    def train(self, source: str, name: Path, point: Mapping[str, Any], title: str) -> Run:
        """One run on one dataset, unless it is finished already; a retrained one is tested."""
        config = self._config(source, point)
        folder = self._existing_folder(self._folder(source) / name, config)
        run = _finished(folder, config)
        self.devices.barrier()  # or a fast process would start what a slow one is still looking for
        final = config.data.train_on == "train+val"
        if run is not None:
            if final and run.info().get("status") == "failed":
                raise FailureError(f"{folder}: {run.info()['message']}")
            return run
        say(f"{title}{self._suffix(source)}")
        try:
            train_config(
                config, folder, resume=True, device=self.device, facts=self.facts, test=final
            )
        except DivergedError as error:
            if final:
                raise
            say(f"failed   {error}")  # a learning rate that is too high is a result too
        self.devices.barrier()
        if Run(folder).info().get("status") == "stopped":
            message = Run(folder).info().get("message")
            raise FailureError(f"{message}; the same command continues from there")
        return Run(folder)

    def _existing_folder(self, folder: Path, config: Config) -> Path:
        """The folder of a run with these settings, for whichever grid it was started, or
        `folder`."""
        beside = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []
        return next((one for one in (folder, *beside) if self._holds(one, config)), folder)

    def _holds(self, folder: Path, config: Config) -> bool:
        """Whether a folder holds a run with these settings; `system` settings count only where they
        are part of the grid."""
        if not runs.is_run(folder):
            return False
        began, wanted = to_flat(load_config(folder / "config.toml")), to_flat(config)
        tried = self.config.sweep
        counts = (name for name in wanted if name in tried or not name.startswith("system."))
        return all(began[name] == wanted[name] for name in counts)

    def _folder(self, source: str) -> Path:
        """Of the runs on a dataset: below its name, where there are several."""
        return self.out / runs.run_name(source, ()) if _SOURCE in self.config.sweep else self.out

    def _suffix(self, source: str) -> str:
        """The dataset, where there are several, and the settings for it alone."""
        own = ", ".join(
            f"{name}={toml_value(value)}"
            for name, value in DATASET_SETTINGS.get(source, {}).items()
        )
        if _SOURCE not in self.config.sweep:
            return ""
        return f"  on {source}" + (f" ({own})" if own else "")

    def _config(self, source: str, point: Mapping[str, Any]) -> Config:
        """The config of a point of the grid on one dataset."""
        own = (
            {_SOURCE: source, **DATASET_SETTINGS.get(source, {})}
            if _SOURCE in self.config.sweep
            else {}
        )
        config = with_settings(self.config, {**own, **point})
        if not config.train.hyperrule:
            return config
        # The rule counts what the retrained runs are trained on, or it could choose one length for
        # the trials and another for these.
        final = {"data.train_on": "train+val", "seed": self.config.seed}
        return apply_hyperrule(config, open_run_data(with_settings(config, final)))


def _folder_name(name: str, point: Mapping[str, Any]) -> str:
    # Folder names leave system settings out, which may be what is tried here.
    settings = [
        f"{k.replace('system.', 'system-')}={toml_value(value)}" for k, value in point.items()
    ]
    return runs.run_name(name, settings)


def _check(config: Config, seeds: int) -> None:
    if not config.train.uses_labels:
        raise VitrailError(
            f"a sweep chooses by val top-1, which "
            f"train.objective={config.train.objective} does not have"
        )
    if seeds < 1:
        raise VitrailError(f"--seeds {seeds}: expected at least one")


@contextmanager
def _open_sweep(
    resolved: Resolved, out: Path, device: str, *, numbered: bool = False, recipe: str = ""
) -> Iterator[Sweep]:
    """Opens the data, and locks the folder."""
    config, facts = resolved.config, resolved.facts()
    system = config.system
    # One process group for all runs: processes that left it could not find each other again.
    with (
        setup_devices(device, system.precision, system.deterministic) as devices,
        ExitStack() as stack,
    ):
        sources, absent = present(config, devices, resolved.changed)
        if devices.main:
            out = stack.enter_context(runs.open_folder(out, numbered))
        out = devices.broadcast(out)
        yield Sweep(config, out, device, facts, devices, sources, absent, recipe)


def points(config: Config) -> list[dict[str, Any]]:
    """Every combination of the grid's values; datasets are not part of the grid."""
    return grid_points({name: values for name, values in config.sweep.items() if name != _SOURCE})


def present(
    config: Config, devices: Devices, changed: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The datasets that every process can open, and why the others cannot be opened."""
    if _SOURCE not in config.sweep:
        _check_splits(config, changed)
        return [config.data.source], {}
    sources = config.sweep[_SOURCE]
    configs = {source: with_settings(config, {_SOURCE: source}) for source in sources}
    absent = find_absent(configs, devices, changed)
    return [source for source in sources if source not in absent], absent


def find_absent(
    configs: Mapping[str, Config], devices: Devices, changed: Sequence[str] = ()
) -> dict[str, str]:
    """The datasets that some process cannot open, and why."""
    found: dict[str, str] = {}
    for source, config in configs.items():
        try:
            _check_splits(config, changed)
        except DamagedError:
            raise  # a task must not drop out of the means because its file is damaged
        except FailureError as error:
            found[source] = str(error)
    found = devices.union(found)  # processes with different lists of runs would wait forever
    absent = {source: found[source] for source in configs if source in found}
    for source, reason in absent.items():
        say(f"absent   {source}: {reason}")
    if len(absent) == len(configs):
        raise FailureError(
            f"none of {len(absent)} datasets can be opened; {next(iter(absent.values()))}"
        )
    return absent


def _check_splits(config: Config, changed: Sequence[str]) -> None:
    parts = open_run_data(config, changed)
    if parts.val is None or not config.train.evaluations:
        raise VitrailError("a sweep chooses on held-out images; set data.val and train.evaluations")
    if parts.test is None:
        raise VitrailError("a sweep needs a test split; set data.test, e.g. data.test=0.1")


def _finished(folder: Path, config: Config) -> Run | None:
    """The run in a folder if it is complete, or diverged, as it would again."""
    run = Run(folder)
    if runs.is_run(folder):
        runs.check_same_config(folder, config)
    info = run.info()
    diverged = info.get("status") == "failed" and info.get("message", "").startswith("loss is ")
    return run if info.get("status") == "finished" or diverged else None


def chosen(trials: Sequence[Trial]) -> Trial:
    """The best trial on val."""
    best = max(trials, key=Trial.rank)
    if not any(best.vals.values()):
        last = list(trials[-1].runs.values())[-1]
        raise FailureError(f"every trial failed; the last: {last.info().get('message')}")
    if (top1 := best.mean("top1")) is not None:
        among = f", the mean of {len(best.runs)} datasets" if len(best.runs) > 1 else ""
        say(f"chosen   {best.title()}  val {100 * top1:.2f}%{among}")
    return best


def _trial_row(trial: Trial, best: Trial, many: bool) -> dict[str, Any]:
    """A trial as plain values; with `many` datasets, its result on each."""
    row = {
        "settings": dict(trial.settings),
        "val_top1": trial.mean("top1"),
        "val_loss": trial.mean("loss"),
        "chosen": trial is best,
    }
    if not many:
        return row | {"run": str(next(iter(trial.runs.values())).folder)}
    return row | {
        "data": {
            source: {"val_top1": trial.vals[source].get("top1"), "run": str(run.folder)}
            for source, run in trial.runs.items()
        }
    }
