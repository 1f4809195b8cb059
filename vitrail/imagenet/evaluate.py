"""`vitrail evaluate --labels …`: an ImageNet-1k model on other labels or images."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.catalog import data_folder
from vitrail.data.dataset import Splits, imagenet_classes
from vitrail.data.opening import open_stored
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError, did_you_mean
from vitrail.evaluation.evaluate import evaluate_dataset
from vitrail.evaluation.metrics import Predictions
from vitrail.evaluation.predictor import Predictor, Transform
from vitrail.imagenet.classes import CLASSES, ImageNetSubset, labeled_by_folder
from vitrail.imagenet.objectnet import bit_crop, objectnet
from vitrail.imagenet.real import real

VARIANTS = ("imagenet", "real", "objectnet", "objectnet-unmasked")
_MOST = 0.8
"""Any list of the 1,000 class names has more than this share of them in common with ours."""


class ImageNetPredictor(Predictor):
    """Predicts ImageNet's classes, or only those that a test set allows.

    A model may have the classes, in their order, under other names: WordNet IDs, or all the
    synonyms of a class.
    """

    def __init__(
        self,
        model: nn.Module,
        allowed: tuple[int, ...],
        precision: torch.dtype | None,
        transform: Transform | None,
    ) -> None:
        names = getattr(getattr(model, "module", model), "labels", ())
        labels = names if _are_imagenet(names) else imagenet_classes()
        super().__init__(model, labels, precision=precision, transform=transform)
        self.excluded = torch.zeros(CLASSES, dtype=torch.bool, device=self.device)
        if allowed:
            self.excluded |= True
            self.excluded[list(allowed)] = False

    def logits(self, pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        return super().logits(pixels).masked_fill(self.excluded, -torch.inf)


def evaluate(
    model: nn.Module,
    data: str | Path,
    labels: str,
    precision: torch.dtype | None = None,
    *,
    split: str,
    transform: Transform | None = None,
    **options: Any,
) -> dict[str, Any]:
    """As `evaluate_dataset`, with a prediction counted as correct if it is any of the correct
    classes, and without a loss, which several correct classes do not define.

    ObjectNet's images are cropped as in BiT and the paper, whatever the model's own crop.
    """
    source, total, split = open_variant(labels, data, split)
    predictor = ImageNetPredictor(model, source.allowed, precision, transform)
    used = predictor.transform
    if labels.startswith("objectnet") and isinstance(used, Preprocessing):
        used = predictor.transform = bit_crop(used)
    result = evaluate_dataset(
        predictor,
        source,
        data=str(data),
        split=split,
        relabel=lambda predictions: relabel(predictions, source),
        **options,
    )
    del result["loss"]
    return result | {
        "labels": labels,
        "left_out": total - len(source.correct),
        "preprocessing": used.to_dict() if isinstance(used, Preprocessing) else None,
    }


def open_variant(labels: str, data: str | Path, split: str) -> tuple[ImageNetSubset, int, str]:
    """The images that count, how many there are in all, and the split that they are from."""
    if labels not in VARIANTS:
        hint = did_you_mean(labels, VARIANTS) or f"; expected {', '.join(VARIANTS)}"
        raise VitrailError(f"--labels {labels} is unknown{hint}")
    folder = Path(data).expanduser()
    if labels.startswith("objectnet") and (folder / "images").is_dir():
        data = folder / "images"
    brought = open_stored(data, unlabeled=labels == "real")
    split = _split_of(brought, split)
    source = brought.part(split)
    folders = [folder, folder.parent, data_folder() / folder.name, data_folder()]
    if labels == "imagenet":
        found = labeled_by_folder(source, str(data))
    elif labels == "real":
        found = real(source, folders)
    else:
        found = objectnet(source, folders)
    if labels == "objectnet-unmasked":
        found = replace(found, allowed=())
    return found, len(source.targets), split


def _split_of(data: Splits, split: str) -> str:
    """The requested split, or what stands for it: the only one of undivided data, and val, which
    papers on ImageNet test on."""
    if split not in data.parts and len(data.parts) == 1:
        return next(iter(data.parts))
    if split == "test" and data.test is None and data.val is not None:
        return "val"
    return split


def _are_imagenet(names: tuple[str, ...]) -> bool:
    """Whether these are ImageNet's classes in their order by other names."""
    ids = [*names] == sorted(names) and all(re.fullmatch(r"n\d{8}", one) for one in names)
    first = [one.split(",")[0].casefold() for one in names]
    same = sum(a == b.casefold() for a, b in zip(first, imagenet_classes(), strict=False))
    return len(names) == CLASSES and (ids or same > _MOST * CLASSES)


def relabel(predictions: Predictions, source: ImageNetSubset) -> Predictions:
    """The target of each image becomes the best of its guesses that is correct, else the first
    correct class: so every metric of one target counts any correct guess."""
    correct = dict(zip(source.names, source.correct, strict=True))
    targets = [
        next((guess for guess in guesses if guess in correct[name]), correct[name][0])
        for name, guesses in zip(predictions.names, predictions.guesses.tolist(), strict=True)
    ]
    return replace(predictions, targets=np.array(targets, dtype=np.int64))
