"""A model that classifies, embeds and maps attention for batches of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.evaluation.predictor import Predictor
from vitrail.inspection.attention import record
from vitrail.model import Classifier
from vitrail.model.classifier import NO_PREPROCESSING
from vitrail.model.variants import variant_name
from vitrail.serving.maps import AttentionMap, AttentionShape, MapQuery, attention_maps
from vitrail.weights.load import load


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
    model: Classifier
    preprocess: Preprocessing
    attention: AttentionShape
    predictor: Predictor

    @torch.inference_mode()
    def predict(self, requests: list[PredictionRequest]) -> list[Prediction]:
        """One prediction each; images without maps go through the model as one batch."""
        weights = next(self.model.parameters())
        plain = [one.pixels for one in requests if one.query is None]
        predictions = iter(self._classify(torch.stack(plain)) if plain else ())
        return [
            next(predictions)
            if one.query is None
            else Prediction(maps=attention_maps(self.model, one.pixels.to(weights), one.query))
            for one in requests
        ]

    def _classify(self, pixels: Float[Tensor, "b c y x"]) -> list[Prediction]:
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
        classes, grids = self.model.architecture.classes, self.attention.grids
        facts = {
            "name": self.name,
            "variant": variant_name(self.model.architecture),
            "parameters": sum(x.numel() for x in self.model.parameters()),
            "classes": classes,
            "size": list(self.preprocess.size),
            "features": self.model.feature_width,
            "heads": list(self.attention.heads),
            "grid": list(grids[0]) if grids else None,
            "patches": self.attention.uniform,
        }
        return facts | ({"labels": list(self.predictor.labels)} if labels else {})


def serve_model(model: Classifier, name: str) -> ServedModel:
    """Prepares a model; a forward pass over a black image finds out early what does not work."""
    if not isinstance(model.preprocess, Preprocessing):
        raise VitrailError(f"{name}: {NO_PREPROCESSING}")
    weights = next(model.eval().parameters())
    black = torch.zeros(1, len(model.preprocess.mean), *model.preprocess.size)
    with torch.inference_mode():
        recording = record(model, black.to(weights), gradient=False)
    shape = AttentionShape.of(recording)
    return ServedModel(name, model, model.preprocess, shape, Predictor(model))


def open_models(sources: Sequence[str | Path], device: torch.device) -> list[ServedModel]:
    """Loads each MODEL or NAME=MODEL; names must differ."""
    models: list[ServedModel] = []
    for source in sources:
        name, path = split_name(str(source))
        if name in (one.name for one in models):
            raise VitrailError(f"two models are called '{name}'; rename one, as in other={path}")
        models.append(serve_model(load(path).to(device), name))
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
