"""Who looks at whom: attention distance, the maps of heads, and rollout, layer by layer.

No layer's matrices outlive their layer. Rollout is the product of all of them, but what is read of
it is one row, so it is taken from that side: vector times matrix, last layer first.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.inspection.recording import Layer, Recording
from vitrail.model.positions import Grid


@dataclass(frozen=True)
class Seen:
    """What attention does with one picture; layers by their number."""

    distances: dict[int, Float[Tensor, " h"]]
    """Mean attention distance of each head, in pixels."""
    heads: dict[int, Float[Tensor, "h y x"]]
    """Where each head of a layer looks, from the tokens that the classifier reads."""
    rollout: Float[Tensor, " n"]
    """The row of the product that the classifier reads: prefix and grid of the first layer."""
    gradient: Float[Tensor, " n"] | None
    """The same, gradient-weighted; None where no gradient was taken."""


@dataclass(frozen=True)
class Passage:
    """What one layer does to the vectors that come down from above."""

    rollout: Float[Tensor, " n"]
    gradient: Float[Tensor, " n"]
    distance: Float[Tensor, " h"]
    heads: Float[Tensor, "h n"]


@torch.no_grad()
def look(recording: Recording, chosen: Collection[int]) -> Seen:
    """One walk from the last layer to the first; distances and maps of the chosen layers alone."""
    distances, heads = {}, {}
    start = gradient_start(recording)
    flow, sloped, grid = recording.reader, start, recording.grid
    for number in reversed(range(len(recording.layers))):
        layer = recording.layers[number]
        flow, sloped = (spread(vector, grid, layer) for vector in (flow, sloped))
        start = spread(start, grid, layer)
        origin = spread(recording.reader, recording.grid, layer)
        through = passage(layer, flow, sloped, origin, number in chosen)
        # Rows of A + 1 sum to 2 since those of A sum to 1: halving renormalizes them.
        flow, sloped = (flow + through.rollout) / 2, sloped + through.gradient
        grid = layer.grid
        if number in chosen:
            distances[number] = through.distance.cpu()
            heads[number] = on_grid(through.heads, layer.grid).cpu()
    if recording.pool is None:
        sloped = sloped - start  # the identity's part: it lies where the walk began
    taken = recording.target >= 0
    return Seen(distances, heads, flow.cpu(), sloped.cpu() if taken else None)


def passage(
    layer: Layer,
    flow: Float[Tensor, " n"],
    sloped: Float[Tensor, " n"],
    origin: Float[Tensor, " n"],
    whole: bool,
) -> Passage:
    """Through one layer, some rows of its matrices at a time; `whole` wants the heads apart too."""
    rollout, gradient = torch.zeros_like(flow), torch.zeros_like(flow)
    distance = flow.new_zeros(layer.module.heads)
    heads = flow.new_zeros(layer.module.heads, layer.tokens)
    for rows, weights in layer.chunks():
        rollout += flow[rows] @ weights.mean(0)
        if whole:
            distance += travelled(weights, rows, layer.grid, layer.prefix) * layer.pixels
            heads += torch.einsum("r, h r n -> h n", origin[rows], weights)
        if layer.slope is not None:
            weights *= layer.slope.of(rows)
            gradient += sloped[rows] @ weights.clamp_(min=0).mean(0)
    return Passage(rollout, gradient, distance / (layer.grid[0] * layer.grid[1]), heads)


def travelled(
    weights: Float[Tensor, "h r n"], rows: slice, grid: Grid, prefix: int
) -> Float[Tensor, " h"]:
    """Distance in patches that each head looks, summed over the patches among some rows.

    Class token and registers have no place: as queries they are left out, as keys too, and what
    remains of each row is scaled to sum 1.
    """
    queries = slice(max(rows.start, prefix) - rows.start, None)
    among_patches = weights[:, queries, prefix:]
    places = torch.stack(
        torch.meshgrid(*(torch.arange(side, device=weights.device) for side in grid), indexing="ij")
    )
    places = places.flatten(1).mT.float()
    own = places[max(rows.start, prefix) - prefix : max(rows.stop, prefix) - prefix]
    weighted = torch.einsum("h r n, r n -> h r", among_patches, torch.cdist(own, places))
    return (weighted / among_patches.sum(-1).clamp(min=1e-12)).sum(1)


def attention_distance(
    weights: Float[Tensor, "h n n"], grid: Grid, pixels: int, prefix: int = 0
) -> Float[Tensor, " h"]:
    """Mean attention distance of each head in pixels (D.7), from whole matrices."""
    rows = slice(0, weights.shape[1])
    return travelled(weights, rows, grid, prefix) * pixels / (grid[0] * grid[1])


def uniform_distance(grid: Grid, pixels: int) -> float:
    """The attention distance of a head that looks at all patches alike."""
    apart = [torch.arange(side, dtype=torch.float64) for side in grid]
    # Of side² pairs along an axis, side lie 0 apart, and 2 (side − d) lie d apart.
    pairs = [
        (side - d) * (2 - (d == 0).double()) / side**2 for side, d in zip(grid, apart, strict=True)
    ]
    lengths = torch.hypot(apart[0][:, None], apart[1][None])
    return float(pairs[0] @ lengths @ pairs[1] * pixels)


def gradient_start(recording: Recording) -> Float[Tensor, " n"]:
    """Where gradient-weighted rollout begins: attention pooling is one more matrix to weight."""
    if recording.pool is None:
        return recording.reader
    weights, slope = recording.pool
    return (weights * slope.of(slice(None))).clamp(min=0).mean(0)[0]


def spread(vector: Float[Tensor, " n"], grid: Grid, layer: Layer) -> Float[Tensor, " m"]:
    """A vector over a map as one over the larger map that was averaged into it."""
    if grid == layer.grid:
        return vector
    cells = [
        torch.arange(large, device=vector.device) * small // large
        for small, large in zip(grid, layer.grid, strict=True)
    ]
    cell = (cells[0][:, None] * grid[1] + cells[1][None]).flatten()
    return (vector / cell.bincount(minlength=len(vector)).clamp(min=1))[cell]


def on_grid(vectors: Float[Tensor, "h n"], grid: Grid) -> Float[Tensor, "h y x"]:
    """The part on the grid, each map in sum 1, or zero where nothing is looked at."""
    patches = vectors[:, vectors.shape[1] - grid[0] * grid[1] :]
    patches = patches / patches.sum(1, keepdim=True).clamp(min=1e-12)
    return patches.unflatten(1, grid)
