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
_NOT_RECORDED = (
    ", since the model's training images were not recorded; --split all evaluates all of a folder "
    "that it never saw"
)


@dataclass(frozen=True)
class Selection:
    """Images of a dataset to evaluate a model on."""

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
    original = open_stored(data)
    # Content hashes of the training images; None where they were not recorded.
    recorded = runs.training_image_hashes(model.file)
    is_own = same_data(model.training_data.get("source", ""), data)
    if not split:
        known = original.test is not None or is_own or _is_training_data(model, original, recorded)
        split = "test" if known else "all"
    every_split = list(original.parts.values())
    # A folder that is evaluated whole may be too small to be split.
    divided = None if split == "all" else split_as_trained(model, original)
    source = reduce(Joined, every_split) if divided is None else divided.part(split)
    if recorded is not None:
        trained_on = _trained_on(source, divided.train if divided else None, split, recorded)
    else:  # only the settings of the training run are known
        retrained = is_own and model.training_data.get("train_on") == "train+val"
        trained_on = np.full(len(source.targets), split == "val" and retrained)
    n, left_out = len(trained_on), int(trained_on.sum())
    total = sum(len(part.targets) for part in every_split)
    if left_out == n:
        raise VitrailError(
            f"this model was trained on all {n} images of {data} ({split}); evaluate it on others, "
            "or with --split test"
        )
    note = f"{Path(str(data)).name}: {n - left_out:,} of {total:,} images"
    if split != "all":
        as_trained = bool(model.training_data) and split not in original.parts
        note += f", its {split} split{' as in training' * as_trained}"
        note += _NOT_RECORDED if as_trained and recorded is None and not is_own else ""
    elif recorded is not None and not left_out:
        note += ", all new to the model"
    if not left_out:
        return Selection(source, split, 0, note)
    note += f"; {left_out:,} excluded because the model was trained on them"
    return Selection(subset(source, ~trained_on), split, left_out, note)


def _trained_on(
    source: Source, train: Source | None, split: str, recorded: Hashes
) -> Bool[np.ndarray, " n"]:
    """Which images of a split were trained on.

    Of `train`, none are excluded. If all of train was trained on, test was held out by the same
    rule and is evaluated whole: a duplicate of a training image in it is a property of the data.
    """
    same_split = split == "test" and train is not None and is_recorded(train, recorded).all()
    if split == "train" or same_split:
        return np.zeros(len(source.targets), dtype=bool)
    return is_recorded(source, recorded)


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


def _is_training_data(model: Classifier, original: Splits, recorded: Hashes | None) -> bool:
    """Whether this is a copy of the model's training data, perhaps with more images by now; a few
    training images among others do not make it that."""
    settings = model.training_data
    if recorded is None:  # how its data was split is all that is known
        return bool(settings)
    if original.train is None:
        return False
    comes_split = original.parts.keys() != {"train"}
    held_out = 0.0 if comes_split else settings.get("val", 0.0) + settings.get("test", 0.0)
    return bool(is_recorded(original.train, recorded).mean() > 0.5 * (1 - held_out))
