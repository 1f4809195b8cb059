"""Labeled images, however they are stored, and how they are split into train, val and test.

Splits depend on names alone, so they are the same everywhere. A name is hashed to a number from 0
to 1; the first part of that range is test, the next is val, the rest is train. So an image stays in
its split when others are added or removed, and test does not depend on the size of val. If a class
is so small that test or val would have none of its images, it gets the nearest one.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image

from vitrail.data.decode import Pixels
from vitrail.errors import FailureError, VitrailError

SplitMethod = Literal["hash", "stratified", "hash alone"]
"""`hash alone` is how earlier versions split: a small class could be missing from a split."""
_Fractions = Float[np.ndarray, " n"]
"""Hashes of names, from 0 to 1: those below a fraction f are about the fraction f of all names."""
_HeldOut = dict[str, Bool[np.ndarray, " n"]]
"""Which images go to val and to test."""


class Broken(NamedTuple):
    """An image that cannot be used, and why."""

    name: str
    reason: str


@runtime_checkable
class Source(Protocol):
    """A map-style dataset of labeled images, which can be pickled for worker processes."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes."""
        ...

    @property
    def targets(self) -> Int[np.ndarray, " n"]:
        """The class of each image."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Unique, and the same wherever the data is stored (`daisy/100.jpg`)."""
        ...

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        """Where each image is stored, such as the number of its shard: reading few blocks at a time
        is fast. All zero if the order does not matter."""
        ...

    def image(self, index: int) -> Image.Image:
        """The decoded image, upright 8-bit RGB; a `VitrailError` says why it cannot be decoded.

        A source that has faster access to pixels than through images has a method `rgb` as well:
        see `read_pixels`.
        """
        ...


@dataclass(frozen=True)
class IndexedSource:
    """Base of the sources that have their index in memory."""

    labels: tuple[str, ...]
    targets: Int[np.ndarray, " n"]
    names: Sequence[str]

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return np.zeros(len(self.targets), dtype=np.int64)


@dataclass(frozen=True)
class ArraySource(IndexedSource):
    """Images in memory, for small datasets."""

    pixels: np.ndarray
    """(n, rows, columns) or (n, rows, columns, 3), uint8."""

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index]).convert("RGB")

    def rgb(self, index: int, side: int) -> Pixels:
        pixels = self.pixels[index]
        return pixels if pixels.ndim == 3 else pixels[..., None].repeat(3, 2)


@dataclass(frozen=True)
class Subset:
    """Some of a source's images, in the order given."""

    source: Source
    indices: Int[np.ndarray, " n"]

    @property
    def labels(self) -> tuple[str, ...]:
        return self.source.labels

    @cached_property
    def targets(self) -> Int[np.ndarray, " n"]:
        return self.source.targets[self.indices]

    @cached_property
    def names(self) -> Sequence[str]:
        names = self.source.names
        return [names[index] for index in self.indices.tolist()]

    @cached_property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return self.source.blocks[self.indices]

    def image(self, index: int) -> Image.Image:
        return self.source.image(int(self.indices[index]))

    def rgb(self, index: int, side: int) -> Pixels:
        return read_pixels(self.source, int(self.indices[index]), side)


@dataclass(frozen=True)
class Joined:
    """Two splits of a dataset as one."""

    first: Source
    second: Source

    @property
    def labels(self) -> tuple[str, ...]:
        return self.first.labels

    @property
    def targets(self) -> Int[np.ndarray, " n"]:
        return np.concatenate([self.first.targets, self.second.targets])

    @property
    def names(self) -> Sequence[str]:
        return [*self.first.names, *self.second.names]

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return np.concatenate([self.first.blocks, self.second.blocks])

    def image(self, index: int) -> Image.Image:
        split = len(self.first.targets)
        return self.first.image(index) if index < split else self.second.image(index - split)

    def rgb(self, index: int, side: int) -> Pixels:
        split = len(self.first.targets)
        source, number = (self.first, index) if index < split else (self.second, index - split)
        return read_pixels(source, number, side)


@dataclass(frozen=True)
class Renamed:
    """A source whose classes have other names, or more of them."""

    source: Source
    labels: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    """The new number of each old class; empty if unchanged."""

    @cached_property
    def targets(self) -> Int[np.ndarray, " n"]:
        old = self.source.targets
        return np.array(self.numbers, dtype=old.dtype)[old] if self.numbers else old

    @property
    def names(self) -> Sequence[str]:
        return self.source.names

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return self.source.blocks

    def image(self, index: int) -> Image.Image:
        return self.source.image(index)

    def rgb(self, index: int, side: int) -> Pixels:
        return read_pixels(self.source, index, side)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """A dataset in its splits; one that does not exist is None.

    Train on `train`, choose settings on `val`, and use `test` once, at the very end.
    """

    name: str
    train: Source | None = None
    val: Source | None = None
    test: Source | None = None

    @property
    def parts(self) -> dict[str, Source]:
        """The splits that exist, by name."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {name: source for name, source in splits.items() if source is not None}

    @property
    def labels(self) -> tuple[str, ...]:
        return next(iter(self.parts.values())).labels

    def part(self, split: str) -> Source:
        """One split by its name."""
        if (part := self.parts.get(split)) is not None:
            return part
        raise VitrailError(f"{self.name} has no {split} split; it has {', '.join(self.parts)}")


def unwrap(source: Source) -> tuple[Source, Int[np.ndarray, " n"]]:
    """The source below all subsets and renamings, and the indices of the images there."""
    indices = np.arange(len(source.targets))
    while isinstance(source, (Subset, Renamed)):
        indices = source.indices[indices] if isinstance(source, Subset) else indices
        source = source.source
    return source, indices


def image_or_reason(source: Source, index: int) -> Image.Image | str:
    """The image, or why it cannot be decoded.

    A failing network or disk is raised instead: it says nothing about the image.
    """
    try:
        return source.image(index)
    except FailureError:
        raise
    except VitrailError as error:
        return str(error)


def read_pixels(source: Source, index: int, side: int = 0) -> Pixels:
    """The pixels of `Source.image`, not to be written to. With a `side`, a large image may be
    decoded at a smaller scale, as long as its short side does not become shorter than that."""
    rgb = getattr(source, "rgb", None)
    return np.asarray(source.image(index)) if rgb is None else rgb(index, side)


def pixels_or_reason(source: Source, index: int, side: int = 0) -> Pixels | str:
    """`image_or_reason` for `read_pixels`."""
    try:
        return read_pixels(source, index, side)
    except FailureError:
        raise
    except VitrailError as error:
        return str(error)


# Names.


def stable_name(name: str) -> str:
    """A file's name, the same on every system: some decompose accents, some allow invalid UTF-8."""
    if name.isascii():
        return name
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", text)


def sort_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Classes sorted by number if all are numbers, else by name."""
    unique = set(labels)
    if all(re.fullmatch("[0-9]+", label) for label in unique):
        return tuple(sorted(unique, key=lambda label: (int(label), label)))
    return tuple(sorted(unique))


def listed(names: Sequence[str], most: int = 5, quote: str = "'") -> str:
    """`'a', 'b'`, or `'a', 'b', 'c', 'd', 'e' and 12 more`."""
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(f"{quote}{name}{quote}" for name in names[:most]) + rest


def pack_strings(strings: Iterable[str]) -> UInt8[np.ndarray, " bytes"]:
    """Strings as one array that NumPy saves without pickle, each ending with a zero byte."""
    text = "".join(f"{string}\0" for string in strings)
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)


def unpack_strings(array: UInt8[np.ndarray, " bytes"]) -> list[str]:
    return array.tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]


# Splits.


def hold_out(data: Splits, *, val: float, test: float, how: SplitMethod) -> Splits:
    """The data with val and test; if one is missing, it is taken out of train."""
    if not (0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise VitrailError(
            f"data.val={val:g} and data.test={test:g} leave nothing to train on; "
            "choose fractions that sum to less than 1"
        )
    if how not in _SPLIT_METHODS:
        raise VitrailError(f"data.split={how}: expected hash or stratified")
    train = data.train
    fractions = {
        "test": test if data.test is None else 0.0,
        "val": val if data.val is None else 0.0,
    }
    if train is None or not any(fractions.values()):
        return data
    # Data that has one of them already may have been split by these very hashes: use others then.
    salt = "" if data.val is None and data.test is None else "rest/"
    hashes = hash_fractions(f"{salt}{name}" for name in train.names)
    held_out = _SPLIT_METHODS[how](hashes, train.targets, fractions["test"], fractions["val"])
    parts: dict[str, Any] = {"train": subset(train, ~(held_out["test"] | held_out["val"]))}
    for part, fraction in fractions.items():
        if fraction:
            if not held_out[part].any():
                raise _too_few(data.name, train, part, how)
            parts[part] = subset(train, held_out[part])
    return replace(data, **parts)


def _too_few(name: str, source: Source, part: str, how: SplitMethod) -> VitrailError:
    ways = ["more images of a class (three are enough for train, val and test)"]
    if how == "stratified":
        ways = ["data.split=hash", "more images", f"a larger data.{part}"]
    ways += [f"data.{part}=0 for none"]
    return VitrailError(
        f"{name} has too few images ({len(source.targets)}): the {part} split would be empty; "
        f"use {', or '.join(ways)}"
    )


def _by_hash(
    hashes: _Fractions, targets: Int[np.ndarray, " n"], test: float, val: float
) -> _HeldOut:
    """About the fractions `test` and `val` of each class, at least one image of each in test, then
    in val, and at least one left in train."""
    counts = np.bincount(targets)
    ends = (test, test + val)
    tests, both = (np.bincount(targets[hashes < end], minlength=len(counts)) for end in ends)
    # One is left for val even if `val` is 0: test must not depend on it.
    tests = np.clip(tests, int(test > 0), np.maximum(counts - 2, 1))
    return _lowest(hashes, targets, tests, np.maximum(both, tests + 1) if val else tests)


def _by_hash_alone(
    hashes: _Fractions, targets: Int[np.ndarray, " n"], test: float, val: float
) -> _HeldOut:
    return {"test": hashes < test, "val": (hashes >= test) & (hashes < test + val)}


def stratified(
    hashes: _Fractions, targets: Int[np.ndarray, " n"], test: float, val: float
) -> _HeldOut:
    """Exactly the fractions of each class, rounded, with at least one image left in train."""
    counts = np.bincount(targets)
    tests = np.round(counts * test).astype(int)
    return _lowest(hashes, targets, tests, tests + np.round(counts * val).astype(int))


_SPLIT_METHODS = {"hash": _by_hash, "stratified": stratified, "hash alone": _by_hash_alone}


def _lowest(
    hashes: _Fractions,
    targets: Int[np.ndarray, " n"],
    tests: Int[np.ndarray, " classes"],
    both: Int[np.ndarray, " classes"],
) -> _HeldOut:
    """In each class, the `tests` lowest hashes go to test and those up to `both` to val; never all
    of them."""
    counts = np.bincount(targets)
    order = np.lexsort((hashes, targets))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    spare = np.maximum(counts - 1, 0)
    is_test = rank < np.minimum(tests, spare)[targets]
    return {"test": is_test, "val": ~is_test & (rank < np.minimum(both, spare)[targets])}


def random_subset(source: Source, size: int, seed: int) -> Subset:
    """`size` images, drawn by the seed; a smaller subset is part of every larger one."""
    total = len(source.targets)
    if not 0 < size <= total:
        raise VitrailError(
            f"data.subset={size}: train has {total:,} images; choose from 1 to {total}"
        )
    hashes = hash_fractions(f"{seed}/{name}" for name in source.names)
    return Subset(source, np.sort(np.argsort(hashes, kind="stable")[:size]))


def hash_fractions(names: Iterable[str]) -> _Fractions:
    """The hash of each name, from 0 to 1: the first eight bytes of its SHA-256."""
    digests = b"".join(
        hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()[:8] for name in names
    )
    return np.frombuffer(digests, dtype=">u8") / 2.0**64


def subset(source: Source, chosen: Bool[np.ndarray, " n"]) -> Subset:
    """The chosen images, in the source's order."""
    return Subset(source, np.flatnonzero(chosen))


@cache
def imagenet_classes() -> tuple[str, ...]:
    """The 1,000 classes in the order of their WordNet numbers, as torchvision names them."""
    text = Path(__file__).with_name("imagenet.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())
