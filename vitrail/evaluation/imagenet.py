"""Other test sets for a model of ImageNet's 1,000 classes: which of their pictures count, and what
counts as right."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from jaxtyping import Int
from PIL import Image, ImageOps

from vitrail.console import say
from vitrail.data.dataset import Source, Subset
from vitrail.errors import VitrailError

CLASSES = 1000
WORDNET = ("n01440764", "n15075141")
"""The first and the last of its classes."""


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

    def image(self, index: int) -> Image.Image:
        picture = super().image(index)
        return ImageOps.crop(picture, self.border) if self.border else picture


def asked(source: Source, name: str) -> Questions:
    """Pictures whose class folders are ImageNet's, by WordNet number, number or name."""
    places = class_places(source.labels)
    if places is None:
        raise VitrailError(
            f"{name} has {len(source.labels):,} classes such as '{source.labels[0]}'; expected "
            "ImageNet's 1,000 folders n01440764 … or 0 to 999, or some of its names or numbers "
            "(1, 2, 3 … alone could be any classes: use names)"
        )
    if len(places) < CLASSES and source.labels[0].isdecimal():
        first = f"folder {source.labels[0]} is read as class {places[0]}, {categories()[places[0]]}"
        say(f"labels   {first}, and the other {len(places) - 1:,} likewise")
    right = [(places[target],) for target in source.targets.tolist()]
    return Questions(source, np.arange(len(right)), right)


def class_places(labels: Sequence[str]) -> list[int] | None:
    """Which of ImageNet's classes each class of the data is; None where they are others."""
    if tuple(labels) == categories():
        return list(range(CLASSES))
    # Both stand in the order of the numbers; the ends tell ImageNet's from other 1,000 synsets.
    if len(labels) == CLASSES and (labels[0], labels[-1]) == WORDNET:
        return list(range(CLASSES)) if all(re.fullmatch(r"n\d{8}", x) for x in labels) else None
    if labels and all(re.fullmatch(r"\d{1,3}", label) for label in labels):
        return numbered(list(map(int, labels)))
    names = {name: place for place, name in enumerate(categories())}
    twice = {name for name, count in Counter(categories()).items() if count > 1}
    known = labels and {*labels} <= names.keys() - twice
    return [names[label] for label in labels] if known else None


def numbered(places: list[int]) -> list[int] | None:
    """Numbers of folders as ImageNet's. Fewer than 1,000 that count up from 0 or 1 are no choice of
    ImageNet's classes, but how any data set numbers its own; two spellings of one are no class."""
    counted = [*range(places[0], places[0] + len(places))] == places and places[0] < 2
    own = counted and len(places) < CLASSES
    return None if own or len(set(places)) < len(places) else places
