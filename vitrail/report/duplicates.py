"""The page about pictures that lie in a data set twice, or come back in another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.dataset import Source
from vitrail.duplicates.find import Duplicates, Pair, Section
from vitrail.errors import VitrailError
from vitrail.evaluation.mistakes import thumbnail
from vitrail.report.rendering import put, render

EQUAL, NEAREST, FARTHEST = 6, 18, 18
"""Pairs that are shown as pictures: of equal pixels, the surest others, and the least sure."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A pair with its pictures."""

    pair: Pair
    pictures: tuple[str, str]
    """Data URIs; empty where a picture can no longer be read."""


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """What the page says of two parts."""

    section: Section
    equal: int
    firsts: int
    """Different pictures of the first part that have a duplicate."""
    seconds: int
    equals: list[Shown]
    nearest: list[Shown]
    farthest: list[Shown]


def write(duplicates: Duplicates, target: Path) -> Path:
    """Write the page with counts and pictures, and say where it is."""
    chapters = [chapter(section) for section in duplicates.sections if section.pairs]
    clean = [section for section in duplicates.sections if not section.pairs]
    page = render("duplicates.html", found=duplicates, chapters=chapters, clean=clean)
    return put(page, target)


def chapter(section: Section) -> Chapter:
    """The counts of a section, and some of its pairs as pictures."""
    equal = [pair for pair in section.pairs if pair.kind == "exact"]
    near = [pair for pair in section.pairs if pair.kind == "near"]
    chosen = (equal[:EQUAL], near[:NEAREST], near[NEAREST:][-FARTHEST:])
    wanted = [pair for some in chosen for pair in some]
    first = pictures(section.sources[0], {pair.first for pair in wanted})
    second = pictures(section.sources[1], {pair.second for pair in wanted})

    def shown(some: Sequence[Pair]) -> list[Shown]:
        return [
            Shown(pair=pair, pictures=(first.get(pair.first, ""), second.get(pair.second, "")))
            for pair in some
        ]

    return Chapter(
        section=section,
        equal=len(equal),
        firsts=len({pair.first for pair in section.pairs}),
        seconds=len({pair.second for pair in section.pairs}),
        equals=shown(chosen[0]),
        nearest=shown(chosen[1]),
        farthest=shown(chosen[2]),
    )


def pictures(source: Source, names: Iterable[str]) -> dict[str, str]:
    """Small copies of the pictures of these names, as data URIs."""
    wanted = set(names)
    found = {}
    for place, name in enumerate(source.names):
        if name in wanted:
            try:
                found[name] = thumbnail(source.picture(place))
            except VitrailError:  # gone since it was compared
                continue
    return found
