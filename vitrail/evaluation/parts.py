"""Which pictures a model may be asked about."""

from pathlib import Path

from vitrail.data.opening import open_data, same_data
from vitrail.data.source import Data, Source
from vitrail.errors import VitrailError
from vitrail.model import Classifier


def part_of(model: Classifier, data: str | Path, split: str) -> Source:
    """One part of the data, parted as the model's training parted it."""
    train_on = model.learnt_from.get("train_on", "train")
    source = model.learnt_from.get("source", "")
    if split == "val" and train_on == "train+val" and same_data(source, data):
        raise VitrailError("this model learnt from val as well; evaluate it with --split test")
    return parts_of(model, data).part(split)


def parts_of(model: Classifier, data: str | Path) -> Data:
    """The data, parted as the model's training parted it: parted otherwise, test would hold images
    that it learnt from."""
    own = {k: v for k, v in model.learnt_from.items() if k not in ("source", "train_on")}
    return open_data(data, **own)
