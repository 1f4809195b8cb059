"""A model that is asked about pictures, many at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.inspection.recording import record
from vitrail.model import Classifier
from vitrail.model.variants import name as variant_name
from vitrail.serving.maps import Map, Shape, Wanted, maps, shape_of
from vitrail.weights.load import load


@dataclass(frozen=True)
class Question:
    """A picture, and the maps of attention that are wanted of it, if any."""

    pixels: Float[Tensor, "c y x"]
    wanted: Wanted | None = None


@dataclass(frozen=True)
class Answer:
    """What came out for one picture."""

    features: Float[Tensor, " d"] | None = None
    probabilities: Float[Tensor, " classes"] | None = None
    """None where the model has no classes."""
    maps: Sequence[Map] = ()


@dataclass(frozen=True)
class Served:
    """A model under the name that requests call it by."""

    name: str
    model: Classifier
    preprocess: Preprocessing
    shape: Shape

    @torch.inference_mode()
    def answer(self, questions: list[Question]) -> list[Answer]:
        """One answer for each; pictures without maps go through the model together."""
        plain = [one.pixels for one in questions if one.wanted is None]
        answers = iter(self.classify(torch.stack(plain)) if plain else ())
        return [next(answers) if one.wanted is None else self.attend(one) for one in questions]

    def classify(self, pixels: Float[Tensor, "b c y x"]) -> list[Answer]:
        """Features and probabilities of a batch."""
        features = self.model.features(pixels.to(next(self.model.parameters())))
        if self.model.head is None:
            return [Answer(one) for one in features.float().cpu()]
        found = self.model.probabilities(self.model.head(features).float()).cpu()
        return [Answer(*pair) for pair in zip(features.float().cpu(), found, strict=True)]

    def attend(self, question: Question) -> Answer:
        """Maps of one picture."""
        assert question.wanted is not None
        pixels = question.pixels.to(next(self.model.parameters()))
        return Answer(maps=maps(self.model, pixels, question.wanted))

    def top(self, answer: Answer, count: int) -> list[dict[str, Any]]:
        """The most likely classes, best first."""
        assert answer.probabilities is not None
        best = answer.probabilities.topk(min(count, len(answer.probabilities)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"label": self.label(number), "probability": value} for number, value in pairs]

    def label(self, number: int) -> str:
        """The name of a class."""
        return self.model.labels[number] if self.model.labels else f"class {number}"

    def describe(self, labels: bool = True) -> dict[str, Any]:
        """The model in plain values."""
        classes = self.model.architecture.classes
        found = {
            "name": self.name,
            "variant": variant_name(self.model.architecture),
            "parameters": sum(x.numel() for x in self.model.parameters()),
            "classes": classes,
            "size": list(self.preprocess.size),
            "features": self.model.feature_width,
            "heads": list(self.shape.heads),
            "grid": list(self.shape.grids[0]) if self.shape.grids else None,
            "patches": self.shape.even,
        }
        return found | ({"labels": [self.label(n) for n in range(classes)]} if labels else {})


def serve_model(model: Classifier, name: str) -> Served:
    """A model made ready; one pass over a black picture finds out what cannot work."""
    if not isinstance(model.preprocess, Preprocessing):
        raise VitrailError(f"{name} has no preprocessing; load it with vitrail.load(...)")
    weights = next(model.eval().parameters())
    black = torch.zeros(1, len(model.preprocess.mean), *model.preprocess.size)
    with torch.inference_mode():
        shape = shape_of(record(model, black.to(weights), gradient=False))
    return Served(name, model, model.preprocess, shape)


def open_models(sources: Sequence[str | Path], device: torch.device) -> list[Served]:
    """Each MODEL, or NAME=MODEL, under a name that no other has."""
    found: list[Served] = []
    for source in sources:
        name, where = split_name(str(source))
        if name in (one.name for one in found):
            raise VitrailError(f"two models are called '{name}'; name one, as other={where}")
        found.append(serve_model(load(where).to(device), name))
    if not found:
        raise VitrailError("no model to serve; name a run folder or a weights file")
    return found


def split_name(source: str) -> tuple[str, str]:
    """The name and place of NAME=MODEL; by default, the last part of the place."""
    name, sign, where = source.partition("=")
    if sign and "/" not in name and not Path(source).exists():
        return name, where
    path = Path(source)
    if not path.exists():
        return source, source
    return path.resolve().name.removesuffix(".safetensors") or source, source
