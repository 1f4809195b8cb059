"""A recipe, a folder or a run, with settings on top: the config of a run, and its folder."""

import itertools
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail import aliases, runs
from vitrail.config import Config, refuse_without_effect
from vitrail.console import say
from vitrail.data.catalog import known_datasets
from vitrail.data.opening import same_data
from vitrail.errors import VitrailError, did_you_mean
from vitrail.runs import Run
from vitrail.settings import (
    beneath,
    build,
    changed,
    find,
    load,
    override,
    parse,
    put,
    read,
    recipes,
    with_settings,
)

DEFAULT = "finetune/folder"
"""The recipe for a plain folder."""
LONGEST_WARMUP = 0.1
"""Of `train.steps`, where a recipe counts epochs and its own share is not known."""
RUNS = Path("runs")
"""Where runs are written without `--out`."""

Settings = Mapping[str, Any] | Sequence[str]
"""`{"optim.lr": 0.01}` or `["optim.lr=0.01"]`."""


@dataclass(frozen=True)
class Resolved:
    """What a user asked for."""

    config: Config
    recipe: str
    title: str
    """What the run folder is named after."""
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

    def name(self, ending: str = "") -> Path:
        """The folder of a first run; later ones are numbered."""
        return RUNS / f"{runs.name_of(self.title, ())}{ending}"

    def run_folder(self, out: str | Path | None, resume: bool) -> tuple[Path, bool]:
        """The run folder, and whether to number it where that name is taken.

        Without `out`, `resume` takes the newest unfinished run with the same settings.
        """
        if out or self.folder:
            return Path(out or self.folder or ""), False
        same = [run for run in reversed(runs.find(RUNS, "*/run.json")) if self.began(run)]
        unfinished = [run for run in same if run.info().get("status") != "finished"]
        if resume and same:
            return (unfinished or same)[0].folder, False
        if resume:
            say(f"no run with these settings in {RUNS}/ to resume: starting a new one")
        stopped = (run.folder for run in unfinished if not runs.is_void(run))
        if folder := next((one for one in stopped if not runs.busy(one)), None):
            command = runs.resume_command(folder)
            say(f"hint     `{command}` would continue the unfinished run with these settings")
        return self.name(), True

    def sweep_folder(self, out: str | Path | None) -> tuple[Path, bool]:
        """The folder of a sweep, and whether to number it where that name is taken.

        Without `out`, the newest sweep with the same settings is continued.
        """
        if out:
            return Path(out), False
        for run in reversed(runs.find(RUNS, f"*/{self.trials}")):
            if self.began(run):
                return RUNS / run.folder.relative_to(RUNS).parts[0], False
        return self.name("-sweep"), True

    @property
    def trials(self) -> str:
        """Where the trials of a sweep are, below its folder."""
        return f"{'*/' * ('data.source' in self.config.sweep)}trials/*/run.json"

    def began(self, run: Run) -> bool:
        """Whether a run was started with these settings, however the machine is used."""
        info = run.info()
        changes = info.get("recipe"), lasting(info.get("changed") or ())
        if changes != (self.recipe, lasting(self.changed)):
            return False
        try:
            source = load(run.folder / "config.toml").data.source
        except VitrailError:
            return False
        return not self.config.data.source or same_data(source, self.config.data.source)


def lasting(settings: Sequence[str]) -> list[str]:
    """Settings that decide what a run learns."""
    return [aliases.setting(one) for one in settings if not one.startswith("system.")]


def comparison_folder(resolved: Mapping[str, Resolved]) -> Path:
    """The folder of a comparison: the newest with the same sweeps, or the next number."""
    same = None
    for folder in runs.numbered(RUNS / "comparison"):
        if not runs.taken(folder):
            return same or folder
        trials = runs.find(folder, "**/trials/*/run.json")
        begun = {run.folder.relative_to(folder).parts[0]: run for run in trials}
        if begun and all(name in resolved and resolved[name].began(begun[name]) for name in begun):
            same = folder
    raise AssertionError("folders are numbered without end")


def resolve_config(what: str | Path, settings: Settings = (), lists: bool = False) -> Resolved:
    """RECIPE|FOLDER and SETTINGS; with `lists`, a list is a range for a sweep to try."""
    pairs = settings.items() if isinstance(settings, Mapping) else map(parse, settings)
    recipe, extra, folder = locate(what)
    written, given = read(find(recipe)), [*extra, *pairs]
    before, values = beneath(written, {}), beneath(written, dict(given))
    title = runs.title_of(extra[0][1]) if extra else recipe
    for name, value in given:
        swept = lists and isinstance(value, list) and not isinstance(values.get(name), tuple)
        override(values, f"sweep.{name}" if swept else name, value)
    scale_warmup(values, before, {name for name, _ in given})
    config = build(values)
    refuse_without_effect(
        {name.removeprefix("sweep."): value for name, value in given},
        tried(config) if lists else [config],
    )
    changes = tuple(
        setting
        for setting in changed(config, build(before))
        if not (extra and setting.startswith("data.source="))
    )
    name = Path(title).stem if title.endswith(".toml") else title
    return Resolved(config, recipe, name, changes, folder)


def scale_warmup(values: dict[str, Any], recipe: Mapping[str, Any], given: Set[str]) -> None:
    """Shortens a recipe's warm-up with its run, where only the length was given."""
    warmup = values.get("optim.warmup", 0)
    if not warmup or "optim.warmup" in given or "sweep.optim.warmup" in values:
        return
    steps, share = values.get("train.steps", 0), 1.0
    if "train.steps" in given and not recipe.get("train.steps"):
        # A recipe that counts epochs, whose steps are known once its data is open.
        share = min(1.0, LONGEST_WARMUP * steps / warmup)
    else:
        for name in ("train.steps", "train.epochs"):
            if name in given and recipe.get(name) and values.get(name):
                share = min(1.0, values[name] / recipe[name])
    if share < 1:
        put(values, "optim.warmup", max(1, round(share * warmup)))


def tried(config: Config) -> list[Config]:
    """Every run of a sweep's grid."""
    names = [name.replace(".", "__") for name in config.sweep]
    grid = itertools.product(*config.sweep.values())
    return [with_settings(config, **dict(zip(names, point, strict=True))) for point in grid]


def locate(what: str | Path) -> tuple[str, list[tuple[str, Any]], Path | None]:
    """The recipe, the settings that a FOLDER stands for, and the run folder, if it is one."""
    text, path = str(what), Path(what)
    if runs.is_run(path):
        return str(path / "config.toml"), [], path
    if path.is_file() and path.suffix == ".toml":
        return text, [], None
    if (name := text.removesuffix(".toml")) in recipes():
        return name, [], None
    is_data = os.path.lexists(path) or text in known_datasets() or "://" in text or ".tar" in text
    if is_data:
        return DEFAULT, [("data.source", text)], None
    hint = (
        did_you_mean(text, [*recipes(), *known_datasets()])
        or "; `vitrail config` lists the recipes"
    )
    raise VitrailError(f"'{what}' is neither a recipe nor a folder nor a known data set{hint}")
