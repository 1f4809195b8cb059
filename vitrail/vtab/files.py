"""VTAB's datasets that torchvision does not provide as images with classes.

Each function fetches the public files and opens them, with the label rule it is given. The rules
are those of google-research/task_adaptation, which made the benchmark.
"""

import csv
import gzip
import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from vitrail.data.catalog import load_torchvision
from vitrail.data.dataset import ArraySource, IndexedSource, Source, Splits, unwrap
from vitrail.data.folder import FolderSource, read_classes
from vitrail.errors import DamagedError, FailureError, VitrailError, one_line
from vitrail.files import fetch_file

DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
_DSPRITES_URL = f"https://github.com/google-deepmind/dsprites-dataset/raw/master/{DSPRITES}"
_SMALLNORB_URL = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
SMALLNORB = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
_GRADED = {"image": ".+", "level": "[0-4]"}
"""The columns of retinopathy's tables, and what they may contain."""
_KITTI_DEVKIT_URL = "https://s3.eu-central-1.amazonaws.com/avg-kitti/devkit_object.zip"

_CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
_KITTI_METERS = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE = 1000.0
_VEHICLES = ("Car", "Van", "Truck")
BYTES, WHOLE_NUMBERS = 0x1E3D4C55, 0x1E3D4C54
"""The first four bytes of small NORB's files."""

_Rule = Callable[[Any], Any]
"""Maps a dataset's own annotations to the class."""


def not_downloadable(advice: str, name: str, folder: Path) -> Splits:
    """Refuses data that may not be redistributed, or that has no readable public file."""
    raise FailureError(f"{name} cannot be downloaded; put {advice} in {folder / name}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns whatever a damaged file raises into one line."""
    try:
        yield
    except (
        OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError, MemoryError,
        OverflowError, csv.Error, struct.error, zlib.error, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise DamagedError(
            f"cannot read {path} ({one_line(error)}); delete it and download it again"
        ) from None


def caltech101(name: str, folder: Path) -> Splits:
    """Caltech 101 with its class of background images, which torchvision leaves out."""
    from torchvision import datasets

    load_torchvision(datasets.Caltech101, {}, name, folder)
    return Splits(name=name, train=read_classes(folder / "caltech101" / "101_ObjectCategories"))


@dataclass(frozen=True)
class Hdf5Source(IndexedSource):
    path: Path

    def image(self, index: int) -> Image.Image:
        with _reading(self.path), import_module("h5py").File(self.path) as file:
            return Image.fromarray(file["x"][index]).convert("RGB")


def camelyon(name: str, folder: Path) -> Splits:
    """Patches of tissue with or without a tumor, in the splits of PatchCamelyon."""
    from torchvision import datasets

    parts = {}
    for part in ("train", "val", "test"):
        load_torchvision(datasets.PCAM, {"split": part}, name, folder)
        root = folder / "pcam"
        stem = f"camelyonpatch_level_2_split_{part.replace('val', 'valid')}"
        parts[part] = _patches(root / f"{stem}_x.h5", root / f"{stem}_y.h5", part)
    return Splits(name=name, **parts)


def _patches(pixels: Path, labels: Path, part: str) -> Hdf5Source:
    open_file = import_module("h5py").File
    with _reading(labels), open_file(labels) as file:
        targets = np.asarray(file["y"]).reshape(-1).astype(np.int64)
        if not np.isin(targets, (0, 1)).all():
            raise ValueError("expected classes 0 and 1")
    with _reading(pixels), open_file(pixels) as file:
        if len(file["x"]) != len(targets):
            raise ValueError(f"{len(file['x']):,} images and {len(targets):,} labels")
    names = [f"{part}/{number}" for number in range(len(targets))]
    return Hdf5Source(("normal", "tumour"), targets, names, pixels)


def retinopathy(name: str, folder: Path) -> Splits:
    """Kaggle's layout: `trainLabels.csv` for train/, `retinopathy_solution.csv` for test/, whose
    public half is val."""
    root = folder / name
    train, rest = root / "trainLabels.csv", root / "retinopathy_solution.csv"
    if not (train.is_file() and rest.is_file()):
        not_downloadable(
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
        train=_graded(root / "train", _table_of(train, _GRADED)),
        val=_graded(root / "test", halves["val"]),
        test=_graded(root / "test", halves["test"]),
    )


def _table_of(path: Path, columns: Mapping[str, str]) -> list[dict[str, str]]:
    """Some columns of a CSV file, each with the pattern of its values."""
    rows = []
    with _reading(path), path.open(newline="", encoding="utf-8-sig") as file:
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
    return rows


def _graded(folder: Path, rows: Sequence[Mapping[str, str]]) -> FolderSource:
    targets = np.array([int(row["level"]) for row in rows], dtype=np.int64)
    files = [f"{row['image']}.jpeg" for row in rows]
    return FolderSource(tuple("01234"), targets, files, folder, files)


def clevr(rule: _Rule, name: str, folder: Path) -> Splits:
    """Scenes of simple objects, labeled by a rule about them; CLEVR's own val split is test."""
    from torchvision import datasets

    root = folder / "clevr" / "CLEVR_v1.0"
    if not root.is_dir():
        load_torchvision(datasets.CLEVRClassification, {"split": "train"}, name, folder)
    train, test = (_scenes(root, part, rule) for part in ("train", "val"))
    return Splits(name=name, train=train, test=test)


def _scenes(root: Path, part: str, rule: _Rule) -> FolderSource:
    """The images of a split, in the order of their names."""
    path = root / "scenes" / f"CLEVR_{part}_scenes.json"
    with _reading(path):
        scenes = json.loads(path.read_text(encoding="utf-8"))["scenes"]
        labeled = sorted((scene["image_filename"], rule(scene["objects"])) for scene in scenes)
    files = [file for file, _ in labeled]
    targets = np.array([target for _, target in labeled], dtype=np.int64)
    return FolderSource(_numbers(targets), targets, files, root / "images" / part, files)


def dsprites(rule: _Rule, name: str, folder: Path) -> Splits:
    """White shapes on black, labeled by a rule about their latent factors."""
    path = folder / "dsprites" / DSPRITES
    if not path.is_file():
        path = fetch_file(_DSPRITES_URL)
    with _reading(path), path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        targets = np.asarray(rule(file["latents_classes"]), dtype=np.int64)
    names = [str(number) for number in range(len(targets))]
    read = partial(_white_on_black, path)
    return Splits(name=name, train=Frames(_numbers(targets), targets, names, read))


def _white_on_black(path: Path, wanted: Int[np.ndarray, " m"]) -> np.ndarray:
    """Images of zeros and ones, scaled to 0 and 255."""
    return npz_rows(path, "imgs", wanted) * np.uint8(255)


def smallnorb(rule: _Rule, name: str, folder: Path) -> Splits:
    """Toys on a turntable, seen by the left camera, labeled by a rule about their pose."""
    parts = {}
    for part, stem in SMALLNORB.items():
        targets = np.asarray(rule(mat_array(_matrix(folder, f"{stem}-info.mat"))), dtype=np.int64)
        names = [f"{part}/{number}" for number in range(len(targets))]
        read = partial(mat_rows, _matrix(folder, f"{stem}-dat.mat"))
        parts[part] = Frames(_numbers(targets), targets, names, read)
    return Splits(name=name, **parts)


def _matrix(folder: Path, file: str) -> Path:
    """A file of small NORB, decompressed or as published."""
    paths = [folder / "smallnorb" / name for name in (file, f"{file}.gz")]
    local = next((path for path in paths if path.is_file()), None)
    return local or fetch_file(f"{_SMALLNORB_URL}{file}.gz")


def kitti(rule: _Rule, name: str, folder: Path) -> Splits:
    """Street scenes, labeled by a rule about the vehicles in them, split by video as in TFDS:
    frames of one video are nearly the same image."""
    from torchvision import datasets

    load_torchvision(datasets.Kitti, {"train": True}, name, folder)
    root = folder / "Kitti" / "raw"
    devkit = root / "devkit_object.zip"
    videos = _videos_of(devkit if devkit.is_file() else fetch_file(_KITTI_DEVKIT_URL))
    parts = {}
    for part, frames in by_video(videos).items():
        stems = [f"{frame:06d}" for frame in frames]
        targets = np.zeros(len(stems), dtype=np.int64)
        for i, stem in enumerate(stems):
            path = root / "training" / "label_2" / f"{stem}.txt"
            with _reading(path):
                targets[i] = rule(path.read_text(encoding="utf-8").splitlines())
        files = [f"{stem}.png" for stem in stems]
        images = root / "training" / "image_2"
        parts[part] = FolderSource(tuple("0123"), targets, files, images, files)
    return Splits(name=name, **parts)


def _videos_of(devkit: Path) -> list[str]:
    """The video of each image, by the image's number."""
    with _reading(devkit), zipfile.ZipFile(devkit) as archive:
        order = archive.read("mapping/train_rand.txt").decode()
        frames = archive.read("mapping/train_mapping.txt").decode().splitlines()
        # The file counts lines from one.
        return [frames[int(line) - 1].split()[1] for line in order.split(",")]


def by_video(videos: Sequence[str]) -> dict[str, list[int]]:
    """The images of each split: a tenth of the videos each for val and test, drawn as in TFDS
    (numpy's old generator, seed 123)."""
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
    return tuple(map(str, range(int(targets.max(initial=0)) + 1)))


# Small images in one large file.


@dataclass(frozen=True)
class Frames(IndexedSource):
    """Images in a file that is read from its beginning to its end."""

    read: Callable[[np.ndarray], np.ndarray]
    """The pixels of some images, by their indices."""

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.read(np.array([index]))[0]).convert("RGB")


def in_memory(source: Source) -> Source:
    """Frames with their pixels loaded; any other source unchanged."""
    base, indices = unwrap(source)
    if not isinstance(base, Frames):
        return source
    return ArraySource(source.labels, source.targets, source.names, base.read(indices))


def _rows(
    file: Any, length: int, shape: tuple[int, ...], wanted: Int[np.ndarray, " m"]
) -> np.ndarray:
    """The wanted rows of a stream, each of `length` bytes that begin with an image of `shape`."""
    size = math.prod(shape)
    pixels = np.empty((len(wanted), size), dtype=np.uint8)
    position = 0
    for number in np.argsort(wanted, kind="stable").tolist():
        row = int(wanted[number])
        file.seek(
            (row - position) * length, io.SEEK_CUR
        )  # ahead only: the stream may be compressed
        data = file.read(length)
        if len(data) < length:
            raise EOFError("the file ends too early")
        position = row + 1
        pixels[number] = np.frombuffer(data, np.uint8, size)
    return pixels.reshape(len(wanted), *shape)


def npz_rows(path: Path, name: str, wanted: Int[np.ndarray, " m"]) -> np.ndarray:
    """Rows of an array in an npz file, without the gigabytes of all its rows."""
    with _reading(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        np.lib.format.read_magic(file)
        shape, by_columns, kind = np.lib.format.read_array_header_1_0(file)
        if by_columns or kind.itemsize != 1:
            raise ValueError(f"{name} is not an array of bytes in row order")
        return _rows(file, math.prod(shape[1:]), shape[1:], wanted)


def mat_rows(path: Path, wanted: Int[np.ndarray, " m"]) -> np.ndarray:
    """The left images of some of the pairs in a file of small NORB."""
    with _reading(path), _opened(path) as file:
        kind, shape = _mat_header(file)
        if kind != BYTES:
            raise ValueError("not a matrix of bytes")
        return _rows(file, math.prod(shape[1:]), shape[2:], wanted)


def mat_array(path: Path) -> Int[np.ndarray, "..."]:
    """A matrix of integers from a file of small NORB."""
    with _reading(path), _opened(path) as file:
        kind, shape = _mat_header(file)
        if kind != WHOLE_NUMBERS:
            raise ValueError("not a matrix of whole numbers")
        return np.frombuffer(file.read(4 * math.prod(shape)), "<i4").reshape(shape)


def _mat_header(file: io.BufferedIOBase) -> tuple[int, tuple[int, ...]]:
    """Type and shape of a matrix of small NORB; the file always gives three dimensions or more."""
    kind, dimensions = struct.unpack("<2i", file.read(8))
    if kind not in (BYTES, WHOLE_NUMBERS) or not 0 < dimensions < 8:
        raise ValueError("not a matrix of small NORB")
    shape = struct.unpack(f"<{max(3, dimensions)}i", file.read(4 * max(3, dimensions)))
    return kind, shape[:dimensions]


def _opened(path: Path) -> io.BufferedIOBase:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


# Label rules.


def _above(thresholds: Sequence[float], value: float) -> int:
    """The index of the last threshold that is strictly below the value."""
    below = [number for number, threshold in enumerate(thresholds) if threshold < value]
    if not below:
        raise VitrailError(f"a distance of {value:g} is below {thresholds[0]:g}; check the labels")
    return below[-1]


def clevr_count(objects: Sequence[Mapping[str, Any]]) -> int:
    """The number of objects, from three to ten."""
    if not 3 <= len(objects) <= 10:
        raise VitrailError(f"a CLEVR scene has {len(objects)} objects; expected 3 to 10")
    return len(objects) - 3


def clevr_distance(objects: Sequence[Mapping[str, Any]]) -> int:
    """How far the nearest object is from the camera."""
    return _above(_CLEVR_DEPTHS, min(float(one["pixel_coords"][2]) for one in objects))


def kitti_distance(lines: Iterable[str]) -> int:
    """How far ahead the nearest car, van or truck is, from the lines of a label file."""
    rows = [line.split() for line in lines]
    ahead = [float(row[13]) for row in rows if row and row[0] in _VEHICLES]
    return _above(_KITTI_METERS, min(ahead, default=_NO_VEHICLE))


def dsprites_location(classes: Int[np.ndarray, "n 6"]) -> Int[np.ndarray, " n"]:
    """Sixteen columns out of 32; the latent factors are color, shape, scale, orientation, x, y."""
    return classes[:, 4] // 2


def dsprites_orientation(classes: Int[np.ndarray, "n 6"]) -> Int[np.ndarray, " n"]:
    """Sixteen ranges of the 40 orientations."""
    return np.floor_divide(classes[:, 3], 2.5).astype(np.int64)


def smallnorb_azimuth(info: Int[np.ndarray, "n 4"]) -> Int[np.ndarray, " n"]:
    """Eighteen directions, which the file numbers 0, 2, … 34."""
    return info[:, 2].astype(np.int64) // 2


def smallnorb_elevation(info: Int[np.ndarray, "n 4"]) -> Int[np.ndarray, " n"]:
    """Nine heights of the camera."""
    return info[:, 1].astype(np.int64)
