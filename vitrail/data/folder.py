"""Pictures in folders: one sub-folder per class, perhaps below train, val and test.

What a class folder holds, however deep, belongs to the class. Hidden files, and files that are no
pictures by their names, are passed over; images that nobody would expect to be, are counted.
"""

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int
from PIL import Image

from vitrail.console import say
from vitrail.data.dataset import Data, listed, ordered, stable
from vitrail.data.decode import open_picture
from vitrail.errors import DamagedError, FailureError, VitrailError, one_line

SUFFIXES = frozenset(
    (
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "bmp", "dib", "gif", "webp", "avif"),
        *("tif", "tiff", "ppm", "pgm", "pbm", "pnm", "jp2", "j2k"),
    )
)
"""How the names of pictures end, in either case."""
HEIC = frozenset(("heic", "heif"))
"""How the names of images end that cannot be read here, though phones write them."""

PARTS = {
    **{"train": "train", "training": "train"},
    **{"val": "val", "valid": "val", "validation": "val", "dev": "val"},
    **{"test": "test", "testing": "test"},
}
"""What the folders above the classes may be called, in either case."""

NO_CLASS = "pictures"
"""What stands for the class of pictures that have none."""

OF_A_RUN = frozenset(("run.json", "config.toml"))
"""What a folder that training writes to holds: its pictures are not data."""

Identity = tuple[int, int]
"""What a folder is on the disk, whatever it is called."""


@dataclass(frozen=True)
class FolderSource:
    """Pictures in files below one folder."""

    root: Path
    labels: tuple[str, ...]
    targets: Int[np.ndarray, " n"]
    names: Sequence[str]
    files: Sequence[str]
    """Paths below the root. Names, but for accents that this disk spells in another way."""

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return np.zeros(len(self.targets), dtype=np.int64)

    def picture(self, index: int) -> Image.Image:
        return open_picture(self.root / self.files[index])


def open_folder(folder: Path, unlabelled: bool = False) -> Data:
    """A folder of class folders, or of parts that are such folders; with `unlabelled`, pictures
    of one class, or without any, will do."""
    name = folder.resolve().name
    parts = parts_of(folder)
    if not parts:
        return Data(name=name, train=read_classes(folder, unlabelled))
    sources = {part: read_classes(folder / place, unlabelled) for part, place in parts.items()}
    say_left_out(folder)
    first, *others = parts
    for other in () if unlabelled else others:
        compare(folder / parts[first], sources[first], folder / parts[other], sources[other])
    return Data(name=name, **sources)


def parts_of(folder: Path) -> dict[str, str]:
    """The sub-folders for train, val and test; empty where the sub-folders are classes.

    A class may well be called `train`: among other folders, parts are several folders of folders.
    """
    below = sub_folders(folder)
    places = [name for name in below if name.lower() in PARTS]
    if len(places) < len(below):
        several = sum(bool(sub_folders(folder / name)) for name in places) > 1
        if not several or any(has_pictures(folder / name) for name in places):
            return {}
    parts: dict[str, str] = {}
    for name in places:
        if not entries_of(folder / name):
            say(f"{folder / name}/ is empty, left out")
        elif (other := parts.setdefault(PARTS[name.lower()], name)) != name:
            raise VitrailError(f"{folder}/ has both {other}/ and {name}/; keep one of them")
    return {part: parts[part] for part in ("train", "val", "test") if part in parts}


def read_classes(folder: Path, unlabelled: bool = False) -> FolderSource:
    """All pictures below a folder's class folders, in the order of their names."""
    classes = {stable(name): name for name in sub_folders(folder)}
    if not classes and unlabelled:
        classes = {NO_CLASS: "."}
    if not classes:
        raise VitrailError(
            f"{folder}/ has no sub-folders; expected one folder per class, e.g. {folder}/cat/1.jpg"
        )
    tops = {name: identity(folder / name) for name in classes.values()}
    above = {identity(one) for one in (folder.resolve(), *folder.resolve().parents)}
    # A link from one class into another, or up to all of them, would give its pictures two labels.
    files_of = {
        label: files_below(folder, name, (above | {*tops.values()}) - {tops[name]})
        for label, name in sorted(classes.items())
    }
    found = {label: [*filter(is_picture, files)] for label, files in files_of.items()}
    if "." not in tops:
        say_left_out(folder, sum(map(len, files_of.values())) - sum(map(len, found.values())))
    labels = ordered(label for label, files in found.items() if files)
    check_classes(folder, labels, unlabelled)
    if empty := [label for label in found if not found[label]]:
        say(f"{folder}/ has {len(empty)} class folders without pictures, left out: {listed(empty)}")
    files = [file for label in labels for file in found[label]]
    counts = [len(found[label]) for label in labels]
    targets = np.repeat(np.arange(len(labels)), counts)
    return FolderSource(folder, labels, targets, stable_names(files), files)


def say_left_out(folder: Path, unread: int = 0) -> None:
    """How many images are no data, in one line: those `unread` in class folders, and those beside
    them."""
    beside = [ending(entry.name) for entry in entries_of(folder) if not is_folder(entry)]
    told = {
        "images that lie in no class folder": sum(end in SUFFIXES for end in beside),
        ".heic and .heif files, to be saved as JPEG": unread + sum(end in HEIC for end in beside),
    }
    if lines := [f"{what} ({count:,})" for what, count in told.items() if count]:
        say(f"{folder}/: left out {' and '.join(lines)}")


def check_classes(folder: Path, labels: tuple[str, ...], unlabelled: bool) -> None:
    """Two classes at least, or there is nothing to tell apart."""
    if not labels:
        raise VitrailError(
            f"{folder}/ has no pictures in its sub-folders; expected e.g. {folder}/cat/1.jpg"
        )
    if len(labels) == 1 and not unlabelled:
        only = folder / labels[0]
        deeper = only.is_dir() and len(sub_folders(only)) > 1
        hint = f"did you mean {only}?" if deeper else "expected one folder per class, two or more"
        raise VitrailError(f"{folder}/ has pictures of one class only, '{labels[0]}'; {hint}")


def compare(one: Path, a: FolderSource, other: Path, b: FolderSource) -> None:
    """Parts of one data set have the same classes."""
    for has, source, lacks, rest in ((one, a, other, b), (other, b, one, a)):
        if more := sorted(set(source.labels) - set(rest.labels)):
            raise VitrailError(
                f"{has} has pictures of {listed(more)} and {lacks} has none; "
                "give every part the same class folders"
            )


def stable_names(files: list[str]) -> list[str]:
    """What the pictures are called: the very list of their paths, where that is the same."""
    if all(map(str.isascii, files)):
        return files
    names = [stable(file) for file in files]
    # Two spellings of one name can lie side by side; then each keeps its own.
    return names if len(set(names)) == len(names) else files


def pictures_below(root: Path, top: str) -> list[str]:
    """Paths of all pictures in a sub-folder of the root, however deep, in order."""
    return [*filter(is_picture, files_below(root, top))]


def files_below(root: Path, top: str, beyond: Set[Identity] = frozenset()) -> list[str]:
    """The same with those that cannot be read.

    A link that leads back up, or to what lies `beyond`, is not followed.
    """
    found: list[str] = []
    todo: list[tuple[str, Set[Identity]]] = [(top, beyond)]
    while todo:
        folder, above = todo.pop()
        here = identity(root / folder)
        entries = entries_of(root / folder)
        run = folder != top and {entry.name for entry in entries} >= OF_A_RUN
        if run or here in above:
            continue
        for entry in entries:
            if is_folder(entry):
                todo.append((f"{folder}/{entry.name}", above | {here}))
            elif ending(entry.name) in SUFFIXES | HEIC and is_file(entry):
                found.append(f"{folder}/{entry.name}")
    return sorted(found, key=stable)


def identity(folder: Path) -> Identity:
    """The same for a folder and for every link to it."""
    try:
        status = folder.stat()
    except OSError as error:
        raise FailureError(f"cannot read {folder} ({one_line(error)}); check its rights") from None
    return status.st_dev, status.st_ino


def sub_folders(folder: Path) -> list[str]:
    """Names of the folders in a folder."""
    return [entry.name for entry in entries_of(folder) if is_folder(entry)]


def has_pictures(folder: Path) -> bool:
    """Whether pictures lie in the folder itself."""
    return any(is_picture(entry.name) and not is_folder(entry) for entry in entries_of(folder))


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, but for what systems and archivers leave there."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not is_litter(entry.name)]
    except OSError as error:
        raise FailureError(f"cannot read {folder} ({one_line(error)}); check its rights") from None


def is_litter(name: str) -> bool:
    """Hidden files, and the folders that archivers and network disks add."""
    return name.startswith(".") or name in {"__MACOSX", "@eaDir"}


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Links are followed; one that leads in a circle is no folder."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_file(entry: os.DirEntry[str]) -> bool:
    """No pipe, which would be waited for. A link to nothing is named when it is opened."""
    try:
        return entry.is_symlink() or entry.is_file()
    except OSError:
        return False


def is_picture(name: str) -> bool:
    """By the end of its name; whether it really is one shows when it is opened."""
    return ending(name) in SUFFIXES


def ending(name: str) -> str:
    """What follows the last dot, in lower case."""
    return name.rpartition(".")[2].lower()


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
