"""Data sets by name.

A folder of that name in `$VITRAIL_DATA` (class folders, parts above them, tar files or a store)
comes first; otherwise the data is fetched from where it is published.
"""

import os
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.dataset import ArraySource, Source, Splits, exactly, positions, stable, subset
from vitrail.data.folder import FolderSource, open_folder, parts_of, sub_folders
from vitrail.data.shards import ShardSource, holds_shards, open_shards
from vitrail.data.store import is_store, open_store
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import alone, cache, fetch_file, on_disk, reason_of

# torchvision's data sets: fetched by torchvision, read from their lists of files.

Parts = Mapping[str, Mapping[str, Any]]
"""What torchvision's class is given for each part of the data."""

WHOLE: Parts = {"train": {}}
FLAG: Parts = {"train": {"train": True}, "test": {"train": False}}
TWO: Parts = {"train": {"split": "train"}, "test": {"split": "test"}}
THREE: Parts = {**TWO, "val": {"split": "val"}}
VALID: Parts = {**TWO, "val": {"split": "valid"}}
PETS: Parts = {"train": {"split": "trainval"}, "test": {"split": "test"}}
VAL_IS_TEST: Parts = {"train": {"split": "train"}, "test": {"split": "val"}}


def from_torchvision(kind: str, parts: Parts, name: str, folder: Path) -> Splits:
    """A data set by the name of torchvision's class, its files below `folder`."""
    from torchvision import datasets

    make = getattr(datasets, kind)
    return Splits(
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
            f"put its images there as {name}/train/<class>/… and {name}/test/<class>/…"
        ) from None


def source_of(dataset: Any) -> Source:
    """A torchvision data set as a source that opens only the images that are needed, as if their
    files lay in class folders, in the order of their names."""
    samples = _samples_of(dataset)
    if samples is None:
        return _array_source(dataset)
    targets = np.array([target for _, target in samples], dtype=np.int64)
    labels = _labels_of(dataset, targets)
    files = [str(Path(path)) for path, _ in samples]
    names = [f"{labels[t]}/{stable(Path(f).name)}" for f, t in zip(files, targets, strict=True)]
    order = sorted(range(len(names)), key=names.__getitem__)
    return FolderSource(
        labels, targets[order], [names[i] for i in order], Path(), [files[i] for i in order]
    )


def _samples_of(dataset: Any) -> list[tuple[str | Path, int]] | None:
    """The list of files that a data set has, under one of several names; none for arrays."""
    for samples in ("samples", "_samples"):
        if hasattr(dataset, samples):
            return list(getattr(dataset, samples))
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
    """The names of the classes, or their numbers."""
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    return tuple(map(str, names if names else range(int(targets.max()) + 1)))


def _digits(name: str, folder: Path) -> Splits:
    """scikit-learn's handwritten digits, 8 × 8 pixels; a fifth of each is test."""
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
    test = exactly(positions(names), targets, 0.2, 0.0)["test"]
    return Splits(name=name, train=subset(source, ~test), test=subset(source, test))


def from_archive(url: str, name: str, folder: Path) -> Splits:
    """Class folders from a tar file of the web, unpacked into `folder / name`."""
    target = folder / name
    with on_disk(target):
        folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / f".{name}"):
        if not target.exists():
            try:
                archive = fetch_file(url)
            except FailureError as error:
                raise FailureError(
                    f"{str(error).partition(';')[0]}; connect, or put its class folders in {target}"
                ) from None
            unpack(archive, target)
            archive.unlink()
    return open_folder(target)


def unpack(archive: Path, target: Path) -> None:
    """The folder inside an archive, under its name only once it is whole."""
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        (only,) = temporary.iterdir()
        only.rename(target)
    except (OSError, EOFError, ValueError, tarfile.TarError) as error:
        raise FailureError(
            f"cannot unpack {archive} to {target} ({one_line(error)}); free some space, or unpack "
            "it yourself"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _without_val(data: Splits) -> Splits:
    """Train and test alone: what is held out for choosing is part of train."""
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
    """The official validation set is what papers test on; class folders get readable names."""
    parts: dict[str, Source | None] = {"train": data.train, "val": data.val, "test": data.test}
    if data.test is None:
        parts |= {"val": None, "test": data.val}
    named = {part: source and _readable(source) for part, source in parts.items()}
    return Splits(name=data.name, **named)


def _all_test(data: Splits) -> Splits:
    """Undivided data that nobody learns from."""
    if data.train is None or data.test is not None:
        return _imagenet(data)
    return Splits(name=data.name, test=_readable(data.train))


def _readable(source: Source) -> Source:
    """`tench` for `n01440764`, or for class 0, where all 1,000 classes are there."""
    numbers = source.labels == tuple(map(str, range(1000)))
    wnids = len(source.labels) == 1000 and all(re.fullmatch(r"n\d{8}", x) for x in source.labels)
    if not (numbers or wnids) or not isinstance(source, FolderSource | ShardSource):
        return source
    from torchvision.models import ResNet50_Weights

    return replace(source, labels=tuple(ResNet50_Weights.DEFAULT.meta["categories"]))


@dataclass(frozen=True)
class CatalogEntry:
    """A data set of the catalog."""

    what: str
    classes: int
    images: int
    fetch: Callable[[str, Path], Splits] | None
    """Gets the data by its name, with its files in a folder; None where nobody may hand it out."""
    origin: str = "torchvision"
    parts: Callable[[Splits], Splits] = lambda data: data
    """The splits that everyone compares on, out of those that the data comes with."""
    lists: Callable[[str, Path], Splits | None] | None = None
    """Opens the data from file lists, which come before all else, where there are any."""
    task: Any = None
    """The task of a benchmark that the data is: its `title` and its `group`."""


def tv(kind: str, parts: Parts) -> Callable[[str, Path], Splits]:
    """How torchvision's class of that name gets the data."""
    return partial(from_torchvision, kind, parts)


FLOWER_PHOTOS = partial(
    from_archive,
    "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz",
)
IMAGENET_V2 = partial(
    from_archive,
    "https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/"
    "imagenetv2-matched-frequency.tar.gz",
)

_ENTRIES = {
    "digits": CatalogEntry("handwritten digits, 8 px", 10, 1_797, _digits, "scikit-learn"),
    "mnist": CatalogEntry("handwritten digits, 28 px", 10, 70_000, tv("MNIST", FLAG)),
    "fashion_mnist": CatalogEntry("clothes, 28 px", 10, 70_000, tv("FashionMNIST", FLAG)),
    "kmnist": CatalogEntry("Japanese letters, 28 px", 10, 70_000, tv("KMNIST", FLAG)),
    "svhn": CatalogEntry("house numbers, 32 px", 10, 99_289, tv("SVHN", TWO)),
    "cifar10": CatalogEntry("objects, 32 px", 10, 60_000, tv("CIFAR10", FLAG)),
    "cifar100": CatalogEntry("objects, 32 px", 100, 60_000, tv("CIFAR100", FLAG)),
    "stl10": CatalogEntry("objects, 96 px", 10, 13_000, tv("STL10", TWO)),
    "flower_photos": CatalogEntry("flowers", 5, 3_670, FLOWER_PHOTOS, "TensorFlow", _every_fifth),
    "flowers102": CatalogEntry(
        "flowers (Oxford)", 102, 7_169, tv("Flowers102", TWO), parts=_without_val
    ),
    "pets": CatalogEntry(
        "cats and dogs by breed (Oxford-IIIT)", 37, 7_349, tv("OxfordIIITPet", PETS)
    ),
    "food101": CatalogEntry("dishes", 101, 101_000, tv("Food101", TWO)),
    "dtd": CatalogEntry("textures", 47, 5_640, tv("DTD", THREE)),
    "eurosat": CatalogEntry("land use from space, 64 px", 10, 27_000, tv("EuroSAT", WHOLE)),
    "caltech101": CatalogEntry("objects", 101, 8_677, tv("Caltech101", WHOLE)),
    "sun397": CatalogEntry("scenes", 397, 108_754, tv("SUN397", WHOLE)),
    "gtsrb": CatalogEntry("German traffic signs", 43, 39_270, tv("GTSRB", TWO)),
    "country211": CatalogEntry("photographs by country", 211, 63_300, tv("Country211", VALID)),
    "fgvc_aircraft": CatalogEntry("aircraft by variant", 100, 10_000, tv("FGVCAircraft", THREE)),
    "stanford_cars": CatalogEntry("cars by model", 196, 16_185, tv("StanfordCars", TWO)),
    "imagenette": CatalogEntry(
        "ten classes of ImageNet", 10, 13_394, tv("Imagenette", VAL_IS_TEST)
    ),
    "imagenet": CatalogEntry("ILSVRC 2012", 1_000, 1_331_167, None, "your copy", _imagenet),
    "imagenet21k": CatalogEntry(
        "all of ImageNet, by synset", 21_841, 14_197_122, None, "your copy"
    ),
    "imagenet_v2": CatalogEntry(
        "new test images", 1_000, 10_000, IMAGENET_V2, "its authors", _all_test
    ),
}


class _Catalog(Mapping[str, CatalogEntry]):
    """Data sets by name. Those of VTAB have a package of their own, which may be absent: it is
    looked for when somebody first asks for a name."""

    @cached_property
    def entries(self) -> dict[str, CatalogEntry]:
        try:
            return _ENTRIES | import_module("vitrail.vtab.tasks").entries()
        except ModuleNotFoundError as error:
            if error.name not in ("vitrail.vtab", "vitrail.vtab.tasks"):
                raise
            return _ENTRIES

    def __getitem__(self, name: str) -> CatalogEntry:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


CATALOG = _Catalog()


def data_folder() -> Path:
    """Where data sets lie: `$VITRAIL_DATA`, else a folder in the cache."""
    folder = os.environ.get("VITRAIL_DATA")
    return Path(folder).expanduser() if folder else cache() / "data"


def open_named(name: str) -> Splits:
    """A data set of the catalog, with the parts that everyone compares on."""
    entry, folder = CATALOG[name], data_folder()
    data = entry.lists(name, folder) if entry.lists is not None else None
    if data is None:
        data = here(folder / name, entry)
    if data is None:
        if entry.fetch is None:
            raise FailureError(
                f"{name} cannot be fetched for you; let VITRAIL_DATA name the folder that has "
                f"{name}/, with class folders, train/ and val/ above them, or tar files in it"
            )
        try:
            data = entry.fetch(name, folder)
        except FailureError as error:
            if not (folders := _classes_in(folder / name)):
                raise
            raise type(error)(
                f"{error}; {folder / name} holds {folders} folders, not those of its "
                f"{entry.classes} classes"
            ) from None
    return replace(entry.parts(data), name=name)


def _classes_in(folder: Path) -> int:
    """How many class folders lie in a folder, or in its first part."""
    if not folder.is_dir():
        return 0
    return len(sub_folders(folder / next(iter(parts_of(folder).values()), "")))


def here(folder: Path, entry: CatalogEntry) -> Splits | None:
    """The data in its own folder. torchvision also has folders of these names: what it unpacked
    there is known by the number of classes."""
    if not folder.is_dir():
        return None
    if is_store(folder):
        return open_store(folder)
    classes = _classes_in(folder)
    if classes == entry.classes or (classes and entry.fetch is None):
        return open_folder(folder)
    return open_shards(str(folder)) if holds_shards(folder) else None
