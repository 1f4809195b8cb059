"""Datasets by name.

A folder of that name in `$VITRAIL_DATA` (class folders, split folders above them, tar files or a
store) comes first; otherwise the data is downloaded from where it is published.
"""

import os
import re
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache as cached
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.console import import_optional
from vitrail.data.dataset import (
    ArraySource,
    Source,
    Splits,
    hash_fractions,
    imagenet_classes,
    stable_name,
    stratified,
    subset,
)
from vitrail.data.folder import FolderSource, open_folder, parts_of, sub_folders
from vitrail.data.shards import ShardSource, has_shards, open_shards
from vitrail.data.store import is_store, open_store
from vitrail.data.tiny_imagenet import extract_images, open_published, with_words
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import (
    cache_folder,
    damage_error,
    disk_errors,
    download_lock,
    failure_reason,
    fetch_file,
    hash_mismatch,
    host_of,
)

# torchvision's datasets: downloaded by torchvision, read from their lists of files.

_Arguments = Mapping[str, Mapping[str, Any]]
"""The arguments of torchvision's class for each split."""

WHOLE: _Arguments = {"train": {}}
FLAG: _Arguments = {"train": {"train": True}, "test": {"train": False}}
TWO: _Arguments = {"train": {"split": "train"}, "test": {"split": "test"}}
THREE: _Arguments = {**TWO, "val": {"split": "val"}}
VALID: _Arguments = {**TWO, "val": {"split": "valid"}}
PETS: _Arguments = {"train": {"split": "trainval"}, "test": {"split": "test"}}
VAL_IS_TEST: _Arguments = {"train": {"split": "train"}, "test": {"split": "val"}}


def from_torchvision(kind: str, splits: _Arguments, name: str, folder: Path) -> Splits:
    """A dataset by the name of torchvision's class, with its files in `folder`."""
    from torchvision import datasets

    make = getattr(datasets, kind)
    sources = {
        split: source_of(load_torchvision(make, given, name, folder))
        for split, given in splits.items()
    }
    return Splits(name=name, **sources)


def load_torchvision(make: Any, arguments: Mapping[str, Any], name: str, folder: Path) -> Any:
    """torchvision's dataset, downloaded if necessary."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        return make(folder, **arguments)
    except ImportError as error:
        raise VitrailError(f"{name} needs {error.name}: pip install {error.name}") from None
    except (RuntimeError, OSError):
        pass  # not downloaded yet
    try:
        # torchvision prints what it does, and stdout is for results.
        with download_lock(folder / f".{name.replace('/', '-')}"), redirect_stdout(sys.stderr):
            return make(folder, download=True, **arguments)
    except (
        RuntimeError, OSError, ValueError, ImportError, EOFError, tarfile.TarError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise FailureError(
            f"{name} is not in {folder} and cannot be downloaded ({failure_reason(error)}); go "
            f"online, or put its images there as {name}/train/<class>/… and {name}/test/<class>/…"
        ) from None


def source_of(dataset: Any) -> Source:
    """A torchvision dataset as a source, its images named as in class folders and sorted."""
    samples = _samples_of(dataset)
    if samples is None:
        return _array_source(dataset)
    targets = np.array([target for _, target in samples], dtype=np.int64)
    labels = _labels_of(dataset, targets)
    files = [str(Path(path)) for path, _ in samples]
    names = [
        f"{labels[t]}/{stable_name(Path(f).name)}" for f, t in zip(files, targets, strict=True)
    ]
    order = sorted(range(len(names)), key=names.__getitem__)
    return FolderSource(
        labels, targets[order], [names[i] for i in order], Path(), [files[i] for i in order]
    )


def _samples_of(dataset: Any) -> list[tuple[str | Path, int]] | None:
    """The list of files of a dataset, which has one of several names; None for arrays."""
    for name in ("samples", "_samples"):
        if hasattr(dataset, name):
            return list(getattr(dataset, name))
    for name in ("_image_files", "_images"):
        if hasattr(dataset, name):
            return list(zip(getattr(dataset, name), dataset._labels, strict=True))
    if hasattr(dataset, "categories"):  # Caltech 101
        folder = Path(dataset.root) / "101_ObjectCategories"
        return [
            (folder / dataset.categories[target] / f"image_{number:04d}.jpg", target)
            for number, target in zip(dataset.index, dataset.y, strict=True)
        ]
    return None


def _array_source(dataset: Any) -> ArraySource:
    pixels = np.asarray(dataset.data)
    if pixels.ndim == 4 and pixels.shape[1] == 3:
        pixels = pixels.transpose(0, 2, 3, 1)
    targets = dataset.targets if hasattr(dataset, "targets") else dataset.labels
    targets = np.asarray(targets).astype(np.int64)
    labels = _labels_of(dataset, targets)
    names = [f"{labels[target]}/{index}" for index, target in enumerate(targets)]
    return ArraySource(labels, targets, names, pixels)


def _labels_of(dataset: Any, targets: np.ndarray) -> tuple[str, ...]:
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    return tuple(map(str, names if names else range(int(targets.max()) + 1)))


def _digits(name: str, folder: Path) -> Splits:
    """scikit-learn's handwritten digits, 8 × 8 pixels; a fifth of each class is test."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise VitrailError("digits needs the demo extra: pip install 'vitrail[demo]'")
    # The file itself: importing scikit-learn for it would take seconds.
    table = np.loadtxt(
        Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", np.int64, delimiter=","
    )
    pixels = np.round(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    targets = table[:, -1]
    names = [f"{target}/{index}" for index, target in enumerate(targets)]
    source = ArraySource(tuple("0123456789"), targets, names, pixels)
    test = stratified(hash_fractions(names), targets, 0.2, 0.0)["test"]
    return Splits(name=name, train=subset(source, ~test), test=subset(source, test))


def extract_tar(archive: Path, folder: Path) -> Path:
    """Unpacks a tar file into a folder, and returns the only folder in it."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (only,) = folder.iterdir()
    return only


_Extract = Callable[[Path, Path], Path]
"""Unpacks an archive into a new folder, and returns the one of its class folders or splits."""


def from_archive(
    url: str, name: str, folder: Path, *, md5: str = "", extract: _Extract = extract_tar
) -> Splits:
    """Class folders from an archive on the web, unpacked into `folder / name`."""
    target = folder / name
    with disk_errors(target):
        folder.mkdir(parents=True, exist_ok=True)
    with download_lock(folder / f".{name}"):
        if not target.exists():
            archive = _fetch_archive(url, md5, target)
            unpack(archive, target, extract)
            archive.unlink()
    return open_folder(target)


def _fetch_archive(url: str, md5: str, target: Path) -> Path:
    try:
        archive = fetch_file(url)
    except FailureError as error:
        reason = str(error).partition(";")[0]
        raise FailureError(f"{reason}; go online, or put its class folders in {target}") from None
    if mismatch := hash_mismatch(archive, {"md5": md5} if md5 else {}):
        archive.unlink()
        raise damage_error(archive.name, host_of(url), mismatch)
    return archive


def unpack(archive: Path, target: Path, extract: _Extract = extract_tar) -> None:
    """Moves what is extracted from an archive to `target` once it is complete."""
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        extract(archive, temporary).rename(target)
    except (
        OSError, EOFError, ValueError, LookupError, RuntimeError, tarfile.TarError,
        zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise FailureError(
            f"cannot unpack {archive} to {target} ({one_line(error)}); free some space, or unpack "
            "it yourself"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _without_val(data: Splits) -> Splits:
    return replace(data, val=None)


def _every_fifth(data: Splits) -> Splits:
    """Within each class, in the order of names, every fifth image is test, from the first on."""
    train = data.train
    if train is None or data.test is not None:
        return data
    test = np.zeros(len(train.targets), dtype=bool)
    order = np.array(sorted(range(len(test)), key=train.names.__getitem__))
    for target in range(len(train.labels)):
        test[order[train.targets[order] == target][::5]] = True
    return replace(data, train=subset(train, ~test), test=subset(train, test))


def _imagenet(data: Splits) -> Splits:
    """The official validation set, on which papers report, is test; classes get their names."""
    parts: dict[str, Source | None] = {"train": data.train, "val": data.val, "test": data.test}
    if data.test is None:
        parts |= {"val": None, "test": data.val}
    named = {part: source and _readable(source) for part, source in parts.items()}
    return Splits(name=data.name, **named)


def _tiny_imagenet(data: Splits) -> Splits:
    """The splits as those of ImageNet; the names of the classes are stored with the images."""
    parts = _imagenet(data).parts
    return Splits(name=data.name, **{part: with_words(parts[part]) for part in parts})


def _all_test(data: Splits) -> Splits:
    """Data without splits that is only for testing."""
    if data.train is None or data.test is not None:
        return _imagenet(data)
    return Splits(name=data.name, test=_readable(data.train))


def _readable(source: Source) -> Source:
    """Names for the 1,000 classes of ImageNet: `tench` for `n01440764` or class 0."""
    numbers = source.labels == tuple(map(str, range(1000)))
    wnids = len(source.labels) == 1000 and all(re.fullmatch(r"n\d{8}", x) for x in source.labels)
    if not (numbers or wnids) or not isinstance(source, FolderSource | ShardSource):
        return source
    return replace(source, labels=imagenet_classes())


@dataclass(frozen=True)
class CatalogEntry:
    """A dataset of the catalog."""

    what: str
    classes: int
    images: int
    fetch: Callable[[str, Path], Splits] | None
    """Downloads the dataset of that name into a folder; None if it may not be redistributed."""
    origin: str = "torchvision"
    parts: Callable[[Splits], Splits] = lambda data: data
    """Turns the splits of the stored data into those that published results use."""
    lists: Callable[[str, Path], Splits | None] | None = None
    """Opens the data from file lists, which take precedence, if there are any."""
    task: Any = None
    """The benchmark's task, with its `title` and `group`."""


def torchvision_dataset(kind: str, splits: _Arguments) -> Callable[[str, Path], Splits]:
    """A function that downloads and opens torchvision's dataset of that name."""
    return partial(from_torchvision, kind, splits)


FLOWER_PHOTOS = partial(
    from_archive,
    "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz",
)
_IMAGENET_V2 = partial(
    from_archive,
    "https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/"
    "imagenetv2-matched-frequency.tar.gz",
)
_TINY_IMAGENET = partial(
    from_archive,
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    md5="90528d7ca1a48142e341f4ef8d21d0de",
    extract=extract_images,
)

_FLOWERS102 = torchvision_dataset("Flowers102", TWO)

_ENTRIES: dict[str, tuple[Any, ...]] = {
    "digits": ("handwritten digits, 8 px", 10, 1_797, _digits, "scikit-learn"),
    "mnist": ("handwritten digits, 28 px", 10, 70_000, torchvision_dataset("MNIST", FLAG)),
    "fashion_mnist": ("clothes, 28 px", 10, 70_000, torchvision_dataset("FashionMNIST", FLAG)),
    "kmnist": ("Japanese letters, 28 px", 10, 70_000, torchvision_dataset("KMNIST", FLAG)),
    "svhn": ("house numbers, 32 px", 10, 99_289, torchvision_dataset("SVHN", TWO)),
    "cifar10": ("objects, 32 px", 10, 60_000, torchvision_dataset("CIFAR10", FLAG)),
    "cifar100": ("objects, 32 px", 100, 60_000, torchvision_dataset("CIFAR100", FLAG)),
    "stl10": ("objects, 96 px", 10, 13_000, torchvision_dataset("STL10", TWO)),
    "flower_photos": ("flowers", 5, 3_670, FLOWER_PHOTOS, "TensorFlow", _every_fifth),
    "flowers102": ("flowers (Oxford)", 102, 7_169, _FLOWERS102, "torchvision", _without_val),
    "pets": (
        "cats and dogs by breed (Oxford-IIIT)",
        37,
        7_349,
        torchvision_dataset("OxfordIIITPet", PETS),
    ),
    "food101": ("dishes", 101, 101_000, torchvision_dataset("Food101", TWO)),
    "dtd": ("textures", 47, 5_640, torchvision_dataset("DTD", THREE)),
    "eurosat": ("land use from space, 64 px", 10, 27_000, torchvision_dataset("EuroSAT", WHOLE)),
    "caltech101": ("objects", 101, 8_677, torchvision_dataset("Caltech101", WHOLE)),
    "sun397": ("scenes", 397, 108_754, torchvision_dataset("SUN397", WHOLE)),
    "gtsrb": ("German traffic signs", 43, 39_270, torchvision_dataset("GTSRB", TWO)),
    "country211": ("photographs by country", 211, 63_300, torchvision_dataset("Country211", VALID)),
    "fgvc_aircraft": (
        "aircraft by variant",
        100,
        10_000,
        torchvision_dataset("FGVCAircraft", THREE),
    ),
    "stanford_cars": ("cars by model", 196, 16_185, torchvision_dataset("StanfordCars", TWO)),
    "imagenette": (
        "ten classes of ImageNet",
        10,
        13_394,
        torchvision_dataset("Imagenette", VAL_IS_TEST),
    ),
    "tiny_imagenet": (
        "classes of ImageNet, 64 px",
        200,
        110_000,
        _TINY_IMAGENET,
        "its authors",
        _tiny_imagenet,
        open_published,
    ),
    "imagenet": ("ILSVRC 2012", 1_000, 1_331_167, None, "your copy", _imagenet),
    "imagenet21k": ("all of ImageNet, by synset", 21_841, 14_197_122, None, "your copy"),
    "imagenet_v2": ("new test images", 1_000, 10_000, _IMAGENET_V2, "its authors", _all_test),
}
"""The fields of `CatalogEntry` by name."""


@cached
def known_datasets() -> dict[str, CatalogEntry]:
    """The catalog, with the tasks of VTAB if that package is installed."""
    entries = {name: CatalogEntry(*fields) for name, fields in _ENTRIES.items()}
    vtab = import_optional("vtab.tasks")
    return entries if vtab is None else entries | vtab.entries()


def data_folder() -> Path:
    """Where datasets are stored: `$VITRAIL_DATA`, else a folder in the cache."""
    folder = os.environ.get("VITRAIL_DATA")
    return Path(folder).expanduser() if folder else cache_folder() / "data"


def open_named(name: str) -> Splits:
    """A dataset of the catalog, with the splits that published results use."""
    entry, folder = known_datasets()[name], data_folder()
    data = entry.lists(name, folder) if entry.lists is not None else None
    if data is None:
        data = open_local(folder / name, entry)
    if data is None:
        if entry.fetch is None:
            raise FailureError(
                f"{name} cannot be downloaded; set VITRAIL_DATA to the folder that contains {name}/"
                " with class folders, with train/ and val/ of class folders, or with tar files"
            )
        try:
            data = entry.fetch(name, folder)
        except FailureError as error:
            if not (folders := _classes_in(folder / name)):
                raise
            raise type(error)(
                f"{error}; {folder / name} has {folders} folders, expected {entry.classes} classes"
            ) from None
    return replace(entry.parts(data), name=name)


def _classes_in(folder: Path) -> int:
    """The number of class folders in a folder, or in its first split."""
    if not folder.is_dir():
        return 0
    return len(sub_folders(folder / next(iter(parts_of(folder).values()), "")))


def open_local(folder: Path, entry: CatalogEntry) -> Splits | None:
    """The data in a folder, if it is there. torchvision also unpacks into folders of these names:
    class folders count only if they are as many as the classes."""
    if not folder.is_dir():
        return None
    if is_store(folder):
        return open_store(folder)
    classes = _classes_in(folder)
    if classes == entry.classes or (classes and entry.fetch is None):
        return open_folder(folder)
    return open_shards(str(folder)) if has_shards(folder) else None
