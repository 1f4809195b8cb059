"""VTAB's data sets that torchvision does not hand out as images with classes.

Each function gets the public files and makes sources of them, with the label rule it is given.
"""

import csv
import json
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from vitrail.data.catalog import get
from vitrail.data.dataset import IndexedSource, Splits
from vitrail.data.folder import FolderSource, read_classes
from vitrail.errors import DamagedError, FailureError, one_line
from vitrail.files import fetch_file
from vitrail.vtab.frames import Frames, mat_array, mat_rows, npz_array, npz_rows, whole

DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
_DSPRITES_URL = f"https://github.com/google-deepmind/dsprites-dataset/raw/master/{DSPRITES}"
_SMALLNORB_URL = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
SMALLNORB = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
_GRADED = {"image": ".+", "level": "[0-4]"}
"""Columns of retinopathy's tables."""
_KITTI_DEVKIT_URL = "https://s3.eu-central-1.amazonaws.com/avg-kitti/devkit_object.zip"

_Rule = Callable[[Any], Any]
"""A label rule of `vtab_labels`."""


def from_hand(advice: str, name: str, folder: Path) -> Splits:
    """Data that nobody may hand out, or that has no public file to read."""
    raise FailureError(f"{name} cannot be fetched for you; put {advice} in {folder / name}")


def caltech101(name: str, folder: Path) -> Splits:
    """With the class of background images, which torchvision leaves out."""
    from torchvision import datasets

    get(datasets.Caltech101, {}, name, folder)
    return Splits(name=name, train=read_classes(folder / "caltech101" / "101_ObjectCategories"))


@dataclass(frozen=True)
class Hdf5Source(IndexedSource):
    """Images in an HDF5 file."""

    path: Path

    def image(self, index: int) -> Image.Image:
        with whole(self.path), import_module("h5py").File(self.path) as file:
            return Image.fromarray(file["x"][index]).convert("RGB")


def camelyon(name: str, folder: Path) -> Splits:
    """Patches of tissue with or without a tumor, in the parts of PatchCamelyon."""
    from torchvision import datasets

    parts = {}
    for part in ("train", "val", "test"):
        get(datasets.PCAM, {"split": part}, name, folder)
        place = folder / "pcam"
        stem = f"camelyonpatch_level_2_split_{part.replace('val', 'valid')}"
        parts[part] = _patches(place / f"{stem}_x.h5", place / f"{stem}_y.h5", part)
    return Splits(name=name, **parts)


def _patches(pixels: Path, labels: Path, part: str) -> Hdf5Source:
    """The images of one file with the classes of another."""
    open_file = import_module("h5py").File
    with whole(labels), open_file(labels) as file:
        targets = np.asarray(file["y"]).reshape(-1).astype(np.int64)
        if not np.isin(targets, (0, 1)).all():
            raise ValueError("expected classes 0 and 1")
    with whole(pixels), open_file(pixels) as file:
        if len(file["x"]) != len(targets):
            raise ValueError(f"{len(file['x']):,} images and {len(targets):,} labels")
    names = [f"{part}/{number}" for number in range(len(targets))]
    return Hdf5Source(("normal", "tumour"), targets, names, pixels)


def retinopathy(name: str, folder: Path) -> Splits:
    """Kaggle's layout: `trainLabels.csv` for train/, `retinopathy_solution.csv` for test/, whose
    public half is val."""
    place = folder / name
    train, rest = place / "trainLabels.csv", place / "retinopathy_solution.csv"
    if not (train.is_file() and rest.is_file()):
        from_hand(
            "Kaggle's trainLabels.csv, retinopathy_solution.csv, train/ and test/, the images "
            "prepared as btgraham-300, or train/ val/ test/ with class folders,",
            name,
            folder,
        )
    solution = _table_of(rest, _GRADED | {"Usage": "Public|Private"})
    halves = {
        part: [row for row in solution if row["Usage"] == usage]
        for part, usage in {"val": "Public", "test": "Private"}.items()
    }
    return Splits(
        name=name,
        train=_graded(place / "train", _table_of(train, _GRADED)),
        val=_graded(place / "test", halves["val"]),
        test=_graded(place / "test", halves["test"]),
    )


def _table_of(path: Path, columns: Mapping[str, str]) -> list[dict[str, str]]:
    """Some columns of a CSV file, each with the pattern of its values."""
    rows = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for row in reader:
                values = {name: (row.get(name) or "").strip() for name in columns}
                for name, pattern in columns.items():
                    if not re.fullmatch(pattern, values[name]):
                        raise ValueError(
                            f"line {reader.line_num} has the {name} '{values[name]}'; "
                            f"expected {pattern}"
                        )
                rows.append(values)
    except (OSError, ValueError, csv.Error) as error:
        raise DamagedError(f"cannot read {path} ({one_line(error)})") from None
    return rows


def _graded(folder: Path, rows: Sequence[Mapping[str, str]]) -> FolderSource:
    """Images with their grade of retinopathy, 0 to 4."""
    targets = np.array([int(row["level"]) for row in rows], dtype=np.int64)
    files = [f"{row['image']}.jpeg" for row in rows]
    return FolderSource(tuple("01234"), targets, files, folder, files)


def clevr(rule: _Rule, name: str, folder: Path) -> Splits:
    """Scenes of simple objects, labeled by a rule about them; CLEVR's own val part is test."""
    from torchvision import datasets

    place = folder / "clevr" / "CLEVR_v1.0"
    if not place.is_dir():
        get(datasets.CLEVRClassification, {"split": "train"}, name, folder)
    train, test = (_scenes(place, part, rule) for part in ("train", "val"))
    return Splits(name=name, train=train, test=test)


def _scenes(place: Path, part: str, rule: _Rule) -> FolderSource:
    """The images of a part, by the order of their names."""
    path = place / "scenes" / f"CLEVR_{part}_scenes.json"
    try:
        all_scenes = json.loads(path.read_text(encoding="utf-8"))["scenes"]
        labeled = sorted((scene["image_filename"], rule(scene["objects"])) for scene in all_scenes)
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"cannot read {path} ({one_line(error)})") from None
    files = [file for file, _ in labeled]
    targets = np.array([target for _, target in labeled], dtype=np.int64)
    return FolderSource(_numbers(targets), targets, files, place / "images" / part, files)


def dsprites(rule: _Rule, name: str, folder: Path) -> Splits:
    """White shapes on black, labeled by a rule about their latent factors."""
    path = folder / "dsprites" / DSPRITES
    if not path.is_file():
        path = fetch_file(_DSPRITES_URL)
    targets = np.asarray(rule(npz_array(path, "latents_classes")), dtype=np.int64)
    names = [str(number) for number in range(len(targets))]
    read = partial(_white_on_black, path)
    return Splits(name=name, train=Frames(_numbers(targets), targets, names, read))


def _white_on_black(path: Path, wanted: Int[np.ndarray, " m"]) -> np.ndarray:
    """The file has ones and zeros."""
    return npz_rows(path, "imgs", wanted) * np.uint8(255)


def smallnorb(rule: _Rule, name: str, folder: Path) -> Splits:
    """Toys on a turntable, the left camera's image, labeled by a rule about how they stand."""
    parts = {}
    for part, stem in SMALLNORB.items():
        targets = np.asarray(rule(mat_array(_matrix(folder, f"{stem}-info.mat"))), dtype=np.int64)
        names = [f"{part}/{number}" for number in range(len(targets))]
        read = partial(mat_rows, _matrix(folder, f"{stem}-dat.mat"))
        parts[part] = Frames(_numbers(targets), targets, names, read)
    return Splits(name=name, **parts)


def _matrix(folder: Path, file: str) -> Path:
    """A file of small NORB, unpacked or as it is published."""
    here = [folder / "smallnorb" / name for name in (file, f"{file}.gz")]
    found = next((path for path in here if path.is_file()), None)
    return found or fetch_file(f"{_SMALLNORB_URL}{file}.gz")


def kitti(rule: _Rule, name: str, folder: Path) -> Splits:
    """Street scenes, labeled by a rule about the vehicles in them, parted by video as TFDS does:
    frames of one video are nearly the same image."""
    from torchvision import datasets

    get(datasets.Kitti, {"train": True}, name, folder)
    place = folder / "Kitti" / "raw"
    devkit = place / "devkit_object.zip"
    videos = _videos_of(devkit if devkit.is_file() else fetch_file(_KITTI_DEVKIT_URL))
    parts = {}
    for part, numbers_of_part in by_video(videos).items():
        stems = [f"{number:06d}" for number in numbers_of_part]
        labels = [place / "training" / "label_2" / f"{stem}.txt" for stem in stems]
        targets = np.array([_ruled(rule, path) for path in labels], dtype=np.int64)
        files = [f"{stem}.png" for stem in stems]
        images = place / "training" / "image_2"
        parts[part] = FolderSource(tuple("0123"), targets, files, images, files)
    return Splits(name=name, **parts)


def _ruled(rule: _Rule, path: Path) -> int:
    """What a rule says about the lines of a label file."""
    try:
        return rule(path.read_text(encoding="utf-8").splitlines())
    except (OSError, IndexError, ValueError) as error:
        raise DamagedError(f"cannot read {path} ({one_line(error)})") from None


def _videos_of(devkit: Path) -> list[str]:
    """The video of each image, by the image's number."""
    try:
        with zipfile.ZipFile(devkit) as archive:
            order = archive.read("mapping/train_rand.txt").decode()
            frames = archive.read("mapping/train_mapping.txt").decode().splitlines()
        # The file counts lines from one.
        return [frames[int(line) - 1].split()[1] for line in order.split(",")]
    except (OSError, KeyError, IndexError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedError(f"cannot read {devkit} ({one_line(error)}); fetch it again") from None


def by_video(videos: Sequence[str]) -> dict[str, list[int]]:
    """The images of each split: a tenth of the videos each for val
    and test, drawn as TFDS draws them (numpy's old generator, seed 123)."""
    draw = np.random.RandomState(123)
    every = sorted(set(videos))
    tenth = max(1, len(every) // 10)
    test = set(draw.choice(every, tenth, replace=False))
    val = set(draw.choice(sorted(set(every) - test), tenth, replace=False))
    parts: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for image, video in enumerate(videos):
        parts["test" if video in test else "val" if video in val else "train"].append(image)
    return parts


def _numbers(targets: Int[np.ndarray, " n"]) -> tuple[str, ...]:
    """Classes that have no names."""
    return tuple(map(str, range(int(targets.max(initial=0)) + 1)))
