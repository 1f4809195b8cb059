"""A recipe, a folder or a run, with settings on top: the config of a run, and its folder."""

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail import aliases, runs
from vitrail.config import (
    Config,
    build_config,
    changed_settings,
    find_recipe,
    grid_points,
    load_config,
    override_value,
    parse_setting,
    read_recipe,
    recipe_names,
    refuse_without_effect,
    set_value,
    with_dataset_settings,
    with_settings,
)
from vitrail.console import say
from vitrail.data.catalog import known_datasets
from vitrail.data.opening import same_data
from vitrail.errors import VitrailError, did_you_mean
from vitrail.runs import Run

_DEFAULT = "finetune/folder"
"""The recipe for a plain folder."""
_MAX_WARMUP = 0.1
"""Share of `train.steps`, where a recipe counts epochs and its own share is not known."""
RUNS = Path("runs")
"""Where runs are written without `--out`."""

Settings = Mapping[str, Any] | Sequence[str]
"""`{"optim.lr": 0.01}` or `["optim.lr=0.01"]`."""


@dataclass(frozen=True)
class Resolved:
    """A config, and where it came from."""

    config: Config
    recipe: str
    title: str
    """The run folder is named after it."""
    changed: tuple[str, ...]
    """Settings beyond the recipe's."""
    folder: Path | None = None
    """The run folder that was given in place of a recipe."""

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        return runs.provenance(runs.command_line()) | {
            "recipe": self.recipe,
            "changed": list(self.changed),
        }

    def _name(self, suffix: str = "") -> Path:
        """The folder of a first run; later ones are numbered."""
        return RUNS / f"{runs.run_name(self.title, ())}{suffix}"

    def run_folder(self, out: str | Path | None, resume: bool) -> tuple[Path, bool]:
        """The run folder, and whether to number it where that name is taken.

        Without `out`, `resume` takes the newest unfinished run with the same settings.
        """
        if out or self.folder:
            return Path(out or self.folder or ""), False
        same = [run for run in reversed(runs.find_runs(RUNS, "*/run.json")) if self.matches(run)]
        unfinished = [run for run in same if run.info().get("status") != "finished"]
        if resume and same:
            return (unfinished or same)[0].folder, False
        if resume:
            say(f"no run with these settings in {RUNS}/ to resume: starting a new one")
        stopped = (run.folder for run in unfinished if not run.failed_at_start())
        if folder := next((one for one in stopped if not runs.is_locked(one)), None):
            command = runs.resume_command(folder)
            say(f"hint     `{command}` would continue the unfinished run with these settings")
        return self._name(), True

    def sweep_folder(self, out: str | Path | None) -> tuple[Path, bool]:
        """The folder of a sweep, and whether to number it where that name is taken.

        Without `out`, the newest sweep with the same settings is continued.
        """
        if out:
            return Path(out), False
        for run in reversed(runs.find_runs(RUNS, f"*/{self.trials}")):
            if self.matches(run):
                return RUNS / run.folder.relative_to(RUNS).parts[0], False
        return self._name("-sweep"), True

    @property
    def trials(self) -> str:
        """Where the trials of a sweep are, below its folder."""
        return f"{'*/' * ('data.source' in self.config.sweep)}trials/*/run.json"

    def matches(self, run: Run) -> bool:
        """Whether a run was started with these settings, `system` aside."""
        info = run.info()
        changes = info.get("recipe"), _without_system(info.get("changed") or ())
        if changes != (self.recipe, _without_system(self.changed)):
            return False
        try:
            source = load_config(run.folder / "config.toml").data.source
        except VitrailError:
            return False
        return not self.config.data.source or same_data(source, self.config.data.source)


def _without_system(settings: Sequence[str]) -> list[str]:
    return [aliases.setting(one) for one in settings if not one.startswith("system.")]


def comparison_folder(resolved: Mapping[str, Resolved]) -> Path:
    """The folder of a comparison: the newest one with the same sweeps, or the next number."""
    same = None
    for folder in runs.numbered_folders(RUNS / "comparison"):
        if not runs.is_occupied(folder):
            return same or folder
        trials = runs.find_runs(folder, "**/trials/*/run.json")
        started = {run.folder.relative_to(folder).parts[0]: run for run in trials}
        if started and all(
            name in resolved and resolved[name].matches(run) for name, run in started.items()
        ):
            same = folder
    raise AssertionError("folders are numbered without end")


def resolve_config(
    what: str | Path, settings: Settings = (), lists: bool = False, strict: bool = True
) -> Resolved:
    """RECIPE|FOLDER and SETTINGS; with `lists`, a list is a range for a sweep to try.

    `strict` refuses settings that have no effect.
    """
    pairs = settings.items() if isinstance(settings, Mapping) else map(parse_setting, settings)
    recipe, extra, folder = _locate(what)
    written, given = read_recipe(find_recipe(recipe)), [*extra, *pairs]
    before, values = with_dataset_settings(written, {}), with_dataset_settings(written, dict(given))
    title = runs.data_name(extra[0][1]) if extra else recipe
    for name, value in given:
        swept = lists and isinstance(value, list) and not isinstance(values.get(name), tuple)
        override_value(values, f"sweep.{name}" if swept else name, value)
    _scale_warmup(values, before, {name for name, _ in given})
    config = build_config(values)
    if strict:
        points = grid_points(config.sweep) if lists else [{}]
        refuse_without_effect(
            {name.removeprefix("sweep."): value for name, value in given},
            [with_settings(config, one) for one in points],
        )
    changes = tuple(
        setting
        for setting in changed_settings(config, build_config(before))
        if not (extra and setting.startswith("data.source="))
    )
    name = Path(title).stem if title.endswith(".toml") else title
    return Resolved(config, recipe, name, changes, folder)


def _scale_warmup(values: dict[str, Any], recipe: Mapping[str, Any], given: Set[str]) -> None:
    """Shortens a recipe's warm-up with its run, where only the length was given."""
    warmup = values.get("optim.warmup", 0)
    if not warmup or "optim.warmup" in given or "sweep.optim.warmup" in values:
        return
    steps, share = values.get("train.steps", 0), 1.0
    if "train.steps" in given and not recipe.get("train.steps"):
        # A recipe that counts epochs, whose steps are known once its data is open.
        share = min(1.0, _MAX_WARMUP * steps / warmup)
    else:
        for name in ("train.steps", "train.epochs"):
            if name in given and recipe.get(name) and values.get(name):
                share = min(1.0, values[name] / recipe[name])
    if share < 1:
        set_value(values, "optim.warmup", max(1, round(share * warmup)))


def _locate(what: str | Path) -> tuple[str, list[tuple[str, Any]], Path | None]:
    """The recipe, the settings that a FOLDER stands for, and the run folder, if it is one."""
    text, path = str(what), Path(what)
    if runs.is_run(path):
        return str(path / "config.toml"), [], path
    if path.is_file() and path.suffix == ".toml":
        return text, [], None
    if (name := text.removesuffix(".toml")) in recipe_names():
        return name, [], None
    is_data = os.path.lexists(path) or text in known_datasets() or "://" in text or ".tar" in text
    if is_data:
        return _DEFAULT, [("data.source", text)], None
    hint = (
        did_you_mean(text, [*recipe_names(), *known_datasets()])
        or "; `vitrail config` lists the recipes"
    )
    raise VitrailError(f"'{what}' is neither a recipe nor a folder nor a known dataset{hint}")
