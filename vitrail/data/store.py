"""Decoded pictures in one flat file per part, mapped into memory: training never decodes twice.

A store is a folder: `store.json` says what it holds, `train.pixels` has the pixels of all pictures
one after another, `train.npz` their sizes, classes and names; likewise for val and test.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt64
from PIL import Image

from vitrail.console import Advance
from vitrail.data.contents import content_hashes
from vitrail.data.dataset import Data, Source, joined, separate
from vitrail.data.decode import quiet
from vitrail.errors import FailureError, VitrailError, one_line

FORMAT = "vitrail store 1"
Broken = tuple[str, str]
"""The name of a picture, and why it is left out."""


@dataclass(frozen=True)
class StoreSource:
    """Pictures of one part of a store."""

    path: Path
    """The file of pixels."""
    written: int
    """When that was, so that no map of an older store is taken for this one."""
    labels: tuple[str, ...]
    targets: Int[np.ndarray, " n"]
    names: Sequence[str]
    offsets: Int64[np.ndarray, " n"]
    shapes: Int64[np.ndarray, "n 2"]
    """Rows and columns."""
    hashes: UInt64[np.ndarray, " n"]
    """Of the files that they were packed from (`vitrail.data.contents`); 0 where not known."""

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return np.zeros(len(self.targets), dtype=np.int64)

    def picture(self, index: int) -> Image.Image:
        rows, columns = self.shapes[index].tolist()
        start = int(self.offsets[index])
        pixels = mapped(self.path, self.written)[start : start + rows * columns * 3]
        return Image.fromarray(pixels.reshape(rows, columns, 3))  # which copies them


@lru_cache(8)
def mapped(path: Path, written: int) -> UInt8[np.ndarray, " bytes"]:
    """The pixels of a part, mapped once per process and never pickled."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


# Writing.


def nothing(amount: int, total: int | None = None) -> None:
    """Shows no progress."""


def pack(
    source: Source, folder: Path, *, side: int = 0, progress: Advance = nothing
) -> list[Broken]:
    """A store with a train part alone."""
    data = Data(name=folder.resolve().name, train=source)
    return pack_data(data, folder, side=side, progress=progress)


def pack_data(
    data: Data, folder: Path, *, side: int = 0, progress: Advance = nothing
) -> list[Broken]:
    """Writes a store, all or nothing; gives the pictures that cannot be decoded, left out of it.

    With a `side`, pictures whose short side is longer are shrunk to it.
    """
    if side < 0:
        raise VitrailError(f"side={side}: expected pixels, or 0 to keep pictures as they are")
    if folder.exists():
        raise VitrailError(f"{folder} exists; delete it, or choose another place for the store")
    broken: list[Broken] = []
    progress(0, sum(len(part.targets) for part in data.parts.values()))
    with written_whole(folder) as temporary:
        for name, part in data.parts.items():
            broken += write_part(part, temporary / name, side, progress)
        about = {
            "format": FORMAT,
            "name": data.name,
            "side": side,
            "labels": data.labels,
            "parts": list(data.parts),
        }
        text = json.dumps(about, ensure_ascii=False, indent=1)
        (temporary / "store.json").write_text(text, encoding="utf-8")
    return broken


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder under another name until all is in it; nothing stays of one that failed."""
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(folder)
    except OSError as error:
        raise FailureError(
            f"cannot write {folder} ({one_line(error)}); free some space, or choose another place"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_part(source: Source, stem: Path, side: int, progress: Advance) -> list[Broken]:
    """The pixels and the index of one part."""
    kept: list[tuple[int, int, int]] = []
    broken: list[Broken] = []
    with stem.with_suffix(".pixels").open("wb") as file:
        for index, pixels in decoded(source, side):
            progress(1)
            if isinstance(pixels, str):
                broken.append((source.names[index], pixels))
            else:
                file.write(pixels.data)
                kept.append((index, *pixels.shape[:2]))
    if not kept:
        raise VitrailError(f"none of the {len(broken)} pictures of {stem.name} can be decoded")
    table = np.array(kept, dtype=np.int64)
    lengths = table[:, 1] * table[:, 2] * 3
    np.savez(
        stem.with_suffix(".npz"),
        offsets=np.cumsum(lengths) - lengths,
        shapes=table[:, 1:],
        targets=source.targets[table[:, 0]],
        hashes=content_hashes(source)[table[:, 0]],
        names=joined(source.names[index] for index in table[:, 0].tolist()),
    )
    return broken


def decoded(source: Source, side: int) -> Iterator[tuple[int, UInt8[np.ndarray, "y x 3"] | str]]:
    """Every picture's pixels in order, or why there are none."""

    def read(index: int) -> UInt8[np.ndarray, "y x 3"] | str:
        try:
            return np.asarray(shrunk(source.picture(index), side))
        except FailureError:
            raise
        except VitrailError as error:
            return str(error)

    workers, total = min(8, os.cpu_count() or 1), len(source.targets)
    # Decoding sets Pillow's warnings aside for all threads at once, hence here as well.
    with quiet(), ThreadPoolExecutor(workers) as pool:
        for first in range(0, total, 4 * workers):
            few = range(first, min(first + 4 * workers, total))
            yield from zip(few, pool.map(read, few), strict=True)


def shrunk(picture: Image.Image, side: int) -> Image.Image:
    """With a short side of at most `side`, the aspect kept."""
    short = min(picture.size)
    if not side or short <= side:
        return picture
    width, height = (max(side, round(length * side / short)) for length in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


# Reading.


def is_store(where: Path) -> bool:
    """Whether a path is a store's folder, or its description."""
    return (where / "store.json").is_file() or (where.name == "store.json" and where.is_file())


def open_store(where: Path) -> Data:
    """The parts of a store, as they were packed."""
    folder = where if where.is_dir() else where.parent
    try:
        about = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise VitrailError(f"{folder} was packed by another version; pack it again")
        labels = tuple(map(str, about["labels"]))
        parts = {str(part): open_part(folder / str(part), labels) for part in about["parts"]}
        return Data(name=str(about["name"]), **parts)
    except VitrailError:
        raise
    except (
        OSError, LookupError, TypeError, ValueError, EOFError, RecursionError, MemoryError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise damaged(folder, one_line(error)) from None


def open_part(stem: Path, labels: tuple[str, ...]) -> StoreSource:
    """One part; whether its two files belong together is checked before anything is read."""
    path = stem.with_suffix(".pixels")
    with stem.with_suffix(".npz").open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        offsets, shapes, targets = file["offsets"], file["shapes"], file["targets"]
        names = separate(file["names"])
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
        raise damaged(stem.parent, f"the index of {stem.name} contradicts itself")
    if offsets.min() < 0 or ends.max() != status.st_size:
        raise damaged(stem.parent, f"{path.name} has {status.st_size:,} of {ends.max():,} bytes")
    return StoreSource(path, status.st_mtime_ns, labels, targets, names, offsets, shapes, hashes)


def damaged(folder: Path, reason: str) -> VitrailError:
    """What to do is always the same."""
    return VitrailError(f"{folder} is no whole store ({reason}); delete it and pack it again")
