"""Images in folders: one sub-folder per class, perhaps below train, val and test; or file lists.

All images in a class folder, however deep, belong to the class. Hidden files and files without an
image suffix are ignored; images in unexpected places are counted.
"""

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.console import say
from vitrail.data.dataset import IndexedSource, Splits, listed, sort_classes, stable_name
from vitrail.data.decode import Pixels, decode_pixels, open_image, regular_file
from vitrail.errors import DamagedError, FailureError, VitrailError, one_line

SUFFIXES = frozenset(
    (
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "bmp", "dib", "gif", "webp", "avif"),
        *("tif", "tiff", "ppm", "pgm", "pbm", "pnm", "jp2", "j2k"),
    )
)
"""Suffixes of image files, in lower case."""
_HEIC = frozenset(("heic", "heif"))
"""Suffixes of image files that phones write, but Pillow cannot decode."""

PARTS = {
    **{"train": "train", "training": "train"},
    **{"val": "val", "valid": "val", "validation": "val", "dev": "val"},
    **{"test": "test", "testing": "test"},
}
"""The splits by the names of their folders, in lower case."""

NO_CLASS = "pictures"
"""The label of unlabeled images."""

_OF_A_RUN = frozenset(("run.json", "config.toml"))
"""Files of a run folder, whose images are not data."""

_Identity = tuple[int, int]
"""Device and inode of a folder."""


@dataclass(frozen=True)
class FolderSource(IndexedSource):
    """Images in files below one folder."""

    root: Path
    files: Sequence[str]
    """Paths below the root: the names, except for accents that this disk stores differently."""

    def image(self, index: int) -> Image.Image:
        return open_image(self.root / self.files[index])

    def rgb(self, index: int, side: int) -> Pixels:
        path = self.root / self.files[index]
        return decode_pixels(regular_file(path), str(path), side)


# Class folders.


def open_folder(folder: Path, unlabeled: bool = False) -> Splits:
    """A folder of class folders, or of splits with class folders; `unlabeled` images need none."""
    name = folder.resolve().name
    parts = parts_of(folder)
    if not parts:
        return Splits(name=name, train=read_classes(folder, unlabeled))
    sources = {part: read_classes(folder / place, unlabeled) for part, place in parts.items()}
    _say_left_out(folder)
    first, *others = parts
    for other in () if unlabeled else others:
        for one, two in ((first, other), (other, first)):
            if more := sorted(set(sources[one].labels) - set(sources[two].labels)):
                raise VitrailError(
                    f"{folder / parts[one]} has images of {listed(more)} and "
                    f"{folder / parts[two]} has none; give every split the same class folders"
                )
    return Splits(name=name, **sources)


def parts_of(folder: Path) -> dict[str, str]:
    """The sub-folders for train, val and test; empty if the sub-folders are classes.

    A class may be called `train`: beside other folders, only several folders of folders are splits.
    """
    below = sub_folders(folder)
    places = [name for name in below if name.lower() in PARTS]
    if len(places) < len(below):
        several = sum(bool(sub_folders(folder / name)) for name in places) > 1
        if not several or any(has_images(folder / name) for name in places):
            return {}
    parts: dict[str, str] = {}
    for name in places:
        if not _entries_of(folder / name):
            say(f"{folder / name}/ is empty and left out")
        elif (other := parts.setdefault(PARTS[name.lower()], name)) != name:
            raise VitrailError(f"{folder}/ has both {other}/ and {name}/; keep one of them")
    return {part: parts[part] for part in ("train", "val", "test") if part in parts}


def read_classes(folder: Path, unlabeled: bool = False) -> FolderSource:
    """All images in a folder's class folders, sorted by name."""
    classes = {stable_name(name): name for name in sub_folders(folder)}
    if not classes and unlabeled:
        classes = {NO_CLASS: "."}
    if not classes:
        raise VitrailError(
            f"{folder}/ has no sub-folders; expected one folder per class, e.g. {folder}/cat/1.jpg"
        )
    tops = {name: _identity(folder / name) for name in classes.values()}
    above = {_identity(one) for one in (folder.resolve(), *folder.resolve().parents)}
    # A link from one class into another, or up to all of them, would give its images two labels.
    files_of = {
        label: _files_below(folder, name, (above | {*tops.values()}) - {tops[name]})
        for label, name in sorted(classes.items())
    }
    images = {label: [*filter(is_image, files)] for label, files in files_of.items()}
    if "." not in tops:
        _say_left_out(folder, sum(map(len, files_of.values())) - sum(map(len, images.values())))
    labels = sort_classes(label for label, files in images.items() if files)
    _check_classes(folder, labels, unlabeled)
    if empty := [label for label in images if not images[label]]:
        say(f"{folder}/: left out class folders without images ({len(empty):,}): {listed(empty)}")
    files = [file for label in labels for file in images[label]]
    targets = np.repeat(np.arange(len(labels)), [len(images[label]) for label in labels])
    return FolderSource(labels, targets, _stable_names(files), folder, files)


def _say_left_out(folder: Path, unread: int = 0) -> None:
    """Counts the images that are not used: `unread` ones in class folders, and those beside."""
    beside = [_suffix(entry.name) for entry in _entries_of(folder) if not _is_folder(entry)]
    counts = {
        "images outside the class folders": sum(end in SUFFIXES for end in beside),
        ".heic and .heif files, which have to be saved as JPEG": unread
        + sum(end in _HEIC for end in beside),
    }
    if lines := [f"{what} ({count:,})" for what, count in counts.items() if count]:
        say(f"{folder}/: left out {' and '.join(lines)}")


def _check_classes(folder: Path, labels: tuple[str, ...], unlabeled: bool) -> None:
    if not labels:
        raise VitrailError(
            f"{folder}/ has no images in its sub-folders; expected e.g. {folder}/cat/1.jpg"
        )
    if len(labels) == 1 and not unlabeled:
        only = folder / labels[0]
        deeper = only.is_dir() and len(sub_folders(only)) > 1
        hint = f"did you mean {only}?" if deeper else "expected one folder per class, two or more"
        raise VitrailError(f"{folder}/ has images of one class only, '{labels[0]}'; {hint}")


def _stable_names(files: list[str]) -> list[str]:
    """The names of images; the same list if nothing changes."""
    if all(map(str.isascii, files)):
        return files
    names = [stable_name(file) for file in files]
    # Two encodings of one name may exist side by side; then each keeps its own.
    return names if len(set(names)) == len(names) else files


# Files.


def images_below(root: Path, top: str, undecodable: bool = False) -> list[str]:
    """Paths of all images in a sub-folder of the root, however deep, sorted; with `undecodable`,
    including HEIC files."""
    files = _files_below(root, top)
    return files if undecodable else [*filter(is_image, files)]


def _files_below(root: Path, top: str, beyond: Set[_Identity] = frozenset()) -> list[str]:
    """The same, including images in formats that cannot be decoded.

    Links to folders above, or to those in `beyond`, are not followed.
    """
    files: list[str] = []
    todo: list[tuple[str, Set[_Identity]]] = [(top, beyond)]
    while todo:
        folder, above = todo.pop()
        here = _identity(root / folder)
        entries = _entries_of(root / folder)
        run = folder != top and {entry.name for entry in entries} >= _OF_A_RUN
        if run or here in above:
            continue
        for entry in entries:
            if _is_folder(entry):
                todo.append((f"{folder}/{entry.name}", above | {here}))
            elif _suffix(entry.name) in SUFFIXES | _HEIC and _is_file(entry):
                files.append(f"{folder}/{entry.name}")
    return sorted(files, key=stable_name)


def _identity(folder: Path) -> _Identity:
    try:
        status = folder.stat()
    except OSError as error:
        raise _unreadable(folder, error) from None
    return status.st_dev, status.st_ino


def _unreadable(folder: Path, error: OSError) -> FailureError:
    return FailureError(f"cannot read {folder} ({one_line(error)}); check its permissions")


def sub_folders(folder: Path) -> list[str]:
    return [entry.name for entry in _entries_of(folder) if _is_folder(entry)]


def has_images(folder: Path) -> bool:
    return any(is_image(entry.name) and not _is_folder(entry) for entry in _entries_of(folder))


def _entries_of(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not is_litter(entry.name)]
    except OSError as error:
        raise _unreadable(folder, error) from None


def is_litter(name: str) -> bool:
    """Hidden files, and the folders that archivers and NAS systems add."""
    return name.startswith(".") or name in {"__MACOSX", "@eaDir"}


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Links are followed; a circular one is not a folder."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a file and not a pipe, which may block. A broken link is reported when it is
    opened."""
    try:
        return entry.is_symlink() or entry.is_file()
    except OSError:
        return False


def is_image(name: str) -> bool:
    """By its suffix."""
    return _suffix(name) in SUFFIXES


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower()


# File lists, as VTAB-1k is distributed: each line has a path, relative to the list, and a class.

_TRAIN, _VAL, _BOTH, _TEST = "train800.txt", "val200.txt", "train800val200.txt", "test.txt"
_LINES = {_TRAIN: 800, _VAL: 200, _BOTH: 1000}
"""The number of images in each list."""
_DIGITS = 5
"""The most digits of a class number: the largest number sets how many classes there are."""


def has_lists(folder: Path) -> bool:
    """Whether a folder has a list of training images."""
    return any((folder / name).is_file() for name in (_TRAIN, _BOTH))


def open_lists(folder: Path) -> Splits:
    """The splits that the lists of a folder define; classes are named by their numbers."""
    present = {name for name in (_TRAIN, _VAL, _BOTH, _TEST) if (folder / name).is_file()}
    if _TEST not in present:
        raise VitrailError(f"{folder} has no {_TEST}; put it beside {', '.join(sorted(present))}")
    if {_TRAIN, _VAL} <= present:
        wanted = {"train": _TRAIN, "val": _VAL, "test": _TEST}
    elif _BOTH in present:
        wanted = {"train": _BOTH, "test": _TEST}
    else:
        raise VitrailError(f"{folder} has {_TRAIN} but no {_VAL}; add it, or {_BOTH}")
    lists = {part: _read_list(folder / name) for part, name in wanted.items()}
    classes = 1 + max(target for lines in lists.values() for _, target in lines)
    parts = {}
    for part, lines in lists.items():
        files = [file for file, _ in lines]
        targets = np.array([target for _, target in lines], dtype=np.int64)
        names = [stable_name(file) for file in files]
        parts[part] = FolderSource(tuple(map(str, range(classes))), targets, names, folder, files)
    return Splits(name=folder.resolve().name, **parts)


def _read_list(path: Path) -> list[tuple[str, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"cannot read {path} ({one_line(error)})") from None
    lines = enumerate(text.splitlines(), 1)
    rows = [_read_line(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not rows:
        raise VitrailError(f"{path} is empty; expected lines such as images/000001.jpg 7")
    if len(rows) != (expected := _LINES.get(path.name, len(rows))):
        raise VitrailError(f"{path} lists {len(rows):,} images; expected {expected:,}")
    if not (path.parent / rows[0][0]).is_file():
        raise VitrailError(f"{path} lists {rows[0][0]}, which is not in {path.parent}")
    return rows


def _read_line(line: str, position: str) -> tuple[str, int]:
    # From the right, since a path may have spaces.
    file, _, target = line.strip().rpartition(" ")
    if not file or not target.isdecimal():
        raise VitrailError(f"{position}: expected a path, a space and a class")
    if len(target.lstrip("0")) > _DIGITS:
        raise VitrailError(
            f"{position}: class {target[:20]} is too large; expected less than 100,000"
        )
    return file.strip(), int(target)
