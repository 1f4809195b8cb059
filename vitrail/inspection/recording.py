"""One picture through a model, with all that is needed to look at its attention afterwards.

The pass itself uses the fused kernels. Of each layer only the input is kept; its matrices are built
from that, some rows at a time, and thrown away.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.model import Classifier
from vitrail.model.positions import Grid
from vitrail.model.vit import Attention, AttentionPool, AxialAttention, ViT, grid_for

MOST_NUMBERS = 16_000_000
"""Attention weights that are in memory at once, as far as single rows allow it."""


@dataclass(frozen=True)
class Slope:
    """What the gradient of an attention matrix is made of.

    A head's output is its matrix times its values, so the gradient of the matrix is what flows back
    into the output, times the values: neither it nor the matrix need be kept.
    """

    values: Float[Tensor, "h n k"]
    backward: Float[Tensor, "h m k"]
    """Gradient of the chosen class's logit by the outputs of the heads."""

    def of(self, rows: slice) -> Float[Tensor, "h r n"]:
        """The gradient by some rows of the matrix."""
        return self.backward[:, rows] @ self.values.mT


@dataclass(frozen=True)
class Layer:
    """One attention layer and what it was given."""

    module: Any
    inputs: Tensor
    grid: Grid
    prefix: int
    """Tokens ahead of those on the grid."""
    pixels: int
    """Pixels of the image between neighbours on the grid."""
    slope: Slope | None = None

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    def chunks(self) -> Iterator[tuple[slice, Float[Tensor, "h r n"]]]:
        """The attention weights, some rows at a time."""
        step = max(1, MOST_NUMBERS // (self.module.heads * self.tokens))
        for start in range(0, self.tokens, step):
            rows = slice(start, min(start + step, self.tokens))
            yield rows, self.module.weights(self.inputs, rows)[0].float()


@dataclass(frozen=True)
class Recording:
    """What a pass through a model left behind."""

    layers: tuple[Layer, ...]
    """From input to output; empty where the model has no attention."""
    tokens: Float[Tensor, "n d"]
    """The final sequence."""
    grid: Grid
    """Where the final tokens lie, but for the first `prefix`."""
    prefix: int
    reader: Float[Tensor, " n"]
    """How much of each final token the head reads, in sum 1."""
    logits: Float[Tensor, " classes"] | None
    target: int = -1
    """The class whose gradient was taken; -1 for none."""
    pool: tuple[Float[Tensor, "h 1 n"], Slope] | None = None
    """Weights and gradient of attention pooling, where a gradient was taken."""


def record(
    model: Classifier,
    image: Float[Tensor, "1 c y x"],
    target: int | None = None,
    *,
    gradient: bool = True,
) -> Recording:
    """One pass, and where wanted the gradient of a class's logit (the best guess's by default), if
    all of the model's attention has one."""
    modules = model.attention_layers()
    pool = model.pool if isinstance(model, ViT) else None
    sloped = gradient and model.head is not None and bool(modules) and all(map(is_plain, modules))
    readers = [*modules, *([] if pool is None else [pool])] if sloped else []
    with prepared(model, recompute=sloped), torch.set_grad_enabled(sloped):
        ends = [module.get_submodule("out") for module in readers]
        with kept(modules) as inputs, kept(ends) as outputs:
            tokens = model.tokens(image.detach().requires_grad_(sloped))
            features = model.summary(tokens)
            logits = None if model.head is None else model.head(features)
        found: list[Tensor] = []
        if sloped and logits is not None:
            target = int(logits[0].argmax()) if target is None else target
            found = list(torch.autograd.grad(logits[0, target], outputs))
    with torch.no_grad():
        slopes = [
            slope(module, x.detach(), y)
            for module, x, y in zip(readers, [*inputs, tokens], found, strict=False)
        ]
        return Recording(
            layers=placed(model, image, inputs, slopes),
            tokens=tokens[0].detach(),
            grid=final_grid(model, size_of(image)),
            prefix=prefix(model),
            reader=reader(model, tokens.detach()),
            logits=None if logits is None else logits[0].detach().float(),
            target=-1 if not slopes or target is None else target,
            pool=None
            if pool is None or not slopes
            else (pool.weights(tokens.detach())[0].float(), slopes[-1]),
        )


@contextmanager
def prepared(model: Classifier, *, recompute: bool) -> Iterator[None]:
    """The model as in use, its activations recomputed where a gradient needs them."""
    training, recomputing = model.training, model.activation_checkpointing
    model.eval()
    model.activation_checkpointing = recompute
    try:
        yield
    finally:
        model.train(training)
        model.activation_checkpointing = recomputing


@contextmanager
def kept(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """The inputs of modules, in the order in which they are run."""
    found: list[Tensor] = []

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append(inputs[0])

    hooks = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def is_plain(module: nn.Module) -> bool:
    """Whether a head's output is its matrix times its values and nothing else."""
    return isinstance(module, Attention)


def slope(module: Any, x: Tensor, backward: Tensor) -> Slope:
    """The gradient by a layer's matrix, from the layer's input and the gradient by its heads."""
    values = module.split(x)[2]
    if isinstance(module, AxialAttention):
        lines = "1 y h x k" if module.axis == "row" else "1 x h y k"
        values = rearrange(values, f"{lines} -> h (y x) k")
        backward = rearrange(backward, "1 y x (h k) -> h (y x) k", h=module.heads)
    elif isinstance(module, AttentionPool):
        values, backward = values[0], rearrange(backward, "1 (h k) -> h 1 k", h=module.heads)
    else:
        values, backward = values[0], rearrange(backward, "1 n (h k) -> h n k", h=module.heads)
    return Slope(values.float(), backward.float())


def placed(
    model: Classifier, image: Tensor, inputs: Sequence[Tensor], slopes: Sequence[Slope]
) -> tuple[Layer, ...]:
    """The layers with the grid that each works on."""
    found = []
    for number, (module, x) in enumerate(zip(model.attention_layers(), inputs, strict=True)):
        grid, pixels = layer_grid(model, image, x)
        of = slopes[number] if slopes else None
        found.append(Layer(module, x.detach(), grid, prefix(model), pixels, of))
    return tuple(found)


def layer_grid(model: Classifier, image: Tensor, x: Tensor) -> tuple[Grid, int]:
    """The grid of a layer's input, and the pixels between its neighbours."""
    if isinstance(model, ViT):
        return final_grid(model, size_of(image)), model.architecture.stride
    grid = (x.shape[-2], x.shape[-1])
    # Sides round up, and the stride is a power of two.
    strides = (2**power for power in range(6))
    return grid, next(one for one in strides if -(-image.shape[-2] // one) == grid[0])


def size_of(image: Tensor) -> tuple[int, int]:
    """Rows and columns."""
    return image.shape[-2], image.shape[-1]


def final_grid(model: Classifier, size: tuple[int, int]) -> Grid:
    """Rows and columns of the last map for images of so many pixels."""
    if isinstance(model, ViT):
        return grid_for(size, model.architecture.patch, model.architecture.backbone)
    return -(-size[0] // 32), -(-size[1] // 32)


def prefix(model: Classifier) -> int:
    """Tokens ahead of those on the grid."""
    return model.architecture.prefix if isinstance(model, ViT) else 0


def reader(model: Classifier, tokens: Float[Tensor, "1 n d"]) -> Float[Tensor, " n"]:
    """What stands for the class token: how much of each final token the head's vector is made of.

    The class token itself where it is read, all patches alike for the mean, and for attention
    pooling what its query looks at, averaged over heads.
    """
    weights = tokens.new_zeros(tokens.shape[1], dtype=torch.float32)
    if isinstance(model, ViT) and model.pool is not None:
        return model.pool.weights(tokens)[0, :, 0].float().mean(0)
    if isinstance(model, ViT) and model.architecture.pool == "class":
        weights[0] = 1.0
        return weights
    weights[prefix(model) :] = 1.0
    return weights / weights.sum()
