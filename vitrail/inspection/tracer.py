"""One image traced through a model: its prediction, attention maps and features."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError, did_you_mean
from vitrail.inspection.attention import (
    AttentionAnalysis,
    Recording,
    analyze_attention,
    final_grid,
    has_attention_grad,
    on_grid,
    record,
    uniform_distance,
)
from vitrail.inspection.embeddings import (
    Filters,
    PositionSimilarity,
    first_filters,
    position_similarity,
    why_no_positions,
)
from vitrail.model import Classifier
from vitrail.model.classifier import NO_PREPROCESSING
from vitrail.model.variants import variant_name
from vitrail.weights.load import fitted

ImageInput = str | Path | Image.Image | np.ndarray
_SHOWN_LAYERS = 4
"""Layers whose heads are drawn by default."""


@dataclass(frozen=True)
class ImageTrace:
    """One image on its way through a model."""

    name: str
    pixels: Float[Tensor, "c y x"]
    preprocess: Preprocessing
    recording: Recording
    attention: AttentionAnalysis | None
    """None for a model without attention."""
    prediction: str = ""
    probability: float = 0.0
    target: str = ""
    """The class of gradient-weighted rollout."""

    @property
    def visible(self) -> Float[Tensor, "c v u"]:
        """The pixels in whole patches; the model does not see those beyond the last one."""
        if not self.recording.layers:
            return self.pixels
        layer = self.recording.layers[0]
        rows, columns = (side * layer.pixels for side in layer.grid)
        return self.pixels[:, :rows, :columns]

    @property
    def rollout(self) -> Float[Tensor, "y x"] | None:
        return self._on_first_grid(None if self.attention is None else self.attention.rollout)

    @property
    def gradient(self) -> Float[Tensor, "y x"] | None:
        """Gradient-weighted rollout."""
        return self._on_first_grid(None if self.attention is None else self.attention.gradient)

    def _on_first_grid(self, vector: Float[Tensor, " n"] | None) -> Float[Tensor, "y x"] | None:
        return None if vector is None else on_grid(vector[None], self.recording.layers[0].grid)[0]

    def distances(self) -> list[dict[str, Any]]:
        """Mean attention distance of each head in pixels, by layer."""
        if self.attention is None:
            return []
        layers = self.recording.layers
        return [
            {
                "layer": number,
                "heads": heads.tolist(),
                "uniform": uniform_distance(layers[number].grid, layers[number].pixels),
            }
            for number, heads in sorted(self.attention.distances.items())
        ]

    def to_dict(self) -> dict[str, Any]:
        maps = {"rollout": self.rollout, "gradient_rollout": self.gradient}
        return {
            "name": self.name,
            "guess": self.prediction,
            "probability": round(self.probability, 4),
            "gradient_class": self.target,
            "grid": list(self.recording.grid),
            **{k: None if m is None else rounded(m.tolist(), 6) for k, m in maps.items()},
        }


class Tracer:
    """A model, with the layers, image size and class to inspect."""

    def __init__(
        self,
        model: Classifier,
        *,
        layers: Sequence[int] | None = None,
        size: tuple[int, int] | None = None,
        target: str | int | None = None,
    ) -> None:
        self.model = model
        known = model.preprocess if isinstance(model.preprocess, Preprocessing) else None
        self._preprocess = fitted(known, size) if known and size else known
        self.size = size or (known.size if known else model.architecture.size)
        count = len(model.attention_layers())
        self.layers = checked_layers(layers, count)
        spaced = np.linspace(0, count - 1, min(count, _SHOWN_LAYERS)).round().astype(int).tolist()
        self.shown_layers = self.layers if layers else tuple(spaced)
        self.target = None if target is None else _class_number(model, target)

    @property
    def preprocess(self) -> Preprocessing:
        if self._preprocess is None:
            raise VitrailError(NO_PREPROCESSING)
        return self._preprocess

    @property
    def title(self) -> str:
        """The model and its image size."""
        rows, columns = self.size
        return f"{variant_name(self.model.architecture)} · {rows} × {columns} px"

    @cached_property
    def filters(self) -> Filters:
        return first_filters(self.model)

    @cached_property
    def positions(self) -> PositionSimilarity | None:
        return position_similarity(self.model, final_grid(self.model, self.size))

    def trace(self, pixels: Float[Tensor, "c y x"], name: str) -> ImageTrace:
        """Run one preprocessed image."""
        weights = next(self.model.parameters())
        try:
            recording = record(self.model, pixels[None].to(weights), self.target)
            attention = analyze_attention(recording, self.layers) if recording.layers else None
        except torch.OutOfMemoryError:
            rows, columns = self.size
            raise VitrailError(
                f"out of memory at {rows}x{columns} pixels; try a smaller size, or device cpu"
            ) from None
        prediction, probability = "", 0.0
        if recording.logits is not None:
            best = self.model.probabilities(recording.logits).max(-1)
            prediction, probability = self._label(int(best.indices)), float(best.values)
        target = "" if recording.target is None else self._label(recording.target)
        return ImageTrace(
            name, pixels, self.preprocess, recording, attention, prediction, probability, target
        )

    def _label(self, number: int) -> str:
        return self.model.labels[number] if self.model.labels else f"class {number}"

    def absent(self) -> dict[str, str]:
        """What this model does not have, and why."""
        reasons = {}
        kind = type(self.model).__name__
        if reason := why_no_positions(self.model):
            reasons["positions"] = reason
        if not self.model.attention_layers():
            reasons["attention"] = f"{kind} has no attention layers"
        elif self.model.head is None:
            reasons["gradient"] = "this model has no classes to take a gradient of"
        elif not has_attention_grad(self.model):
            reasons["gradient"] = f"attention in {kind} is more than weights times values"
        return reasons

    def to_dict(self) -> dict[str, Any]:
        """Model, size, filters and position embeddings as plain values."""
        filters, positions = self.filters, self.positions
        return {
            "model": self.title,
            "size": list(self.size),
            "layers": list(self.layers),
            "filters": {
                "of": filters.of,
                "count": filters.count,
                "shares": rounded(filters.shares.tolist(), 5),
            },
            "positions": None if positions is None else _mean_similarity(positions),
        }


def _mean_similarity(positions: PositionSimilarity) -> dict[str, Any]:
    """Mean cosine similarity of a patch with its row, its column and all other patches."""
    rows, columns = positions.rows, positions.columns
    maps = positions.maps.unflatten(0, (len(rows), len(columns)))

    def mean_without_self(values: Tensor) -> float | None:
        n, length = values.numel() // values.shape[-1], values.shape[-1]
        return None if length == 1 else round((float(values.sum()) - n) / (n * (length - 1)), 4)

    return {
        "kind": positions.kind,
        "grid": list(positions.maps.shape[1:]),
        "same_row": mean_without_self(maps[range(len(rows)), :, rows]),
        "same_column": mean_without_self(maps[:, range(len(columns)), :, columns]),
        "all": mean_without_self(positions.maps.flatten(1)),
    }


def mean_distances(images: Sequence[list[dict[str, Any]]]) -> dict[str, Any] | None:
    """The `distances` of several images, averaged head by head; None if there are none."""
    if not any(images):
        return None
    layers = [
        {
            "layer": rows[0]["layer"],
            "heads": rounded(np.mean([row["heads"] for row in rows], 0).tolist(), 3),
            "uniform": round(rows[0]["uniform"], 2),
        }
        for rows in zip(*images, strict=True)
    ]
    return {"unit": "pixels", "n": len(images), "layers": layers}


def checked_layers(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Layer numbers from 0 up, where -1 is the last; all layers by default."""
    if not layers:
        return tuple(range(count))
    for layer in layers:
        if not -count <= layer < count:
            expected = f"they are 0 to {count - 1}" if count else "this model has none"
            raise VitrailError(f"no attention layer {layer}: {expected}")
    return tuple(sorted({layer % count for layer in layers}))


def _class_number(model: Classifier, target: str | int) -> int:
    """A class by its name or number."""
    classes = model.architecture.classes
    if isinstance(target, str) and target in model.labels:
        return model.labels.index(target)
    if str(target).isdecimal() and int(target) < classes:
        return int(target)
    expected = f"; expected a name, or 0 to {classes - 1}" if classes else ", nor any other"
    hint = did_you_mean(str(target), model.labels) or expected
    raise VitrailError(f"this model has no class '{target}'{hint}")


def rounded(values: Any, digits: int) -> Any:
    """Nested lists of numbers, rounded."""
    if isinstance(values, list):
        return [rounded(value, digits) for value in values]
    return round(values, digits)
