"""Attention distance (appendix D.7), head maps and rollout (appendix D.8) of one forward pass.

The pass uses the fused kernels and keeps only the input of each attention layer. The attention
matrices are rebuilt from it a few rows at a time. Rollout is the product of all of them, but only
one row of it is needed, so it is computed as vector times matrix, from the last layer down.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.model import Classifier
from vitrail.model.classifier import eval_mode
from vitrail.model.positions import Grid
from vitrail.model.resnet import stride_of
from vitrail.model.vit import Attention, AxialAttention, ViT, grid_for

MAX_WEIGHTS = 16_000_000
"""Attention weights in memory at once; a single row may exceed it."""


@dataclass(frozen=True)
class AttentionGrad:
    """The gradient of a logit with respect to an attention matrix, in two factors.

    A head's output is its matrix times its values, so the gradient is that of the output times the
    values. The full matrix is never stored.
    """

    values: Float[Tensor, "h n k"]
    output_grad: Float[Tensor, "h m k"]

    def rows(self, rows: slice) -> Float[Tensor, "h r n"]:
        return self.output_grad[:, rows] @ self.values.mT


@dataclass(frozen=True)
class Layer:
    """One attention layer and its input."""

    module: Any
    inputs: Tensor
    grid: Grid
    prefix: int
    """Tokens ahead of those on the grid: class token and registers."""
    pixels: int
    """Pixels of the image between neighbors on the grid."""
    grad: AttentionGrad | None = None

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    def chunks(self) -> Iterator[tuple[slice, Float[Tensor, "h r n"]]]:
        """The attention weights, a few rows at a time."""
        step = max(1, MAX_WEIGHTS // (self.module.heads * self.tokens))
        for start in range(0, self.tokens, step):
            rows = slice(start, min(start + step, self.tokens))
            yield rows, self.module.weights(self.inputs, rows)[0].float()


@dataclass(frozen=True)
class Recording:
    """A forward pass: the inputs of the attention layers, the final tokens and the logits."""

    layers: tuple[Layer, ...]
    """From input to output; empty for a model without attention."""
    tokens: Float[Tensor, "n d"]
    """The final sequence."""
    grid: Grid
    prefix: int
    reader: Float[Tensor, " n"]
    """The weight of each final token in what the classifier reads; they sum to 1."""
    logits: Float[Tensor, " classes"] | None
    target: int | None = None
    """The class whose logit the gradients are of; None without gradients."""
    pool_grad: Float[Tensor, " n"] | None = None
    """`reader` weighted by its gradient, where attention pooling makes it a layer of its own."""


@dataclass(frozen=True)
class AttentionAnalysis:
    """What the attention layers did with one image, by layer number."""

    distances: dict[int, Float[Tensor, " h"]]
    """Mean attention distance of each head, in pixels."""
    heads: dict[int, Float[Tensor, "h y x"]]
    """Where each head attends, from the tokens that the classifier reads."""
    rollout: Float[Tensor, " n"]
    """Over the tokens of the first layer, from the tokens that the classifier reads."""
    gradient: Float[Tensor, " n"] | None
    """Gradient-weighted rollout; None without gradients."""


@dataclass(frozen=True)
class LayerFlow:
    """What one layer does to the rollout vectors of the layer above."""

    rollout: Float[Tensor, " n"]
    gradient: Float[Tensor, " n"]
    distance: Float[Tensor, " h"]
    heads: Float[Tensor, "h n"]


def has_attention_grad(model: Classifier) -> bool:
    """Whether every head's output is its attention matrix times its values and nothing else."""
    modules = model.attention_layers()
    return bool(modules) and all(isinstance(module, Attention) for module in modules)


def record(
    model: Classifier,
    image: Float[Tensor, "1 c y x"],
    target: int | None = None,
    *,
    gradient: bool = True,
) -> Recording:
    """Run one image; with `gradient`, also take the gradient of the target's logit by attention.

    The default target is the predicted class. Models without classes, or whose attention has other
    terms (`has_attention_grad`), get no gradient.
    """
    modules = model.attention_layers()
    pool = model.pool if isinstance(model, ViT) else None
    gradient = gradient and model.head is not None and has_attention_grad(model)
    differentiated = [*modules, *([] if pool is None else [pool])] if gradient else []
    projections = [module.get_submodule("out") for module in differentiated]
    with (
        eval_mode(model),
        _checkpointing(model, gradient),
        torch.set_grad_enabled(gradient),
    ):
        with _inputs_of(modules) as inputs, _inputs_of(projections) as head_outputs:
            tokens = model.unfused().tokens(image.detach().requires_grad_(gradient))
            features = model.pool_tokens(tokens)
            logits = None if model.head is None else model.head(features)
        output_grads: Sequence[Tensor] = ()
        if gradient and logits is not None:
            target = int(logits[0].argmax()) if target is None else target
            output_grads = torch.autograd.grad(logits[0, target], head_outputs)
    with torch.no_grad():
        tokens, inputs = tokens.detach(), [x.detach() for x in inputs]
        grads = [
            _attention_grad(module, x, output_grad)
            for module, x, output_grad in zip(
                differentiated, [*inputs, tokens], output_grads, strict=False
            )
        ]
        pool_grad = None
        if pool is not None and grads:
            weighted = pool.weights(tokens)[0].float() * grads[-1].rows(slice(None))
            pool_grad = weighted.clamp(min=0).mean(0)[0]
        layers = []
        for number, (module, x) in enumerate(zip(modules, inputs, strict=True)):
            grid, pixels = _layer_grid(model, image, x)
            grad = grads[number] if grads else None
            layers.append(Layer(module, x, grid, _prefix(model), pixels, grad))
        return Recording(
            layers=tuple(layers),
            tokens=tokens[0],
            grid=final_grid(model, (image.shape[-2], image.shape[-1])),
            prefix=_prefix(model),
            reader=_reader(model, tokens),
            logits=None if logits is None else logits[0].detach().float(),
            target=target if grads else None,
            pool_grad=pool_grad,
        )


@contextmanager
def _checkpointing(model: Classifier, on: bool) -> Iterator[None]:
    before, model.activation_checkpointing = model.activation_checkpointing, on
    try:
        yield
    finally:
        model.activation_checkpointing = before


@contextmanager
def _inputs_of(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """The inputs of modules, in the order in which they run."""
    inputs: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])

    hooks = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _attention_grad(module: Any, x: Tensor, output_grad: Tensor) -> AttentionGrad:
    values = module.split(x)[2]
    if isinstance(module, AxialAttention):
        lines = "1 y h x k" if module.axis == "row" else "1 x h y k"
        values = rearrange(values, f"{lines} -> 1 h (y x) k")
    output_grad = output_grad.reshape(-1, output_grad.shape[-1])
    output_grad = rearrange(output_grad, "m (h k) -> h m k", h=module.heads)
    return AttentionGrad(values[0].float(), output_grad.float())


def _layer_grid(model: Classifier, image: Tensor, x: Tensor) -> tuple[Grid, int]:
    """The grid of a layer's input, and the pixels between neighbors on it."""
    if isinstance(model, ViT):
        return final_grid(model, (image.shape[-2], image.shape[-1])), model.architecture.stride
    grid = (x.shape[-2], x.shape[-1])
    # Sides round up, and the stride is a power of two.
    strides = (2**power for power in range(6))
    return grid, next(stride for stride in strides if -(-image.shape[-2] // stride) == grid[0])


def final_grid(model: Classifier, size: tuple[int, int]) -> Grid:
    """Rows and columns of the last feature map for an image of `size`."""
    a = model.architecture
    if isinstance(model, ViT):
        return grid_for(size, a.patch, stride_of(a.backbone, a.root))
    return grid_for(size, 1, a.stride)


def _prefix(model: Classifier) -> int:
    return model.architecture.prefix if isinstance(model, ViT) else 0


def _reader(model: Classifier, tokens: Float[Tensor, "1 n d"]) -> Float[Tensor, " n"]:
    """The weight of each final token in what the classifier reads.

    One for the class token, equal weights for mean pooling, and the attention weights of attention
    pooling, averaged over heads.
    """
    if isinstance(model, ViT) and model.pool is not None:
        return model.pool.weights(tokens)[0, :, 0].float().mean(0)
    weights = tokens.new_zeros(tokens.shape[1], dtype=torch.float32)
    if isinstance(model, ViT) and model.architecture.pool == "class":
        weights[0] = 1.0
    else:
        weights[_prefix(model) :] = 1.0
    return weights / weights.sum()


@torch.no_grad()
def analyze_attention(recording: Recording, layers: Collection[int]) -> AttentionAnalysis:
    """Rollout over all layers; distances and head maps of `layers` only."""
    distances, heads = {}, {}
    pool_grad = recording.pool_grad
    start = recording.reader if pool_grad is None else pool_grad
    rollout, gradient, grid = recording.reader, start, recording.grid
    for number, layer in reversed(list(enumerate(recording.layers))):
        rollout, gradient, start = (
            _spread(vector, grid, layer.grid) for vector in (rollout, gradient, start)
        )
        grid = layer.grid
        wanted = number in layers
        reader = _spread(recording.reader, recording.grid, grid) if wanted else None
        flow = _layer_flow(layer, rollout, gradient, reader)
        # Rows of A + 1 sum to 2 since those of A sum to 1: halving renormalizes them.
        rollout, gradient = (rollout + flow.rollout) / 2, gradient + flow.gradient
        if wanted:
            distances[number] = flow.distance.cpu()
            heads[number] = on_grid(flow.heads, grid).cpu()
    if pool_grad is None:
        gradient = gradient - start  # the identity would only mark the tokens that are read
    has_gradient = recording.target is not None
    return AttentionAnalysis(
        distances, heads, rollout.cpu(), gradient.cpu() if has_gradient else None
    )


def _layer_flow(
    layer: Layer,
    rollout: Float[Tensor, " n"],
    gradient: Float[Tensor, " n"],
    reader: Float[Tensor, " n"] | None,
) -> LayerFlow:
    """Through one layer; distances and head maps are computed only for a `reader`."""
    layer_rollout, layer_gradient = torch.zeros_like(rollout), torch.zeros_like(gradient)
    distance = rollout.new_zeros(layer.module.heads)
    heads = rollout.new_zeros(layer.module.heads, layer.tokens)
    for rows, weights in layer.chunks():
        layer_rollout += rollout[rows] @ weights.mean(0)
        if reader is not None:
            distance += summed_distance(weights, rows, layer.grid, layer.prefix) * layer.pixels
            heads += torch.einsum("r, h r n -> h n", reader[rows], weights)
        if layer.grad is not None:
            weights *= layer.grad.rows(rows)
            layer_gradient += gradient[rows] @ weights.clamp_(min=0).mean(0)
    patches = layer.grid[0] * layer.grid[1]
    return LayerFlow(layer_rollout, layer_gradient, distance / patches, heads)


def summed_distance(
    weights: Float[Tensor, "h r n"], rows: slice, grid: Grid, prefix: int
) -> Float[Tensor, " h"]:
    """The attention distance of each head in patches, summed over the patches among some rows.

    Class token and registers have no position: they are left out as queries and as keys, and the
    rest of each row is rescaled to sum to 1.
    """
    queries = slice(max(rows.start, prefix) - rows.start, None)
    among_patches = weights[:, queries, prefix:]
    positions = torch.cartesian_prod(
        *(torch.arange(side, device=weights.device).float() for side in grid)
    )
    own = positions[max(rows.start, prefix) - prefix : max(rows.stop, prefix) - prefix]
    weighted = torch.einsum("h r n, r n -> h r", among_patches, torch.cdist(own, positions))
    return (weighted / among_patches.sum(-1).clamp(min=1e-12)).sum(1)


def uniform_distance(grid: Grid, pixels: int) -> float:
    """The attention distance of a head that attends to all patches equally."""
    offsets = [torch.arange(side, dtype=torch.float64) for side in grid]
    # Of side² pairs along an axis, side lie 0 apart, and 2 (side − d) lie d apart.
    shares = [
        (side - d) * (2 - (d == 0).double()) / side**2
        for side, d in zip(grid, offsets, strict=True)
    ]
    lengths = torch.hypot(offsets[0][:, None], offsets[1][None])
    return float(shares[0] @ lengths @ shares[1] * pixels)


def _spread(vector: Float[Tensor, " n"], small: Grid, large: Grid) -> Float[Tensor, " m"]:
    """A vector over a grid, divided evenly over the larger grid that was pooled into it."""
    if small == large:
        return vector
    rows, columns = (
        torch.arange(b, device=vector.device) * a // b for a, b in zip(small, large, strict=True)
    )
    cell = (rows[:, None] * small[1] + columns[None]).flatten()
    return (vector / cell.bincount(minlength=len(vector)).clamp(min=1))[cell]


def on_grid(vectors: Float[Tensor, "h n"], grid: Grid) -> Float[Tensor, "h y x"]:
    """The part on the grid as maps that sum to 1, or to 0 where nothing is attended to."""
    patches = vectors[:, vectors.shape[1] - grid[0] * grid[1] :]
    patches = patches / patches.sum(1, keepdim=True).clamp(min=1e-12)
    return patches.unflatten(1, grid)
