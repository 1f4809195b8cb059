"""Content hashes: eight bytes that identify an image, whatever its name and wherever it is stored.

Training saves those of its images, so that evaluation can leave them out.
"""

import hashlib
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt64

from vitrail.console import Advance
from vitrail.data.dataset import Joined, Source, unwrap
from vitrail.data.decode import in_threads, refuse_large
from vitrail.data.folder import FolderSource
from vitrail.data.shards import ShardSource
from vitrail.data.tars import is_url
from vitrail.errors import VitrailError
from vitrail.files import cache_folder, write_cached

UNKNOWN = 0
"""The hash of an image on the web, in a store of an earlier version, or that cannot be read."""
_CHUNK = 1024

_Hashes = UInt64[np.ndarray, " n"]


def content_hashes(source: Source, progress: Advance | None = None) -> _Hashes:
    """A hash of each image's file, or of its pixels if it has none.

    A copy of a file has the same hash in another folder, under another name, in a tar file or a
    store; a file that was compressed again has another one.
    """
    if isinstance(source, Joined):
        both = (content_hashes(part, progress) for part in (source.first, source.second))
        return np.concatenate(list(both))
    base, indices = unwrap(source)
    if (known := getattr(base, "hashes", None)) is not None:  # a store's
        return known[indices]
    if isinstance(base, FolderSource):
        return _of_files([base.root / base.files[index] for index in indices.tolist()], progress)
    if not isinstance(base, ShardSource):
        return hash_each(lambda i: _pixels(source, i), len(indices), progress)
    if any(is_url(shard.address) for shard in base.shards):  # would have to be downloaded first
        return np.full(len(indices), UNKNOWN, dtype=np.uint64)
    content, count = base.content, len(indices)
    files = [_state_of(Path(shard.address)) for shard in base.shards]
    places = np.stack([base.shard_numbers[indices], base.offsets[indices]])
    return _cached(
        (files, _digest(places.tobytes())),
        count,
        lambda: hash_each(lambda i: content(int(indices[i])), count, progress),
    )


def source_digest(source: Source) -> str:
    """A digest that changes with any image, its name or its place in the source.

    Tar files, which may be large or on the web, count as changed when the files are.
    """
    text = repr((list(source.names), _versions(source)))
    return _digest(text.encode("utf-8", "surrogateescape"))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _versions(source: Source) -> Any:
    if isinstance(source, Joined):
        return _versions(source.first), _versions(source.second)
    base, indices = unwrap(source)
    if isinstance(base, ShardSource):
        shards = [(shard, _state_of(Path(shard.address))) for shard in base.shards]
        return shards, base.shard_numbers[indices].tolist(), base.offsets[indices].tolist()
    # The images of a store of an earlier version have no hashes, but it has a time.
    return content_hashes(source).tolist(), getattr(base, "written", None)


def _of_files(paths: Sequence[Path], progress: Advance | None) -> _Hashes:
    states = [_state_of(path) for path in paths]

    def content(number: int) -> bytes:
        if not states[number]:
            raise FileNotFoundError
        refuse_large(str(paths[number]), states[number][1])  # a sparse file would fill memory
        return paths[number].read_bytes()

    return _cached(states, len(paths), lambda: hash_each(content, len(paths), progress))


def _cached(states: Any, count: int, compute: Callable[[], _Hashes]) -> _Hashes:
    """Hashes from the cache if no file has changed since."""
    cached = cache_folder() / "hashes" / f"{_digest(repr(states).encode())}.npy"
    with suppress(OSError, ValueError, EOFError):
        known = np.load(cached, allow_pickle=False)
        if known.shape == (count,) and known.dtype == np.uint64:
            return known
    hashes = compute()
    if hashes.all():  # a file that cannot be read now may be later
        write_cached(cached, lambda file: np.save(file, hashes))
    return hashes


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes when a file does; empty for anything but a regular file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    if not stat.S_ISREG(status.st_mode):
        return ()
    # Inode number and change time detect two files that were swapped.
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _pixels(source: Source, index: int) -> bytes:
    image = source.image(index)
    return repr(image.size).encode() + image.tobytes()


def hash_each(content: Callable[[int], bytes], count: int, progress: Advance | None) -> _Hashes:

    def digest(number: int) -> int:
        try:
            data = content(number)
        except (OSError, VitrailError):
            return UNKNOWN  # reported when it is decoded
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1

    hashes = np.full(count, UNKNOWN, dtype=np.uint64)
    for number, value in enumerate(in_threads(digest, count, ahead=_CHUNK)):
        hashes[number] = value
        if progress is not None and (number % _CHUNK == _CHUNK - 1 or number == count - 1):
            progress(number % _CHUNK + 1, total=count)
    return hashes
