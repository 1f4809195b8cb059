"""Filters and position embeddings (Figure 7), and the principal components of patch features."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitrail.model import Classifier
from vitrail.model.axial import AxialResNet
from vitrail.model.positions import Grid, Positions
from vitrail.model.resnet import StandardizedConv
from vitrail.model.vit import ViT

MAX_MAPS = 16
"""Position maps per side; of a larger grid, this many evenly spaced rows and columns are shown."""


@dataclass(frozen=True)
class Filters:
    """Principal components of the filters of the first convolution."""

    components: Float[Tensor, "k c y x"]
    shares: Float[Tensor, " k"]
    """The share of the variance that each component explains."""
    count: int
    """The number of filters."""
    of: str
    """The name of the layer."""


@dataclass(frozen=True)
class PositionSimilarity:
    """Cosine similarity of the position embeddings of some patches with those of all patches."""

    maps: Float[Tensor, "q y x"]
    rows: Int[Tensor, " r"]
    """Rows of the patches that have a map; the maps are ordered row by row."""
    columns: Int[Tensor, " s"]
    kind: str


def principal_components(
    x: Float[Tensor, "n d"], count: int
) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]:
    """The first principal components as unit vectors, and the share of variance of each.

    Signs are arbitrary; here the largest entry of each component is positive.
    """
    centered = (x - x.mean(0)).double()
    n, d = centered.shape
    # The smaller of the two Gram matrices: a map may have 49 positions of 8,192 channels.
    gram = centered.mT @ centered if d <= n else centered @ centered.mT
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    # The last direction of n centered points has no variance, only rounding.
    k = min(count, d, max(n - 1, 1))
    components = (vectors if d <= n else centered.mT @ vectors)[:, :k].mT
    components = F.normalize(components, dim=1)
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    total = values.sum().clamp(min=1e-30)
    return (components * largest.sign()).to(x.dtype), (values[:k] / total).to(x.dtype)


def first_filters(model: Classifier, count: int = 28) -> Filters:
    """The filters of the patch embedding, or of the first convolution of a ResNet or hybrid."""
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    patches = isinstance(model, ViT) and convolution is model.embedding
    standardized = isinstance(convolution, StandardizedConv)
    kernel = convolution.standardized() if standardized else convolution.weight
    kernel = kernel.detach().float().cpu()
    components, shares = principal_components(kernel.flatten(1), count)
    components = components.unflatten(1, kernel.shape[1:])
    layer = "patch embedding" if patches else "first convolution"
    return Filters(components, shares, len(kernel), layer)


def why_no_positions(model: Classifier) -> str:
    """Why the position embeddings of a model cannot be compared; empty if they can be."""
    if not isinstance(model, ViT):
        relative = isinstance(model, AxialResNet)
        reason = (
            "encodes relative offsets, not positions" if relative else "has no position embeddings"
        )
        return f"{type(model).__name__} {reason}"
    if model.architecture.positions == "relative":
        return "relative position embeddings encode offsets, not positions"
    return "" if len(model.positions) else "this model has no position embeddings"


def position_similarity(model: Classifier, grid: Grid) -> PositionSimilarity | None:
    """The position embeddings on a grid, compared; None where `why_no_positions` gives a reason."""
    if not isinstance(model, ViT) or why_no_positions(model):
        return None
    a, positions = model.architecture, model.positions[0]
    assert isinstance(positions, Positions)
    like = next(model.parameters()).new_zeros(1, 1, a.width)
    table = F.normalize(positions.patches(like, grid)[0].detach().float().cpu(), dim=1)
    rows, columns = (
        torch.linspace(0, side - 1, min(side, MAX_MAPS)).round().long() for side in grid
    )
    chosen = (rows[:, None] * grid[1] + columns[None]).flatten()
    kind = a.positions + ("" if a.injection == "stem" else " (first layer)")
    return PositionSimilarity((table[chosen] @ table.mT).unflatten(1, grid), rows, columns, kind)


def feature_colors(tokens: Float[Tensor, "n d"], grid: Grid) -> Float[Tensor, "y x 3"]:
    """The first three principal components of an image's patch features as RGB.

    Scaled to the middle 98 percent, so that a few extreme patches do not take all the contrast.
    """
    tokens = tokens.float().cpu()
    components, _ = principal_components(tokens, 3)
    scores = (tokens - tokens.mean(0)) @ components.mT
    low, high = (scores.quantile(q, 0, keepdim=True) for q in (0.01, 0.99))
    scaled = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    scaled = F.pad(scaled, (0, 3 - scaled.shape[1]), value=0.5)
    return scaled.unflatten(0, grid)
