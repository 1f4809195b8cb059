"""Other test sets for a model of ImageNet's 1,000 classes: which of their pictures count, and what
counts as right."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from jaxtyping import Int
from PIL import Image, ImageOps

from vitrail.data.source import Source, Subset
from vitrail.errors import VitrailError

CLASSES = 1000


@cache
def categories() -> tuple[str, ...]:
    """ImageNet's classes in the order of their WordNet numbers, as torchvision names them."""
    from torchvision.models import ResNet50_Weights

    return tuple(ResNet50_Weights.DEFAULT.meta["categories"])


@dataclass(frozen=True)
class Questions(Subset):
    """The pictures of a source that count, as a model of ImageNet is asked about them."""

    right: Sequence[tuple[int, ...]]
    """The classes that count as right, one or more for each of them."""
    border: int = 0
    """Pixels that are cut off on each side."""
    only: tuple[int, ...] = ()
    """The classes that may be guessed; empty for all."""

    @property
    def labels(self) -> tuple[str, ...]:
        return categories()

    @cached_property
    def targets(self) -> Int[np.ndarray, " n"]:
        """The first of the right classes."""
        return np.array([classes[0] for classes in self.right], dtype=np.int64)

    def picture(self, index: int) -> Image.Image:
        picture = super().picture(index)
        return ImageOps.crop(picture, self.border) if self.border else picture


def asked(source: Source, name: str) -> Questions:
    """Pictures whose class folders are ImageNet's, by WordNet number, number or name."""
    places = class_places(source.labels, name)
    right = [(places[target],) for target in source.targets.tolist()]
    return Questions(source, np.arange(len(right)), right)


def class_places(labels: Sequence[str], name: str) -> list[int]:
    """Which of ImageNet's classes each class of the data is."""
    if tuple(labels) == categories():
        return list(range(CLASSES))
    if all(re.fullmatch(r"\d{1,3}", label) for label in labels):
        return [int(label) for label in labels]
    if len(labels) == CLASSES and all(re.fullmatch(r"n\d{8}", label) for label in labels):
        return list(range(CLASSES))  # both stand in the order of the numbers
    raise VitrailError(
        f"{name} has {len(labels):,} classes such as '{labels[0]}'; expected ImageNet's 1,000 "
        "folders n01440764 …, or numbers from 0 to 999"
    )
