"""Where in a tar file each picture lies, and what the tar says of its class.

The tar is walked through once; what was found is kept in the cache, so that pictures can then be
read in any order. Only facts are kept here, what they mean is decided when shards are opened.
"""

import hashlib
import json
import os
import shutil
import sys
import tarfile
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Int64

from vitrail.data.dataset import joined, separate, stable
from vitrail.data.folder import is_litter, is_picture
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.web import cache, fetch_file, place

CLASS_LISTS = ("classes.txt", "labels.txt")
"""Files that name the classes, one per line, in the order of their numbers."""
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
BEGINNING = 1 << 16
"""So many bytes of a shard are hashed."""


@dataclass(frozen=True)
class Index:
    """The pictures of one tar file, in the order in which they lie there."""

    offsets: Int64[np.ndarray, " n"]
    sizes: Int64[np.ndarray, " n"]
    members: Sequence[str]
    """The pictures' paths in the tar."""
    told: Sequence[str]
    """What lies beside each picture as its label; empty where nothing does."""
    classes: Sequence[str]
    """The lines of a class list in the tar."""
    length: int
    beginning: str
    """The tar's size in bytes, and a hash of its first ones."""
    damage: str
    """Why the rest of the tar cannot be read."""

    def save(self, path: Path) -> None:
        """Whole or not at all; a cache that cannot be written only costs time."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                np.savez(
                    file,
                    offsets=self.offsets,
                    sizes=self.sizes,
                    members=joined(self.members),
                    told=joined(self.told),
                    classes=joined(self.classes),
                    shard=joined([str(self.length), self.beginning, self.damage]),
                )
            temporary.replace(path)


def load(path: Path) -> Index | None:
    """What `save` wrote; None where there is nothing, or something else."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            length, beginning, damage = separate(file["shard"])
            index = Index(
                file["offsets"],
                file["sizes"],
                separate(file["members"]),
                separate(file["told"]),
                separate(file["classes"]),
                int(length),
                beginning,
                damage,
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    n = len(index.offsets)
    return index if n == len(index.sizes) == len(index.members) == len(index.told) else None


@dataclass
class Sample:
    """The files of a tar that share a key."""

    pictures: list[tuple[str, int, int, bool]] = field(default_factory=list)
    """Path, offset, size, and whether the path is the key with a plain suffix."""
    labels: dict[str, str] = field(default_factory=dict)

    def kept(self) -> list[tuple[str, int, int, str]]:
        """One picture where a label belongs to the key; each for itself where there is none."""
        told = self.labels.get("cls") or self.labels.get("json") or ""
        pictures = sorted(self.pictures, key=lambda picture: not picture[-1])
        return [(*picture[:-1], told) for picture in (pictures[:1] if told else self.pictures)]


def build(path: Path, name: str) -> Index:
    """One pass over a tar file from its beginning to its end."""
    length, beginning = path.stat().st_size, beginning_of(path)
    refuse_compressed(path, name)
    samples: dict[str, Sample] = {}
    classes: list[str] = []
    damage = ""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in whole_members(tar, length):
                _add_member(tar, member, samples, classes)
            damage = unread(path, tar.offset)
    except (tarfile.TarError, ValueError, OverflowError) as error:  # the latter of odd headers
        damage = one_line(error)
    found = [picture for sample in samples.values() for picture in sample.kept()]
    if not found:
        reason = f" ({damage})" if damage else ""
        raise VitrailError(
            f"{name} holds no pictures{reason}; expected an uncompressed tar of them"
        )
    members, offsets, sizes, told = zip(*found, strict=True)
    return Index(
        np.array(offsets, dtype=np.int64),
        np.array(sizes, dtype=np.int64),
        members,
        told,
        classes,
        length,
        beginning,
        damage,
    )


def whole_members(tar: tarfile.TarFile, length: int) -> Iterator[tarfile.TarInfo]:
    """The plain files of a tar, as far as they lie in it to their end."""
    while (member := tar.next()) is not None:
        vars(tar)["members"] = []  # or a tar of a million files would fill the memory
        plain = member.isreg() and not member.issparse()
        if plain and member.offset_data + member.size <= length:
            yield member


def _add_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, samples: dict[str, Sample], classes: list[str]
) -> None:
    """A file goes to its sample: its key is its path up to the first dot of the last name."""
    path = stable(member.name.removeprefix("./"))
    if any(map(is_litter, path.split("/"))):
        return
    folder, slash, name = path.rpartition("/")
    key, _, suffix = name.partition(".")
    sample = samples.setdefault(f"{folder}{slash}{key}", Sample())
    if suffix.lower() in ("cls", "json"):
        sample.labels[suffix.lower()] = label_in(text_of(tar, member), suffix.lower())
    elif is_picture(name):
        sample.pictures.append((path, member.offset_data, member.size, "." not in suffix))
    elif name.lower() in CLASS_LISTS:
        classes[:] = text_of(tar, member).splitlines()


def text_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """A small file's text."""
    file = tar.extractfile(member)
    return "" if file is None else file.read(1 << 24).decode("utf-8", "replace")


def label_in(text: str, suffix: str) -> str:
    """A class number or name; JSON keeps it as `label` or `cls`."""
    if suffix == "cls":
        return text.strip().replace("\0", "")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(told, dict):
        told = told.get("label", told.get("cls"))
    known = isinstance(told, (int, str)) and not isinstance(told, bool)
    return str(told).strip().replace("\0", "") if known else ""


def refuse_compressed(path: Path, name: str) -> None:
    """Inside a compressed tar nothing can be found without reading all that lies before it."""
    with path.open("rb") as file:
        begins = file.read(8)
    if begins.startswith(COMPRESSED):
        raise VitrailError(f"{name} is compressed; unpack it, or make an uncompressed tar of it")


def unread(path: Path, offset: int) -> str:
    """A tar ends with zeros; anything else where the walk stopped is no file's header."""
    with path.open("rb") as file:
        file.seek(offset)
        return "what follows is no tar" if file.read(512).strip(b"\0") else ""


def beginning_of(path: Path) -> str:
    """A hash of a file's first bytes."""
    with path.open("rb") as file:
        return hash_of(file.read(BEGINNING))


def hash_of(data: bytes) -> str:
    """What tells one shard from another of the same length."""
    return hashlib.sha256(data).hexdigest()


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
