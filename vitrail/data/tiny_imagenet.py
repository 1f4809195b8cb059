"""Tiny-ImageNet as published: a table has the classes of its val images, and test has none."""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitrail.console import byte_size
from vitrail.data.dataset import Source, Splits
from vitrail.data.folder import FolderSource, images_below, read_classes
from vitrail.errors import DamagedError, one_line

UNPACKED_LIMIT = 1 << 30
"""The most bytes that are unpacked; the published images have a quarter of that."""


def extract_images(archive: Path, folder: Path) -> Path:
    """Unpacks the images that have a class into `train/<class>/` and `test/<class>/`, and the names
    of the classes."""
    with zipfile.ZipFile(archive) as file:
        classes = _val_classes(file.read("tiny-imagenet-200/val/val_annotations.txt").decode())
        places = {member: _place_of(member.filename, classes) for member in file.infolist()}
        wanted = {member: folder / place for member, place in places.items() if place}
        if sum(member.file_size for member in wanted) > UNPACKED_LIMIT:
            raise ValueError(f"its images take more than {byte_size(UNPACKED_LIMIT)}")
        for member, path in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read(member))
    return folder


def _place_of(member: str, classes: Mapping[str, str]) -> str:
    """Where a file of the archive is unpacked; empty if it is not."""
    if member == "tiny-imagenet-200/words.txt":
        return "words.txt"
    if train := re.fullmatch(r"tiny-imagenet-200/train/(n\d{8})/images/(\w+\.JPEG)", member):
        return f"train/{train[1]}/{train[2]}"
    if val := re.fullmatch(r"tiny-imagenet-200/val/images/(\w+\.JPEG)", member):
        return f"test/{classes[val[1]]}/{val[1]}"
    return ""


def _val_classes(table: str) -> dict[str, str]:
    """The class of each val image; the columns are the file, the class and a box."""
    return dict(re.findall(r"^(\w+\.JPEG)\t(n\d{8})\b", table, re.MULTILINE))


def open_published(name: str, folder: Path) -> Splits | None:
    """The folders of the archive, if they are there; images are named as in class folders."""
    root = folder / name
    table = root / "val" / "val_annotations.txt"
    if not (table.is_file() and (root / "val" / "images").is_dir()):
        return None
    train = read_classes(root / "train")
    train = replace(train, names=[name.replace("/images/", "/", 1) for name in train.names])
    numbers = {label: number for number, label in enumerate(train.labels)}
    classes = _val_classes(_text_of(table))
    files = images_below(root / "val", "images")
    try:
        labeled = sorted((classes[Path(file).name], file) for file in files)
        targets = np.array([numbers[label] for label, _ in labeled], dtype=np.int64)
    except KeyError as error:
        raise DamagedError(
            f"{table} or {root / 'train'} lacks {error}; unpack the archive again"
        ) from None
    names = [f"{label}/{Path(file).name}" for label, file in labeled]
    files = [file for _, file in labeled]
    test = FolderSource(train.labels, targets, names, root / "val", files)
    return Splits(name=name, train=train, test=test)


def with_words(source: Source) -> Source:
    """Names each class by its first word in `words.txt`, unless another class has the same."""
    if not isinstance(source, FolderSource):
        return source
    path = source.root.parent / "words.txt"
    if not path.is_file():
        return source
    rows = (line.partition("\t") for line in _text_of(path).splitlines())
    words = {label: synonyms.partition(",")[0].strip() for label, _, synonyms in rows}
    names = [words.get(label) or label for label in source.labels]
    labels = (
        name if names.count(name) == 1 else label
        for name, label in zip(names, source.labels, strict=True)
    )
    return replace(source, labels=tuple(labels))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"cannot read {path} ({one_line(error)})") from None
