"""What `vitrail predict` writes, picture by picture: a table, CSV, JSON lines, features."""

import csv
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from vitrail.console import count_progress, echo, escaped, padded, say, width_of
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import atomic_write
from vitrail.prediction.files import Files, find
from vitrail.prediction.predicting import Options, stream
from vitrail.weights.load import load

Row = dict[str, Any]
Writer = Callable[[Row], None]
WIDEST_PATH, WIDEST_LABEL = 60, 20
"""Columns are no wider than that; what is longer is not cut but shifts its line."""
ROWS_TOGETHER = 1024
NUMBER = r"[+-]?[\d.]+(e[+-]?\d+)?"


def write(
    model: str | Path,
    images: Sequence[str | Path],
    *,
    as_json: bool = False,
    csv_path: str = "",
    features: str = "",
    **options: Any,
) -> None:
    """Judges the pictures and writes each answer as soon as it is known."""
    if as_json and csv_path == "-":
        raise VitrailError("--json and --csv - both want stdout; name a file for the CSV")
    keep = feature_writer(Path(features)) if features else None
    loaded, asked = load(model), Options(features=bool(features), **options)
    asked.check(loaded)
    files = find(images)
    writers = [] if keep is None else [keep]
    if csv_path:
        writers.append(csv_rows(csv_path, min(asked.top, loaded.architecture.classes)))
    if as_json or csv_path != "-":
        writers.append(json_lines() if as_json else table(files, loaded.labels))
    # Lines that appear on a terminal are progress enough.
    hidden = sys.stdout.isatty() and (as_json or not csv_path)
    read = 0
    with ExitStack() as stack:
        to = [stack.enter_context(writer) for writer in writers]
        advance = stack.enter_context(count_progress("predicting", not hidden))
        for row in stream(loaded, files, asked, advance):
            row |= {key: printable(row[key]) for key in ("path", "error") if key in row}
            for one in to:
                one(row)
            read += report(row, quiet=as_json)
    if not read:
        raise FailureError(f"none of the {len(files.names):,} pictures can be read")


def report(row: Row, quiet: bool) -> bool:
    """Whether the picture could be read; one line on stderr where not."""
    if "error" in row and not quiet:
        say(f"left out  {row['error']}")
    return "error" not in row


def printable(text: str) -> str:
    """A path as text: names on a disk may hold bytes that are none."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@contextmanager
def table(files: Files, labels: Sequence[str]) -> Iterator[Writer]:
    """One line per picture; a single picture's guesses one below the other."""
    across = min(max(width_of(escaped(printable(path))) for path in files.names), WIDEST_PATH)
    name = min(max((width_of(escaped(label)) for label in labels), default=0), WIDEST_LABEL)
    alone = len(files.names) == 1

    def line(row: Row) -> None:
        if "error" in row:
            return
        guesses = [
            f"{padded(escaped(one['label']), name)} {one['probability']:7.2%}" for one in row["top"]
        ]
        if alone:
            echo("\n".join(guesses))
        else:
            echo("  ".join([padded(escaped(row["path"]), across), *guesses]).rstrip())

    yield line


@contextmanager
def json_lines() -> Iterator[Writer]:
    """One JSON object per line on stdout."""

    def line(row: Row) -> None:
        plain = {key: value for key, value in row.items() if key != "features"}
        echo(json.dumps(plain, ensure_ascii=False))

    yield line


@contextmanager
def csv_rows(path: str, top: int) -> Iterator[Writer]:
    """One row per picture: path, label and probability of each guess, error."""
    with opened(path) as file:
        rows = csv.writer(file, lineterminator="\n")
        names = [(f"label_{i}", f"probability_{i}") for i in range(1, top + 1)]
        rows.writerow(["path", *(name for pair in names for name in pair), "error"])

        def row(found: Row) -> None:
            cells = [cell for one in found.get("top", ()) for cell in one.values()]
            cells += [""] * (2 * top - len(cells))
            rows.writerow(map(neutral, [found["path"], *cells, found.get("error", "")]))

        yield row


def neutral(cell: str | float) -> str | float:
    """A cell that no spreadsheet takes for a formula, and no terminal for a command."""
    if not isinstance(cell, str):
        return cell
    formula = re.match(r"[=+\-@\t\r＝＋－＠].", cell) and not re.fullmatch(NUMBER, cell)
    return f"'{escaped(cell)}" if formula else escaped(cell)


@contextmanager
def opened(path: str) -> Iterator[TextIO]:
    """A file to write to, or stdout."""
    if path == "-":
        yield sys.stdout
        return
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise FailureError(f"cannot write {path} ({one_line(error)})") from None


def feature_writer(path: Path) -> AbstractContextManager[Writer]:
    """For the suffix of the file."""
    if path.suffix == ".npz":
        return npz(path)
    if path.suffix != ".parquet":
        raise VitrailError(f"--features {path}: expected a name that ends in .npz or .parquet")
    if find_spec("pyarrow") is None:
        raise VitrailError(
            f"--features {path} needs pyarrow: pip install pyarrow, or write an .npz file"
        )
    return parquet(path)


@contextmanager
def npz(path: Path) -> Iterator[Writer]:
    """`paths` and `vectors`, gathered on disk: they may be more than memory holds."""
    names: list[str] = []
    width = 0
    with tempfile.TemporaryFile() as raw:

        def add(row: Row) -> None:
            nonlocal width
            if "features" in row:
                names.append(row["path"])
                width = len(row["features"])
                raw.write(row["features"].tobytes())

        yield add
        raw.flush()
        shape = (len(names), width)
        vectors = np.memmap(raw, np.float32, "r", shape=shape) if names else np.zeros(shape)

        def save(part: Path) -> None:
            with part.open("wb") as file:
                np.savez(file, paths=np.array(names, dtype=np.str_), vectors=vectors)

        atomic_write(path, save)


@contextmanager
def parquet(path: Path) -> Iterator[Writer]:
    """Columns `path` and `features`, in groups of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = pa.schema([("path", pa.string()), ("features", pa.list_(pa.float32()))])
    rows: list[Row] = []

    with pq.ParquetWriter(path, columns) as file:

        def flush() -> None:
            file.write_table(pa.Table.from_pylist(rows, schema=columns))
            rows.clear()

        def add(row: Row) -> None:
            if "features" in row:
                rows.append({"path": row["path"], "features": row["features"]})
            if len(rows) == ROWS_TOGETHER:
                flush()

        yield add
        flush()
