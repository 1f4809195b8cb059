"""RandAugment (Cubuk et al. 2019) as the ViT papers used it: the operations and the scale of
big_vision's code, of which torchvision's has others.

A magnitude of 10 is the top of the original scale; AugReg goes up to 20. Magnitude 0 is not
nothing: brightness, contrast, colour and sharpness are blended by 0.1 + 0.18 m, posterising keeps
0.4 m bits and solarising starts at 25.6 m, so that 0 darkens, blackens and inverts.
Two details differ: contrast is blended with the picture's mean grey, where the reference takes a
constant by mistake, and distances are shares of the side, where it counts pixels of 224.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image, ImageEnhance, ImageOps

Colour = tuple[int, ...]
Operation = Callable[[Image.Image, float, Colour], Image.Image]
"""A picture, the magnitude as a share of the original scale, and the colour of empty places."""

REFERENCE_SIDE = 224


@dataclass(frozen=True)
class RandAugment:
    """Some operations drawn at random, one after the other, all of the same magnitude."""

    layers: int
    magnitude: float
    fill: Colour

    def __call__(self, image: Image.Image) -> Image.Image:
        for _ in range(self.layers):
            operation = OPERATIONS[int(torch.randint(len(OPERATIONS), ()))]
            image = operation(image, self.magnitude / 10, self.fill)
        return image


def either_way(value: float) -> float:
    """With a random sign."""
    return value if torch.rand(()) < 0.5 else -value


def by_table(image: Image.Image, value_of: Callable[[int], int]) -> Image.Image:
    """Every value replaced by another."""
    return image.point([value_of(value) for value in range(256)] * len(image.getbands()))


def posterize(image: Image.Image, share: float, fill: Colour) -> Image.Image:
    """Only the highest bits stay."""
    lost = 8 - min(int(4 * share), 8)
    return by_table(image, lambda value: value >> lost << lost)


def solarize(image: Image.Image, share: float, fill: Colour) -> Image.Image:
    """Bright values are inverted."""
    threshold = int(256 * share)
    return by_table(image, lambda value: value if value < threshold else 255 - value)


def solarize_add(image: Image.Image, share: float, fill: Colour) -> Image.Image:
    """Dark values become brighter."""
    added = int(110 * share)
    return by_table(image, lambda value: min(value + added, 255) if value < 128 else value)


def blended(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    """An operation that moves away from a dull version of the picture, or towards it."""
    return lambda image, share, fill: enhancer(image).enhance(0.1 + 1.8 * share)


def moved(matrix: Callable[[float, tuple[int, int]], tuple[float, ...]]) -> Operation:
    """An operation whose matrix says where each pixel comes from."""

    def operation(image: Image.Image, share: float, fill: Colour) -> Image.Image:
        data = matrix(either_way(share), image.size)
        return image.transform(image.size, Image.Transform.AFFINE, data, fillcolor=fill)

    return operation


def cut_out(image: Image.Image, share: float, fill: Colour) -> Image.Image:
    """A square somewhere loses its content."""
    columns, rows = image.size
    half = int(40 / REFERENCE_SIDE * share * min(rows, columns))
    x, y = int(torch.randint(columns, ())), int(torch.randint(rows, ()))
    image = image.copy()
    image.paste(fill if len(fill) > 1 else fill[0], (x - half, y - half, x + half, y + half))
    return image


OPERATIONS: tuple[Operation, ...] = (
    lambda image, share, fill: ImageOps.autocontrast(image),
    lambda image, share, fill: ImageOps.equalize(image),
    lambda image, share, fill: ImageOps.invert(image),
    lambda image, share, fill: image.rotate(either_way(30 * share), fillcolor=fill),
    posterize,
    solarize,
    blended(ImageEnhance.Color),
    blended(ImageEnhance.Contrast),
    blended(ImageEnhance.Brightness),
    blended(ImageEnhance.Sharpness),
    moved(lambda share, size: (1, 0.3 * share, 0, 0, 1, 0)),
    moved(lambda share, size: (1, 0, 0, 0.3 * share, 1, 0)),
    moved(lambda share, size: (1, 0, 100 / REFERENCE_SIDE * share * size[0], 0, 1, 0)),
    moved(lambda share, size: (1, 0, 0, 0, 1, 100 / REFERENCE_SIDE * share * size[1])),
    cut_out,
    solarize_add,
)
