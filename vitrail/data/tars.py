"""Tar files of images: downloaded when needed, indexed once, then read in any order.

Those on the web are downloaded when they are first read, and the least recently used ones are
deleted to make room, so that data may be larger than the disk. The index of a tar, which is cached,
has the offset of each image and the label beside it; `shards.py` makes a dataset of them.
"""

import hashlib
import json
import os
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

from vitrail.data.dataset import pack_strings, stable_name, unpack_strings
from vitrail.data.folder import is_image, is_litter
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import BoundedFolder, cache_folder, cached_path, fetch_file, write_cached

T = TypeVar("T")

CLASS_LISTS = ("classes.txt", "labels.txt")
"""Files that name the classes, one per line, in the order of their numbers."""
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_BEGINNING = 1 << 16
"""Bytes of a shard that are hashed, to detect changes."""
_OPEN_FILES = 64
_TRIES = 30
"""Downloads of a shard that other processes keep deleting."""


# Files.


@dataclass(frozen=True)
class Shard:
    """A tar file by its path or URL, with its length and hash when it was indexed."""

    address: str
    length: int
    beginning: str

    @property
    def name(self) -> str:
        return path_of(self.address).rpartition("/")[2]

    def read(self, offset: int, size: int) -> bytes:
        """Some bytes of the shard, which is downloaded first if necessary."""
        data = _opened(self).read(offset, size)
        if len(data) < size:
            raise FailureError(f"{self.address} was truncated while in use; open it again")
        return data


class _OpenFile:
    """A file that several threads and forked processes read at any offset.

    It closes with the last reference to it and is never pickled: each process opens its own.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.path = path
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        try:
            if sys.platform == "win32":  # has no pread
                with self.path.open("rb") as file:
                    file.seek(offset)
                    return file.read(size)
            return os.pread(self.descriptor, size, offset)
        except OSError as error:
            raise FailureError(f"cannot read {self.path} ({one_line(error)})") from None

    def is_deleted(self) -> bool:
        """Whether closing it would free its disk space."""
        return os.fstat(self.descriptor).st_nlink == 0


files: dict[Shard, _OpenFile] = {}
"""The open shards of this process."""


def _opened(shard: Shard) -> _OpenFile:
    """The shard's file, which stays open; it must not have changed since it was indexed."""
    if (file := files.get(shard)) is not None:
        return file
    for other, file in list(files.items()):
        if file.is_deleted() or len(files) >= _OPEN_FILES:
            files.pop(other, None)
    file = on_file(shard.address, _OpenFile)
    length = os.fstat(file.descriptor).st_size
    if length != shard.length or _hash_of(file.read(0, _BEGINNING)) != shard.beginning:
        raise FailureError(f"{shard.address} has changed since it was indexed; open it again")
    files[shard] = file
    return file


def on_file(address: str, use: Callable[[Path], T]) -> T:
    """`use` of the shard's file, which other processes may delete if it was downloaded."""
    for _ in range(_TRIES):
        try:
            return use(_local(address) if is_url(address) else Path(address))
        except OSError as error:
            if not (is_url(address) and isinstance(error, FileNotFoundError)):
                raise FailureError(f"cannot read {address} ({one_line(error)})") from None
    raise FailureError(
        f"{address} is deleted as soon as it is downloaded; raise VITRAIL_SHARD_CACHE_GB"
    )


def is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def path_of(address: str) -> str:
    """A URL without its query; a path may contain a question mark."""
    return address.partition("?")[0] if is_url(address) else address


def fetched(url: str) -> Path:
    """Where a downloaded shard is stored."""
    return cached_path(url, _fetched_folder())


def _fetched_folder() -> Path:
    return cache_folder() / "shards" / "files"


def _local(url: str) -> Path:
    """The downloaded shard, marked as used now."""
    fresh = not fetched(url).exists()
    path = fetch_file(url, _fetched_folder())
    with suppress(OSError):
        os.utime(path)
    if fresh:
        shards = BoundedFolder(_fetched_folder(), "VITRAIL_SHARD_CACHE_GB", gigabytes=20, share=0.8)
        shards.make_room(keep=(path,))
    return path


# Indices.


@dataclass(frozen=True)
class Index:
    """The images of one tar file, in its order."""

    offsets: Int64[np.ndarray, " n"]
    sizes: Int64[np.ndarray, " n"]
    members: Sequence[str]
    """Paths in the tar."""
    labels: Sequence[str]
    """The label beside each image; empty if there is none."""
    classes: Sequence[str]
    """The lines of a class list in the tar."""
    length: int
    beginning: str
    """A hash of the tar's first bytes."""
    damage: str
    """Why the rest of the tar cannot be read."""

    def save(self, path: Path) -> None:
        arrays = {
            "offsets": self.offsets,
            "sizes": self.sizes,
            "members": pack_strings(self.members),
            "labels": pack_strings(self.labels),
            "classes": pack_strings(self.classes),
            "shard": pack_strings([str(self.length), self.beginning, self.damage]),
        }
        write_cached(path, lambda file: np.savez(file, **arrays))

    @staticmethod
    def load(path: Path) -> "Index | None":
        """What `save` wrote; None if there is nothing, or something else."""
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                offsets, sizes = file["offsets"], file["sizes"]
                members, labels, classes = (
                    unpack_strings(file[x]) for x in ("members", "labels", "classes")
                )
                length, beginning, damage = unpack_strings(file["shard"])
            if not len(offsets) == len(sizes) == len(members) == len(labels):
                return None
            return Index(offsets, sizes, members, labels, classes, int(length), beginning, damage)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None

    def is_outdated(self, path: Path) -> bool:
        """Whether another version of the file has been downloaded since."""
        try:
            return (path.stat().st_size, _beginning_of(path)) != (self.length, self.beginning)
        except OSError:  # deleted
            return False


@dataclass
class _Sample:
    """The files of a tar that share a key."""

    images: list[tuple[str, int, int, bool]] = field(default_factory=list)
    """Path, offset, size, and whether the path is the key with a plain suffix."""
    labels: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, int, int, str]]:
        """One image if the key has a label; all of them if it has none."""
        label = self.labels.get("cls") or self.labels.get("json") or ""
        images = sorted(self.images, key=lambda image: not image[-1])
        return [(*image[:-1], label) for image in (images[:1] if label else self.images)]


def build_index(path: Path, name: str) -> Index:
    """Reads the headers of a tar file from its beginning to its end."""
    length, beginning = path.stat().st_size, _beginning_of(path)
    with path.open("rb") as file:
        if file.read(8).startswith(_COMPRESSED):
            # A compressed tar cannot be read at any offset.
            raise VitrailError(f"{name} is compressed; decompress it to a plain .tar")
    samples: dict[str, _Sample] = {}
    classes: list[str] = []
    damage = ""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in _whole_members(tar, length):
                _add_member(tar, member, samples, classes)
            damage = _unread(path, tar.offset)
    except (tarfile.TarError, ValueError, OverflowError) as error:  # OverflowError: odd headers
        damage = one_line(error)
    rows = [row for sample in samples.values() for row in sample.rows()]
    if not rows:
        reason = f" ({damage})" if damage else ""
        raise VitrailError(f"{name} has no images{reason}; expected an uncompressed tar of images")
    members, offsets, sizes, labels = zip(*rows, strict=True)
    at, lengths = (np.array(numbers, dtype=np.int64) for numbers in (offsets, sizes))
    return Index(at, lengths, members, labels, classes, length, beginning, damage)


def _whole_members(tar: tarfile.TarFile, length: int) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar that are not truncated."""
    while (member := tar.next()) is not None:
        vars(tar)["members"] = []  # or a tar of a million files would fill memory
        plain = member.isreg() and not member.issparse()
        if plain and member.offset_data + member.size <= length:
            yield member


def _add_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, samples: dict[str, _Sample], classes: list[str]
) -> None:
    """Adds a file to its sample, whose key is the path up to the first dot of the last name."""
    path = stable_name(member.name.removeprefix("./"))
    if any(map(is_litter, path.split("/"))):
        return
    folder, slash, name = path.rpartition("/")
    key, _, suffix = name.partition(".")
    sample = samples.setdefault(f"{folder}{slash}{key}", _Sample())
    if suffix.lower() in ("cls", "json"):
        sample.labels[suffix.lower()] = _label_in(_text_of(tar, member), suffix.lower())
    elif is_image(name):
        sample.images.append((path, member.offset_data, member.size, "." not in suffix))
    elif name.lower() in CLASS_LISTS:
        classes[:] = _text_of(tar, member).splitlines()


def _text_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    return "" if file is None else file.read(1 << 24).decode("utf-8", "replace")


def _label_in(text: str, suffix: str) -> str:
    """A class number or name; JSON has it as `label` or `cls`."""
    if suffix == "cls":
        return text.strip().replace("\0", "")
    try:
        label = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(label, dict):
        label = label.get("label", label.get("cls"))
    known = isinstance(label, (int, str)) and not isinstance(label, bool)
    return str(label).strip().replace("\0", "") if known else ""


def _unread(path: Path, offset: int) -> str:
    """A tar ends with zeros; anything else where reading stopped is damage."""
    with path.open("rb") as file:
        file.seek(offset)
        return "what follows is not a tar" if file.read(512).strip(b"\0") else ""


def _beginning_of(path: Path) -> str:
    with path.open("rb") as file:
        return _hash_of(file.read(_BEGINNING))


def _hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
