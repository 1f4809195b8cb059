"""Duplicate images in a dataset: equal pixels, or the same scene resized, compressed, brightened or
slightly cropped.

Training images with a duplicate in the test split inflate test accuracy; the paper removes such
images from its pre-training data (section 4.1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from vitrail.console import Advance, plural
from vitrail.data.dataset import Broken, Source, Splits, Subset
from vitrail.duplicates.fingerprints import Fingerprints, fingerprints
from vitrail.duplicates.matching import EXACT, Rows, match

_COMPARED = (
    *(("train", "test"), ("train", "val"), ("val", "test")),
    *((split, split) for split in ("train", "val", "test")),
)
"""The pairs of splits of one dataset, then each split by itself."""


@dataclass(frozen=True)
class Pair:
    """Two images that are duplicates."""

    first: str
    second: str
    kind: Literal["exact", "near"]
    distance: int
    """Number of bits in which their hashes differ; zero if the pixels are equal."""
    labels: tuple[str, str]


@dataclass(frozen=True)
class Section:
    """The duplicates between two splits, or within one."""

    first: str
    second: str
    pairs: tuple[Pair, ...]
    leak: bool = False
    """Whether the second split is for evaluation and the first for training or tuning."""
    same_labels: bool = True
    """Whether both splits have the same classes."""
    sources: tuple[Source, ...] = field(default=(), compare=False, repr=False)
    """The two splits."""

    @property
    def conflicts(self) -> tuple[Pair, ...]:
        """Duplicates in different classes."""
        return tuple(pair for pair in self.pairs if self.same_labels and len(set(pair.labels)) > 1)

    def lines(self, most: int) -> list[str]:
        """A summary and at most so many pairs, those in two classes first."""
        if not self.pairs:
            return []
        exact = sum(pair.kind == "exact" for pair in self.pairs)
        count = f"{plural(len(self.pairs), 'pair')}, {exact:,} identical"
        conflicts = set(self.conflicts)
        if conflicts:
            count += f", {len(self.conflicts):,} in two classes"
        if self.first == self.second:
            line = f"within {self.first}: {count}; {plural(len(groups(self.pairs)), 'group')}"
        else:
            images = plural(len({pair.second for pair in self.pairs}), "image")
            line = f"{self.first} and {self.second}: {count}; {images} of {self.second}"
        lines = [f"{'leak' if self.leak else 'duplicates':<10}  {line}"]
        for pair in sorted(self.pairs, key=lambda pair: pair not in conflicts)[:most]:
            kind = "identical" if pair.kind == "exact" else f"near {pair.distance}"
            note = "  (two classes)" if pair in conflicts else ""
            lines.append(f"  {kind:<10}{pair.first} · {pair.second}{note}")
        if (rest := len(self.pairs) - most) > 0:
            lines.append(f"  … and {rest:,} more")
        return lines


@dataclass(frozen=True)
class Duplicates:
    """All duplicates found, leaks first."""

    name: str
    sections: tuple[Section, ...]
    broken: tuple[Broken, ...] = ()
    """Images that could not be compared."""

    @property
    def leaks(self) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.leak and section.pairs)

    def without_leaks(self, data: Splits) -> tuple[Subset, dict[str, str]]:
        """Train without images that have a duplicate in held-out data, and why each is removed."""
        removed = {
            pair.first: f"duplicate of {pair.second} in {section.second}"
            for section in reversed(self.leaks)
            for pair in reversed(section.pairs)
            if section.first == "train"
        }
        train = data.part("train")
        rest = [index for index, name in enumerate(train.names) if name not in removed]
        return Subset(train, np.array(rest, dtype=np.int64)), removed

    def lines(self, most: int = 10) -> list[str]:
        """Lines for the terminal, with at most so many pairs per section."""
        lines = [line for section in self.sections for line in section.lines(most)]
        if not lines:
            others = dict.fromkeys(one.second for one in self.sections if not one.same_labels)
            inside = any(one.same_labels for one in self.sections) or not others
            where = "" if inside else f" in {' or '.join(others)}"
            lines = [f"no image of {self.name} has a duplicate{where}"]
        if self.broken:
            lines.append(f"{plural(len(self.broken), 'broken image')} left out")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with every pair."""
        return {
            "name": self.name,
            "sections": [
                {
                    "first": section.first,
                    "second": section.second,
                    "leak": section.leak,
                    "pairs": [asdict(pair) for pair in section.pairs],
                }
                for section in self.sections
            ],
            "broken": [list(broken) for broken in self.broken],
        }


def find(
    data: Splits,
    *,
    against: Sequence[Splits] = (),
    inside: bool = True,
    mirrored: bool = False,
    workers: int = 0,
    progress: Advance | None = None,
) -> Duplicates:
    """Duplicates between a dataset and others, and `inside` it, across and within its splits.

    With `mirrored`, mirror images are duplicates as well. Of the others, only val and test count,
    or all of one that has neither. Only the fingerprints of the dataset and of one split of another
    are in memory at a time.
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
                sections.append(_section(names, prints, theirs, mirrored, leak, same_labels=False))
    for names in _COMPARED if inside else ():
        if own.keys() >= set(names):
            first, second = (own[name] for name in names)
            sections.append(_section(names, first, second, mirrored, leak=names[0] != names[1]))
    sections.sort(key=lambda section: not section.leak)
    return Duplicates(data.name, tuple(sections), tuple(broken))


def _section(
    names: tuple[str, str],
    first: Fingerprints,
    second: Fingerprints,
    mirrored: bool,
    leak: bool,
    same_labels: bool = True,
) -> Section:
    duplicates = pairs(first, None if second is first else second, mirrored=mirrored)
    return Section(*names, tuple(duplicates), leak, same_labels, (first.source, second.source))


def pairs(a: Fingerprints, b: Fingerprints | None = None, *, mirrored: bool = False) -> list[Pair]:
    """The duplicates within one set or across two, the most certain first."""
    matches = match(a, b, mirrored=mirrored)
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


def groups(pairs: Sequence[Pair]) -> list[list[str]]:
    """The sets of images that are duplicates of each other, directly or through others."""
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
