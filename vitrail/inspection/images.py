"""Model inputs, maps and filters as images, and images laid out on a page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sheets import load_font, shorten
from vitrail.inspection.embeddings import Filters

_WHITE, _BLACK, _GRAY = (255, 255, 255), (28, 28, 30), (105, 105, 112)
_MIN_SIDE = 224
"""Images with a shorter side are enlarged by a whole factor, with sharp pixels."""
_CLIP_QUANTILE = 0.97
_Resampling = Image.Resampling


@dataclass(frozen=True)
class Panel:
    """An image with a caption above it."""

    image: Image.Image
    caption: str


def denormalize(pixels: Float[Tensor, "c y x"], preprocess: Preprocessing) -> Image.Image:
    """The model's input as an image."""
    mean, std = np.array(preprocess.mean), np.array(preprocess.std)
    values = pixels.float().cpu().numpy().transpose(1, 2, 0) * std + mean
    array = _to_bytes(values)
    image = Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0]).convert("RGB")
    factor = -(-_MIN_SIDE // min(image.size))
    return image.resize((factor * image.width, factor * image.height), _Resampling.NEAREST)


def overlay(image: Image.Image, values: Float[Tensor, "y x"], patch: float) -> Image.Image:
    """The image, visible where the map is high and black where it is low.

    As the authors do it: divided by the maximum, LANCZOS to the size of the image, a Gaussian blur
    of one patch, stretched from 0 to 1, and used as opacity.
    """
    mask = Image.fromarray(_scaled(values)).resize(image.size, _Resampling.LANCZOS)
    blurred = np.asarray(mask.filter(ImageFilter.GaussianBlur(patch)), dtype=np.float32)
    opacity = _to_bytes((blurred - blurred.min()) / max(float(np.ptp(blurred)), 1.0))
    return Image.composite(image, Image.new("RGB", image.size), Image.fromarray(opacity))


def clip_outliers(values: Float[Tensor, "y x"]) -> Float[Tensor, "y x"]:
    """A map with its few highest patches clipped.

    Trained models send unused attention to a few patches without content, often in a corner, and
    next to those nothing else would be visible.
    """
    return values.clamp(max=float(values.flatten().double().quantile(_CLIP_QUANTILE)))


def heatmap(values: Float[Tensor, "y x"], size: tuple[int, int]) -> Image.Image:
    """A map with one square per patch, black for zero."""
    from matplotlib import colormaps

    colors = colormaps["magma"](_scaled(clip_outliers(values)), bytes=True)[:, :, :3]
    return Image.fromarray(np.ascontiguousarray(colors)).resize(size, _Resampling.NEAREST)


def patch_colors(colors: Float[Tensor, "y x 3"], size: tuple[int, int]) -> Image.Image:
    """One square per patch."""
    return Image.fromarray(_to_bytes(colors.numpy())).resize(size, _Resampling.NEAREST)


def filter_grid(
    filters: Filters, *, columns: int = 7, side: int = 100, gap: int = 10
) -> Image.Image:
    """The components, each scaled symmetrically around gray, row by row from the strongest."""
    tiles = []
    for component in filters.components:
        values = component.numpy().transpose(1, 2, 0)
        if values.shape[2] != 3:  # not RGB
            values = values.mean(2, keepdims=True).repeat(3, 2)
        largest = max(float(np.abs(values).max()), 1e-12)
        array = ((values / largest + 1) * 127.5).round().astype(np.uint8)
        tiles.append(Image.fromarray(array).resize((side, side), _Resampling.NEAREST))
    lines = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    return column([row(line, gap) for line in lines], gap)


def _scaled(values: Float[Tensor, "y x"]) -> np.ndarray:
    """A map divided by its maximum, as bytes."""
    array = values.double().numpy()
    return _to_bytes(array / max(float(array.max()), 1e-30))


def _to_bytes(values: np.ndarray) -> np.ndarray:
    return (values.clip(0, 1) * 255).round().astype(np.uint8)


def row(images: Sequence[Image.Image], gap: int) -> Image.Image:
    """Images side by side, aligned at the top."""
    width = sum(image.width + gap for image in images) - gap
    canvas = Image.new("RGB", (width, max(image.height for image in images)), _WHITE)
    x = 0
    for image in images:
        canvas.paste(image, (x, 0))
        x += image.width + gap
    return canvas


def column(images: Sequence[Image.Image], gap: int) -> Image.Image:
    """Images below each other, aligned at the left."""
    height = sum(image.height + gap for image in images) - gap
    canvas = Image.new("RGB", (max(image.width for image in images), height), _WHITE)
    y = 0
    for image in images:
        canvas.paste(image, (0, y))
        y += image.height + gap
    return canvas


def wrapped_rows(images: Sequence[Image.Image], *, width: int, gap: int) -> list[Image.Image]:
    """Images of one height in as many rows as they need."""
    rows: list[list[Image.Image]] = []
    for image in images:
        used = sum(other.width + gap for other in rows[-1]) if rows else width
        if used + image.width > width:
            rows.append([])
        rows[-1].append(image)
    return [row(line, gap) for line in rows]


def resized(image: Image.Image, height: int) -> Image.Image:
    """The image at another height; maps keep sharp edges where the factor is whole."""
    size = (max(1, round(image.width * height / image.height)), height)
    whole = height % image.height == 0
    return image.resize(size, _Resampling.NEAREST if whole else _Resampling.LANCZOS)


def captioned(panel: Panel, *, height: int, font_size: int = 17) -> Image.Image:
    """The panel's image at some height, with its caption above."""
    line = round(1.7 * font_size)
    image, font = resized(panel.image, height), load_font(font_size)
    canvas = Image.new("RGB", (image.width, line + height), _WHITE)
    caption = shorten(panel.caption, font, image.width)
    ImageDraw.Draw(canvas).text((0, line * 0.42), caption, _BLACK, font, anchor="lm")
    canvas.paste(image, (0, line))
    return canvas


def page(title: str, subtitle: str, rows: Sequence[Image.Image]) -> Image.Image:
    """Rows of images under a heading."""
    margin, large, small = 28, load_font(28), load_font(17)
    body = column(rows, 22)
    width = max(720, body.width)
    canvas = Image.new("RGB", (width + 2 * margin, 84 + body.height + 2 * margin), _WHITE)
    draw = ImageDraw.Draw(canvas)
    title, subtitle = shorten(title, large, width), shorten(subtitle, small, width)
    draw.text((margin, margin + 14), title, _BLACK, large, anchor="lm")
    draw.text((margin, margin + 50), subtitle, _GRAY, small, anchor="lm")
    canvas.paste(body, (margin, margin + 84))
    return canvas
