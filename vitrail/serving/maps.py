"""Which maps of attention a request asks for, and what they hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.attention import look, on_grid
from vitrail.inspection.pictures import clipped, overlay, photograph
from vitrail.inspection.recording import Layer, Recording, record
from vitrail.model import Classifier
from vitrail.model.positions import Grid
from vitrail.serving.limits import RequestError

MOST_NUMBERS = 2_000_000
"""Numbers in one answer; a patch's map for each of 1,024 patches is half of it."""


@dataclass(frozen=True)
class Shape:
    """The attention of a model, in numbers."""

    heads: tuple[int, ...]
    """Of each layer."""
    grids: tuple[Grid, ...]
    """Rows and columns of patches that each layer works on."""
    pixels: int
    """Pixels between two patches of the first layer."""

    @property
    def even(self) -> bool:
        """Whether all layers work on the same patches."""
        return len(set(self.grids)) == 1


@dataclass(frozen=True)
class Wanted:
    """Layer, head and patch: a number, or several of them in a word."""

    layer: int | Literal["rollout", "all"] = "rollout"
    head: int | Literal["mean"] | None = None
    """None stands for each of them."""
    patch: int | Literal["all"] | None = None
    """Whose attention; None for what the classifier reads."""

    def layers(self, shape: Shape) -> tuple[int, ...]:
        """The layers whose heads are wanted."""
        if self.layer == "rollout":
            return ()
        return tuple(range(len(shape.heads))) if self.layer == "all" else (int(self.layer),)

    def count(self, shape: Shape) -> int:
        """Maps in the answer."""
        heads = sum(shape.heads[n] if self.head is None else 1 for n in self.layers(shape))
        rollout = int(self.layer in ("rollout", "all"))
        patches = area(shape.grids[0]) if self.patch == "all" else 1
        return (heads + rollout) * patches

    def check(self, shape: Shape) -> None:
        """Nothing, or which of the numbers does not exist in this model."""
        if not shape.heads:
            raise RequestError(404, "no_attention", "this model has no attention layers")
        if isinstance(self.layer, int) and self.layer >= len(shape.heads):
            raise missing("layer", self.layer, len(shape.heads))
        heads = min((shape.heads[n] for n in self.layers(shape)), default=max(shape.heads))
        if isinstance(self.head, int) and self.head >= heads:
            raise missing("head", self.head, heads)
        if self.patch is not None and not shape.even:
            told = "the layers of this model see different patches; leave `patch` out"
            raise RequestError(404, "no_attention", told)
        patches = area(shape.grids[0])
        if isinstance(self.patch, int) and self.patch >= patches:
            raise missing("patch", self.patch, patches)
        if (numbers := self.count(shape) * patches) > MOST_NUMBERS:
            told = f"the answer would have {numbers:,} numbers; ask for one layer, head or patch"
            raise RequestError(400, "bad_parameter", told)


@dataclass(frozen=True)
class Map:
    """Where one head looks, or the mean of heads, or rollout over all layers."""

    layer: int | None
    """None for rollout."""
    head: int | None
    """None for all of them together."""
    patch: int | None
    """None for what the classifier reads."""
    values: Float[Tensor, "y x"]
    """In sum 1."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **{"layer": self.layer, "head": self.head, "patch": self.patch},
            "grid": list(self.values.shape),
            "values": [float(f"{value:.4g}") for value in self.values.flatten().tolist()],
        }


def missing(what: str, number: int, count: int) -> RequestError:
    """A number beyond the last one."""
    told = f"there is no {what} {number}: this model has 0 to {count - 1}"
    return RequestError(404, "not_found", told)


def area(grid: Grid) -> int:
    """Patches on a grid."""
    return grid[0] * grid[1]


def shape_of(recording: Recording) -> Shape:
    """What attention a model has, as one picture showed."""
    layers = recording.layers
    return Shape(
        tuple(layer.module.heads for layer in layers),
        tuple(layer.grid for layer in layers),
        layers[0].pixels if layers else 0,
    )


@torch.inference_mode()
def maps(model: Classifier, pixels: Float[Tensor, "c y x"], wanted: Wanted) -> list[Map]:
    """All the maps that were asked for: rollout first, then by layer, head and patch."""
    recording = record(model, pixels[None], gradient=False)
    found = read_by_classifier if wanted.patch is None else read_by_patches
    return list(found(recording, wanted))


def read_by_classifier(recording: Recording, wanted: Wanted) -> Iterator[Map]:
    """What the tokens look at that the classifier reads."""
    shape = shape_of(recording)
    chosen = wanted.layers(shape)
    seen = look(recording, chosen)
    if wanted.layer in ("rollout", "all"):
        yield Map(None, None, None, on_grid(seen.rollout[None], shape.grids[0])[0])
    for layer in chosen:
        for head, values in picked(seen.heads[layer], wanted.head):
            yield Map(layer, head, None, values)


def read_by_patches(recording: Recording, wanted: Wanted) -> Iterator[Map]:
    """What single patches look at."""
    layers = recording.layers
    grid, prefix = layers[0].grid, layers[0].prefix
    patches = range(area(grid)) if wanted.patch == "all" else [int(wanted.patch or 0)]
    rows = [prefix + patch for patch in patches]
    if wanted.layer in ("rollout", "all"):
        for patch, values in zip(patches, on_grid(rollout(layers)[rows].cpu(), grid), strict=True):
            yield Map(None, None, patch, values)
    for number in wanted.layers(shape_of(recording)):
        for head, weights in picked(matrix(layers[number]).cpu(), wanted.head):
            for patch, values in zip(patches, on_grid(weights[rows], grid), strict=True):
                yield Map(number, head, patch, values)


def picked(heads: Tensor, wish: int | str | None) -> Iterator[tuple[int | None, Tensor]]:
    """One head, the mean of all, or each of them."""
    if wish == "mean":
        yield None, heads.mean(0)
        return
    for number in range(len(heads)) if wish is None else [int(wish)]:
        yield number, heads[number]


def matrix(layer: Layer) -> Float[Tensor, "h n n"]:
    """All rows of a layer's attention."""
    return torch.cat([weights for _, weights in layer.chunks()], dim=1)


def rollout(layers: tuple[Layer, ...]) -> Float[Tensor, "n n"]:
    """The product of all layers, heads averaged and the identity added, rows in sum 1."""
    found = torch.eye(layers[0].tokens, device=layers[0].inputs.device)
    for layer in layers:
        found = (matrix(layer).mean(0) @ found + found) / 2
    return found


def drawn(
    one: Map, pixels: Float[Tensor, "c y x"], preprocess: Preprocessing, shape: Shape
) -> bytes:
    """The picture lit where the map is high, as a PNG file."""
    rows, columns = (side * shape.pixels for side in shape.grids[0])
    picture = photograph(pixels[:, :rows, :columns], preprocess)
    values = one.values if one.layer is None else clipped(one.values)
    file = BytesIO()
    overlay(picture, values, picture.width / one.values.shape[1]).save(file, "PNG")
    return file.getvalue()
