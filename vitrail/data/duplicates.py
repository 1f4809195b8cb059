"""Pictures that lie in a data set twice: the same pixels, or the same scene rescaled, compressed,
brightened or cropped a little.

A picture of train that comes back in test makes the accuracy on test look better than it is; the
paper removes such pictures from its pre-training data (section 4.1).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vitrail.data.fingerprints import Fingerprints, fingerprints
from vitrail.data.matching import EXACT, Rows, match
from vitrail.data.reading import Broken, Progress
from vitrail.data.source import Data, Subset
from vitrail.errors import VitrailError

DISTANCE = 8
"""Bits of 64 that may differ between the hashes of near duplicates."""
FARTHEST = 12
"""Beyond, the search would take hours for a million pictures, and find strangers."""
LEAKS = (("train", "test"), ("train", "val"), ("val", "test"))


@dataclass(frozen=True)
class Pair:
    """Two pictures that are one."""

    first: str
    second: str
    kind: Literal["exact", "near"]
    distance: int
    """Bits between their hashes; zero where the pixels are equal."""
    labels: tuple[str, str]


@dataclass(frozen=True)
class Section:
    """The duplicates between two parts, or inside one."""

    first: str
    second: str
    pairs: tuple[Pair, ...]
    leak: bool = False
    """Whether pictures to measure on are among those to learn from or to choose by."""
    same_labels: bool = True
    """Whether a class of the one is the class of that name in the other."""

    @property
    def conflicts(self) -> tuple[Pair, ...]:
        """One picture in two classes."""
        return tuple(pair for pair in self.pairs if self.same_labels and len(set(pair.labels)) > 1)

    def lines(self, most: int) -> list[str]:
        """A headline and the pairs, those in two classes first."""
        if not self.pairs:
            return []
        exact = sum(pair.kind == "exact" for pair in self.pairs)
        told = f"{counted(len(self.pairs), 'pair')}, {exact:,} of equal pixels"
        if self.conflicts:
            told += f", {len(self.conflicts):,} in two classes"
        if self.first == self.second:
            where = f"inside {self.first}: {told}; {counted(len(groups(self.pairs)), 'group')}"
        else:
            back = counted(len({pair.second for pair in self.pairs}), "picture")
            where = f"{self.first} and {self.second}: {told}; {back} of {self.second}"
        conflicts = set(self.conflicts)
        order = sorted(self.pairs, key=lambda pair: pair not in conflicts)
        shown = [pair_line(pair, pair in conflicts) for pair in order[:most]]
        rest = [f"  … and {len(order) - most:,} more"] if len(order) > most else []
        return [("leak   " if self.leak else "twice  ") + where, *shown, *rest]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "first": self.first,
            "second": self.second,
            "leak": self.leak,
            "pairs": [
                {
                    "first": pair.first,
                    "second": pair.second,
                    "kind": pair.kind,
                    "distance": pair.distance,
                    "labels": list(pair.labels),
                }
                for pair in self.pairs
            ],
        }


@dataclass(frozen=True)
class Duplicates:
    """All that was found, leaks first."""

    name: str
    sections: tuple[Section, ...]
    broken: tuple[Broken, ...] = ()
    """Pictures that could not be compared."""

    @property
    def leaks(self) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.leak and section.pairs)

    def lines(self, most: int = 10) -> list[str]:
        """For a terminal: at most so many pairs of each section."""
        found = [line for section in self.sections for line in section.lines(most)]
        missing = [f"{counted(len(self.broken), 'broken picture')} left out"] if self.broken else []
        return [*(found or [f"no two pictures of {self.name} look alike"]), *missing]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, with every pair."""
        return {
            "name": self.name,
            "sections": [section.to_dict() for section in self.sections],
            "broken": [[broken.name, broken.reason] for broken in self.broken],
        }


def find(
    data: Data,
    *,
    against: Data | None = None,
    distance: int = DISTANCE,
    crops: bool = True,
    mirrored: bool = False,
    workers: int = 0,
    progress: Progress = None,
) -> Duplicates:
    """Duplicates across and inside the parts of a data set, and between it and another.

    Crops of up to a tenth of each side count unless told otherwise; mirror images when asked.
    """
    own = look_at(data, workers, progress)
    sections: list[Section] = []
    broken = [one for prints in own.values() for one in prints.broken]
    options: dict[str, Any] = {"distance": distance, "crops": crops, "mirrored": mirrored}
    if against is not None:
        other = look_at(against, workers, progress)
        broken += [one for prints in other.values() for one in prints.broken]
        for second in reversed(other):
            for first in own:
                found = pairs(own[first], other[second], **options)
                sections.append(
                    Section(
                        first,
                        f"{second} of {against.name}",
                        tuple(found),
                        (first, second) in LEAKS,
                        same_labels=False,
                    )
                )
    for first, second in inner(own):
        found = pairs(own[first], None if first == second else own[second], **options)
        sections.append(Section(first, second, tuple(found), first != second))
    sections.sort(key=lambda section: not section.leak)
    return Duplicates(data.name, tuple(sections), tuple(broken))


def look_at(data: Data, workers: int, progress: Progress) -> dict[str, Fingerprints]:
    """The fingerprints of the parts there are."""
    return {
        name: fingerprints(part, workers=workers, progress=progress)
        for name, part in data.parts.items()
    }


def inner(parts: Iterable[str]) -> list[tuple[str, str]]:
    """The parts of one data set two by two, then each by itself."""
    there = set(parts)
    each = ((part, part) for part in ("train", "val", "test"))
    return [(first, second) for first, second in (*LEAKS, *each) if {first, second} <= there]


def pairs(
    a: Fingerprints,
    b: Fingerprints | None = None,
    *,
    distance: int = DISTANCE,
    crops: bool = True,
    mirrored: bool = False,
) -> list[Pair]:
    """The duplicates within one set or across two, the surest first."""
    if not 0 <= distance <= FARTHEST:
        raise VitrailError(f"distance = {distance}: expected 0 to {FARTHEST} of 64 bits")
    found = match(a, b, distance=distance, crops=crops, mirrored=mirrored)
    one = told(a, found[:, 0])
    two = told(a if b is None else b, found[:, 1])
    result = [
        Pair(first, second, "exact" if bits == EXACT else "near", max(bits, 0), (label, other))
        for (first, label), (second, other), bits in zip(
            one, two, found[:, 2].tolist(), strict=True
        )
    ]
    return sorted(result, key=lambda pair: (pair.kind, pair.distance, pair.first, pair.second))


def told(prints: Fingerprints, rows: Rows) -> Iterator[tuple[str, str]]:
    """The names of some pictures, and of their classes."""
    indices = prints.indices[rows]
    names, labels = prints.source.names, prints.source.labels
    for index, target in zip(indices, prints.source.targets[indices], strict=True):
        yield names[index], labels[target]


def without(data: Data, duplicates: Duplicates) -> tuple[Subset, tuple[str, ...]]:
    """The train part without pictures that come back in val or test, and the names removed."""
    train = data.part("train")
    leaks = [section for section in duplicates.leaks if section.first == "train"]
    twice = {pair.first for section in leaks for pair in section.pairs}
    names = train.names
    kept = [index for index, name in enumerate(names) if name not in twice]
    removed = tuple(name for name in names if name in twice)
    return Subset(train, np.array(kept, dtype=np.int64)), removed


def groups(pairs: Sequence[Pair]) -> list[list[str]]:
    """Inside one part: the pictures that are all one, directly or through others."""
    leader: dict[str, str] = {}

    def lead(name: str) -> str:
        while leader.setdefault(name, name) != name:
            leader[name] = name = leader[leader[name]]
        return name

    for pair in pairs:
        one, two = sorted((lead(pair.first), lead(pair.second)))
        leader[two] = one
    found: dict[str, list[str]] = {}
    for name in sorted(leader):
        found.setdefault(lead(name), []).append(name)
    return list(found.values())


def pair_line(pair: Pair, conflict: bool) -> str:
    """`near 3 bits   daisy/1.jpg · daisy/7.jpg`."""
    kind = "equal " if pair.kind == "exact" else f"near {pair.distance}"
    return f"  {kind:<8} {pair.first} · {pair.second}" + ("  (two classes)" if conflict else "")


def counted(count: int, thing: str) -> str:
    """`1 pair`, `2,000 pairs`."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
