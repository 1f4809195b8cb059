"""Small pictures, a small model that knows something about them, and what it should say."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional as F

from vitrail.data.dataset import ArraySource
from vitrail.errors import VitrailError
from vitrail.evaluation.evaluate import evaluate_dataset
from vitrail.evaluation.metrics import Predictions
from vitrail.evaluation.predictor import Predictor, predict_dataset

LABELS = ("ant", "bee", "cat", "dog", "elk", "fox")


@dataclass(frozen=True)
class Pictures(ArraySource):
    """Pictures in memory, some of which cannot be read."""

    errors: dict[int, VitrailError] = field(default_factory=dict)

    def image(self, index: int) -> Image.Image:
        if index in self.errors:
            raise self.errors[index]
        return super().image(index)


def pictures(n: int, labels: tuple[str, ...] = LABELS, **more: Any) -> Pictures:
    """Noise of 4 × 6 pixels."""
    random = np.random.default_rng(0)
    return Pictures(
        labels=labels,
        targets=random.integers(0, len(labels), n),
        names=[f"{i}.png" for i in range(n)],
        pixels=random.integers(0, 256, (n, 4, 6, 3), dtype=np.uint8),
        **more,
    )


def tensor(picture: Image.Image) -> torch.Tensor:
    return F.resize(F.pil_to_tensor(picture), [4, 6]) / 255


def linear(classes: int = len(LABELS)) -> nn.Sequential:
    """In double precision, so that no batch size rounds otherwise; dropout shows the mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 6 * 3, classes))
    with torch.no_grad():
        model[2].weight *= 10
    return model.double()


def probabilities(model: nn.Sequential, source: ArraySource) -> torch.Tensor:
    """One picture at a time, without any of the code under test."""
    weight, bias = model[2].weight.detach(), model[2].bias.detach()
    pixels = [tensor(Image.fromarray(p)).double().flatten() for p in source.pixels]
    return torch.stack([weight @ p + bias for p in pixels]).softmax(-1)


def predict(model: nn.Module, source: Any, *, precision=None, transform=None, **options: Any):
    predictor = Predictor(model, source.labels, precision=precision, transform=transform)
    return predict_dataset(predictor, source, **options)


def evaluate(model: nn.Module, source: Any, *, data: str, transform=None, **options: Any) -> Any:
    predictor = Predictor(model, source.labels, transform=transform, data=data)
    return evaluate_dataset(predictor, source, data=data, **options)


def predictions(scores: np.ndarray, targets: np.ndarray) -> Predictions:
    """From the whole table of probabilities, which tests can afford."""
    n, classes = scores.shape
    guesses = np.argsort(-scores, axis=1)[:, :5]
    return Predictions(
        names=[str(i) for i in range(n)],
        targets=targets,
        guesses=guesses,
        probabilities=np.take_along_axis(scores, guesses, axis=1),
        loss=-np.log(scores[np.arange(n), targets]),
        labels=tuple(f"class {i}" for i in range(classes)),
    )
