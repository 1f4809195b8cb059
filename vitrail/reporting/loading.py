"""What the pages show of a run. A damaged file is an error; a missing one is named on the page."""

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
from vitrail.data.decode import open_image
from vitrail.errors import DamagedError, VitrailError, one_line
from vitrail.runs import Run, is_run

Rows = Sequence[dict[str, Any]]

_OBJECTS = ("data", "model", "best", "cost", "versions")
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
    """Reads a run folder. A running, stopped or failed run may lack anything but its settings."""
    if not is_run(folder):
        raise VitrailError(f"{folder} is not a run folder: run.json or config.toml is missing")
    run = Run(folder, writes=False)
    info = run.info()
    if not info:
        raise DamagedError(f"{folder / 'run.json'} is damaged; restore it from a copy")
    path = folder / "config.toml"
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DamagedError(
            f"{path} is damaged ({one_line(error)}); restore it from a copy"
        ) from error
    events = run.events()
    return RunData(
        folder=folder,
        info=info | {name: info.get(name) or {} for name in _OBJECTS},
        settings={name: _setting(value) for name, value in flatten(tree)},
        train=[row for row in events if row.get("event") == "train"],
        val=[row for row in events if row.get("event") == "val"],
        evaluations=_evaluations(run),
    )


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_setting, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _evaluations(run: Run) -> dict[str, dict[str, Any]]:
    """Every evaluation; results of other commands in that folder have no `top1`."""
    evaluations = {}
    paths = (run.folder / "evaluation").glob("*.json")
    for path in sorted(paths, key=lambda path: (path.stem != "test", path.stem != "val", path)):
        values = run.evaluation(path.stem)
        if not values:
            raise DamagedError(f"{path} is damaged; delete it and run vitrail evaluate again")
        if "top1" in values:
            evaluations[path.stem] = values | {
                "split": path.stem,
                # A class without images has no recall, rather than zero.
                "per_class": [
                    row if row["n"] else row | {"recall": None, "f1": None}
                    for row in values["per_class"]
                ],
                # Of five classes, the top five are always right.
                "has_top5": len(values["per_class"]) > 5,
            }
    return evaluations


def column(rows: Rows, name: str) -> Float[np.ndarray, " n"]:
    """A value of each row; NaN where it is absent or not finite."""
    values = np.array([row.get(name) for row in rows], dtype=float)
    return np.where(np.isfinite(values), values, np.nan)


def embed(path: Path, most_bytes: int) -> str:
    """An image file as a data URI, made smaller if it is large; empty if there is none."""
    if not path.exists():
        return ""
    large = path.stat().st_size > most_bytes
    data = _shrunk(open_image(path)) if large else path.read_bytes()
    kind = "png" if path.suffix == ".png" and not large else "jpeg"
    return f"data:image/{kind};base64," + b64encode(data).decode()


def _shrunk(image: Image.Image) -> bytes:
    image.thumbnail((_SHRUNK_PIXELS, 2 * _SHRUNK_PIXELS))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
