"""Attention maps: which ones a request selects, and their values."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.attention import Layer, Recording, analyze_attention, on_grid, record
from vitrail.inspection.images import clip_outliers, denormalize, overlay
from vitrail.model import Classifier
from vitrail.model.positions import Grid
from vitrail.serving.limits import RequestError

_MAX_NUMBERS = 2_000_000
"""Numbers in one response; a map for each of 1,024 patches is half of it."""


@dataclass(frozen=True)
class AttentionShape:
    """The attention layers of a model."""

    heads: tuple[int, ...]
    """Number of heads of each layer."""
    grids: tuple[Grid, ...]
    """Rows and columns of patches that each layer works on."""
    pixels: int
    """Stride between two patches of the first layer."""

    @classmethod
    def of(cls, recording: Recording) -> "AttentionShape":
        layers = recording.layers
        return cls(
            tuple(layer.module.heads for layer in layers),
            tuple(layer.grid for layer in layers),
            layers[0].pixels if layers else 0,
        )

    @property
    def uniform(self) -> bool:
        """Whether all layers work on the same patches."""
        return len(set(self.grids)) == 1

    @property
    def visible(self) -> tuple[int, int]:
        """Height and width in pixels that lie in whole patches; the model does not see the rest."""
        rows, columns = self.grids[0]
        return rows * self.pixels, columns * self.pixels


@dataclass(frozen=True)
class MapQuery:
    """The layers, heads and patches whose maps a request selects."""

    layer: int | Literal["rollout", "all"] = "rollout"
    head: int | Literal["mean"] | None = None
    """None selects each of them."""
    patch: int | Literal["all"] | None = None
    """The patch that attends; None for the token or pooling that the head reads."""

    @property
    def rollout(self) -> bool:
        return self.layer in ("rollout", "all")

    def layers(self, shape: AttentionShape) -> tuple[int, ...]:
        """The layers whose heads are selected."""
        if self.layer == "rollout":
            return ()
        return tuple(range(len(shape.heads))) if self.layer == "all" else (int(self.layer),)

    def check(self, shape: AttentionShape) -> None:
        """Refuses what the model does not have, and responses that would be too large."""

        def check_number(what: str, number: int | str | None, count: int) -> None:
            if isinstance(number, int) and number >= count:
                message = f"no {what} {number}; the last one is {count - 1}"
                raise RequestError(404, "not_found", message)

        if not shape.heads:
            raise RequestError(404, "no_attention", "this model has no attention layers")
        check_number("layer", self.layer, len(shape.heads))
        heads = [shape.heads[n] for n in self.layers(shape)]
        check_number("head", self.head, min(heads, default=max(shape.heads)))
        if self.patch is not None and not shape.uniform:
            message = "the layers of this model have different patches; omit `patch`"
            raise RequestError(404, "no_attention", message)
        patches = prod(shape.grids[0])
        check_number("patch", self.patch, patches)
        maps = self.rollout + (sum(heads) if self.head is None else len(heads))
        if (numbers := maps * (patches if self.patch == "all" else 1) * patches) > _MAX_NUMBERS:
            message = (
                f"the response would have {numbers:,} numbers; select one layer, head or patch"
            )
            raise RequestError(400, "bad_parameter", message)


@dataclass(frozen=True)
class AttentionMap:
    """The attention of one head, the mean of heads, or rollout over all layers."""

    layer: int | None
    """None for rollout."""
    head: int | None
    """None for the mean of all."""
    patch: int | None
    """None for what the head reads."""
    values: Float[Tensor, "y x"]
    """They sum to 1."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **{"layer": self.layer, "head": self.head, "patch": self.patch},
            "grid": list(self.values.shape),
            "values": [float(f"{value:.4g}") for value in self.values.flatten().tolist()],
        }

    def overlay_png(
        self, pixels: Float[Tensor, "c y x"], preprocess: Preprocessing, shape: AttentionShape
    ) -> bytes:
        """The image, bright where attention is high, as a PNG file."""
        height, width = shape.visible
        image = denormalize(pixels[:, :height, :width], preprocess)
        values = self.values if self.layer is None else clip_outliers(self.values)
        file = BytesIO()
        overlay(image, values, image.width / self.values.shape[1]).save(file, "PNG")
        return file.getvalue()


@torch.inference_mode()
def attention_maps(
    model: Classifier, pixels: Float[Tensor, "c y x"], query: MapQuery
) -> list[AttentionMap]:
    """The maps of one image: rollout first, then by layer, head and patch."""
    recording = record(model, pixels[None], gradient=False)
    read = _read_by_classifier if query.patch is None else _read_by_patches
    return list(read(recording, query))


def _read_by_classifier(recording: Recording, query: MapQuery) -> Iterator[AttentionMap]:
    """The attention of the class token or of the pooling."""
    shape = AttentionShape.of(recording)
    layers = query.layers(shape)
    seen = analyze_attention(recording, layers)
    if query.rollout:
        yield AttentionMap(None, None, None, on_grid(seen.rollout[None], shape.grids[0])[0])
    for layer in layers:
        for head, values in _pick_heads(seen.heads[layer], query.head):
            yield AttentionMap(layer, head, None, values)


def _read_by_patches(recording: Recording, query: MapQuery) -> Iterator[AttentionMap]:
    """The attention of single patches."""
    layers = recording.layers
    grid, prefix = layers[0].grid, layers[0].prefix
    patches = range(prod(grid)) if query.patch == "all" else [int(query.patch or 0)]
    rows = [prefix + patch for patch in patches]

    def matrix(layer: Layer) -> Float[Tensor, "h n n"]:
        return torch.cat([weights for _, weights in layer.chunks()], dim=1)

    def of_patches(layer: int | None, head: int | None, weights: Tensor) -> Iterator[AttentionMap]:
        for patch, values in zip(patches, on_grid(weights[rows], grid), strict=True):
            yield AttentionMap(layer, head, patch, values)

    if query.rollout:
        # inspection's rollout follows one row through the layers; this needs every row.
        product = torch.eye(layers[0].tokens, device=layers[0].inputs.device)
        for layer in layers:
            product = (matrix(layer).mean(0) @ product + product) / 2
        yield from of_patches(None, None, product.cpu())
    for number in query.layers(AttentionShape.of(recording)):
        for head, weights in _pick_heads(matrix(layers[number]).cpu(), query.head):
            yield from of_patches(number, head, weights)


def _pick_heads(heads: Tensor, choice: int | str | None) -> Iterator[tuple[int | None, Tensor]]:
    if choice == "mean":
        yield None, heads.mean(0)
        return
    for number in range(len(heads)) if choice is None else [int(choice)]:
        yield number, heads[number]
