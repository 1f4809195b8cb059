"""Contact sheets: many images on one, with captions."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitrail.data.dataset import Source
from vitrail.errors import VitrailError

_BACKGROUND, _INK, _FRAME = (255, 255, 255), (68, 68, 68), (236, 236, 236)


def contact_sheet(
    source: Source, *, columns: int = 8, rows: int = 8, side: int = 128, seed: int = 0
) -> Image.Image:
    """A contact sheet: images drawn evenly from the classes, in class order, with captions."""
    chosen = sample_evenly(source, columns * rows, seed)
    if not chosen:
        raise VitrailError("there are no images for a contact sheet")
    tiles, captions = [], []
    for index in chosen:
        try:
            tiles.append(source.image(index))
        except VitrailError:
            tiles.append(_broken_tile(source.names[index], side))
        captions.append(source.labels[source.targets[index]])
    return grid(tiles, columns=columns, side=side, captions=captions)


def sample_evenly(source: Source, count: int, seed: int) -> list[int]:
    """Indices of images drawn as evenly from the classes as possible, in class order."""
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
    """Images in rows, each padded to a square, with an optional caption below."""
    if captions is not None and len(captions) != len(images):
        raise VitrailError(f"{len(images)} images, but {len(captions)} captions")
    columns = max(1, min(columns, len(images)))
    gap, text = max(4, side // 16), max(9, side // 11)
    font = load_font(text)
    line = 0 if captions is None else round(1.6 * text)
    across, down = side + gap, side + line + gap
    sheet = Image.new(
        "RGB", (gap + columns * across, gap + -(-len(images) // columns) * down), _BACKGROUND
    )
    pen = ImageDraw.Draw(sheet)
    for number, image in enumerate(images):
        x, y = gap + number % columns * across, gap + number // columns * down
        sheet.paste(_tile(image, side), (x, y))
        if captions is not None:
            caption = shorten(captions[number], font, side)
            pen.text((x + side / 2, y + side + line / 2), caption, _INK, font, anchor="mm")
    return sheet


def _tile(image: Image.Image, side: int) -> Image.Image:
    """An image padded to a square; tiny ones keep their pixels sharp."""
    enlarged = side >= 4 * max(image.size)
    method = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
    return ImageOps.pad(image.convert("RGB"), (side, side), method, color=_FRAME)


def _broken_tile(name: str, side: int) -> Image.Image:
    """A gray tile with the name of an image that cannot be decoded."""
    sheet = Image.new("RGB", (side, side), (200, 200, 200))
    pen, font = ImageDraw.Draw(sheet), load_font(max(8, side // 12))
    for line, word in enumerate(("broken", name.rpartition("/")[2])):
        at = (side / 2, side * (0.42 + 0.16 * line))
        pen.text(at, shorten(word, font, side - 8), _INK, font, anchor="mm")
    return sheet


def load_font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans from matplotlib: Pillow's own font lacks even ö."""
    from matplotlib import get_data_path

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)


def shorten(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text on one line, cut to the width."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
