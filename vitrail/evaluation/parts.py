"""Which images a model is measured on: none that it learned from, wherever they lie now."""

from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt64

from vitrail import runs
from vitrail.data.contents import content_hashes
from vitrail.data.dataset import Joined, Source, Splits, subset
from vitrail.data.opening import open_data, open_original, same_data
from vitrail.errors import VitrailError
from vitrail.model import Classifier


@dataclass(frozen=True)
class Part:
    """Images of a data set to measure a model on."""

    source: Source
    split: str
    """train, val, test or all."""
    left_out: int = 0
    """Images of the split that the model learned from."""
    note: str = ""
    """Which images these are, and why, in one line."""


def part_of(model: Classifier, data: str | Path, split: str = "") -> Part:
    """The images of a split that the model did not learn from, or all of `train`.

    By default, test of the data that the model was trained on, or of data that brings a test part,
    and all of any other data.
    """
    return Chooser(model, data).choose(split)


def parts_of(model: Classifier, data: str | Path | Splits) -> Splits:
    """The data, split as the model's training split it: split otherwise, test would hold images
    that it learned from."""
    own = {k: v for k, v in model.training_data.items() if k not in ("source", "train_on")}
    if not own.pop("every_class", not own) and own.get("split") == "hash":
        own["split"] = "hash alone"  # as did the version that the model is of
    return open_data(data, **own)


def trained_on(source: Source, recorded: UInt64[np.ndarray, " m"]) -> Bool[np.ndarray, " n"]:
    """Which images are among the recorded ones, by content."""
    return np.isin(content_hashes(source), recorded)


class Chooser:
    """A data set and what a model has seen of it."""

    def __init__(self, model: Classifier, data: str | Path) -> None:
        self.model, self.data = model, data
        self.brought = open_original(data)
        # Contents of the model's training images; None where they were not recorded.
        self.learned = runs.training_images(model.file)

    @cached_property
    def parted(self) -> Splits:
        """As in training; a folder that is measured whole may be too small for that."""
        return parts_of(self.model, self.brought)

    def choose(self, split: str) -> Part:
        split = split or ("test" if self.brought.test is not None or self.seen() else "all")
        parts = list(self.brought.parts.values())
        source = reduce(Joined, parts) if split == "all" else self.parted.part(split)
        unseen = self.unseen(source, split)
        n, left_out = len(unseen), int((~unseen).sum())
        if left_out == n:
            raise VitrailError(
                f"this model was trained on all {n} images of {split} of {self.data}; measure "
                "it on others, or with --split test"
            )
        note = self.note(split, n - left_out, sum(len(part.targets) for part in parts))
        if left_out:
            note += f"; {left_out:,} left out because the model was trained on them"
            source = subset(source, unseen)
        return Part(source, split, left_out, note)

    def seen(self) -> bool:
        """Whether the model was trained on this data, perhaps before more images came to it; a few
        training images among others do not make it that."""
        training_data = self.model.training_data
        if same_data(training_data.get("source", ""), self.data):
            return True
        if self.learned is None:  # its split rule is all that is known
            return bool(training_data)
        if self.brought.train is None:
            return False
        apart = self.brought.parts.keys() != {"train"}
        held_out = 0.0 if apart else training_data.get("val", 0.0) + training_data.get("test", 0.0)
        return bool(self.matches(self.brought.train).mean() > 0.5 * (1 - held_out))

    def unseen(self, source: Source, split: str) -> Bool[np.ndarray, " n"]:
        """Which images of a split the model did not learn from."""
        everything = np.ones(len(source.targets), dtype=bool)
        if self.learned is None:
            if split == "val" and self.training_data_val():
                return ~everything
            return everything
        if split == "train":
            return everything
        # Held out by the same rule, test is measured whole: a training image's duplicate in it is a
        # matter of the data.
        if split == "test" and self.matches_train():
            return everything
        return ~self.matches(source)

    def matches_train(self) -> bool:
        """Whether the model learned from all of train."""
        train = self.parted.train
        return train is not None and bool(self.matches(train).all())

    def training_data_val(self) -> bool:
        """Whether the model was retrained on train and val of this data."""
        learned = self.model.training_data
        own = same_data(learned.get("source", ""), self.data)
        return own and learned.get("train_on") == "train+val"

    def matches(self, source: Source) -> Bool[np.ndarray, " n"]:
        """Which images the model learned from."""
        assert self.learned is not None
        return trained_on(source, self.learned)

    def note(self, split: str, n: int, of: int) -> str:
        """Which images are measured, and why these."""
        name = Path(str(self.data)).name
        if split == "all":
            new = self.learned is not None and n == of
            return f"{name}: {n:,} of {of:,} images" + ", all new to the model" * new
        told = f"{name}: {n:,} of {of:,} images, its {split} split"
        if not self.model.training_data or split in self.brought.parts:
            return told
        told += " as in training"
        known = same_data(self.model.training_data.get("source", ""), self.data)
        if self.learned is None and not known:
            told += (
                ", since the model's training images were not recorded; --split all measures all "
                "of a folder that it never saw"
            )
        return told
