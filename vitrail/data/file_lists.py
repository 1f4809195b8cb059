"""Pictures by lists of files, as VTAB-1k is handed around: on each line a path and a class number.

`train800.txt` and `val200.txt` are what is learnt from and chosen on, `train800val200.txt` is both,
`test.txt` is tested on. Paths begin at the folder of the lists.
"""

from pathlib import Path

import numpy as np

from vitrail.data.folders import FolderSource
from vitrail.data.source import Data, stable
from vitrail.errors import DamagedError, VitrailError, one_line

TRAIN, VAL, BOTH, TEST = "train800.txt", "val200.txt", "train800val200.txt", "test.txt"
LINES = {TRAIN: 800, VAL: 200, BOTH: 1000}
"""How many pictures the names of lists promise."""
DIGITS = 5
"""Of a class number: there will be as many classes as the largest says."""


def holds_lists(folder: Path) -> bool:
    """Whether a folder has a list of what to learn from."""
    return any((folder / name).is_file() for name in (TRAIN, BOTH))


def open_lists(folder: Path) -> Data:
    """The parts that the lists of a folder name; classes are called by their numbers."""
    there = {name for name in (TRAIN, VAL, BOTH, TEST) if (folder / name).is_file()}
    if TEST not in there:
        raise VitrailError(f"{folder} has no {TEST}; put it beside {', '.join(sorted(there))}")
    if {TRAIN, VAL} <= there:
        wanted = {"train": TRAIN, "val": VAL, "test": TEST}
    elif BOTH in there:
        wanted = {"train": BOTH, "test": TEST}
    else:
        raise VitrailError(f"{folder} has {TRAIN} but no {VAL}; add it, or {BOTH}")
    lists = {part: read_list(folder / name) for part, name in wanted.items()}
    classes = 1 + max(target for lines in lists.values() for _, target in lines)
    labels = tuple(map(str, range(classes)))
    parts = {part: source_of(folder, lines, labels) for part, lines in lists.items()}
    return Data(name=folder.resolve().name, **parts)


def read_list(path: Path) -> list[tuple[str, int]]:
    """Path and class of every picture on a list."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"cannot read {path} ({one_line(error)})") from None
    lines = enumerate(text.splitlines(), 1)
    found = [read_line(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not found:
        raise VitrailError(f"{path} is empty; expected lines such as images/000001.jpg 7")
    if len(found) != (promised := LINES.get(path.name, len(found))):
        raise VitrailError(f"{path} lists {len(found):,} pictures; expected {promised:,}")
    if not (path.parent / found[0][0]).is_file():
        raise VitrailError(f"{path} names {found[0][0]}, which is not in {path.parent}")
    return found


def read_line(line: str, where: str) -> tuple[str, int]:
    """A path and a class."""
    # From the right: a path may have spaces in it.
    file, _, target = line.strip().rpartition(" ")
    if not file or not target.isdecimal():
        raise VitrailError(f"{where}: expected a path, a space and a class")
    if len(target.lstrip("0")) > DIGITS:
        raise VitrailError(f"{where}: class {target[:20]} is not below 100,000")
    return file.strip(), int(target)


def source_of(folder: Path, lines: list[tuple[str, int]], labels: tuple[str, ...]) -> FolderSource:
    """The pictures of a list, in its order."""
    files = [file for file, _ in lines]
    targets = np.array([target for _, target in lines], dtype=np.int64)
    return FolderSource(folder, labels, targets, [stable(file) for file in files], files)
