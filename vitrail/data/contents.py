"""Images by content: eight bytes that tell them apart, whatever they are called and wherever they
lie. Training keeps those of its images, so that evaluation can leave them out."""

import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt64

from vitrail.console import Advance
from vitrail.data.dataset import Joined, Renamed, Source, Subset
from vitrail.data.decode import quiet
from vitrail.data.folder import FolderSource
from vitrail.data.shards import ShardSource
from vitrail.data.tars import is_url
from vitrail.errors import VitrailError
from vitrail.web import cache

UNKNOWN = 0
"""Stands for an image whose content is not known: it lies in a shard of the web, in a store of an
earlier version, or cannot be read."""
CHUNK = 1024

Hashes = UInt64[np.ndarray, " n"]


def content_hashes(source: Source, progress: Advance | None = None) -> Hashes:
    """A hash of each image as it is kept: of its file, or of its pixels where it has none.

    A copy of a file has the same hash, in another folder, under another name, in a tar file or a
    store; a file that was compressed anew has another one.
    """
    if isinstance(source, Joined):
        both = (content_hashes(part, progress) for part in (source.first, source.second))
        return np.concatenate(list(both))
    base, indices = source, np.arange(len(source.targets))
    while isinstance(base, (Subset, Renamed)):
        indices = base.indices[indices] if isinstance(base, Subset) else indices
        base = base.source
    if (known := getattr(base, "hashes", None)) is not None:  # a store's
        return known[indices]
    if isinstance(base, FolderSource):
        return of_files([base.root / base.files[index] for index in indices.tolist()], progress)
    if isinstance(base, ShardSource):
        return of_members(base, indices, progress)
    return hash_each(lambda index: pixels_of(source, index), len(indices), progress)


def of_files(paths: Sequence[Path], progress: Advance | None) -> Hashes:
    """Of files; those that are as they were when they were last hashed are not read again."""
    states = [state_of(path) for path in paths]
    key = hashlib.blake2b(repr(states).encode(), digest_size=16).hexdigest()
    kept = cache() / "hashes" / f"{key}.npy"
    with suppress(OSError, ValueError, EOFError):
        known = np.load(kept, allow_pickle=False)
        if known.shape == (len(paths),) and known.dtype == np.uint64:
            return known

    def content(number: int) -> bytes:
        if not states[number]:
            raise FileNotFoundError
        return paths[number].read_bytes()

    found = hash_each(content, len(paths), progress)
    if found.all():  # a file that cannot be read now may be later
        save(kept, found)
    return found


def state_of(path: Path) -> tuple[int, ...]:
    """What changes when a file does; empty for what is no regular file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    if not stat.S_ISREG(found.st_mode):
        return ()
    # The number and the time of the last change of the inode, for two files that trade places.
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def of_members(
    source: ShardSource, indices: Int[np.ndarray, " n"], progress: Advance | None
) -> Hashes:
    """Of the files inside tar files; those of the web would all have to be fetched first."""
    if any(is_url(shard.address) for shard in source.shards):
        return np.full(len(indices), UNKNOWN, dtype=np.uint64)
    return hash_each(lambda number: source.content(int(indices[number])), len(indices), progress)


def pixels_of(source: Source, index: int) -> bytes:
    """The pixels of an image that is kept in no file of its own."""
    image = source.picture(index)
    return repr(image.size).encode() + image.tobytes()


def hash_each(content: Callable[[int], bytes], count: int, progress: Advance | None) -> Hashes:
    """The hash of each content; reading and hashing leave other threads the interpreter."""

    def digest(number: int) -> int:
        try:
            found = content(number)
        except (OSError, VitrailError):
            return UNKNOWN  # named where it is decoded
        return int.from_bytes(hashlib.blake2b(found, digest_size=8).digest(), "little") or 1

    hashes = np.full(count, UNKNOWN, dtype=np.uint64)
    with quiet(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, count, CHUNK):
            some = range(start, min(start + CHUNK, count))
            hashes[some.start : some.stop] = list(pool.map(digest, some))
            if progress is not None:
                progress(len(some), total=count)
    return hashes


def save(path: Path, hashes: Hashes) -> None:
    """Whole or not at all; a cache that cannot be written only costs time."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.save(file, hashes)
        temporary.replace(path)
