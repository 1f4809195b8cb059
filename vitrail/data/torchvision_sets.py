"""torchvision's data sets as sources: fetched by torchvision, read from their lists of files."""

import sys
import tarfile
import zipfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.folders import FolderSource
from vitrail.data.source import ArraySource, Data, Source, stable
from vitrail.errors import FailureError, VitrailError
from vitrail.files import alone, on_disk, reason_of

Parts = Mapping[str, Mapping[str, Any]]
"""What torchvision's class is given for each part of the data."""

WHOLE: Parts = {"train": {}}
FLAG: Parts = {"train": {"train": True}, "test": {"train": False}}
TWO: Parts = {"train": {"split": "train"}, "test": {"split": "test"}}
THREE: Parts = {**TWO, "val": {"split": "val"}}
VALID: Parts = {**TWO, "val": {"split": "valid"}}
PETS: Parts = {"train": {"split": "trainval"}, "test": {"split": "test"}}
VAL_IS_TEST: Parts = {"train": {"split": "train"}, "test": {"split": "val"}}


def from_torchvision(kind: str, parts: Parts, name: str, folder: Path) -> Data:
    """A data set by the name of torchvision's class, its files below `folder`."""
    from torchvision import datasets

    make = getattr(datasets, kind)
    return Data(
        name=name,
        **{part: source_of(get(make, wanted, name, folder)) for part, wanted in parts.items()},
    )


def get(make: Any, wanted: Mapping[str, Any], name: str, folder: Path) -> Any:
    """torchvision's object, once its files are there."""
    with on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        return make(folder, **wanted)
    except ImportError as error:
        raise VitrailError(f"{name} needs {error.name}: pip install {error.name}") from None
    except (RuntimeError, OSError):
        pass  # not there yet
    try:
        # torchvision prints what it does, and stdout is for results.
        with alone(folder / f".{name.replace('/', '-')}"), redirect_stdout(sys.stderr):
            return make(folder, download=True, **wanted)
    except (
        RuntimeError, OSError, ValueError, ImportError, EOFError, tarfile.TarError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise FailureError(
            f"{name} is not in {folder} and cannot be fetched ({reason_of(error)}); connect, or "
            f"put its pictures there as {name}/train/<class>/… and {name}/test/<class>/…"
        ) from None


def source_of(dataset: Any) -> Source:
    """A source that opens only the pictures it is asked for."""
    samples = samples_of(dataset)
    if samples is None:
        return array_source(dataset)
    targets = np.array([target for _, target in samples], dtype=np.int64)
    return file_source([Path(path) for path, _ in samples], targets, labels_of(dataset, targets))


def samples_of(dataset: Any) -> list[tuple[str | Path, int]] | None:
    """The list of files that a data set keeps, under one of several names; none for arrays."""
    for listed in ("samples", "_samples"):
        if hasattr(dataset, listed):
            return list(getattr(dataset, listed))
    for files in ("_image_files", "_images"):
        if hasattr(dataset, files):
            return list(zip(getattr(dataset, files), dataset._labels, strict=True))
    if hasattr(dataset, "categories"):  # Caltech 101
        folder = Path(dataset.root) / "101_ObjectCategories"
        return [
            (folder / dataset.categories[target] / f"image_{number:04d}.jpg", target)
            for number, target in zip(dataset.index, dataset.y, strict=True)
        ]
    return None


def file_source(paths: list[Path], targets: np.ndarray, labels: tuple[str, ...]) -> FolderSource:
    """Files as if they lay in class folders, in the order of their names."""
    names = [f"{labels[t]}/{stable(path.name)}" for path, t in zip(paths, targets, strict=True)]
    order = sorted(range(len(names)), key=names.__getitem__)
    return FolderSource(
        Path(),
        labels,
        targets[order],
        [names[i] for i in order],
        [str(paths[i]) for i in order],
    )


def array_source(dataset: Any) -> ArraySource:
    """Small pictures that a data set holds in memory."""
    pixels = np.asarray(dataset.data)
    if pixels.ndim == 4 and pixels.shape[1] == 3:
        pixels = pixels.transpose(0, 2, 3, 1)
    found = dataset.targets if hasattr(dataset, "targets") else dataset.labels
    targets = np.asarray(found).astype(np.int64)
    labels = labels_of(dataset, targets)
    names = [f"{labels[target]}/{index}" for index, target in enumerate(targets)]
    return ArraySource(labels, targets, names, pixels)


def labels_of(dataset: Any, targets: np.ndarray) -> tuple[str, ...]:
    """The names of the classes, or their numbers."""
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    return tuple(map(str, names if names else range(int(targets.max()) + 1)))
