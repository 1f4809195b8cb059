"""What the pages show of a run, read through `vitrail.runs`.

A file that is missing or damaged becomes a note for the reader.
"""

import io
import tomllib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from vitrail import runs
from vitrail.config import flatten
from vitrail.data.decode import load_bounded, opened
from vitrail.errors import VitrailError
from vitrail.reporting.rendering import MALFORMED, plural

Rows = Sequence[dict[str, Any]]

_FILES = ("run.json", "config.toml", "metrics.jsonl", "evaluation")
_OBJECTS = ("data", "model", "best", "cost", "versions")
_LISTS = ("per_class", "confused", "calibration", "mistakes", "broken")
_SCORES = ("top1", "top5", "balanced_accuracy", "macro_f1", "ece", "loss")
_EMBEDDABLE = {"PNG": "image/png", "JPEG": "image/jpeg"}
_SHRUNK_PIXELS = 1400


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Plain dictionaries, as the files hold them."""

    folder: Path
    info: dict[str, Any]
    """run.json; the objects in it are there, if empty."""
    settings: dict[str, str]
    """config.toml, as `section.key`."""
    train: Rows
    val: Rows
    evaluations: dict[str, dict[str, Any]]
    """evaluation/*.json by file name, the one to lead with first."""
    notes: dict[str, str] = field(default_factory=dict)
    """What is wrong with a file, by its name; nothing where it is whole."""

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.folder.resolve().name)

    @property
    def result(self) -> dict[str, Any] | None:
        """Test, else val, else whatever was measured."""
        return next(iter(self.evaluations.values()), None)


def load_run(folder: Path) -> RunData:
    """A run as far as its files can be read; an error where the folder holds none of them."""
    if not folder.is_dir():
        raise VitrailError(f"{folder} is no run folder; `vitrail runs` lists them")
    if not any((folder / name).exists() for name in _FILES):
        raise VitrailError(f"{folder} holds no run: expected {', '.join(_FILES)} in it")
    run = runs.Run(folder, writes=False)
    notes = {}
    info = run.info() | {name: run.info().get(name) or {} for name in _OBJECTS}
    if not run.info() or not all(isinstance(info[name], dict) for name in _OBJECTS):
        notes["run.json"] = state_of(folder / "run.json")
        info = {name: {} for name in _OBJECTS}
    try:
        tree = tomllib.loads((folder / "config.toml").read_text("utf-8"))
        settings = {name: _setting(value) for name, value in flatten(tree)}
    except (OSError, ValueError, RecursionError):
        settings = {}
        notes["config.toml"] = state_of(folder / "config.toml")
    try:
        events = run.events()
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        if lost := sum(map(bool, map(bytes.strip, lines))) - len(events):
            notes["metrics.jsonl"] = f"has {plural(lost, 'damaged line')}, left out here"
    except OSError:
        events = []
        notes["metrics.jsonl"] = state_of(folder / "metrics.jsonl")
    evaluations, damaged = _evaluations(run)
    if damaged:
        notes["evaluation"] = f"Damaged: {', '.join(damaged)}."
    return RunData(
        folder=folder,
        info=info,
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


def _evaluations(run: runs.Run) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Every evaluation, and the names of damaged files. Other verbs' results lie there too."""
    found, damaged = {}, []
    for path in (run.folder / "evaluation").glob("*.json"):
        values = run.evaluation(path.stem)
        try:
            if not values or "top1" in values:
                found[path.stem] = _evaluation(path.stem, values)
        except MALFORMED:
            damaged.append(f"evaluation/{path.name}")
    order = sorted(found, key=lambda split: (split != "test", split != "val", split))
    return {split: found[split] for split in order}, sorted(damaged)


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
    """One value of each row; NaN where it is absent or not finite."""
    values = [row.get(name) for row in rows]
    numbers = [value if isinstance(value, (int, float)) else np.nan for value in values]
    array = np.array(numbers, dtype=float)
    return np.where(np.isfinite(array), array, np.nan)


def embed(path: Path, most_bytes: int, *, shrink: bool = False) -> str:
    """An image file as a data URI; empty where there is none that a page can carry."""
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
