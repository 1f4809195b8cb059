"""What a data set holds, and what is wrong with it: counts, sizes, broken images, warnings, and
contact sheets to look at."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitrail.console import echo, table
from vitrail.data.dataset import Broken, Source, Splits
from vitrail.data.reading import Progress, read_all
from vitrail.errors import VitrailError

_FEW = 10
"""Images that a class needs for a model to learn it at all."""
_UNEVEN = 10.0
"""Between the largest and the smallest class."""
_SMALL = 32
"""Pixels of the shorter side."""
_ABSENT = {
    "train": "nothing to learn from",
    "val": "nothing to choose settings on",
    "test": "nothing to measure the final model on",
}
_BAR = 24


@dataclass(frozen=True, kw_only=True)
class SplitStats:
    """One part of a data set; what only decoding shows is empty until every image is read."""

    name: str
    counts: dict[str, int]
    """Images of each class, broken ones included."""
    sizes: Int[np.ndarray, "n 2"] | None = None
    """Width and height of each readable image."""
    broken: tuple[Broken, ...] = ()
    small: tuple[str, ...] = ()
    """Images with fewer than SMALL pixels on a side."""
    blank: tuple[str, ...] = ()
    """Images of a single color."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def spread(self) -> dict[str, dict[str, int | float]] | None:
        """Smallest, middle and largest width and height."""
        if self.sizes is None or not len(self.sizes):
            return None
        return {
            side: {
                "min": int(values.min()),
                "median": float(np.median(values)),
                "max": int(values.max()),
            }
            for side, values in zip(("width", "height"), self.sizes.T, strict=True)
        }

    def to_dict(self) -> dict[str, Any]:
        """As plain values; what only decoding shows is left out where nothing was read."""
        counts = {"n": self.total, "classes": self.counts}
        if self.sizes is None:
            return counts
        return counts | {
            "size": self.spread(),
            "broken": [list(broken) for broken in self.broken],
            "small": list(self.small),
            "blank": list(self.blank),
        }


@dataclass(frozen=True)
class Inspection:
    """A data set, described."""

    name: str
    labels: tuple[str, ...]
    parts: tuple[SplitStats, ...]

    @property
    def imbalance(self) -> float:
        """How many times as many images the largest class has as the smallest that has any."""
        counts = [count for count in self.parts[0].counts.values() if count]
        return max(counts, default=1) / min(counts, default=1)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "name": self.name,
            "labels": list(self.labels),
            "parts": {part.name: part.to_dict() for part in self.parts},
            "imbalance": self.imbalance,
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        """What to mend, or to keep in mind."""
        there = {part.name for part in self.parts}
        lines = [f"no {name} part: {why}" for name, why in _ABSENT.items() if name not in there]
        lines += absent_classes(self.parts)
        first = self.parts[0]  # the split whose balance matters
        few = [f"{label} ({n})" for label, n in first.counts.items() if 0 < n < _FEW]
        if few:
            lines.append(f"fewer than {_FEW} images in {first.name} of {_some(few)}")
        if self.imbalance > _UNEVEN:
            lines.append(
                f"the largest class has {self.imbalance:.0f} times as many images as the "
                "smallest; class weights or balanced sampling help"
            )
        decoded = {
            "broken": "images that cannot be read, which training skips",
            "small": f"images with fewer than {_SMALL} pixels on a side",
            "blank": "images of a single color",
        }
        counts = {x: sum(len(getattr(part, x)) for part in self.parts) for x in decoded}
        return lines + [f"{decoded[x]}: {count:,}" for x, count in counts.items() if count]

    def rows(self, most: int = 30) -> tuple[list[str], list[list[str]]]:
        """A table of the classes; of the largest and the smallest ones where there are many."""
        names = [part.name for part in self.parts]
        totals = {
            label: sum(part.counts.get(label, 0) for part in self.parts) for label in self.labels
        }
        largest = max(1, *totals.values())

        def row(label: str) -> list[str]:
            counts = [f"{part.counts.get(label, 0):,}" for part in self.parts]
            return [label, *counts, "█" * round(_BAR * totals[label] / largest)]

        shown = [row(label) for label in self.labels]
        if len(shown) > most:
            by_size = sorted(self.labels, key=lambda label: -totals[label])
            gap = ["…", *("" for _ in names), f"{len(shown) - most:,} more"]
            half = most // 2
            shown = [*map(row, by_size[:half]), gap, *map(row, by_size[half - most :])]
        return ["class", *names, ""], shown

    def lines(self, most: int = 10) -> list[str]:
        """Sizes, broken images by name, and warnings."""
        lines = []
        for part in self.parts:
            if spread := part.spread():
                sides = " · ".join(
                    f"{side} {at['min']:,} to {at['max']:,}, median {at['median']:,.0f}"
                    for side, at in spread.items()
                )
                lines.append(f"{part.name:<8} {sides}")
        broken = [(part.name, *one) for part in self.parts for one in part.broken]
        for part, name, reason in broken[:most]:
            line = reason if name in reason else f"{name}: {reason}"
            lines.append(f"broken   {part}: {line}")
        if len(broken) > most:
            lines.append(f"broken   … and {len(broken) - most:,} more; --json lists all")
        return lines + [f"warning  {warning}" for warning in self.warnings()]


def describe(data: Splits) -> Inspection:
    """Classes and counts, at once: nothing is decoded."""
    parts = []
    for name, source in data.parts.items():
        counts = np.bincount(source.targets, minlength=len(source.labels)).tolist()
        by_label = dict.fromkeys(data.labels, 0) | dict(zip(source.labels, counts, strict=True))
        parts.append(SplitStats(name=name, counts=by_label))
    return Inspection(data.name, data.labels, tuple(parts))


def check(data: Splits, *, workers: int = 0, progress: Progress = None) -> Inspection:
    """The same after reading every image of every part."""
    described = describe(data)
    parts = [_read_part(part, data.part(part.name), workers, progress) for part in described.parts]
    return replace(described, parts=tuple(parts))


def absent_classes(parts: Sequence[SplitStats]) -> list[str]:
    """A line for each part that lacks classes."""
    return [
        f"{part.name} has no images of {_some(labels)}; add some, or try data.split=stratified"
        for part in parts
        if (labels := [label for label, count in part.counts.items() if not count])
    ]


def _read_part(part: SplitStats, source: Source, workers: int, progress: Progress) -> SplitStats:
    """A part with what decoding shows."""
    sizes, broken = np.zeros((len(source.targets), 2), dtype=np.int32), {}
    blank = np.zeros(len(source.targets), dtype=bool)
    for index, seen in read_all(source, _measure, workers=workers, progress=progress):
        if isinstance(seen, Broken):
            broken[index] = seen
        else:
            *sizes[index], blank[index] = seen
    readable = sizes[:, 0] > 0
    small = readable & (sizes.min(1) < _SMALL)
    names = source.names
    return replace(
        part,
        sizes=sizes[readable],
        broken=tuple(broken[index] for index in sorted(broken)),
        small=tuple(names[index] for index in np.flatnonzero(small).tolist()),
        blank=tuple(names[index] for index in np.flatnonzero(blank).tolist()),
    )


def _measure(image: Image.Image) -> tuple[int, int, bool]:
    """Width, height, and whether it shows nothing at all."""
    return image.width, image.height, image.getcolors(1) is not None


def show(inspection: Inspection) -> None:
    """All of it on the terminal."""
    counts = " · ".join(f"{part.total:,} {part.name}" for part in inspection.parts)
    echo(f"{inspection.name}  {counts} · {len(inspection.labels):,} classes\n")
    table(*inspection.rows())
    if lines := inspection.lines():
        echo("\n" + "\n".join(lines))


def _some(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c` or `a, b, c, d, e and 12 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


# Contact sheets: many images at a glance.

_PAPER, _INK, _FRAME = (255, 255, 255), (68, 68, 68), (236, 236, 236)


def sheet(
    source: Source, *, columns: int = 8, rows: int = 8, side: int = 128, seed: int = 0
) -> Image.Image:
    """Images drawn evenly from the classes, class by class, with the names of their classes."""
    chosen = drawn(source, columns * rows, seed)
    if not chosen:
        raise VitrailError("there are no images to put on a sheet")
    tiles, captions = [], []
    for index in chosen:
        try:
            tiles.append(source.image(index))
        except VitrailError:
            tiles.append(_broken_tile(source.names[index], side))
        captions.append(source.labels[source.targets[index]])
    return grid(tiles, columns=columns, side=side, captions=captions)


def drawn(source: Source, count: int, seed: int) -> list[int]:
    """So many images, as equally many of each class as there are, in the order of the classes."""
    generator = np.random.default_rng(seed)
    targets = source.targets
    shuffled = generator.permutation(len(targets))
    by_class = shuffled[np.argsort(targets[shuffled], kind="stable")]
    sizes = np.bincount(targets, minlength=len(source.labels))
    turn = np.arange(len(targets)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # One image of every class, then a second of each, and so on; the last round is a lottery.
    order = np.lexsort((generator.random(len(targets)), turn))
    return by_class[np.sort(order[:count])].tolist()


def grid(
    images: Sequence[Image.Image], *, columns: int, side: int, captions: Sequence[str] | None = None
) -> Image.Image:
    """Images in rows, each whole inside a square, with a line of text below."""
    if captions is not None and len(captions) != len(images):
        raise VitrailError(f"{len(images)} images, but {len(captions)} captions")
    columns = max(1, min(columns, len(images)))
    gap, text = max(4, side // 16), max(9, side // 11)
    font = letters(text)
    line = 0 if captions is None else round(1.6 * text)
    across, down = side + gap, side + line + gap
    paper = Image.new(
        "RGB", (gap + columns * across, gap + -(-len(images) // columns) * down), _PAPER
    )
    pen = ImageDraw.Draw(paper)
    for number, image in enumerate(images):
        x, y = gap + number % columns * across, gap + number // columns * down
        paper.paste(_tile(image, side), (x, y))
        if captions is not None:
            caption = shortened(captions[number], font, side)
            pen.text((x + side / 2, y + side + line / 2), caption, _INK, font, anchor="mm")
    return paper


def _tile(image: Image.Image, side: int) -> Image.Image:
    """An image as large as fits into a square; tiny ones keep their pixels sharp."""
    enlarged = side >= 4 * max(image.size)
    method = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
    return ImageOps.pad(image.convert("RGB"), (side, side), method, color=_FRAME)


def _broken_tile(name: str, side: int) -> Image.Image:
    """What stands for an image that cannot be read: its name on gray."""
    paper = Image.new("RGB", (side, side), (200, 200, 200))
    pen, font = ImageDraw.Draw(paper), letters(max(8, side // 12))
    for line, word in enumerate(("broken", name.rpartition("/")[2])):
        at = (side / 2, side * (0.42 + 0.16 * line))
        pen.text(at, shortened(word, font, side - 8), _INK, font, anchor="mm")
    return paper


def letters(size: int) -> ImageFont.FreeTypeFont:
    """The font of matplotlib: that of Pillow has not even an ö."""
    from matplotlib import get_data_path

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)


def shortened(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """As much of a line as fits, on one line."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
