"""Small images in one large file: an index at once, the pixels only of what is asked for."""

import gzip
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from vitrail.data.dataset import ArraySource, IndexedSource, Source, unwrap
from vitrail.errors import DamagedError, one_line

BYTES, WHOLE_NUMBERS = 0x1E3D4C55, 0x1E3D4C54
"""What the files of small NORB begin with."""

_Read = Callable[[np.ndarray], np.ndarray]
"""The pixels of some images, by their numbers."""


@dataclass(frozen=True)
class Frames(IndexedSource):
    """Images in a file that is read from its beginning to its end."""

    read: _Read

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.read(np.array([index]))[0]).convert("RGB")


def in_memory(source: Source) -> Source:
    """Chosen frames with their pixels; any other source as it is."""
    base, indices = unwrap(source)
    if not isinstance(base, Frames):
        return source
    return ArraySource(source.labels, source.targets, source.names, base.read(indices))


def _rows(
    file: Any, length: int, shape: tuple[int, ...], wanted: Int[np.ndarray, " m"]
) -> np.ndarray:
    """The wanted rows of a stream in which each has so many bytes, an image of `shape` first."""
    size = math.prod(shape)
    pixels = np.empty((len(wanted), size), dtype=np.uint8)
    place = 0
    for number in np.argsort(wanted, kind="stable").tolist():
        row = int(wanted[number])
        file.seek((row - place) * length, io.SEEK_CUR)  # ahead only: the stream may be compressed
        found = file.read(length)
        if len(found) < length:
            raise EOFError("the file ends too early")
        place = row + 1
        pixels[number] = np.frombuffer(found, np.uint8, size)
    return pixels.reshape(len(wanted), *shape)


def npz_rows(path: Path, name: str, wanted: Int[np.ndarray, " m"]) -> np.ndarray:
    """Rows of an array in an npz file, without the gigabytes of all its rows."""
    with whole(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        np.lib.format.read_magic(file)
        shape, by_columns, kind = np.lib.format.read_array_header_1_0(file)
        if by_columns or kind.itemsize != 1:
            raise ValueError(f"{name} has no rows of bytes")
        return _rows(file, math.prod(shape[1:]), shape[1:], wanted)


def npz_array(path: Path, name: str) -> np.ndarray:
    """A whole array of an npz file."""
    with whole(path), path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        return file[name]


def mat_rows(path: Path, wanted: Int[np.ndarray, " m"]) -> np.ndarray:
    """Of pairs of images in a file of small NORB, the left ones of some."""
    with whole(path), _opened(path) as file:
        kind, shape = _mat_header(file)
        if kind != BYTES:
            raise ValueError("not a matrix of bytes")
        return _rows(file, math.prod(shape[1:]), shape[2:], wanted)


def mat_array(path: Path) -> Int[np.ndarray, "..."]:
    """A matrix of whole numbers from a file of small NORB."""
    with whole(path), _opened(path) as file:
        kind, shape = _mat_header(file)
        if kind != WHOLE_NUMBERS:
            raise ValueError("not a matrix of whole numbers")
        return np.frombuffer(file.read(4 * math.prod(shape)), "<i4").reshape(shape)


def _mat_header(file: io.BufferedIOBase) -> tuple[int, tuple[int, ...]]:
    """What a matrix of small NORB holds, and its shape: it says so of three dimensions at least."""
    kind, dimensions = struct.unpack("<2i", file.read(8))
    if kind not in (BYTES, WHOLE_NUMBERS) or not 0 < dimensions < 8:
        raise ValueError("not a matrix of small NORB")
    shape = struct.unpack(f"<{max(3, dimensions)}i", file.read(4 * max(3, dimensions)))
    return kind, shape[:dimensions]


def _opened(path: Path) -> io.BufferedIOBase:
    """A file, unpacked while it is read if it is packed."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Turns all that reading a damaged file may raise into one line."""
    try:
        yield
    except (
        OSError, EOFError, ValueError, LookupError, RuntimeError, MemoryError, OverflowError,
        struct.error, zlib.error, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise DamagedError(
            f"cannot read {path} ({one_line(error)}); delete it and fetch it again"
        ) from None
