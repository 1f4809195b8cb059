"""A model that classifies, embeds and maps attention for batches of images."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torchvision.transforms.v2 import RandomResizedCrop

from vitrail.data.decode import open_image
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.evaluation.fast import MAX_IMAGES, choose_form
from vitrail.evaluation.held_out import select_images
from vitrail.evaluation.predictor import Predictor, PreparedImages, collate
from vitrail.inspection.attention import record
from vitrail.model import Classifier
from vitrail.model.classifier import NO_PREPROCESSING
from vitrail.model.variants import variant_name
from vitrail.serving.maps import AttentionMap, AttentionShape, MapQuery, attention_maps
from vitrail.serving.page import samples
from vitrail.weights.exported import ExportedModel, open_model

_TRIAL_BATCH = 8
_CROPS = 64


@dataclass(frozen=True)
class PredictionRequest:
    """An image, and its attention maps to compute, if any."""

    pixels: Float[Tensor, "c y x"]
    query: MapQuery | None = None


@dataclass(frozen=True)
class Prediction:
    """What the model returns for one image."""

    features: Float[Tensor, " d"] | None = None
    logits: Float[Tensor, " classes"] | None = None
    """None where the model has no classes."""
    maps: Sequence[AttentionMap] = ()


@dataclass(frozen=True)
class ServedModel:
    """A model under the name that requests use."""

    name: str
    model: Classifier | ExportedModel
    preprocess: Preprocessing
    attention: AttentionShape
    predictor: Predictor

    @property
    def embeds(self) -> bool:
        """Whether it gives features; an exported classifier computes logits alone."""
        return isinstance(self.model, Classifier) or self.model.head is None

    @torch.inference_mode()
    def predict(self, requests: list[PredictionRequest]) -> list[Prediction]:
        """One prediction each; images without maps go through the model as one batch."""
        plain = [one.pixels for one in requests if one.query is None]
        predictions = iter(self._classify(torch.stack(plain)) if plain else ())
        return [
            next(predictions)
            if one.query is None
            else Prediction(maps=self._maps(one.pixels, one.query))
            for one in requests
        ]

    def _maps(self, pixels: Float[Tensor, "c y x"], query: MapQuery) -> list[AttentionMap]:
        assert isinstance(self.model, Classifier)  # exported files have no layers to query
        return attention_maps(self.model, pixels.to(next(self.model.parameters())), query)

    def _classify(self, pixels: Float[Tensor, "b c y x"]) -> list[Prediction]:
        if not self.embeds:
            return [Prediction(logits=one) for one in self.predictor.logits(pixels).cpu()]
        features = self.predictor.features(pixels)
        if self.model.head is None:
            return [Prediction(one) for one in features.float().cpu()]
        logits = self.predictor.classify(features).cpu()
        pairs = zip(features.float().cpu(), logits, strict=True)
        return [Prediction(*pair) for pair in pairs]

    def top(self, prediction: Prediction, count: int) -> list[dict[str, Any]]:
        """The most likely classes, best first."""
        assert prediction.logits is not None
        return self.predictor.top(prediction.logits[None], count)[0]

    def describe(self, labels: bool = True) -> dict[str, Any]:
        """The model as /model returns it."""
        model, grids = self.model, self.attention.grids
        if isinstance(model, ExportedModel):
            variant, parameters = model.variant, model.parameter_count
        else:
            variant = variant_name(model.architecture)
            parameters = sum(x.numel() for x in model.parameters())
        facts = {
            "name": self.name,
            "variant": variant,
            "parameters": parameters,
            "classes": model.architecture.classes,
            "size": list(self.preprocess.size),
            "features": model.feature_width,
            "heads": list(self.attention.heads),
            "grid": list(grids[0]) if grids else None,
            "patches": self.attention.uniform,
        }
        return facts | ({"labels": list(self.predictor.labels)} if labels else {})


def serve_model(model: Classifier | ExportedModel, name: str, *, fast: bool = False) -> ServedModel:
    """Prepares a model; a forward pass over a black image finds out early what does not work."""
    if not isinstance(model.preprocess, Preprocessing):
        raise VitrailError(f"{name}: {NO_PREPROCESSING}")
    predictor = Predictor(model.eval())
    black = torch.zeros(1, len(model.preprocess.mean), *model.preprocess.size)
    if isinstance(model, ExportedModel):
        if fast:
            raise VitrailError(f"{name}: an exported file has a single form; remove --fast")
        model(black)
        return ServedModel(name, model, model.preprocess, AttentionShape((), (), 0), predictor)
    with torch.inference_mode():
        recording = record(model, black.to(next(model.parameters())), gradient=False)
    shape = AttentionShape.of(recording)
    if fast:
        pixels, what = _trial_images(model)
        predictor = choose_form(predictor, pixels, _TRIAL_BATCH, what, compiled=True)
    return ServedModel(name, model, model.preprocess, shape, predictor)


def _trial_images(model: Classifier) -> tuple[Float[Tensor, "b c y x"], str]:
    """Images to choose a form on: held-out ones of the model's data if it is still there, or else
    random crops of the page's photographs; and what they are."""
    data, transform = Path(str(model.training_data.get("source", ""))), model.preprocess
    assert transform is not None
    if data.exists() and str(data) != ".":
        with suppress(VitrailError):
            source = select_images(model, data, "test").source
            chosen = np.random.default_rng(0).permutation(len(source.targets))[:MAX_IMAGES]
            batch = collate(
                [PreparedImages(source, chosen, transform)[i] for i in range(len(chosen))]
            )
            if batch.pixels is not None:
                return batch.pixels, f"held-out images of {data.name}"
    photographs = [open_image(path) for path, _ in samples().values()]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        crop = RandomResizedCrop(min(photographs[0].size), scale=(0.02, 1))
        crops = [crop(photographs[i % len(photographs)]) for i in range(_CROPS)]
    return torch.stack([transform(one) for one in crops]), "crops of sample images"


def open_models(
    sources: Sequence[str | Path], device: torch.device, *, fast: bool = False
) -> list[ServedModel]:
    """Loads each MODEL or NAME=MODEL; names must differ."""
    models: list[ServedModel] = []
    for source in sources:
        name, path = split_name(str(source))
        if name in (one.name for one in models):
            raise VitrailError(f"two models are called '{name}'; rename one, as in other={path}")
        models.append(serve_model(open_model(path).to(device), name, fast=fast))
    if not models:
        raise VitrailError("no model to serve; pass a run folder or a weights file")
    return models


def split_name(source: str) -> tuple[str, str]:
    """Name and path of NAME=MODEL; the default name is the last part of the path."""
    name, sign, rest = source.partition("=")
    path = Path(source)
    if path.exists():
        return path.resolve().name.removesuffix(".safetensors") or source, source
    return (name, rest) if sign and "/" not in name else (source, source)
