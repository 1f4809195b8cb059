"""Pictures in memory that look like something."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitrail.errors import VitrailError


@dataclass(frozen=True)
class Gallery:
    """A source of any pictures; None stands for a broken one."""

    images: Sequence[Image.Image | None]
    targets: np.ndarray
    names: Sequence[str]
    labels: tuple[str, ...] = ("cat", "dog")

    @property
    def blocks(self) -> np.ndarray:
        return np.zeros(len(self.images), dtype=np.int64)

    def image(self, index: int) -> Image.Image:
        image = self.images[index]
        if image is None:
            raise VitrailError(f"{self.names[index]} cannot be decoded: it is torn")
        return image


def gallery(images: Sequence[Image.Image | None], prefix: str = "", target: int = 0) -> Gallery:
    """Pictures of one class, named `<prefix>0`, `<prefix>1` …"""
    names = [f"{prefix}{number}" for number in range(len(images))]
    return Gallery(images, np.full(len(images), target), names)


def scene(seed: int, width: int = 160, height: int = 120) -> Image.Image:
    """Coarse and fine blotches, as in a photograph."""
    generator = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for cells in (3, 6, 12, 24, 48):
        blotches = generator.standard_normal((cells, cells, 3)) * 160 / cells
        layer = np.clip(128 + blotches, 0, 255).astype(np.uint8)
        total += np.asarray(Image.fromarray(layer).resize((width, height))) - 128.0
    return Image.fromarray(np.clip(128 + total, 0, 255).astype(np.uint8))
