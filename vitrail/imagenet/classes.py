"""ImageNet's 1,000 classes, and test sets that are labeled with them in other ways."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int
from PIL import Image, ImageOps

from vitrail.console import say
from vitrail.data.dataset import Source, Subset, imagenet_classes
from vitrail.data.decode import Pixels
from vitrail.errors import VitrailError

CLASSES = 1000
_WORDNET = ("n01440764", "n15075141")
"""The first and the last of its classes."""


@dataclass(frozen=True)
class ImageNetSubset(Subset):
    """The images of a source that count, each with one or more correct ImageNet classes."""

    correct: Sequence[tuple[int, ...]]
    border: int = 0
    """Pixels to cut off on each side."""
    allowed: tuple[int, ...] = ()
    """The classes that may be predicted; empty for all."""

    @property
    def labels(self) -> tuple[str, ...]:
        return imagenet_classes()

    @cached_property
    def targets(self) -> Int[np.ndarray, " n"]:
        """The first of the correct classes."""
        return np.array([classes[0] for classes in self.correct], dtype=np.int64)

    def image(self, index: int) -> Image.Image:
        image = super().image(index)
        return ImageOps.crop(image, self.border) if self.border else image

    def rgb(self, index: int, side: int) -> Pixels:
        return np.asarray(self.image(index))


def labeled_by_folder(source: Source, name: str) -> ImageNetSubset:
    """Images in class folders named by WordNet ID, class number or class name."""
    numbers = class_numbers(source.labels)
    if numbers is None:
        raise VitrailError(
            f"{name} has {len(source.labels):,} classes such as '{source.labels[0]}'; expected "
            "ImageNet's 1,000 folders n01440764 … or 0 to 999, or some of its names or numbers "
            "(1, 2, 3 … alone could be any classes: use names)"
        )
    if len(numbers) < CLASSES and source.labels[0].isdecimal():
        name = imagenet_classes()[numbers[0]]
        first = f"folder {source.labels[0]} is read as class {numbers[0]}, {name}"
        say(f"labels   {first}, and the other {len(numbers) - 1:,} likewise")
    correct = [(numbers[target],) for target in source.targets.tolist()]
    return ImageNetSubset(source, np.arange(len(correct)), correct)


def class_numbers(labels: Sequence[str]) -> list[int] | None:
    """The ImageNet class of each class of the data; None where they are other classes."""
    if tuple(labels) == imagenet_classes():
        return list(range(CLASSES))
    # Both are sorted by ID; the first and last tell ImageNet's from any other 1,000 synsets.
    if len(labels) == CLASSES and (labels[0], labels[-1]) == _WORDNET:
        return list(range(CLASSES)) if all(re.fullmatch(r"n\d{8}", x) for x in labels) else None
    if labels and all(re.fullmatch(r"\d{1,3}", label) for label in labels):
        return _as_numbers(list(map(int, labels)))
    names = {name: number for number, name in enumerate(imagenet_classes())}
    twice = {name for name, count in Counter(imagenet_classes()).items() if count > 1}
    known = labels and {*labels} <= names.keys() - twice
    return [names[label] for label in labels] if known else None


def _as_numbers(numbers: list[int]) -> list[int] | None:
    """Folders named by class number. Fewer than 1,000 that count up from 0 or 1 are not a selection
    of ImageNet classes but how any dataset may number its own; two spellings of one are neither.
    """
    counted = [*range(numbers[0], numbers[0] + len(numbers))] == numbers and numbers[0] < 2
    own = counted and len(numbers) < CLASSES
    return None if own or len(set(numbers)) < len(numbers) else numbers
