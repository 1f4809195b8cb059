"""Stores: decoded images in one memory-mapped file per split, so that training never decodes.

A store is a folder: `store.json` describes it, `train.pixels` has the pixels of all images one
after another, `train.npz` their sizes, classes and names; likewise for val and test.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8, UInt64
from PIL import Image

from vitrail.console import Advance, log_progress
from vitrail.data.contents import content_hashes
from vitrail.data.dataset import (
    Broken,
    IndexedSource,
    Source,
    Splits,
    image_or_reason,
    pack_strings,
    pixels_or_reason,
    unpack_strings,
    unwrap,
)
from vitrail.data.decode import Pixels, in_threads
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import atomic_write, write_bytes

_FORMAT = "vitrail store 1"


@dataclass(frozen=True)
class StoreSource(IndexedSource):
    """One split of a store."""

    path: Path
    """The file of pixels."""
    written: int
    """Its modification time, so that the map of an older store is not used for this one."""
    offsets: Int64[np.ndarray, " n"]
    shapes: Int64[np.ndarray, "n 2"]
    """Rows and columns."""
    hashes: UInt64[np.ndarray, " n"]
    """Content hashes of the original files (`vitrail.data.contents`); 0 if unknown."""

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.rgb(index))  # a copy

    def rgb(self, index: int, side: int = 0) -> Pixels:
        rows, columns = self.shapes[index].tolist()
        start = int(self.offsets[index])
        pixels = _mapped(self.path, self.written)[start : start + rows * columns * 3]
        return pixels.reshape(rows, columns, 3)


@lru_cache(8)
def _mapped(path: Path, written: int) -> UInt8[np.ndarray, " bytes"]:
    """The pixels of a split, mapped once per process and never pickled."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


# Writing.


def pack_data(
    data: Splits, folder: Path, *, side: int = 0, progress: Advance | None = None
) -> list[Broken]:
    """Writes a store, completely or not at all; returns the images that cannot be decoded.

    With a `side`, images whose short side is longer are resized to it.
    """
    if side < 0:
        raise VitrailError(f"side={side}: expected pixels, or 0 to keep images as they are")
    if folder.exists():
        raise VitrailError(f"{folder} exists; delete it, or choose another folder for the store")
    broken: list[Broken] = []
    progress = progress or log_progress("", visible=False)
    progress(0, sum(len(part.targets) for part in data.parts.values()))
    with _written_whole(folder) as temporary:
        for name, part in data.parts.items():
            broken += _write_part(part, temporary / name, side, progress)
        about = {
            "format": _FORMAT,
            "name": data.name,
            "side": side,
            "labels": data.labels,
            "parts": list(data.parts),
        }
        text = json.dumps(about, ensure_ascii=False, indent=1)
        (temporary / "store.json").write_text(text, encoding="utf-8")
    return broken


@contextmanager
def _written_whole(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when it is complete, and is deleted on failure."""
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(folder)
    except OSError as error:
        raise FailureError(
            f"cannot write {folder} ({one_line(error)}); free some space, or choose another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_part(source: Source, stem: Path, side: int, progress: Advance) -> list[Broken]:
    path = stem.with_suffix(".pixels")
    indices, shapes, broken = _write_pixels(
        source,
        path,
        lambda pixels: shrunk(pixels, side),
        lambda amount, total=None: progress(amount),
    )
    if not len(indices):
        raise VitrailError(f"none of the {len(broken)} images of {stem.name} can be decoded")
    lengths = shapes.prod(1) * 3
    np.savez(
        stem.with_suffix(".npz"),
        offsets=np.cumsum(lengths) - lengths,
        shapes=shapes,
        targets=source.targets[indices],
        hashes=content_hashes(source)[indices],
        names=pack_strings(source.names[index] for index in indices.tolist()),
    )
    return broken


def _write_pixels(
    source: Source,
    path: Path,
    decoded: Callable[[Pixels], UInt8[np.ndarray, "y x c"]],
    progress: Advance | None,
    side: int = 0,
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, "n 2"], list[Broken]]:
    """Writes the pixels of all images to a file; returns the indices and shapes of those that can
    be decoded, and the others."""

    def read(index: int) -> UInt8[np.ndarray, "y x c"] | str:
        pixels = pixels_or_reason(source, index, side)
        return pixels if isinstance(pixels, str) else np.ascontiguousarray(decoded(pixels))

    written: list[tuple[int, int, int]] = []
    broken: list[Broken] = []
    with path.open("wb") as file:
        for index, pixels in enumerate(in_threads(read, len(source.targets))):
            if progress is not None:
                progress(1, len(source.targets))
            if isinstance(pixels, str):
                broken.append(Broken(source.names[index], pixels))
            else:
                file.write(pixels.data)
                written.append((index, *pixels.shape[:2]))
    table = np.array(written, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1:], broken


class DecodedPart(NamedTuple):
    """The images of a source that can be decoded, and those that cannot."""

    pixels: UInt8[np.ndarray, " bytes"]
    offsets: Int64[np.ndarray, " n"]
    shapes: Int64[np.ndarray, "n 2"]
    """Rows and columns."""
    indices: Int64[np.ndarray, " n"]
    """Their numbers in the source."""
    broken: Sequence[Broken]


def packed_part(source: Source) -> DecodedPart | None:
    """The images of a store, mapped into memory; None for anything else."""
    base, indices = unwrap(source)
    if not isinstance(base, StoreSource):
        return None
    pixels, numbers = _mapped(base.path, base.written), np.arange(len(indices))
    return DecodedPart(pixels, base.offsets[indices], base.shapes[indices], numbers, ())


def equal_images(
    source: Source,
) -> tuple[UInt8[np.ndarray, "n y x 3"], Int64[np.ndarray, " m"]] | None:
    """All images of a store, mapped into memory as one array, and the row of each of the source's;
    None for anything else, or if they differ in size."""
    part = packed_part(source)
    if part is None or (part.shapes != part.shapes[:1]).any():
        return None
    rows, columns = part.shapes[0].tolist()
    length = rows * columns * 3
    if len(part.pixels) % length or (part.offsets % length).any():
        return None  # other images of the store have other sizes
    return part.pixels.reshape(-1, rows, columns, 3), part.offsets // length


def write_decoded(
    source: Source,
    stem: Path,
    decoded: Callable[[Pixels], UInt8[np.ndarray, "y x c"]],
    side: int = 0,
    progress: Advance | None = None,
) -> None:
    """Writes the pixels of a source for `read_decoded`, completely or not at all.

    Large images are read with `side`: see `read_pixels`.
    """
    pixels = stem.with_suffix(".pixels")
    table: dict[str, Any] = {}

    def save(part: Path) -> None:
        table["indices"], table["shapes"], _ = _write_pixels(source, part, decoded, progress, side)

    atomic_write(pixels, save)

    try:
        # Written last: where it is, the other is complete.
        write_bytes(stem.with_suffix(".npz"), lambda file: np.savez(file, **table))
    except FailureError:
        pixels.unlink(missing_ok=True)
        raise


def read_decoded(stem: Path, source: Source, channels: int) -> DecodedPart | None:
    """What `write_decoded` wrote, mapped into memory; None if it is not there or damaged."""
    path = stem.with_suffix(".pixels")
    try:
        with (
            stem.with_suffix(".npz").open("rb") as file,
            np.load(file, allow_pickle=False) as table,
        ):
            indices, shapes = table["indices"], table["shapes"]
        lengths, status = shapes.prod(1) * channels, path.stat()
        if lengths.sum() != status.st_size:
            return None
        empty = np.zeros(0, dtype=np.uint8)  # cannot be mapped
        pixels = _mapped(path, status.st_mtime_ns) if status.st_size else empty
    except (OSError, LookupError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    missing = np.setdiff1d(np.arange(len(source.targets)), indices).tolist()
    reasons = {index: image_or_reason(source, index) for index in missing}
    broken = [Broken(source.names[i], why) for i, why in reasons.items() if isinstance(why, str)]
    return DecodedPart(pixels, np.cumsum(lengths) - lengths, shapes, indices, broken)


def shrunk(pixels: UInt8[np.ndarray, "_y _x 3"], side: int) -> Pixels:
    """An image, resized to a short side of `side` if it is longer."""
    short = min(pixels.shape[:2])
    if not side or short <= side:
        return pixels
    height, width = (max(side, round(length * side / short)) for length in pixels.shape[:2])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


# Reading.


def is_store(path: Path) -> bool:
    """Whether a path is a store's folder, or its store.json."""
    return (path / "store.json").is_file() or (path.name == "store.json" and path.is_file())


def open_store(path: Path) -> Splits:
    folder = path if path.is_dir() else path.parent
    try:
        about = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        if about["format"] != _FORMAT:
            raise VitrailError(f"{folder} was packed by another version; pack the data again")
        labels = tuple(map(str, about["labels"]))
        parts = {str(part): _open_part(folder / str(part), labels) for part in about["parts"]}
        return Splits(name=str(about["name"]), **parts)
    except VitrailError:
        raise
    except (
        OSError, LookupError, TypeError, ValueError, EOFError, RecursionError, MemoryError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise _damaged(folder, one_line(error)) from None


def _open_part(stem: Path, labels: tuple[str, ...]) -> StoreSource:
    """One split, after checking that its two files belong together."""
    path = stem.with_suffix(".pixels")
    with stem.with_suffix(".npz").open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        offsets, shapes, targets = file["offsets"], file["shapes"], file["targets"]
        names = unpack_strings(file["names"])
        # Stores of earlier versions have none.
        hashes = file["hashes"] if "hashes" in file else np.zeros(len(targets), dtype=np.uint64)
    status = path.stat()
    ends = offsets + shapes[:, 0] * shapes[:, 1] * 3
    n = len(targets)
    if (
        not (n and len(names) == n == len(ends) == len(hashes))
        or hashes.dtype != np.uint64
        or targets.min() < 0
        or targets.max() >= len(labels)
    ):
        raise _damaged(stem.parent, f"the index of {stem.name} is inconsistent")
    if offsets.min() < 0 or ends.max() != status.st_size:
        raise _damaged(stem.parent, f"{path.name} has {status.st_size:,} of {ends.max():,} bytes")
    return StoreSource(labels, targets, names, path, status.st_mtime_ns, offsets, shapes, hashes)


def _damaged(folder: Path, reason: str) -> VitrailError:
    return VitrailError(
        f"{folder} is not a complete store ({reason}); delete it and pack the data again"
    )
