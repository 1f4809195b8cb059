"""Shards as files: those of the web are fetched when they are needed, and the ones unused for
longest make room for them, so that data may be larger than the disk."""

import os
import shutil
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vitrail.data.shard_index import BEGINNING, hash_of
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import cache, fetch_file, place

T = TypeVar("T")

BUDGET_GB = 20.0
"""What fetched shards may take up; `$VITRAIL_SHARD_CACHE_GB` says otherwise."""
OPEN_FILES = 64
TRIES = 3
"""How often a shard is fetched that other processes keep deleting."""


@dataclass(frozen=True)
class Shard:
    """A tar file by its path or address, and what it was when it was indexed."""

    address: str
    length: int
    beginning: str

    @property
    def name(self) -> str:
        return path_of(self.address).rpartition("/")[2]

    def read(self, offset: int, size: int) -> bytes:
        """Some bytes of the shard, fetched first if need be."""
        data = opened(self).read(offset, size)
        if len(data) < size:
            raise FailureError(f"{self.address} was cut short while it was in use; open it again")
        return data


class Opened:
    """A file that is read at any place, by several threads and forked processes at once.

    It closes with the last reference to it, and is never pickled: sources hold `Shard`s, and each
    process opens its own files.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.path = path
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        try:
            if sys.platform == "win32":  # knows no reading at a place
                with self.path.open("rb") as file:
                    file.seek(offset)
                    return file.read(size)
            return os.pread(self.descriptor, size, offset)
        except OSError as error:
            raise FailureError(f"cannot read {self.path} ({one_line(error)})") from None

    def is_deleted(self) -> bool:
        """Whether closing this file would free its place on the disk."""
        return os.fstat(self.descriptor).st_nlink == 0


files: dict[Shard, Opened] = {}
"""What this process has open."""


def opened(shard: Shard) -> Opened:
    """The shard's file, kept open in this process; it must still be what was indexed."""
    if (file := files.get(shard)) is not None:
        return file
    for other, file in list(files.items()):
        if file.is_deleted() or len(files) >= OPEN_FILES:
            files.pop(other, None)
    file = on_file(shard.address, Opened)
    length = os.fstat(file.descriptor).st_size
    if length != shard.length or hash_of(file.read(0, BEGINNING)) != shard.beginning:
        raise FailureError(f"{shard.address} has changed since it was indexed; open it again")
    files[shard] = file
    return file


def on_file(address: str, use: Callable[[Path], T]) -> T:
    """What `use` makes of the shard's file; other processes may delete a fetched one meanwhile."""
    for _ in range(TRIES):
        path = local(address)
        try:
            return use(path)
        except FileNotFoundError as error:
            if not is_url(address):
                raise FailureError(f"cannot read {address} ({one_line(error)})") from None
        except OSError as error:
            raise FailureError(f"cannot read {address} ({one_line(error)})") from None
    raise FailureError(
        f"{address} is deleted as soon as it is fetched; raise VITRAIL_SHARD_CACHE_GB"
    )


def is_url(address: str) -> bool:
    """Whether a shard must be fetched."""
    return address.startswith(("http://", "https://"))


def path_of(address: str) -> str:
    """An address without what follows a question mark; in a path that is a part of the name."""
    return address.partition("?")[0] if is_url(address) else address


def fetched(url: str) -> Path:
    """Where the shard behind an address is kept while there is room."""
    return place(url, cache() / "shards" / "files")


def local(address: str) -> Path:
    """The shard as a file of this machine, marked as used just now."""
    if not is_url(address):
        return Path(address)
    path = fetched(address)
    fresh = not path.exists()
    fetch_file(address, cache() / "shards" / "files")
    with suppress(OSError):
        os.utime(path)
    if fresh:
        make_room(cache() / "shards" / "files", path)
    return path


def make_room(folder: Path, newest: Path) -> None:
    """Deletes the shards unused for longest, until the rest keeps to the budget.

    A process that has a deleted file open reads on: its bytes go when the last one closes it.
    """
    held: list[tuple[float, int, Path]] = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # deleted by another process
            status = path.stat()
            if path.is_file() and path.suffix not in (".lock", ".part", ".etag"):
                held.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in held)
    limit = budget(folder, total)
    for _, size, path in sorted(held):
        if total <= limit:
            return
        if path != newest:
            with suppress(OSError):
                path.unlink()
            total -= size


def budget(folder: Path, held: int) -> float:
    """How many bytes of shards are kept: as told, else 20 GB, or less on a small disk."""
    told = os.environ.get("VITRAIL_SHARD_CACHE_GB")
    if told is None:
        return min(BUDGET_GB * 1e9, 0.8 * (held + shutil.disk_usage(folder).free))
    try:
        return float(told) * 1e9
    except ValueError:
        raise VitrailError(
            f"VITRAIL_SHARD_CACHE_GB={told}: expected a number of gigabytes, such as 20"
        ) from None
