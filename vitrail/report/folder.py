"""A run folder as the report sees it: every file may be missing or cut short."""

import io
import json
import tomllib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from vitrail.data.decode import load_bounded, opened
from vitrail.errors import VitrailError, one_line
from vitrail.report.fields import Fields, as_number, as_text, is_number, read_object
from vitrail.report.inside import Inside, read_inside
from vitrail.report.results import Evaluation, read_results
from vitrail.report.words import plural

FILES = ("run.json", "config.toml", "metrics.jsonl", "evaluation")

# An e-mail takes a page of five megabytes; the sheet is most of it.
MOST_SHEET_BYTES = 1_500_000
SHEET_PIXELS = 1400


@dataclass(frozen=True)
class Events:
    """The lines of one kind in metrics.jsonl, in the order of their steps."""

    rows: tuple[dict[str, Any], ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Float[np.ndarray, " n"]:
        """One value of each line; NaN where it is absent or not finite."""
        found = [row.get(name) for row in self.rows]
        values = np.array([value if is_number(value) else np.nan for value in found], dtype=float)
        return np.where(np.isfinite(values), values, np.nan)

    @property
    def n(self) -> int:
        """How many images the last line speaks of; zero where it does not."""
        return Fields(self.rows[-1]).count("n") if self.rows else 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a page shows of one run."""

    path: Path
    info: Fields
    """run.json."""
    settings: dict[str, str]
    """config.toml, as `section.key`."""
    train: Events
    val: Events
    evaluations: dict[str, Evaluation]
    sheet: str
    """The sheet of augmented pictures as a data URI, or nothing."""
    inside: Inside
    notes: dict[str, str]
    """What is wrong with a file, by its name."""

    @property
    def name(self) -> str:
        return self.info.text("name") or as_text(self.path.resolve().name)

    @property
    def frozen(self) -> bool:
        """Whether the head alone was trained, on features."""
        return self.settings.get("train.freeze") == "true"

    @property
    def result(self) -> Evaluation | None:
        """What to lead with: test, else val, else whatever was measured."""
        return next(iter(self.evaluations.values()), None)


def read_run(path: Path) -> Run:
    """What a run folder holds; a line where it is none at all."""
    if not path.is_dir():
        raise VitrailError(f"{path} is no run folder; `vitrail runs` lists them")
    if not any((path / name).exists() for name in FILES):
        raise VitrailError(f"{path} holds no run: expected {', '.join(FILES)} in it")
    info, info_note = read_object(path / "run.json")
    settings, settings_note = read_settings(path / "config.toml")
    train, val, metrics_note = read_metrics(path / "metrics.jsonl")
    evaluations, results_notes = read_results(path / "evaluation")
    sheet, sheet_note = read_sheet(path / "augmented.jpg")
    return Run(
        path=path,
        info=info,
        settings=settings,
        train=train,
        val=val,
        evaluations=evaluations,
        sheet=sheet,
        inside=read_inside(path / "inspection"),
        notes={
            "run.json": info_note,
            "config.toml": settings_note,
            "metrics.jsonl": metrics_note,
            "evaluation": " ".join(results_notes),
            "augmented.jpg": sheet_note,
        },
    )


def read_settings(path: Path) -> tuple[dict[str, str], str]:
    """The settings by their full names, and in words why there are none."""
    try:
        values = dict(flatten(tomllib.loads(path.read_text("utf-8"))))
    except FileNotFoundError:
        return {}, "is missing"
    except OSError as error:
        return {}, f"cannot be read: {one_line(error)}"
    except (ValueError, RecursionError):
        return {}, "is cut short or is not TOML"
    return values, ""


def flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """`section.key` and the value as text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{above}{as_text(key)}.")
        elif isinstance(value, (bool, int, float, str, list)):
            yield above + as_text(key), as_text(value)
        else:
            yield above + as_text(key), str(value)  # dates


def read_metrics(path: Path) -> tuple[Events, Events, str]:
    """The lines of training and of validation, and in words what could not be read."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return Events(), Events(), "is missing"
    except OSError as error:
        return Events(), Events(), f"cannot be read: {one_line(error)}"
    rows, unread = [], 0
    for line in filter(bytes.strip, lines):
        row = metric(line)
        if row is None:
            unread += 1
        else:
            rows.append(row)
    kept = rewound(rows)
    train, val = (
        Events(tuple(row for row in kept if row.get("event") == event))
        for event in ("train", "val")
    )
    if unread:
        return train, val, f"has {plural(unread, 'line')} cut short or not JSON, left out here"
    return train, val, "" if rows else "is empty"


def metric(line: bytes) -> dict[str, Any] | None:
    """One line, if it can be placed on a curve."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and np.isfinite(as_number(row.get("step"))) else None


def rewound(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that count: a resumed run goes back to its checkpoint and writes some again."""
    kept: list[dict[str, Any]] = []
    latest: dict[str, float] = {}
    for row in rows:
        event, step = str(row.get("event")), row["step"]
        if step <= latest.get(event, -np.inf):
            while kept and kept[-1]["step"] >= step:
                kept.pop()
            latest = {kind: last for kind, last in latest.items() if last < step}
        kept.append(row)
        latest[event] = step
    return kept


def read_sheet(path: Path) -> tuple[str, str]:
    """The sheet as a data URI, made smaller where it is large, and in words why there is none."""
    try:
        data = path.read_bytes()
        with opened(io.BytesIO(data)) as sheet:
            load_bounded(sheet)
            if len(data) > MOST_SHEET_BYTES or sheet.format != "JPEG":
                data = smaller(sheet)
    except FileNotFoundError:
        return "", "is missing"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return "", "is cut short or is no picture"
    return "data:image/jpeg;base64," + b64encode(data).decode(), ""


def smaller(sheet: Image.Image) -> bytes:
    """The picture as a JPEG that a page can carry."""
    copy = sheet.convert("RGB")
    copy.thumbnail((SHEET_PIXELS, SHEET_PIXELS * 2))
    buffer = io.BytesIO()
    copy.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
