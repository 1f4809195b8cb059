"""Data sets by name.

A folder of that name in `$VITRAIL_DATA` (class folders, parts above them, tar files or a store)
comes first; otherwise the data is fetched from where it is published.
"""

import os
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data import vtab
from vitrail.data.folders import FolderSource, open_folder, parts_of, sub_folders
from vitrail.data.shard_patterns import holds_shards
from vitrail.data.shards import ShardSource, open_shards
from vitrail.data.source import ArraySource, Data, Source
from vitrail.data.splits import exactly, positions, subset
from vitrail.data.store import is_store, open_store
from vitrail.data.torchvision_sets import (
    FLAG,
    PETS,
    THREE,
    TWO,
    VAL_IS_TEST,
    VALID,
    WHOLE,
    Parts,
    from_torchvision,
)
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import alone, cache, fetch_file, on_disk


def digits(name: str, folder: Path) -> Data:
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
    return Data(name=name, train=subset(source, ~test), test=subset(source, test))


def from_archive(url: str, name: str, folder: Path) -> Data:
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


def as_published(data: Data) -> Data:
    """With the parts that it came with."""
    return data


def without_val(data: Data) -> Data:
    """Train and test alone: what is held out for choosing is part of train."""
    return replace(data, val=None)


def every_fifth(data: Data) -> Data:
    """Within each class, in the order of names, every fifth picture is test, from the first on."""
    train = data.train
    if train is None or data.test is not None:
        return data
    test = np.zeros(len(train.targets), dtype=bool)
    order = np.array(sorted(range(len(test)), key=train.names.__getitem__))
    for target in range(len(train.labels)):
        test[order[train.targets[order] == target][::5]] = True
    return replace(data, train=subset(train, ~test), test=subset(train, test))


def imagenet(data: Data) -> Data:
    """The official validation set is what papers test on; class folders get readable names."""
    parts: dict[str, Source | None] = {"train": data.train, "val": data.val, "test": data.test}
    if data.test is None:
        parts |= {"val": None, "test": data.val}
    named = {part: source and readable(source) for part, source in parts.items()}
    return Data(name=data.name, **named)


def all_test(data: Data) -> Data:
    """Undivided data that nobody learns from."""
    if data.train is None or data.test is not None:
        return imagenet(data)
    return Data(name=data.name, test=readable(data.train))


def readable(source: Source) -> Source:
    """`tench` for `n01440764`, or for class 0, where all 1,000 classes are there."""
    numbers = source.labels == tuple(map(str, range(1000)))
    wnids = len(source.labels) == 1000 and all(re.fullmatch(r"n\d{8}", x) for x in source.labels)
    if not (numbers or wnids) or not isinstance(source, FolderSource | ShardSource):
        return source
    from torchvision.models import ResNet50_Weights

    return replace(source, labels=tuple(ResNet50_Weights.DEFAULT.meta["categories"]))


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue."""

    what: str
    classes: int
    images: int
    fetch: Callable[[str, Path], Data] | None
    """Gets the data by its name, with its files in a folder; None where nobody may hand it out."""
    origin: str = "torchvision"
    parts: Callable[[Data], Data] = as_published
    """The parts that everyone compares on."""


def tv(kind: str, parts: Parts) -> Callable[[str, Path], Data]:
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

CATALOGUE = {
    "digits": Entry("handwritten digits, 8 px", 10, 1_797, digits, "scikit-learn"),
    "mnist": Entry("handwritten digits, 28 px", 10, 70_000, tv("MNIST", FLAG)),
    "fashion_mnist": Entry("clothes, 28 px", 10, 70_000, tv("FashionMNIST", FLAG)),
    "kmnist": Entry("Japanese letters, 28 px", 10, 70_000, tv("KMNIST", FLAG)),
    "svhn": Entry("house numbers, 32 px", 10, 99_289, tv("SVHN", TWO)),
    "cifar10": Entry("objects, 32 px", 10, 60_000, tv("CIFAR10", FLAG)),
    "cifar100": Entry("objects, 32 px", 100, 60_000, tv("CIFAR100", FLAG)),
    "stl10": Entry("objects, 96 px", 10, 13_000, tv("STL10", TWO)),
    "flower_photos": Entry("flowers", 5, 3_670, FLOWER_PHOTOS, "TensorFlow", every_fifth),
    "flowers102": Entry("flowers (Oxford)", 102, 7_169, tv("Flowers102", TWO), parts=without_val),
    "pets": Entry("cats and dogs by breed (Oxford-IIIT)", 37, 7_349, tv("OxfordIIITPet", PETS)),
    "food101": Entry("dishes", 101, 101_000, tv("Food101", TWO)),
    "dtd": Entry("textures", 47, 5_640, tv("DTD", THREE)),
    "eurosat": Entry("land use from space, 64 px", 10, 27_000, tv("EuroSAT", WHOLE)),
    "caltech101": Entry("objects", 101, 8_677, tv("Caltech101", WHOLE)),
    "sun397": Entry("scenes", 397, 108_754, tv("SUN397", WHOLE)),
    "gtsrb": Entry("German traffic signs", 43, 39_270, tv("GTSRB", TWO)),
    "country211": Entry("photographs by country", 211, 63_300, tv("Country211", VALID)),
    "fgvc_aircraft": Entry("aircraft by variant", 100, 10_000, tv("FGVCAircraft", THREE)),
    "stanford_cars": Entry("cars by model", 196, 16_185, tv("StanfordCars", TWO)),
    "imagenette": Entry("ten classes of ImageNet", 10, 13_394, tv("Imagenette", VAL_IS_TEST)),
    "imagenet": Entry("ILSVRC 2012", 1_000, 1_331_167, None, "your copy", imagenet),
    "imagenet21k": Entry("all of ImageNet, by synset", 21_841, 14_197_122, None, "your copy"),
    "imagenet_v2": Entry("new test images", 1_000, 10_000, IMAGENET_V2, "its authors", all_test),
    **{
        f"vtab/{short}": Entry(
            f"VTAB-1k: {task.title}",
            task.classes,
            vtab.LEARNT + vtab.CHOSEN + task.whole[2],
            task.fetch,
            "VTAB-1k",
            partial(vtab.as_vtab, short),
        )
        for short, task in vtab.TASKS.items()
    },
}


def rows() -> list[dict[str, Any]]:
    """The catalogue as a table."""
    return [
        {
            "name": name,
            "classes": entry.classes,
            "images": entry.images,
            "what": entry.what,
            "from": entry.origin,
        }
        for name, entry in CATALOGUE.items()
    ]


def data_folder() -> Path:
    """Where data sets lie: `$VITRAIL_DATA`, else a folder in the cache."""
    told = os.environ.get("VITRAIL_DATA")
    return Path(told).expanduser() if told else cache() / "data"


def open_named(name: str) -> Data:
    """A data set of the catalogue, with the parts that everyone compares on."""
    entry, folder = CATALOGUE[name], data_folder()
    data = vtab.from_lists(name, folder)
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
            place, expected = folder / name, entry.classes
            if not (found := classes_in(place)):
                raise
            raise type(error)(
                f"{error}; {place} holds {found} folders, not those of its {expected} classes"
            ) from None
    return replace(entry.parts(data), name=name)


def classes_in(folder: Path) -> int:
    """How many class folders lie in a folder, or in its first part."""
    if not folder.is_dir():
        return 0
    return len(sub_folders(folder / next(iter(parts_of(folder).values()), "")))


def here(folder: Path, entry: Entry) -> Data | None:
    """The data in its own folder. torchvision also has folders of these names: what it unpacked
    there is known by the number of classes."""
    if not folder.is_dir():
        return None
    if is_store(folder):
        return open_store(folder)
    classes = classes_in(folder)
    if classes == entry.classes or (classes and entry.fetch is None):
        return open_folder(folder)
    return open_shards(str(folder)) if holds_shards(folder) else None
