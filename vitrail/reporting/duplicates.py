"""The page about duplicate images within a dataset, or between two."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.dataset import Source
from vitrail.duplicates.find import Duplicates, Pair, Section
from vitrail.errors import VitrailError
from vitrail.evaluation.mistakes import thumbnail
from vitrail.reporting.rendering import write_page

IDENTICAL, CLOSEST, WEAKEST = 6, 18, 18
"""Pairs to show: with identical pixels, and the best and worst matches of the others."""


ShownPair = tuple[Pair, tuple[str, str]]
"""A pair with its images as data URIs, which are empty if an image can no longer be read."""


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """The counts of a section, and some of its pairs."""

    section: Section
    n_identical: int
    n_first: int
    """Different images of the first part that have a duplicate."""
    n_second: int
    identical: list[ShownPair]
    closest: list[ShownPair]
    weakest: list[ShownPair]


def write(duplicates: Duplicates, target: Path) -> Path:
    """Writes the page with counts and images."""
    chapters = [chapter(section) for section in duplicates.sections if section.pairs]
    clean = [section for section in duplicates.sections if not section.pairs]
    return write_page(
        target, "duplicates.html", duplicates=duplicates, chapters=chapters, clean=clean
    )


def chapter(section: Section) -> Chapter:
    """The counts of a section, and some of its pairs with their images."""
    identical = [pair for pair in section.pairs if pair.kind == "exact"]
    near = [pair for pair in section.pairs if pair.kind == "near"]
    groups = (identical[:IDENTICAL], near[:CLOSEST], near[CLOSEST:][-WEAKEST:])
    pairs = [pair for group in groups for pair in group]
    first = _thumbnails(section.sources[0], (pair.first for pair in pairs))
    second = _thumbnails(section.sources[1], (pair.second for pair in pairs))

    def shown(group: Sequence[Pair]) -> list[ShownPair]:
        return [(p, (first.get(p.first, ""), second.get(p.second, ""))) for p in group]

    return Chapter(
        section=section,
        n_identical=len(identical),
        n_first=len({pair.first for pair in section.pairs}),
        n_second=len({pair.second for pair in section.pairs}),
        identical=shown(groups[0]),
        closest=shown(groups[1]),
        weakest=shown(groups[2]),
    )


def _thumbnails(source: Source, names: Iterable[str]) -> dict[str, str]:
    """The images of these names as data URIs, without those that can no longer be read."""
    uris, wanted = {}, set(names)
    for index, name in enumerate(source.names):
        if name in wanted:
            try:
                uris[name] = thumbnail(source.image(index))
            except VitrailError:
                continue
    return uris
