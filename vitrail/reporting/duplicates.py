"""The page about images that occur twice in a data set, or also in another."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.dataset import Source
from vitrail.duplicates.find import Duplicates, Pair, Section
from vitrail.errors import VitrailError
from vitrail.evaluation.mistakes import thumbnail
from vitrail.reporting.rendering import write_page

EQUAL, NEAREST, FARTHEST = 6, 18, 18
"""Pairs that are shown: of equal pixels, the surest others, and the least sure."""


@dataclass(frozen=True, kw_only=True)
class ShownPair:
    """A pair with its images."""

    pair: Pair
    images: tuple[str, str]
    """Data URIs; empty where an image can no longer be read."""


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """What the page says of two parts."""

    section: Section
    equal: int
    firsts: int
    """Different images of the first part that have a duplicate."""
    seconds: int
    equals: list[ShownPair]
    nearest: list[ShownPair]
    farthest: list[ShownPair]


def write(duplicates: Duplicates, target: Path) -> Path:
    """Write the page with counts and images."""
    chapters = [chapter(section) for section in duplicates.sections if section.pairs]
    clean = [section for section in duplicates.sections if not section.pairs]
    return write_page(target, "duplicates.html", found=duplicates, chapters=chapters, clean=clean)


def chapter(section: Section) -> Chapter:
    """The counts of a section, and some of its pairs with their images."""
    equal = [pair for pair in section.pairs if pair.kind == "exact"]
    near = [pair for pair in section.pairs if pair.kind == "near"]
    groups = (equal[:EQUAL], near[:NEAREST], near[NEAREST:][-FARTHEST:])
    wanted = [pair for group in groups for pair in group]
    first = _thumbnails(section.sources[0], {pair.first for pair in wanted})
    second = _thumbnails(section.sources[1], {pair.second for pair in wanted})

    def shown(pairs: Sequence[Pair]) -> list[ShownPair]:
        return [
            ShownPair(pair=pair, images=(first.get(pair.first, ""), second.get(pair.second, "")))
            for pair in pairs
        ]

    return Chapter(
        section=section,
        equal=len(equal),
        firsts=len({pair.first for pair in section.pairs}),
        seconds=len({pair.second for pair in section.pairs}),
        equals=shown(groups[0]),
        nearest=shown(groups[1]),
        farthest=shown(groups[2]),
    )


def _thumbnails(source: Source, wanted: set[str]) -> dict[str, str]:
    """The images of these names as data URIs."""
    uris = {}
    for place, name in enumerate(source.names):
        if name in wanted:
            try:
                uris[name] = thumbnail(source.image(place))
            except VitrailError:  # gone since it was compared
                continue
    return uris
