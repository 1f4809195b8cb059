"""What can be seen in the weights alone, or in the final tokens: filters, positions, features."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.model import Classifier
from vitrail.model.axial import AxialResNet
from vitrail.model.positions import Grid, Positions
from vitrail.model.resnet import ResNet, StandardizedConv
from vitrail.model.vit import ViT

MOST_MAPS = 16
"""Position maps to a side: of a larger grid, so many evenly spaced rows and columns are shown."""


@dataclass(frozen=True)
class Filters:
    """Principal components of the filters that meet the pixels first."""

    components: Float[Tensor, "k c y x"]
    shares: Float[Tensor, " k"]
    """Of the filters' variance, what each component explains."""
    count: int
    """How many filters there are."""
    of: str
    """What they are the filters of."""


@dataclass(frozen=True)
class Similarity:
    """Cosine similarity of the position embeddings of some patches with those of all."""

    maps: Float[Tensor, "q y x"]
    rows: Int[Tensor, " r"]
    """Rows of the patches that have a map; the maps are row by row."""
    columns: Int[Tensor, " s"]
    kind: str


def principal(
    x: Float[Tensor, "n d"], count: int
) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]:
    """The first principal components, as unit vectors, with the share of variance of each.

    Signs are arbitrary; here the largest entry of each is positive.
    """
    centerd = (x - x.mean(0)).double()
    n, d = centerd.shape
    # The smaller of the two Gram matrices: a map may have 49 places of 8,192 channels.
    gram = centerd.mT @ centerd if d <= n else centerd @ centerd.mT
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    # The last direction of n centerd points has no variance, only rounding.
    k = min(count, d, max(n - 1, 1))
    components = (vectors if d <= n else centerd.mT @ vectors)[:, :k].mT
    components = F.normalize(components, dim=1)
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    total = values.sum().clamp(min=1e-30)
    return (components * largest.sign()).to(x.dtype), (values[:k] / total).to(x.dtype)


def filters(model: Classifier, count: int = 28) -> Filters:
    """The filters of the patch embedding, or of the first convolution of a network with one."""
    convolution, of = first_convolution(model)
    kernel = convolution.weight
    if isinstance(convolution, StandardizedConv):
        kernel = convolution.standardized()
    kernel = kernel.detach().float().cpu()
    components, shares = principal(kernel.flatten(1), count)
    return Filters(components.unflatten(1, kernel.shape[1:]), shares, len(kernel), of)


def first_convolution(model: Classifier) -> tuple[torch.nn.Conv2d, str]:
    """The layer that meets the pixels, and what it is called."""
    if isinstance(model, ViT):
        if model.backbone is None:
            return model.embedding, "patch embedding"
        return convolution_at(model.backbone, "root.conv"), "first convolution"
    if isinstance(model, ResNet):
        return model.root, "first convolution"
    return convolution_at(model, "stem.0"), "first convolution"


def convolution_at(model: torch.nn.Module, path: str) -> torch.nn.Conv2d:
    """A convolution by its name."""
    found = model.get_submodule(path)
    assert isinstance(found, torch.nn.Conv2d)
    return found


def similarity(model: Classifier, grid: Grid) -> Similarity:
    """The position embeddings on a grid, compared; a line where a model has none to compare."""
    if not isinstance(model, ViT):
        relative = isinstance(model, AxialResNet)
        has = "embeds offsets, not places" if relative else "has no position embeddings"
        raise VitrailError(f"{type(model).__name__} {has}")
    a = model.architecture
    if a.positions == "relative":
        raise VitrailError("relative positions embed offsets, not places")
    if not len(model.positions):
        raise VitrailError("this model has no position embeddings")
    stem = model.positions[0]
    assert isinstance(stem, Positions)
    like = next(model.parameters()).new_zeros(1, 1, a.width)
    table = F.normalize(stem.patches(like, grid)[0].detach().float().cpu(), dim=1)
    rows, columns = (evenly(side, MOST_MAPS) for side in grid)
    asked = (rows[:, None] * grid[1] + columns[None]).flatten()
    layer = "" if a.injection == "stem" else " (first layer)"
    return Similarity(
        (table[asked] @ table.mT).unflatten(1, grid), rows, columns, a.positions + layer
    )


def evenly(side: int, most: int) -> Int[Tensor, " r"]:
    """At most so many of the numbers below `side`, evenly spaced, both ends among them."""
    return torch.linspace(0, side - 1, min(side, most)).round().long()


def colored(tokens: Float[Tensor, "n d"], grid: Grid) -> Float[Tensor, "y x 3"]:
    """The first three principal components of one picture's patch features as red, green, blue.

    Scaled to the middle 98 per cent, so that a few extreme patches do not take all the contrast.
    """
    tokens = tokens.float().cpu()
    components, _ = principal(tokens, 3)
    scores = (tokens - tokens.mean(0)) @ components.mT
    low, high = (scores.quantile(q, 0, keepdim=True) for q in (0.01, 0.99))
    scaled = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    scaled = F.pad(scaled, (0, 3 - scaled.shape[1]), value=0.5)
    return scaled.unflatten(0, grid)
