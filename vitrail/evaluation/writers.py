"""Output of `vitrail predict`, image by image: a table, CSV, JSON lines, features."""

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

from vitrail.console import count_progress, echo, escaped, padded, plural, say, width_of
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.evaluation.predict import Files, find_images, predict
from vitrail.files import write_bytes
from vitrail.weights.exported import open_model

Row = dict[str, Any]
Writer = Callable[[Row], None]
_PATH_WIDTH, _LABEL_WIDTH = 60, 20
"""At most; what is longer is not cut but shifts its line."""
_ROW_GROUP = 1024
_NUMBER = r"[+-]?[\d.]+(e[+-]?\d+)?"


def write_predictions(
    model: str | Path,
    images: Sequence[str | Path],
    *,
    as_json: bool = False,
    csv_path: str = "",
    features: str = "",
    top: int = 5,
    **options: Any,
) -> None:
    """Predicts and writes each prediction as soon as it is known."""
    if as_json and csv_path == "-":
        raise VitrailError("--json and --csv - both write to stdout; name a file for the CSV")
    writers = [_feature_writer(Path(features))] if features else []
    loaded, files = open_model(model), find_images(images)
    if csv_path:
        writers.append(_csv_rows(csv_path, min(top, loaded.architecture.classes)))
    if as_json or csv_path != "-":
        writers.append(_json_lines() if as_json else _table(files, loaded.labels))
    # Lines that appear on a terminal are progress enough.
    hidden = sys.stdout.isatty() and (as_json or not csv_path)
    read = 0
    with ExitStack() as stack:
        outputs = [stack.enter_context(writer) for writer in writers]
        advance = stack.enter_context(count_progress("predicting", not hidden))
        for row in predict(loaded, files, top=top, features=bool(features), **options):
            row |= {key: _printable(row[key]) for key in ("path", "error") if key in row}
            for write in outputs:
                write(row)
            advance(1, total=len(files.names))
            read += "error" not in row
            if "error" in row and not as_json:
                say(f"skipped  {row['error']}")
    if not read:
        raise FailureError(
            f"no image could be predicted: {plural(len(files.names), 'file')} skipped"
        )


def _printable(text: str) -> str:
    """A path as text: file names may hold bytes that are not."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@contextmanager
def _table(files: Files, labels: Sequence[str]) -> Iterator[Writer]:
    """One line per image; the classes of a single image are listed one below the other."""
    across = min(max(width_of(escaped(_printable(path))) for path in files.names), _PATH_WIDTH)
    name = min(max((width_of(escaped(label)) for label in labels), default=0), _LABEL_WIDTH)
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
def _json_lines() -> Iterator[Writer]:
    def line(row: Row) -> None:
        plain = {key: value for key, value in row.items() if key != "features"}
        echo(json.dumps(plain, ensure_ascii=False))

    yield line


@contextmanager
def _csv_rows(path: str, top: int) -> Iterator[Writer]:
    """One row per image: path, label and probability of each class, error."""
    with _opened(path) as file:
        rows = csv.writer(file, lineterminator="\n")
        names = [(f"label_{i}", f"probability_{i}") for i in range(1, top + 1)]
        rows.writerow(["path", *(name for pair in names for name in pair), "error"])

        def row(found: Row) -> None:
            cells = [cell for one in found.get("top", ()) for cell in one.values()]
            cells += [""] * (2 * top - len(cells))
            rows.writerow(map(_neutral, [found["path"], *cells, found.get("error", "")]))

        yield row


def _neutral(cell: str | float) -> str | float:
    """A cell that no spreadsheet takes for a formula, and no terminal for a command."""
    if not isinstance(cell, str):
        return cell
    formula = re.match(r"[=+\-@\t\r＝＋－＠].", cell) and not re.fullmatch(_NUMBER, cell)
    return f"'{escaped(cell)}" if formula else escaped(cell)


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    """A file to write to, or stdout."""
    if path == "-":
        yield sys.stdout
        return
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise FailureError(f"cannot write {path} ({one_line(error)})") from None


def _feature_writer(path: Path) -> AbstractContextManager[Writer]:
    if path.suffix == ".npz":
        return _npz(path)
    if path.suffix != ".parquet":
        raise VitrailError(f"--features {path}: expected a name that ends in .npz or .parquet")
    if find_spec("pyarrow") is None:
        raise VitrailError(
            f"--features {path} needs pyarrow: pip install pyarrow, or write an .npz file"
        )
    return _parquet(path)


@contextmanager
def _npz(path: Path) -> Iterator[Writer]:
    """`paths` and `vectors`, collected on disk: they may not fit into memory."""
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
        paths = np.array(names, dtype=np.str_)
        write_bytes(path, lambda file: np.savez(file, paths=paths, vectors=vectors))


@contextmanager
def _parquet(path: Path) -> Iterator[Writer]:
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
            if len(rows) == _ROW_GROUP:
                flush()

        yield add
        flush()
