"""The encoder of a ViT, with fused kernels between its matrix products."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.model.kernels.attention import HEAD_WIDTHS, MAX_TOKENS, attend
from vitrail.model.kernels.gelu import gelu, gelu_linear
from vitrail.model.kernels.sum_norm import sum_norm
from vitrail.model.positions import Grid

_MAX_WIDTH = 4096


class _Branch(NamedTuple):
    """What a residual sum adds: nothing before the first block."""

    output: Any = None
    bias: Any = None
    """Part of the output, but without gradient there."""
    drop_path: Any = None


def supports(a: Any) -> bool:
    """Whether `encode` covers an architecture."""
    return not (a.layer_scale or a.dropout) and a.width <= _MAX_WIDTH


def encode(x: Float[Tensor, "b n d"], model: Any, grid: Grid) -> Float[Tensor, "b n d"]:
    """The sequence after every block."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    float8 = hasattr(model.blocks[0].attention.qkv, "weight8")
    branch: Any = _Branch()
    for i, block in enumerate(model.blocks):
        if positions := model.positions_before(i):
            x = positions(x, grid).to(x.dtype)
        x, h = _add_norm(x, branch, block.norm1, float8)
        branch = _Branch(*_attend(h, block.attention, grid), block.drop_path)
        x, h = _add_norm(x, branch, block.norm2, float8)
        branch = _Branch(*_expand(h, block.mlp), block.drop_path)
    # Adds zeros, for the gradient of the bias.
    zeros = (branch.bias - branch.bias.detach()).to(x.dtype)
    return x + branch.drop_path(branch.output + zeros)


def embed(images: Float[Tensor, "b c _y _x"], layer: nn.Conv2d) -> Float[Tensor, "b d y x"]:
    """A convolution of patches as one matrix product."""
    height, width = layer.kernel_size
    rows, columns = images.shape[-2] // height, images.shape[-1] // width
    cut = images[..., : rows * height, : columns * width]
    if torch.is_autocast_enabled(images.device.type):
        cut = cut.to(torch.get_autocast_dtype(images.device.type))
    patches = rearrange(cut, "b c (y p) (x q) -> b y x (c p q)", p=height, q=width)
    return F.linear(patches, layer.weight.flatten(1), layer.bias).permute(0, 3, 1, 2)


def quantize(blocks: Sequence[Any]) -> None:
    """Gives the linear layers weights of 8 bits, for inference.

    Activations are of the order of one and need no scale: the type holds numbers from 1/512 to 448.
    """
    for block in blocks:
        attention, mlp = block.attention, block.mlp
        for layer in (attention.qkv, attention.out, mlp.fc1, mlp.fc2):
            weight = layer.weight.detach().float()
            scale = weight.abs().max() / 448
            layer.register_buffer("weight8", (weight / scale).to(torch.float8_e4m3fn), False)
            layer.register_buffer("scale8", scale, False)
            layer.register_buffer("one", torch.ones_like(scale), False)
            layer.register_buffer("bias16", layer.bias.detach().bfloat16(), False)


def _linear(x: Tensor, layer: Any) -> Tensor:
    """With its bias, whose gradient comes from the kernel that follows."""
    if x.dtype != torch.float8_e4m3fn:
        return F.linear(x, layer.weight, layer.bias.detach())
    y = torch._scaled_mm(
        x.flatten(0, -2), layer.weight8.T, layer.one, layer.scale8, layer.bias16,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return y.unflatten(0, x.shape[:-1])


def _attend(
    h: Float[Tensor, "b n d"], attention: Any, grid: Grid
) -> tuple[Float[Tensor, "b n d"], Tensor]:
    out = attention.out
    if axis := getattr(attention, "axis", ""):
        lines = "(b y) x d" if axis == "row" else "(b x) y d"
        h = rearrange(h, f"b (y x) d -> {lines}", y=grid[0])
        y = _linear(_mix(h, attention), out)
        return rearrange(y, f"{lines} -> b (y x) d", **dict(zip("yx", grid, strict=True))), out.bias
    return _linear(_mix(h, attention), out), out.bias


def _mix(h: Float[Tensor, "b n d"], attention: Any) -> Float[Tensor, "b n e"]:
    """What the heads take from all tokens."""
    heads, layer, float8 = attention.heads, attention.qkv, h.dtype == torch.float8_e4m3fn
    width = attention.out.in_features // heads
    if h.shape[1] > MAX_TOKENS or width not in HEAD_WIDTHS:
        qkv = _linear(h, layer) if float8 else layer(h)
        q, k, v = rearrange(qkv, "b n (c h k) -> c b h n k", c=3, h=heads).unbind(0)
        bias = None if attention.relative is None else attention.relative(q)
        y = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
        return y.to(h.dtype) if float8 else y
    if attention.relative is None:
        return attend(_linear(h, layer), layer.bias, None, heads, float8)[0]
    qkv = _linear(h, layer) if float8 else layer(h)
    q = rearrange(qkv[..., : heads * width], "b n (h k) -> b h n k", h=heads)
    return attend(qkv, layer.bias.detach(), attention.relative(q), heads, float8)[0]


def _expand(h: Float[Tensor, "b n d"], mlp: Any) -> tuple[Float[Tensor, "b n d"], Tensor]:
    fc1, fc2, approximate = mlp.fc1, mlp.fc2, mlp.activation.approximate
    if torch.is_grad_enabled():
        x = _linear(h, fc1)
        weight, bias = fc2.weight.to(x.dtype), fc2.bias.detach().to(x.dtype)
        return gelu_linear(x, fc1.bias, weight, bias, approximate), fc2.bias
    if approximate == "tanh" and h.is_cuda and h.dtype != torch.float8_e4m3fn:
        # cuBLAS has this GELU in its matrix product, without what a backward pass needs.
        weight, bias = fc1.weight.to(h.dtype).T, fc1.bias.to(h.dtype)
        y = torch._addmm_activation(bias, h.flatten(0, -2), weight, use_gelu=True)
        return _linear(y.unflatten(0, h.shape[:-1]), fc2), fc2.bias
    y = gelu(_linear(h, fc1), approximate, h.dtype == torch.float8_e4m3fn)
    return _linear(y, fc2), fc2.bias


def _add_norm(
    x: Float[Tensor, "b n d"], branch: _Branch, norm: nn.LayerNorm, float8: bool
) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
    """The residual sum and its normalization."""
    y, bias, drop_path = branch
    scale, rate = None, getattr(drop_path, "p", 0.0)
    if rate and drop_path.training:
        scale = torch.empty(len(x), device=x.device).bernoulli_(1 - rate)
        scale.div_((1 - rate) or 1.0)
    total, h, _ = sum_norm(x, y, scale, bias, norm.weight, norm.bias, norm.eps, float8)
    return total, h
