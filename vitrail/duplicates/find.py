"""Images that lie in a data set twice: the same pixels, or the same scene rescaled, compressed,
brightened or cropped a little.

An image of train that comes back in test makes the accuracy on test look better than it is; the
paper removes such images from its pre-training data (section 4.1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from vitrail.data.dataset import Broken, Source, Splits, Subset
from vitrail.data.reading import Progress
from vitrail.duplicates.fingerprints import Fingerprints, fingerprints
from vitrail.duplicates.matching import EXACT, Rows, match
from vitrail.errors import VitrailError

DISTANCE = 8
"""Bits of 64 that may differ between the hashes of near duplicates."""
FARTHEST = 12
"""Beyond, the search would take hours for a million images, and find strangers."""
_COMPARED = (
    *(("train", "test"), ("train", "val"), ("val", "test")),
    *((split, split) for split in ("train", "val", "test")),
)
"""The splits of one data set two by two, then each by itself."""


@dataclass(frozen=True)
class Pair:
    """Two images that are one."""

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
    """Whether images to measure on are among those to learn from or to choose by."""
    same_labels: bool = True
    """Whether a class of the one is the class of that name in the other."""
    sources: tuple[Source, ...] = field(default=(), compare=False, repr=False)
    """Where the images of the first and of the second part are."""

    @property
    def conflicts(self) -> tuple[Pair, ...]:
        """One image in two classes."""
        return tuple(pair for pair in self.pairs if self.same_labels and len(set(pair.labels)) > 1)

    def lines(self, most: int) -> list[str]:
        """A headline and the pairs, those in two classes first."""
        if not self.pairs:
            return []
        exact = sum(pair.kind == "exact" for pair in self.pairs)
        count = f"{_counted(len(self.pairs), 'pair')}, {exact:,} of equal pixels"
        conflicts = set(self.conflicts)
        if conflicts:
            count += f", {len(self.conflicts):,} in two classes"
        if self.first == self.second:
            line = f"inside {self.first}: {count}; {_counted(len(groups(self.pairs)), 'group')}"
        else:
            images = _counted(len({pair.second for pair in self.pairs}), "image")
            line = f"{self.first} and {self.second}: {count}; {images} of {self.second}"
        lines = [("leak   " if self.leak else "twice  ") + line]
        for pair in sorted(self.pairs, key=lambda pair: pair not in conflicts)[:most]:
            kind = "equal " if pair.kind == "exact" else f"near {pair.distance}"
            note = "  (two classes)" if pair in conflicts else ""
            lines.append(f"  {kind:<8} {pair.first} · {pair.second}{note}")
        if (rest := len(self.pairs) - most) > 0:
            lines.append(f"  … and {rest:,} more")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "first": self.first,
            "second": self.second,
            "leak": self.leak,
            "pairs": [asdict(pair) for pair in self.pairs],
        }


@dataclass(frozen=True)
class Duplicates:
    """All that was found, leaks first."""

    name: str
    sections: tuple[Section, ...]
    broken: tuple[Broken, ...] = ()
    """Images that could not be compared."""

    @property
    def leaks(self) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.leak and section.pairs)

    def lines(self, most: int = 10) -> list[str]:
        """For a terminal: at most so many pairs of each section."""
        lines = [line for section in self.sections for line in section.lines(most)]
        lines = lines or [self._nothing()]
        if self.broken:
            lines.append(f"{_counted(len(self.broken), 'broken image')} left out")
        return lines

    def _nothing(self) -> str:
        others = dict.fromkeys(one.second for one in self.sections if not one.same_labels)
        if any(one.same_labels for one in self.sections) or not others:
            return f"no two images of {self.name} look alike"
        return f"no image of {self.name} comes back in {' or '.join(others)}"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, with every pair."""
        return {
            "name": self.name,
            "sections": [section.to_dict() for section in self.sections],
            "broken": [list(broken) for broken in self.broken],
        }


@dataclass(frozen=True)
class MatchOptions:
    """When two images count as one."""

    distance: int = DISTANCE
    """Bits of 64 that may differ."""
    crops: bool = True
    """Whether one may be a crop of the other, by up to a tenth of each side."""
    mirrored: bool = False
    """Whether one may be a mirror image of the other."""


_USUAL = MatchOptions()


def find(
    data: Splits,
    *,
    against: Sequence[Splits] = (),
    inside: bool = True,
    alike: MatchOptions = _USUAL,
    workers: int = 0,
    progress: Progress = None,
) -> Duplicates:
    """Duplicates between a data set and others, and `inside` it, across its parts and within them.

    Of the others, what they hold out for val and test counts, or all of one without such parts.
    Only the fingerprints of the data set and of one part of another are in memory at a time.
    """
    own = {
        name: fingerprints(part, workers=workers, progress=progress)
        for name, part in data.parts.items()
    }
    broken = [one for prints in own.values() for one in prints.broken]
    sections: list[Section] = []
    for other in against:
        held_out = {name: part for name, part in other.parts.items() if name != "train"}
        for second, part in (held_out or other.parts).items():
            theirs = fingerprints(part, workers=workers, progress=progress)
            broken += theirs.broken
            for first, prints in own.items():
                names = (first, f"{second} of {other.name}")
                leak = first == "train"
                sections.append(_section(names, prints, theirs, alike, leak, same_labels=False))
    for names in _COMPARED if inside else ():
        if own.keys() >= set(names):
            first, second = (own[name] for name in names)
            sections.append(_section(names, first, second, alike, leak=names[0] != names[1]))
    sections.sort(key=lambda section: not section.leak)
    return Duplicates(data.name, tuple(sections), tuple(broken))


def _section(
    names: tuple[str, str],
    first: Fingerprints,
    second: Fingerprints,
    alike: MatchOptions,
    leak: bool,
    same_labels: bool = True,
) -> Section:
    """The duplicates between two parts, or inside one."""
    found = tuple(pairs(first, None if second is first else second, **vars(alike)))
    return Section(*names, found, leak, same_labels, (first.source, second.source))


def pairs(a: Fingerprints, b: Fingerprints | None = None, **options: Any) -> list[Pair]:
    """The duplicates within one set or across two, the surest first; options of `MatchOptions`."""
    alike = MatchOptions(**options)
    if not 0 <= alike.distance <= FARTHEST:
        raise VitrailError(f"distance = {alike.distance}: expected 0 to {FARTHEST} of 64 bits")
    matches = match(a, b, **vars(alike))
    one = _names_and_labels(a, matches[:, 0])
    two = _names_and_labels(a if b is None else b, matches[:, 1])
    result = [
        Pair(first, second, "exact" if bits == EXACT else "near", max(bits, 0), (label, other))
        for (first, label), (second, other), bits in zip(
            one, two, matches[:, 2].tolist(), strict=True
        )
    ]
    return sorted(result, key=lambda pair: (pair.kind, pair.distance, pair.first, pair.second))


def _names_and_labels(prints: Fingerprints, rows: Rows) -> Iterator[tuple[str, str]]:
    indices = prints.indices[rows]
    names, labels = prints.source.names, prints.source.labels
    for index, target in zip(indices, prints.source.targets[indices], strict=True):
        yield names[index], labels[target]


def without(data: Splits, duplicates: Duplicates) -> tuple[Subset, tuple[str, ...]]:
    """The train part without images that come back in val or test, and the names removed."""
    train = data.part("train")
    leaked = reasons(duplicates)
    rest = [index for index, name in enumerate(train.names) if name not in leaked]
    removed = tuple(name for name in train.names if name in leaked)
    return Subset(train, np.array(rest, dtype=np.int64)), removed


def reasons(duplicates: Duplicates) -> dict[str, str]:
    """For each image of train that `without` removes, where it comes back."""
    leaks = [section for section in duplicates.leaks if section.first == "train"]
    return {
        pair.first: f"comes back in {section.second} as {pair.second}"
        for section in reversed(leaks)
        for pair in reversed(section.pairs)
    }


def groups(pairs: Sequence[Pair]) -> list[list[str]]:
    """Inside one part: the images that are all one, directly or through others."""
    leader: dict[str, str] = {}

    def lead(name: str) -> str:
        while leader.setdefault(name, name) != name:
            leader[name] = name = leader[leader[name]]
        return name

    for pair in pairs:
        one, two = sorted((lead(pair.first), lead(pair.second)))
        leader[two] = one
    members: dict[str, list[str]] = {}
    for name in sorted(leader):
        members.setdefault(lead(name), []).append(name)
    return list(members.values())


def _counted(count: int, thing: str) -> str:
    """`1 pair`, `2,000 pairs`."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
