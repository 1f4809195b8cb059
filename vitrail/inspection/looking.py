"""One model asked about pictures: what it saw in each, and in all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError, did_you_mean
from vitrail.inspection.attention import Seen, look, on_grid, uniform_distance
from vitrail.inspection.recording import Recording, final_grid, is_plain, record
from vitrail.inspection.structure import Similarity, similarity
from vitrail.model import Classifier
from vitrail.model.variants import name as variant_name
from vitrail.weights.load import fitted

Picture = str | Path | Image.Image | np.ndarray
SHOWN_LAYERS = 4
"""Layers whose heads are drawn where nobody asked for others."""


@dataclass(frozen=True)
class Look:
    """One picture as the model took it in."""

    name: str
    pixels: Float[Tensor, "c y x"]
    recording: Recording
    seen: Seen | None
    """None where the model has no attention."""
    preprocess: Preprocessing
    guess: str = ""
    probability: float = 0.0
    target: str = ""
    """The class that gradient-weighted rollout is about."""

    @property
    def visible(self) -> Float[Tensor, "c v u"]:
        """The pixels that lie in a patch: those beyond the last whole one are not seen."""
        if not self.recording.layers:
            return self.pixels
        layer = self.recording.layers[0]
        rows, columns = (side * layer.pixels for side in layer.grid)
        return self.pixels[:, :rows, :columns]

    @property
    def rollout(self) -> Float[Tensor, "y x"] | None:
        return None if self.seen is None else self.on_first_grid(self.seen.rollout)

    @property
    def gradient(self) -> Float[Tensor, "y x"] | None:
        """Gradient-weighted rollout."""
        if self.seen is None or self.seen.gradient is None:
            return None
        return self.on_first_grid(self.seen.gradient)

    def on_first_grid(self, vector: Float[Tensor, " n"]) -> Float[Tensor, "y x"]:
        """What lies on the grid that attention begins with, in sum 1."""
        return on_grid(vector[None], self.recording.layers[0].grid)[0]


@dataclass
class Distances:
    """Mean attention distances, head by head, over all pictures so far."""

    n: int = 0
    sums: dict[int, Tensor] = field(default_factory=dict)
    uniform: dict[int, float] = field(default_factory=dict)

    def add(self, one: Look) -> None:
        """One more picture."""
        if one.seen is None:
            return
        self.n += 1
        for layer, heads in sorted(one.seen.distances.items()):
            self.sums[layer] = self.sums.get(layer, 0) + heads.double()
            place = one.recording.layers[layer]
            self.uniform[layer] = uniform_distance(place.grid, place.pixels)

    @property
    def means(self) -> dict[int, list[float]]:
        """By layer."""
        return {layer: (heads / self.n).tolist() for layer, heads in self.sums.items()}

    def to_dict(self) -> dict[str, Any] | None:
        """As plain values."""
        if not self.n:
            return None
        layers = [
            {"layer": layer, "heads": rounded(heads), "uniform": round(self.uniform[layer], 2)}
            for layer, heads in self.means.items()
        ]
        return {"unit": "pixels", "n": self.n, "layers": layers}


@dataclass(frozen=True)
class Inspector:
    """A model with what was asked about it."""

    model: Classifier
    preprocess: Preprocessing | None
    size: tuple[int, int]
    layers: tuple[int, ...]
    """For distances."""
    shown: tuple[int, ...]
    """For the maps of heads."""
    target: int | None = None

    def check(self) -> Preprocessing:
        """How pictures become tensors; a line where the model does not know."""
        if self.preprocess is None:
            raise VitrailError("this model has no preprocessing; load it with vitrail.load(...)")
        return self.preprocess

    def pixels(self, picture: Picture) -> Float[Tensor, "c y x"]:
        """A picture as the model wants it; a line where it cannot be read."""
        return self.check()(picture)

    def look(self, pixels: Float[Tensor, "c y x"], name: str) -> Look:
        """One picture through the model."""
        weights = next(self.model.parameters())
        try:
            recording = record(self.model, pixels[None].to(weights), self.target)
            seen = look(recording, self.layers) if recording.layers else None
        except torch.OutOfMemoryError:
            rows, columns = self.size
            raise VitrailError(
                f"out of memory at {rows}x{columns} pixels; try a smaller size, or device cpu"
            ) from None
        one = Look(name, pixels, recording, seen, self.check())
        if recording.logits is None:
            return one
        probability, best = self.model.probabilities(recording.logits).max(-1)
        target = "" if recording.target < 0 else self.label(recording.target)
        return replace(
            one, guess=self.label(int(best)), probability=float(probability), target=target
        )

    def label(self, number: int) -> str:
        """The name of a class."""
        return self.model.labels[number] if self.model.labels else f"class {number}"

    def about(self) -> str:
        """Model and size in words."""
        rows, columns = self.size
        return f"{variant_name(self.model.architecture)} · {rows} × {columns} px"

    def positions(self) -> Similarity | str:
        """How alike the places are; where a model has no places to compare, why."""
        try:
            return similarity(self.model, final_grid(self.model, self.size))
        except VitrailError as error:
            return str(error)

    def absent(self) -> dict[str, str]:
        """What cannot be shown of this model, and why."""
        found = {}
        kind, modules = type(self.model).__name__, self.model.attention_layers()
        if isinstance(positions := self.positions(), str):
            found["positions"] = positions
        if not modules:
            found["attention"] = f"{kind} has no attention layers"
        elif self.model.head is None:
            found["gradient"] = "this model has no classes to take a gradient of"
        elif not all(map(is_plain, modules)):
            found["gradient"] = f"attention in {kind} is more than weights times values"
        return found


def inspector(
    model: Classifier,
    *,
    layers: Sequence[int] | None = None,
    size: tuple[int, int] | None = None,
    target: str | int | None = None,
) -> Inspector:
    """The model ready to be asked; wrong layers and classes are told before any work is done."""
    preprocess = model.preprocess if isinstance(model.preprocess, Preprocessing) else None
    if preprocess is not None and size is not None:
        preprocess = fitted(preprocess, size)
    count = len(model.attention_layers())
    chosen = checked_layers(layers, count)
    spaced = np.linspace(0, count - 1, min(count, SHOWN_LAYERS)).round().astype(int).tolist()
    return Inspector(
        model,
        preprocess,
        size or (preprocess.size if preprocess is not None else model.architecture.size),
        layers=chosen,
        shown=chosen if layers else tuple(spaced),
        target=None if target is None else class_number(model, target),
    )


def checked_layers(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Layers counted from 0, the last ones also from -1."""
    if not layers:
        return tuple(range(count))
    for layer in layers:
        if not -count <= layer < count:
            there = f"they are 0 to {count - 1}" if count else "this model has none"
            raise VitrailError(f"no attention layer {layer}: {there}")
    return tuple(sorted({layer % count for layer in layers}))


def class_number(model: Classifier, target: str | int) -> int:
    """A class by its name or number."""
    classes = model.architecture.classes
    if isinstance(target, str) and target in model.labels:
        return model.labels.index(target)
    if str(target).isdecimal() and int(target) < classes:
        return int(target)
    expected = f"; expected a name, or 0 to {classes - 1}" if classes else ", nor any other"
    hint = did_you_mean(str(target), model.labels) or expected
    raise VitrailError(f"this model has no class '{target}'{hint}")


def rounded(values: Any, digits: int = 3) -> Any:
    """Numbers short enough for a file people read."""
    if isinstance(values, list):
        return [rounded(value, digits) for value in values]
    return round(values, digits)
