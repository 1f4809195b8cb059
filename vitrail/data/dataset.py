"""What a set of labelled pictures is, whatever it is kept in: folders, shards, arrays, a store."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image

from vitrail.errors import VitrailError


@runtime_checkable
class Source(Protocol):
    """Labelled pictures by number. Sources travel to worker processes, so they can be pickled."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes."""
        ...

    @property
    def targets(self) -> Int[np.ndarray, " n"]:
        """The class of each picture."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """What each picture is called: unique, and the same wherever the data lies
        (`daisy/100.jpg`)."""
        ...

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        """Where each picture is kept, such as the number of its shard: an order that stays within
        a few blocks reads fast. All zero where any order is as good."""
        ...

    def picture(self, index: int) -> Image.Image:
        """The decoded picture, upright, 8 bits, RGB; a `VitrailError` says why there is none."""
        ...


@dataclass(frozen=True)
class Subset:
    """Some of a source's pictures, in the order given."""

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

    def picture(self, index: int) -> Image.Image:
        return self.source.picture(int(self.indices[index]))


@dataclass(frozen=True)
class Joined:
    """Two parts of a data set as one."""

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

    def picture(self, index: int) -> Image.Image:
        split = len(self.first.targets)
        if index < split:
            return self.first.picture(index)
        return self.second.picture(index - split)


@dataclass(frozen=True)
class Renamed:
    """A source whose classes have other names, or more of them."""

    source: Source
    labels: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    """The new number of each old class; empty where they stay."""

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

    def picture(self, index: int) -> Image.Image:
        return self.source.picture(index)


@dataclass(frozen=True)
class ArraySource:
    """Pictures in memory: small sets such as digits."""

    labels: tuple[str, ...]
    targets: Int[np.ndarray, " n"]
    names: Sequence[str]
    pixels: np.ndarray
    """(n, rows, columns) or (n, rows, columns, 3), 8 bits."""

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return np.zeros(len(self.targets), dtype=np.int64)

    def picture(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index]).convert("RGB")


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set in its three parts; a part that does not exist is None.

    Learn from `train`, choose on `val`, and touch `test` once, at the very end.
    """

    name: str
    train: Source | None = None
    val: Source | None = None
    test: Source | None = None

    @property
    def parts(self) -> dict[str, Source]:
        """The parts that exist, by name."""
        every = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in every.items() if part is not None}

    @property
    def labels(self) -> tuple[str, ...]:
        return next(iter(self.parts.values())).labels

    def part(self, split: str) -> Source:
        """One part by its name, or a line that says what there is."""
        if (part := self.parts.get(split)) is not None:
            return part
        raise VitrailError(f"{self.name} has no {split} part; it has {', '.join(self.parts)}")


def stable(name: str) -> str:
    """A file's name as it is the same on every system: some take accents apart, and some let
    through bytes that are no text."""
    if name.isascii():
        return name
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", text)


def ordered(labels: Iterable[str]) -> tuple[str, ...]:
    """The order of classes: by number where all are numbers, else by name."""
    found = set(labels)
    if all(re.fullmatch("[0-9]+", label) for label in found):
        return tuple(sorted(found, key=lambda label: (int(label), label)))
    return tuple(sorted(found))


def listed(names: Sequence[str]) -> str:
    """The first few names of a list."""
    return ", ".join(f"'{name}'" for name in names[:5]) + (", …" if len(names) > 5 else "")


How = Literal["hash", "stratified", "hash alone"]
"""`hash alone` is how versions split that let all images of a small class lie in one part."""
At = Float[np.ndarray, " n"]
"""Where between 0 and 1 the names of pictures fall."""
Chosen = dict[str, Bool[np.ndarray, " n"]]
"""Which pictures go to each part that is held out."""


def hold_out(data: Data, *, val: float, test: float, how: How) -> Data:
    """The data with a val and a test part; what it does not bring is taken out of train."""
    check_fractions(val, test, how)
    train = data.train
    fractions = {
        "test": test if data.test is None else 0.0,
        "val": val if data.val is None else 0.0,
    }
    if train is None or not any(fractions.values()):
        return data
    # Data that brings one part may have been split by these very numbers: take others then.
    salt = "" if data.val is None and data.test is None else "rest/"
    at = positions(f"{salt}{name}" for name in train.names)
    chosen = WAYS[how](at, train.targets, fractions["test"], fractions["val"])
    rest = ~(chosen["test"] | chosen["val"])
    for part, pictures in chosen.items():
        if fractions[part] and not pictures.any():
            raise too_few(data.name, train, part, how)
    return replace(
        data,
        train=subset(train, rest),
        val=subset(train, chosen["val"]) if fractions["val"] else data.val,
        test=subset(train, chosen["test"]) if fractions["test"] else data.test,
    )


def by_hash(at: At, targets: Int[np.ndarray, " n"], test: float, val: float) -> Chosen:
    """Each image by itself, about `test` and `val` of each class; but a class that would have none
    in test gives the nearest, then in val, and always keeps one to learn from."""
    counts = np.bincount(targets)
    ends = (test, test + val)
    tests, both = (np.bincount(targets[at < end], minlength=len(counts)) for end in ends)
    # One is left for val whatever `val` is, on which test must not depend.
    tests = np.clip(tests, int(test > 0), np.maximum(counts - 2, 1))
    return lowest(at, targets, tests, np.maximum(both, tests + 1) if val else tests)


def by_hash_alone(at: At, targets: Int[np.ndarray, " n"], test: float, val: float) -> Chosen:
    """Each image by itself, whatever that leaves of a class."""
    return {"test": at < test, "val": (at >= test) & (at < test + val)}


def exactly(at: At, targets: Int[np.ndarray, " n"], test: float, val: float) -> Chosen:
    """Within each class the nearest whole numbers, and at least one picture left to learn from."""
    counts = np.bincount(targets)
    tests = np.round(counts * test).astype(int)
    return lowest(at, targets, tests, tests + np.round(counts * val).astype(int))


def lowest(
    at: At,
    targets: Int[np.ndarray, " n"],
    tests: Int[np.ndarray, " classes"],
    both: Int[np.ndarray, " classes"],
) -> Chosen:
    """Of each class the lowest, up to a number, are test, then up to another val; never all."""
    counts = np.bincount(targets)
    order = np.lexsort((at, targets))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    spare = np.maximum(counts - 1, 0)
    is_test = rank < np.minimum(tests, spare)[targets]
    return {"test": is_test, "val": ~is_test & (rank < np.minimum(both, spare)[targets])}


WAYS = {"hash": by_hash, "stratified": exactly, "hash alone": by_hash_alone}


def random_subset(source: Source, size: int, seed: int) -> Subset:
    """So many pictures, drawn by the seed; a smaller draw is part of every larger one."""
    there = len(source.targets)
    if not 0 < size <= there:
        raise VitrailError(
            f"data.subset={size}: train has {there:,} pictures; choose from 1 to {there}"
        )
    at = positions(f"{seed}/{name}" for name in source.names)
    return Subset(source, np.sort(np.argsort(at, kind="stable")[:size]))


def positions(names: Iterable[str]) -> At:
    """Where each name falls: the first eight bytes of its SHA-256."""
    digests = b"".join(
        hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()[:8] for name in names
    )
    return np.frombuffer(digests, dtype=">u8") / 2.0**64


def subset(source: Source, chosen: Bool[np.ndarray, " n"]) -> Subset:
    """The chosen pictures, in the source's order."""
    indices: Int[np.ndarray, " m"] = np.flatnonzero(chosen)
    return Subset(source, indices)


def check_fractions(val: float, test: float, how: str) -> None:
    """Fractions that leave something to learn from, and a way to split that exists."""
    if not (0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise VitrailError(
            f"data.val={val:g} and data.test={test:g} leave nothing to train on; "
            "choose fractions of train that sum to less than 1"
        )
    if how not in WAYS:
        raise VitrailError(f"data.split={how}: expected hash or stratified")


def too_few(name: str, source: Source, part: str, how: How) -> VitrailError:
    """A part that was asked for came out empty."""
    n = len(source.targets)
    ways = ["more images of a class (three are enough for train, val and test)"]
    if how == "stratified":
        ways = ["data.split=hash", "more images", f"a larger data.{part}"]
    ways += [f"data.{part}=0 for none"]
    return VitrailError(
        f"{name} has too few images ({n}): none falls to {part}; use {', or '.join(ways)}"
    )


def joined(strings: Iterable[str]) -> UInt8[np.ndarray, " bytes"]:
    """Each string with a zero byte behind it, which no file name can contain."""
    text = "".join(f"{string}\0" for string in strings)
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)


def separate(array: UInt8[np.ndarray, " bytes"]) -> list[str]:
    """What `joined` was given."""
    return array.tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
