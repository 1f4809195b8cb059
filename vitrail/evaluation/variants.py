"""`vitrail evaluate --labels …`: a model of ImageNet's classes on other labels or pictures."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.catalog import data_folder
from vitrail.data.dataset import Splits
from vitrail.data.opening import open_original
from vitrail.errors import VitrailError, did_you_mean
from vitrail.evaluation import classify
from vitrail.evaluation.imagenet import CLASSES, Questions, asked, categories
from vitrail.evaluation.matching import class_order
from vitrail.evaluation.metrics import Predictions
from vitrail.evaluation.objectnet import objectnet
from vitrail.evaluation.real import real

MOST_ALIKE = 0.8
"""Of the classes, so many have the same name at the same place in any list of them."""
VARIANTS = ("imagenet", "real", "objectnet", "objectnet-unmasked")


def evaluate(
    model: nn.Module, data: str | Path, labels: str, *, split: str, model_name: str, **options: Any
) -> dict[str, Any]:
    """What `classify.evaluate` says, with a guess counted as right if it is any of the right
    classes, and without a loss, which several right classes do not have."""
    source, of, split = ask(labels, data, split)
    result = classify.evaluate(
        masked(as_imagenet(model), source),
        source,
        data=str(data),
        split=split,
        model_name=model_name,
        judged=lambda predictions: leniently(predictions, source),
        **options,
    )
    del result["loss"]
    return result | {"labels": labels, "left_out": of - len(source.right)}


def ask(labels: str, data: str | Path, split: str) -> tuple[Questions, int, str]:
    """The pictures that count, how many there were before, and of which part."""
    if labels not in VARIANTS:
        hint = did_you_mean(labels, VARIANTS) or f"; expected {', '.join(VARIANTS)}"
        raise VitrailError(f"--labels {labels} is unknown{hint}")
    place = Path(data).expanduser()
    if labels.startswith("objectnet") and (place / "images").is_dir():
        data = place / "images"
    brought = open_original(data, unlabeled=labels == "real")
    split = to_test_on(brought, split)
    source = brought.part(split)
    folders = [place, place.parent, data_folder() / place.name, data_folder()]
    if labels == "imagenet":
        found = asked(source, str(data))
    elif labels == "real":
        found = real(source, folders)
    else:
        found = objectnet(source, folders)
    if labels == "objectnet-unmasked":
        found = replace(found, only=())
    return found, len(source.targets), split


def to_test_on(data: Splits, split: str) -> str:
    """The part that is asked for, or stands for it: the only one, as undivided data is, out of
    which nothing is taken; and val, which papers on ImageNet test on."""
    if split not in data.parts and len(data.parts) == 1:
        return next(iter(data.parts))
    if split == "test" and data.test is None and data.val is not None:
        return "val"
    return split


def as_imagenet(model: nn.Module) -> nn.Module:
    """A model that has ImageNet's classes in their order by other names: WordNet numbers, or all
    the synonyms of a class."""
    known = classify.known_labels(model)
    numbers = [*known] == sorted(known) and all(re.fullmatch(r"n\d{8}", one) for one in known)
    first = [one.split(",")[0].casefold() for one in known]
    alike = sum(a == b.casefold() for a, b in zip(first, categories(), strict=False))
    # Some classes are called otherwise by everyone who lists them; none is out of place.
    if len(known) != CLASSES or not (numbers or alike > MOST_ALIKE * CLASSES):
        return model
    named: Any = copy.copy(classify.unwrapped(model))
    named.labels = categories()
    return named


def leniently(predictions: Predictions, source: Questions) -> Predictions:
    """With the truth of each picture the best of its guesses that is right, else the first right
    class: so every metric of one truth counts any right guess."""
    right = dict(zip(source.names, source.right, strict=True))
    targets = [
        next((guess for guess in guesses if guess in right[name]), right[name][0])
        for name, guesses in zip(predictions.names, predictions.guesses.tolist(), strict=True)
    ]
    return replace(predictions, targets=np.array(targets, dtype=np.int64))


class Masked(nn.Module):
    """A model that may guess some classes only."""

    def __init__(self, model: nn.Module, closed: Tensor) -> None:
        super().__init__()
        self.module = model  # the name under which labels and preprocessing are looked for
        self.closed = closed

    def forward(self, pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        logits = self.module(pixels)
        if logits.shape[-1] != len(self.closed):
            return logits  # whoever asked says what is wrong with that
        return logits.masked_fill(self.closed, -torch.inf)


def masked(model: nn.Module, source: Questions) -> nn.Module:
    """The model, asked for no other classes than may be guessed."""
    if not source.only:
        return model
    order = class_order(classify.known_labels(model), source.labels) or range(CLASSES)
    closed = torch.ones(CLASSES, dtype=torch.bool, device=next(model.parameters()).device)
    closed[[order[number] for number in source.only]] = False
    return Masked(model, closed)
