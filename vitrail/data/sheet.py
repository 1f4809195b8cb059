"""Many pictures on one sheet, to see at a glance what a data set or a batch holds."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitrail.data.source import Source
from vitrail.errors import VitrailError

PAPER, INK, FRAME = (255, 255, 255), (68, 68, 68), (236, 236, 236)
Resampling = Image.Resampling


def sheet(
    source: Source, *, columns: int = 8, rows: int = 8, side: int = 128, seed: int = 0
) -> Image.Image:
    """Pictures drawn evenly from the classes, class by class, with the names of their classes."""
    chosen = drawn(source, columns * rows, seed)
    if not chosen:
        raise VitrailError("there are no pictures to put on a sheet")
    tiles, captions = [], []
    for index in chosen:
        try:
            tiles.append(source.picture(index))
        except VitrailError:
            tiles.append(broken_tile(source.names[index], side))
        captions.append(source.labels[source.targets[index]])
    return grid(tiles, columns=columns, side=side, captions=captions)


def drawn(source: Source, count: int, seed: int) -> list[int]:
    """So many pictures, as equally many of each class as there are, in the order of the classes."""
    generator = np.random.default_rng(seed)
    targets = source.targets
    shuffled = generator.permutation(len(targets))
    by_class = shuffled[np.argsort(targets[shuffled], kind="stable")]
    sizes = np.bincount(targets, minlength=len(source.labels))
    turn = np.arange(len(targets)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # One picture of every class, then a second of each, and so on; the last round is a lottery.
    order = np.lexsort((generator.random(len(targets)), turn))
    return by_class[np.sort(order[:count])].tolist()


def grid(
    images: Sequence[Image.Image], *, columns: int, side: int, captions: Sequence[str] | None = None
) -> Image.Image:
    """Pictures in rows, each whole inside a square, with a line of text below."""
    if captions is not None and len(captions) != len(images):
        raise VitrailError(f"{len(images)} pictures, but {len(captions)} captions")
    columns = max(1, min(columns, len(images)))
    gap, text = max(4, side // 16), max(9, side // 11)
    font = letters(text)
    line = 0 if captions is None else round(1.6 * text)
    across, down = side + gap, side + line + gap
    paper = Image.new(
        "RGB", (gap + columns * across, gap + -(-len(images) // columns) * down), PAPER
    )
    pen = ImageDraw.Draw(paper)
    for number, image in enumerate(images):
        x, y = gap + number % columns * across, gap + number // columns * down
        paper.paste(tile(image, side), (x, y))
        if captions is not None:
            caption = shortened(captions[number], font, side)
            pen.text((x + side / 2, y + side + line / 2), caption, INK, font, anchor="mm")
    return paper


def tile(image: Image.Image, side: int) -> Image.Image:
    """A picture as large as fits into a square; tiny ones keep their pixels sharp."""
    enlarged = side >= 4 * max(image.size)
    method = Resampling.NEAREST if enlarged else Resampling.LANCZOS
    return ImageOps.pad(image.convert("RGB"), (side, side), method, color=FRAME)


def broken_tile(name: str, side: int) -> Image.Image:
    """What stands for a picture that cannot be read: its name on grey."""
    paper = Image.new("RGB", (side, side), (200, 200, 200))
    pen, font = ImageDraw.Draw(paper), letters(max(8, side // 12))
    for line, word in enumerate(("broken", name.rpartition("/")[2])):
        at = (side / 2, side * (0.42 + 0.16 * line))
        pen.text(at, shortened(word, font, side - 8), INK, font, anchor="mm")
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
