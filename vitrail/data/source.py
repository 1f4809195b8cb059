"""What a set of labelled pictures is, whatever it is kept in: folders, shards, arrays, a store."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
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
