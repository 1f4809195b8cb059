"""What the pages show of a run. A file that is missing or damaged becomes a note on the page."""

import io
import tomllib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from vitrail.config import flatten
from vitrail.data.decode import load_bounded, opened
from vitrail.errors import VitrailError
from vitrail.reporting.rendering import MALFORMED, plural
from vitrail.runs import Run

Rows = Sequence[dict[str, Any]]

_FILES = ("run.json", "config.toml", "metrics.jsonl", "evaluation")
_OBJECTS = ("data", "model", "best", "cost", "versions")
_LISTS = ("per_class", "confused", "calibration", "mistakes", "broken")
_SCORES = ("top1", "top5", "balanced_accuracy", "macro_f1", "ece", "loss")
_EMBEDDABLE = {"PNG": "image/png", "JPEG": "image/jpeg"}
_SHRUNK_PIXELS = 1400


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as its files describe it, in plain dictionaries."""

    folder: Path
    info: dict[str, Any]
    """run.json; the objects in it are present, though perhaps empty."""
    settings: dict[str, str]
    """config.toml, as `section.key`."""
    train: Rows
    val: Rows
    evaluations: dict[str, dict[str, Any]]
    """evaluation/*.json by split: test, val, then the others."""
    notes: dict[str, str]
    """What is wrong with a file, by its name."""

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.folder.resolve().name)

    @property
    def result(self) -> dict[str, Any] | None:
        """The evaluation to lead with."""
        return next(iter(self.evaluations.values()), None)

    def rows(self, event: str) -> Rows:
        return self.train if event == "train" else self.val


def load_run(folder: Path) -> RunData:
    """A run as far as its files can be read; an error if the folder has none of them."""
    if not any((folder / name).exists() for name in _FILES):
        raise VitrailError(f"{folder} is not a run folder: expected {', '.join(_FILES)} in it")
    run, notes = Run(folder, writes=False), {}
    info = run.info()
    objects = {name: info.get(name) or {} for name in _OBJECTS}
    if not info or not all(isinstance(value, dict) for value in objects.values()):
        notes["run.json"] = state_of(folder / "run.json")
        info, objects = {}, {name: {} for name in _OBJECTS}
    try:
        tree = tomllib.loads((folder / "config.toml").read_text("utf-8"))
        settings = {name: _setting(value) for name, value in flatten(tree)}
    except (OSError, ValueError, RecursionError):
        settings = {}
        notes["config.toml"] = state_of(folder / "config.toml")
    try:
        events = run.events()
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        if damaged := sum(bool(line.strip()) for line in lines) - len(events):
            notes["metrics.jsonl"] = f"has {plural(damaged, 'damaged line')}, skipped here"
    except OSError:
        events = []
        notes["metrics.jsonl"] = state_of(folder / "metrics.jsonl")
    evaluations = _evaluations(run, notes)
    return RunData(
        folder=folder,
        info=info | objects,
        settings=settings,
        train=[row for row in events if row.get("event") == "train"],
        val=[row for row in events if row.get("event") == "val"],
        evaluations=evaluations,
        notes=notes,
    )


def state_of(path: Path) -> str:
    """Why a file cannot be shown."""
    return "is damaged" if path.exists() else "is missing"


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_setting, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _evaluations(run: Run, notes: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Every evaluation; other verbs' results in that folder have no `top1`."""
    evaluations, damaged = {}, []
    splits = (path.stem for path in (run.folder / "evaluation").glob("*.json"))
    for split in sorted(splits, key=lambda name: (name != "test", name != "val", name)):
        values = run.evaluation(split)
        try:
            if not values or "top1" in values:
                evaluations[split] = _evaluation(split, values)
        except MALFORMED:
            damaged.append(f"evaluation/{split}.json")
    if damaged:
        notes["evaluation"] = f"Damaged: {', '.join(damaged)}."
    return evaluations


def _evaluation(split: str, values: dict[str, Any]) -> dict[str, Any]:
    """One file with every key in place."""
    lists = {name: list(values.get(name) or ()) for name in _LISTS}
    # A class without images has no recall, rather than zero.
    lists["per_class"] = [
        row if row["n"] else row | {"recall": None, "f1": None} for row in lists["per_class"]
    ]
    return {
        **dict.fromkeys(_SCORES),
        **values,
        **lists,
        "split": split,
        "n": int(values["n"]),
        "intervals": dict.fromkeys(_SCORES) | (values.get("intervals") or {}),
        # Of five classes, the top five are always right.
        "has_top5": not 0 < len(lists["per_class"]) <= 5,
    }


def column(rows: Rows, name: str) -> Float[np.ndarray, " n"]:
    """A value of each row; NaN where it is absent or not finite."""
    values = [row.get(name) for row in rows]
    numbers = [value if isinstance(value, (int, float)) else np.nan for value in values]
    array = np.array(numbers, dtype=float)
    return np.where(np.isfinite(array), array, np.nan)


def embed(path: Path, most_bytes: int, *, shrink: bool = False) -> str:
    """An image file as a data URI; empty if it cannot be read or is too large."""
    try:
        data = path.read_bytes()
        with opened(io.BytesIO(data)) as image:
            load_bounded(image)
            kind = _EMBEDDABLE.get(image.format or "")
            if shrink and (kind is None or len(data) > most_bytes):
                data, kind = _shrunk(image), "image/jpeg"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    if kind is None or (len(data) > most_bytes and not shrink):
        return ""
    return f"data:{kind};base64," + b64encode(data).decode()


def _shrunk(image: Image.Image) -> bytes:
    copy = image.convert("RGB")
    copy.thumbnail((_SHRUNK_PIXELS, 2 * _SHRUNK_PIXELS))
    buffer = io.BytesIO()
    copy.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
