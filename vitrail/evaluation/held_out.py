"""Which images a model is evaluated on: none that it was trained on, wherever they are now."""

from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt64

from vitrail import runs
from vitrail.data.contents import content_hashes
from vitrail.data.dataset import Joined, Source, Splits, subset
from vitrail.data.opening import open_data, open_stored, same_data
from vitrail.errors import VitrailError
from vitrail.model import Classifier

Hashes = UInt64[np.ndarray, " m"]


@dataclass(frozen=True)
class Selection:
    """Images of a data set to evaluate a model on."""

    source: Source
    split: str
    """train, val, test or all."""
    left_out: int = 0
    """Images of the split that the model was trained on."""
    note: str = ""
    """Which images these are, and why, in one line."""


def select_images(model: Classifier, data: str | Path, split: str = "") -> Selection:
    """The images of a split that the model was not trained on, or all of `train`.

    By default, test of the data that the model was trained on, or of data that comes with a test
    split, and all of any other data.
    """
    brought = open_stored(data)
    # Content hashes of the training images; None where they were not recorded.
    recorded = runs.training_image_hashes(model.file)
    if not split:
        seen = brought.test is not None or _was_trained_on(model, data, brought, recorded)
        split = "test" if seen else "all"
    parts = list(brought.parts.values())
    # A folder that is evaluated whole may be too small to be split.
    divided = None if split == "all" else split_as_trained(model, brought)
    source = reduce(Joined, parts) if divided is None else divided.part(split)
    unseen = _unseen(model, data, source, split, divided, recorded)
    n, left_out = len(unseen), int((~unseen).sum())
    if left_out == n:
        raise VitrailError(
            f"this model was trained on all {n} images of {split} of {data}; evaluate it on "
            "others, or with --split test"
        )
    total = sum(len(part.targets) for part in parts)
    note = f"{Path(str(data)).name}: {n - left_out:,} of {total:,} images"
    note += _explanation(model, data, split, brought, recorded, everything=n - left_out == total)
    if left_out:
        note += f"; {left_out:,} left out because the model was trained on them"
        source = subset(source, unseen)
    return Selection(source, split, left_out, note)


def split_as_trained(model: Classifier, data: str | Path | Splits) -> Splits:
    """The data, split as in the model's training: split differently, test would hold images that
    it was trained on."""
    own = {k: v for k, v in model.training_data.items() if k not in ("source", "train_on")}
    if not own.pop("every_class", not own) and own.get("split") == "hash":
        own["split"] = "hash alone"  # the rule of the version that the model was trained with
    return open_data(data, **own)


def is_recorded(source: Source, recorded: Hashes) -> Bool[np.ndarray, " n"]:
    """Which images of a source are among the recorded ones, by content."""
    return np.isin(content_hashes(source), recorded)


def _was_trained_on(
    model: Classifier, data: str | Path, brought: Splits, recorded: Hashes | None
) -> bool:
    """Whether this is the model's training data, perhaps with more images by now; a few training
    images among others do not make it that."""
    origin = model.training_data
    if same_data(origin.get("source", ""), data):
        return True
    if recorded is None:  # how its data was split is all that is known
        return bool(origin)
    if brought.train is None:
        return False
    comes_split = brought.parts.keys() != {"train"}
    held_out = 0.0 if comes_split else origin.get("val", 0.0) + origin.get("test", 0.0)
    return bool(is_recorded(brought.train, recorded).mean() > 0.5 * (1 - held_out))


def _unseen(
    model: Classifier,
    data: str | Path,
    source: Source,
    split: str,
    divided: Splits | None,
    recorded: Hashes | None,
) -> Bool[np.ndarray, " n"]:
    """Which images of a split the model was not trained on."""
    everything = np.ones(len(source.targets), dtype=bool)
    if recorded is None:
        origin = model.training_data
        retrained = origin.get("train_on") == "train+val"
        own = same_data(origin.get("source", ""), data)
        return ~everything if split == "val" and retrained and own else everything
    if split == "train":
        return everything
    # Held out by the same rule, test is evaluated whole: a duplicate of a training image in it is a
    # matter of the data.
    train = None if divided is None else divided.train
    if split == "test" and train is not None and is_recorded(train, recorded).all():
        return everything
    return ~is_recorded(source, recorded)


def _explanation(
    model: Classifier,
    data: str | Path,
    split: str,
    brought: Splits,
    recorded: Hashes | None,
    everything: bool,
) -> str:
    """Why these images."""
    if split == "all":
        return ", all new to the model" * (recorded is not None and everything)
    text = f", its {split} split"
    if not model.training_data or split in brought.parts:
        return text
    text += " as in training"
    if recorded is None and not same_data(model.training_data.get("source", ""), data):
        text += (
            ", since the model's training images were not recorded; --split all evaluates all of a "
            "folder that it never saw"
        )
    return text
