"""What a user asked for: a recipe, a folder or a run, with settings on top."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail import runs
from vitrail.config import Config
from vitrail.data.catalogue import CATALOGUE
from vitrail.errors import VitrailError, did_you_mean
from vitrail.settings import beneath, build, changed, find, override, parse, read, recipes

DEFAULT = "finetune/folder"
"""The recipe for a plain folder."""

Settings = Mapping[str, Any] | Sequence[str]
"""`{"optim.lr": 0.01}` or `["optim.lr=0.01"]`."""


@dataclass(frozen=True)
class Order:
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

    def out(self, out: str | Path | None) -> Path:
        """Where the run will be."""
        return (
            Path(out)
            if out
            else self.folder or Path("runs") / runs.name_of(self.title, self.changed)
        )


def understand(what: str | Path, settings: Settings = (), lists: bool = False) -> Order:
    """RECIPE|FOLDER and SETTINGS; with `lists`, a list is a range for a sweep to try."""
    pairs = settings.items() if isinstance(settings, Mapping) else map(parse, settings)
    recipe, extra, folder = locate(what)
    written, given = read(find(recipe)), [*extra, *pairs]
    before, values = beneath(written, {}), beneath(written, dict(given))
    title = recipe if not extra else Path(extra[0][1]).name or "data"
    for name, value in given:
        swept = lists and isinstance(value, list) and not isinstance(values.get(name), tuple)
        override(values, f"sweep.{name}" if swept else name, value)
    config = build(values)
    told = tuple(
        setting
        for setting in changed(config, build(before))
        if not (extra and setting.startswith("data.source="))
    )
    name = Path(title).stem if title.endswith(".toml") else title
    return Order(config, recipe, name, told, folder)


def locate(what: str | Path) -> tuple[str, list[tuple[str, Any]], Path | None]:
    """The recipe, the settings that a FOLDER stands for, and the run folder, if it is one."""
    text, path = str(what), Path(what)
    if runs.is_run(path):
        return str(path / "config.toml"), [], path
    if path.is_file() and path.suffix == ".toml":
        return text, [], None
    if (name := text.removesuffix(".toml")) in recipes():
        return name, [], None
    is_data = os.path.lexists(path) or text in CATALOGUE or "://" in text or ".tar" in text
    if is_data:
        return DEFAULT, [("data.source", text)], None
    hint = did_you_mean(text, [*recipes(), *CATALOGUE]) or "; `vitrail config` lists the recipes"
    raise VitrailError(f"'{what}' is neither a recipe nor a folder nor a known data set{hint}")
