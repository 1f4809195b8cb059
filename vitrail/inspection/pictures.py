"""Numbers as pictures: what the model saw, maps laid over it, maps alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor

from vitrail.data.check import letters, shortened
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.structure import Filters

PAPER, INK, MUTED = (255, 255, 255), (28, 28, 30), (105, 105, 112)
SMALLEST = 224
"""Pictures with a shorter side than this are enlarged by a whole factor, their pixels sharp."""
MAPS = "magma"
HIGHEST = 0.97
"""The share of patches that is drawn to scale; those above are drawn as bright as the last."""
Resampling = Image.Resampling


@dataclass(frozen=True)
class Panel:
    """A picture with a line above it."""

    picture: Image.Image
    caption: str


def photograph(pixels: Float[Tensor, "c y x"], preprocess: Preprocessing) -> Image.Image:
    """What the model was given, as a person sees it."""
    mean, std = np.array(preprocess.mean), np.array(preprocess.std)
    values = pixels.float().cpu().numpy().transpose(1, 2, 0) * std + mean
    array = (values.clip(0, 1) * 255).round().astype(np.uint8)
    image = Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0]).convert("RGB")
    factor = -(-SMALLEST // min(image.size))
    return image.resize((factor * image.width, factor * image.height), Resampling.NEAREST)


def overlay(picture: Image.Image, seen: Float[Tensor, "y x"], patch: float) -> Image.Image:
    """The picture lit where the map is high, on black.

    As the authors do it: divided by the maximum, LANCZOS to the size of the picture, a Gaussian
    blur of one patch, stretched from 0 to 1, and used as opacity.
    """
    mask = gray(seen).resize(picture.size, Resampling.LANCZOS)
    values = np.asarray(mask.filter(ImageFilter.GaussianBlur(patch)), dtype=np.float32)
    span = max(float(np.ptp(values)), 1.0)
    opacity = Image.fromarray(((values - values.min()) / span * 255).round().astype(np.uint8))
    return Image.composite(picture, Image.new("RGB", picture.size), opacity)


def gray(seen: Float[Tensor, "y x"]) -> Image.Image:
    """A map divided by its maximum, as 8 bits."""
    values = seen.double().numpy()
    share = values / max(float(values.max()), 1e-30)
    return Image.fromarray((share.clip(0, 1) * 255).round().astype(np.uint8))


def clipped(seen: Float[Tensor, "y x"]) -> Float[Tensor, "y x"]:
    """A map whose few highest patches are cut down.

    Trained models send attention that nobody needs to some patch without content, often a corner,
    and beside that nothing else would be seen.
    """
    return seen.clamp(max=float(seen.flatten().double().quantile(HIGHEST)))


def heat(seen: Float[Tensor, "y x"], size: tuple[int, int]) -> Image.Image:
    """A map by itself, every patch a square, black for nothing and bright for the most."""
    from matplotlib import colormaps

    colors = colormaps[MAPS](np.asarray(gray(clipped(seen))), bytes=True)[:, :, :3]
    return Image.fromarray(np.ascontiguousarray(colors)).resize(size, Resampling.NEAREST)


def blocks(colors: Float[Tensor, "y x 3"], size: tuple[int, int]) -> Image.Image:
    """Colors of patches as squares."""
    array = (colors.numpy() * 255).round().astype(np.uint8)
    return Image.fromarray(array).resize(size, Resampling.NEAREST)


def filter_sheet(
    found: Filters, *, columns: int = 7, side: int = 100, gap: int = 10
) -> Image.Image:
    """The components, each stretched evenly around gray, row by row from the strongest."""
    tiles = []
    for component in found.components:
        values = component.numpy().transpose(1, 2, 0)
        if values.shape[2] != 3:  # neither red nor green nor blue
            values = values.mean(2, keepdims=True).repeat(3, 2)
        half = max(float(np.abs(values).max()), 1e-12)
        array = ((values / half + 1) * 127.5).round().astype(np.uint8)
        tiles.append(Image.fromarray(array).resize((side, side), Resampling.NEAREST))
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    paper = Image.new("RGB", (columns * (side + gap) - gap, rows * (side + gap) - gap), PAPER)
    for number, tile in enumerate(tiles):
        place = (number % columns * (side + gap), number // columns * (side + gap))
        paper.paste(tile, place)
    return paper


def strip(panels: Sequence[Panel], *, height: int, gap: int = 14, text: int = 17) -> Image.Image:
    """Pictures of one height side by side, each with its line above."""
    line = round(1.7 * text)
    scaled = [fitted(panel.picture, height) for panel in panels]
    width = sum(image.width for image in scaled) + gap * (len(scaled) - 1)
    paper = Image.new("RGB", (width, line + height), PAPER)
    pen, font, x = ImageDraw.Draw(paper), letters(text), 0
    for panel, image in zip(panels, scaled, strict=True):
        caption = shortened(panel.caption, font, image.width)
        pen.text((x, line * 0.42), caption, INK, font, anchor="lm")
        paper.paste(image, (x, line))
        x += image.width + gap
    return paper


def fitted(image: Image.Image, height: int) -> Image.Image:
    """The picture at another height; maps of a few colors keep their edges when enlarged."""
    size = (max(1, round(image.width * height / image.height)), height)
    method = Resampling.NEAREST if height % image.height == 0 else Resampling.LANCZOS
    return image.resize(size, method)


def flow(parts: Sequence[Image.Image], *, width: int, gap: int = 30) -> list[Image.Image]:
    """Pictures of one height in as many rows as they need."""
    rows: list[list[Image.Image]] = []
    for part in parts:
        used = sum(one.width + gap for one in rows[-1]) if rows else width
        if not rows or used + part.width > width:
            rows.append([])
        rows[-1].append(part)
    return [beside(row, gap) for row in rows]


def beside(parts: Sequence[Image.Image], gap: int) -> Image.Image:
    """Pictures in one row, their tops level."""
    width = sum(part.width for part in parts) + gap * (len(parts) - 1)
    paper = Image.new("RGB", (width, max(part.height for part in parts)), PAPER)
    x = 0
    for part in parts:
        paper.paste(part, (x, 0))
        x += part.width + gap
    return paper


def page(title: str, words: str, parts: Sequence[Image.Image], gap: int = 22) -> Image.Image:
    """Pictures below each other under a heading."""
    edge, large, small = 28, letters(28), letters(17)
    width = max([720, *(part.width for part in parts)])
    height = 84 + sum(part.height + gap for part in parts) - gap
    paper = Image.new("RGB", (width + 2 * edge, height + 2 * edge), PAPER)
    pen = ImageDraw.Draw(paper)
    pen.text((edge, edge + 14), shortened(title, large, width), INK, large, anchor="lm")
    pen.text((edge, edge + 50), shortened(words, small, width), MUTED, small, anchor="lm")
    y = edge + 84
    for part in parts:
        paper.paste(part, (edge, y))
        y += part.height + gap
    return paper
