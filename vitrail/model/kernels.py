"""Triton kernels for NVIDIA GPUs, which read and write each tensor once.

`encode` computes what `ViT.encode` does, with the residual stream in the precision of autocast.
Matrix products stay with PyTorch. Between them, three kinds of steps are fused: attention, GELU,
and a residual sum with the normalization after it. The backward kernels also sum the gradient of
the bias that the product before them adds. `group_norm` is for ResNets: PyTorch's takes float32
alone under autocast, and channels one after another in memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.library import custom_op

from vitrail.model.positions import Grid

CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Data-center GPUs since the A100; others have less shared memory than attention takes."""
_MAX_TOKENS = 256
"""Keys and values of a longer sequence do not fit into one multiprocessor."""
_HEAD_WIDTHS = (16, 32, 64)
_MAX_WIDTH = 4096
_LOG2_E = tl.constexpr(1.4426950408889634)
_kernel: Any = triton.jit
"""Launched with more than its signature says, which type checkers do not know."""


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
    if h.shape[1] > _MAX_TOKENS or width not in _HEAD_WIDTHS:
        qkv = _linear(h, layer) if float8 else layer(h)
        q, k, v = rearrange(qkv, "b n (c h k) -> c b h n k", c=3, h=heads).unbind(0)
        bias = None if attention.relative is None else attention.relative(q)
        y = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
        return y.to(h.dtype) if float8 else y
    if attention.relative is None:
        return _attention(_linear(h, layer), layer.bias, None, heads, float8)[0]
    qkv = _linear(h, layer) if float8 else layer(h)
    q = rearrange(qkv[..., : heads * width], "b n (h k) -> b h n k", h=heads)
    return _attention(qkv, layer.bias.detach(), attention.relative(q), heads, float8)[0]


def _expand(h: Float[Tensor, "b n d"], mlp: Any) -> tuple[Float[Tensor, "b n d"], Tensor]:
    fc1, fc2, approximate = mlp.fc1, mlp.fc2, mlp.activation.approximate
    if torch.is_grad_enabled():
        x = _linear(h, fc1)
        weight, bias = fc2.weight.to(x.dtype), fc2.bias.detach().to(x.dtype)
        return _gelu_linear(x, fc1.bias, weight, bias, approximate), fc2.bias
    if approximate == "tanh" and h.is_cuda and h.dtype != torch.float8_e4m3fn:
        # cuBLAS has this GELU in its matrix product, without what a backward pass needs.
        weight, bias = fc1.weight.to(h.dtype).T, fc1.bias.to(h.dtype)
        y = torch._addmm_activation(bias, h.flatten(0, -2), weight, use_gelu=True)
        return _linear(y.unflatten(0, h.shape[:-1]), fc2), fc2.bias
    y = _gelu(_linear(h, fc1), approximate, h.dtype == torch.float8_e4m3fn)
    return _linear(y, fc2), fc2.bias


# A residual sum and the normalization after it.


def _add_norm(
    x: Float[Tensor, "b n d"], branch: _Branch, norm: nn.LayerNorm, float8: bool
) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
    """The residual sum and its normalization."""
    y, bias, drop_path = branch
    scale, rate = None, getattr(drop_path, "p", 0.0)
    if rate and drop_path.training:
        scale = torch.empty(len(x), device=x.device).bernoulli_(1 - rate)
        scale.div_((1 - rate) or 1.0)
    total, h, _ = _sum_norm(x, y, scale, bias, norm.weight, norm.bias, norm.eps, float8)
    return total, h


@_kernel
def _sum_norm_kernel(
    x, y, scale, gamma, beta, total, h, stats, rows, tokens, eps,
    width: tl.constexpr, block: tl.constexpr, height: tl.constexpr, added: tl.constexpr,
    scaled: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * height + tl.arange(0, height)[:, None]
    d = tl.arange(0, block)
    inside = (r < rows) & (d < width)
    at = r.to(tl.int64) * width + d
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if added:
        change = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if scaled:
            change *= tl.load(scale + r // tokens, mask=r < rows, other=0.0)
        value += change
    value = value.to(x.dtype.element_ty)
    tl.store(total + at, value, mask=inside)
    value = value.to(tl.float32)
    mean = tl.sum(value, 1, keep_dims=True) / width
    centered = tl.where(d < width, value - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centered * centered, 1, keep_dims=True) / width + eps)
    weight = tl.load(gamma + d, mask=d < width, other=0.0).to(tl.float32)
    offset = tl.load(beta + d, mask=d < width, other=0.0).to(tl.float32)
    y = centered * inverse * weight + offset
    tl.store(h + at, y.to(h.dtype.element_ty), mask=inside)
    tl.store(stats + r, mean, mask=r < rows)
    tl.store(stats + rows + r, inverse, mask=r < rows)


@_kernel
def _sum_norm_gradient_kernel(
    total, stats, gamma, scale, grad_total, grad_h, grad_x, grad_y, partial, rows, tokens,
    width: tl.constexpr, block: tl.constexpr, height: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """Each program sums the gradients of bias, gamma and beta over its rows."""
    d = tl.arange(0, block)[None, :]
    weight = tl.load(gamma + d, mask=d < width, other=0.0).to(tl.float32)
    for_bias = tl.zeros((height, block), tl.float32)
    for_gamma = tl.zeros((height, block), tl.float32)
    for_beta = tl.zeros((height, block), tl.float32)
    for start in range(tl.program_id(0) * height, rows, tl.num_programs(0) * height):
        r = start + tl.arange(0, height)[:, None]
        inside = (r < rows) & (d < width)
        at = r.to(tl.int64) * width + d
        mean = tl.load(stats + r, mask=r < rows, other=0.0)
        inverse = tl.load(stats + rows + r, mask=r < rows, other=0.0)
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_h + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.where(d < width, (value - mean) * inverse, 0.0)
        weighted = grad * weight
        along = tl.sum(normed * weighted, 1, keep_dims=True) / width
        offset = tl.sum(weighted, 1, keep_dims=True) / width
        change = (weighted - normed * along - offset) * inverse
        change += tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
        change = tl.where(inside, change, 0.0)
        tl.store(grad_x + at, change.to(total.dtype.element_ty), mask=inside)
        if scaled:
            change *= tl.load(scale + r // tokens, mask=r < rows, other=0.0)
            tl.store(grad_y + at, change.to(total.dtype.element_ty), mask=inside)
        for_bias += change
        for_gamma += grad * normed
        for_beta += grad
    sums = partial + tl.program_id(0) * 3 * width + tl.arange(0, block)
    here = tl.arange(0, block) < width
    tl.store(sums, tl.sum(for_bias, 0), mask=here)
    tl.store(sums + width, tl.sum(for_gamma, 0), mask=here)
    tl.store(sums + 2 * width, tl.sum(for_beta, 0), mask=here)


@custom_op("vitrail::sum_norm", mutates_args=())
def _sum_norm(
    x: Tensor, y: Tensor | None, scale: Tensor | None, bias: Tensor | None, gamma: Tensor,
    beta: Tensor, eps: float, float8: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum, its normalization, and mean and inverse deviation of each row."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    total, h = torch.empty_like(x), _empty(x, float8)
    stats = torch.empty(2, rows, device=x.device)
    height = 4
    _sum_norm_kernel[(triton.cdiv(rows, height),)](
        x, y, scale, gamma, beta, total, h, stats, rows, x.shape[1], eps,
        width, triton.next_power_of_2(width), height, y is not None, scale is not None,
    )  # fmt: skip
    return total, h, stats


@_sum_norm.register_fake
def _(x, y, scale, bias, gamma, beta, eps, float8):
    return (
        torch.empty_like(x),
        _empty(x, float8),
        x.new_empty(2, x.numel() // x.shape[-1], dtype=torch.float32),
    )


@custom_op("vitrail::sum_norm_gradient", mutates_args=())
def _sum_norm_gradient(
    total: Tensor, stats: Tensor, gamma: Tensor, scale: Tensor | None, grad_total: Tensor,
    grad_h: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, of y where it is scaled, and of bias, gamma and beta."""
    rows, width = stats.shape[1], total.shape[-1]
    grad_x = torch.empty_like(total)
    grad_y = torch.empty_like(total) if scale is not None else total.new_empty(0)
    block = triton.next_power_of_2(width)
    each, height, warps = norm_launch(block)
    programs = _programs(total, each, rows)
    partial = torch.empty(programs, 3, width, device=total.device)
    _sum_norm_gradient_kernel[(programs,)](
        total, stats, gamma, scale, grad_total, grad_h, grad_x, grad_y, partial, rows,
        total.shape[1], width, block, height, scale is not None, num_warps=warps,
    )  # fmt: skip
    return grad_x, grad_y, partial.sum(0)


def norm_launch(block: int) -> tuple[int, int, int]:
    """Programs on a multiprocessor, rows at a time, and warps, of which one has a row of up to
    1,024 numbers: sums along rows then need no barrier."""
    return 16 if block < 1024 else 8, max(1, min(2, 512 // block)), max(1, block // 1024)


@_sum_norm_gradient.register_fake
def _(total, stats, gamma, scale, grad_total, grad_h):
    grad_y = torch.empty_like(total) if scale is not None else total.new_empty(0)
    sums = total.new_empty(3, total.shape[-1], dtype=torch.float32)
    return torch.empty_like(total), grad_y, sums


def _save_sum_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[0], output[2], inputs[4], inputs[2])


def _sum_norm_backward(ctx: Any, grad_total: Tensor, grad_h: Tensor, _: Any) -> Any:
    total, stats, gamma, scale = ctx.saved_tensors
    grad_x, grad_y, sums = _sum_norm_gradient(
        total, stats, gamma, scale, grad_total.contiguous(), grad_h.contiguous()
    )
    bias, for_gamma, for_beta = sums.unbind(0)
    needs_y, needs_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    grad_y = (grad_x if scale is None else grad_y) if needs_y else None
    return grad_x, grad_y, None, bias if needs_bias else None, for_gamma, for_beta, None, None


_sum_norm.register_autograd(_sum_norm_backward, setup_context=_save_sum_norm)


def _empty(like: Tensor, float8: bool) -> Tensor:
    """Contiguous, of the same shape."""
    return like.new_empty(like.shape, dtype=torch.float8_e4m3fn if float8 else like.dtype)


def _programs(x: Tensor, each: int, most: int) -> int:
    """As many as run at the same time, a few on each multiprocessor."""
    count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    return min(each * count, most)


# GELU and the linear layer after it.


@_kernel
def _gelu_parts(x, tanh: tl.constexpr):
    """GELU is x · share; its derivative is share + x · slope."""
    if tanh:
        inner = 1.5957691216057308 * x * (1 + 0.044715 * x * x)
        share = tl.sigmoid(inner)
        slope = share * (1 - share) * 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
    else:
        # The error function to 1.5e-7 (Abramowitz and Stegun 7.1.26); both need the exponential.
        density = tl.exp2(-0.5 * 1.4426950408889634 * x * x)
        t = 1 / (1 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
        tail = ((1.061405429 * t - 1.453152027) * t + 1.421413741) * t
        half = 0.5 * ((tail - 0.284496736) * t + 0.254829592) * t * density
        share = tl.where(x < 0, half, 1 - half)
        slope = 0.3989422804014327 * density
    return share, slope


@_kernel
def _gelu_kernel(x, y, size, tanh: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    share, _ = _gelu_parts(value, tanh)
    tl.store(y + at, (value * share).to(y.dtype.element_ty), mask=at < size)


@_kernel
def _gelu_gradient_kernel(
    x, grad_y, y, grad_x, partial, rows, width,
    tanh: tl.constexpr, height: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Also computes GELU again, and each program's sum of the gradient over its rows."""
    d = tl.program_id(1) * block + tl.arange(0, block)
    sums = tl.zeros((height, block), tl.float32)
    for start in range(tl.program_id(0) * height, rows, tl.num_programs(0) * height):
        r = start + tl.arange(0, height)[:, None]
        inside = (r < rows) & (d < width)
        at = r.to(tl.int64) * width + d
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        share, slope = _gelu_parts(value, tanh)
        tl.store(y + at, (value * share).to(x.dtype.element_ty), mask=inside)
        grad *= share + value * slope
        tl.store(grad_x + at, grad.to(x.dtype.element_ty), mask=inside)
        sums += grad
    tl.store(partial + tl.program_id(0) * width + d, tl.sum(sums, 0), mask=d < width)


@custom_op("vitrail::gelu_linear", mutates_args=())
def _gelu_linear(
    x: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor, approximate: str
) -> Tensor:
    """Keeps x alone: its GELU is computed again in the backward pass."""
    return F.linear(_gelu(x, approximate, False), weight, bias)


@custom_op("vitrail::gelu", mutates_args=())
def _gelu(x: Tensor, approximate: str, float8: bool) -> Tensor:
    y, block = _empty(x, float8), 2048
    _gelu_kernel[(triton.cdiv(x.numel(), block),)](
        x, y, x.numel(), approximate == "tanh", block, num_warps=4
    )
    return y


@_gelu.register_fake
def _(x, approximate, float8):
    return _empty(x, float8)


@_gelu_linear.register_fake
def _(x, x_bias, weight, bias, approximate):
    return x.new_empty(*x.shape[:-1], len(weight))


@custom_op("vitrail::gelu_gradient", mutates_args=())
def _gelu_gradient(x: Tensor, grad_y: Tensor, approximate: str) -> tuple[Tensor, Tensor, Tensor]:
    """GELU, the gradient of x, and that of the bias in it."""
    rows, width, block = x.numel() // x.shape[-1], x.shape[-1], 256
    columns = triton.cdiv(width, block)
    programs = max(1, _programs(x, 8, rows) // columns)
    y, grad_x = torch.empty_like(x), torch.empty_like(x)
    partial = torch.empty(programs, width, device=x.device)
    _gelu_gradient_kernel[(programs, columns)](
        x, grad_y, y, grad_x, partial, rows, width, approximate == "tanh", 8, block
    )
    return y, grad_x, partial.sum(0)


@_gelu_gradient.register_fake
def _(x, grad_y, approximate):
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[-1], dtype=torch.float32)


def _save_gelu_linear(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, weight, _, ctx.approximate = inputs
    ctx.save_for_backward(x, weight)


def _gelu_linear_backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    y, grad_x, sums = _gelu_gradient(x, grad @ weight, ctx.approximate)
    grad_weight = grad.flatten(0, -2).T @ y.flatten(0, -2)
    return grad_x, sums, grad_weight, None, None


_gelu_linear.register_autograd(_gelu_linear_backward, setup_context=_save_gelu_linear)


# Attention.


@_kernel
def _attention_kernel(
    qkv, relative, out, lse, scale, tokens, image_step, head_step, row_step, step,
    heads: tl.constexpr, head_width: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    biased: tl.constexpr,
):  # fmt: skip
    """One head of one image: its keys and values stay on the chip while the queries pass by."""
    head = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = heads * head_width
    qkv += head // heads * tokens * 3 * width + head % heads * head_width
    out += head // heads * tokens * width + head % heads * head_width
    n, d = tl.arange(0, keys), tl.arange(0, head_width)
    at = n[:, None] * 3 * width + d
    k = tl.load(qkv + width + at, mask=n[:, None] < tokens, other=0.0)
    v = tl.load(qkv + 2 * width + at, mask=n[:, None] < tokens, other=0.0)
    for start in range(tl.program_id(1) * rows, tokens, rows * tl.num_programs(1)):
        m = start + tl.arange(0, rows)
        inside = m[:, None] < tokens
        q = tl.load(qkv + m[:, None] * 3 * width + d, mask=inside, other=0.0)
        logits = tl.dot(q, tl.trans(k)) * scale
        if biased:
            place = relative + head // heads * image_step + head % heads * head_step
            place += m[:, None] * row_step + n * step
            more = tl.load(place, mask=inside & (n < tokens), other=0.0)
            logits += more.to(tl.float32) * _LOG2_E
        logits = tl.where(n < tokens, logits, float("-inf"))
        top = tl.max(logits, 1)
        weights = tl.exp2(logits - top[:, None])  # pyrefly: ignore[bad-index]
        total = tl.sum(weights, 1)
        y = tl.dot(weights.to(v.dtype), v) / total[:, None]  # pyrefly: ignore[bad-index]
        tl.store(out + m[:, None] * width + d, y.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + head * tokens + m, top + tl.log2(total), mask=m < tokens)


@_kernel
def _attention_gradient_kernel(
    qkv, relative, out, lse, grad, grad_qkv, grad_relative, partial, scale, tokens, image_step,
    head_step, row_step, step,
    heads: tl.constexpr, head_width: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    biased: tl.constexpr,
):  # fmt: skip
    """One head of one image. The weights are transposed, keys by queries, so that the products that
    sum over queries take them from registers."""
    head = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = heads * head_width
    first = head // heads * tokens * width + head % heads * head_width
    qkv += first + head // heads * tokens * 2 * width
    grad_qkv += first + head // heads * tokens * 2 * width
    n, d = tl.arange(0, keys), tl.arange(0, head_width)
    at = n[:, None] * 3 * width + d
    known = n[:, None] < tokens
    k = tl.load(qkv + width + at, mask=known, other=0.0)
    v = tl.load(qkv + 2 * width + at, mask=known, other=0.0)
    grad_k = tl.zeros((keys, head_width), tl.float32)
    grad_v = tl.zeros((keys, head_width), tl.float32)
    total = tl.zeros((keys,), tl.float32)
    for start in range(0, tokens, rows):
        m = start + tl.arange(0, rows)
        inside = m[:, None] < tokens
        q = tl.load(qkv + m[:, None] * 3 * width + d, mask=inside, other=0.0)
        y = tl.load(out + first + m[:, None] * width + d, mask=inside, other=0.0)
        dy = tl.load(grad + first + m[:, None] * width + d, mask=inside, other=0.0)
        norm = tl.load(lse + head * tokens + m, mask=m < tokens, other=0.0)
        mean = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
        logits = tl.dot(k, tl.trans(q)) * (scale * _LOG2_E)
        pair = known & (m < tokens)
        if biased:
            place = relative + head // heads * image_step + head % heads * head_step
            place += m * row_step + n[:, None] * step
            logits += tl.load(place, mask=pair, other=0.0).to(tl.float32) * _LOG2_E
        weights = tl.where(known, tl.exp2(logits - norm), 0.0)
        grad_v += tl.dot(weights.to(v.dtype), dy)
        change = (weights * (tl.dot(v, tl.trans(dy)) - mean)).to(v.dtype)
        if biased:
            place = grad_relative + head * tokens * tokens + m * tokens + n[:, None]
            tl.store(place, change, mask=pair)
        grad_k += tl.dot(change, q)
        total += tl.sum(change.to(tl.float32), 1)
        grad_q = tl.dot(tl.trans(k), change) * scale
        place = grad_qkv + m[None, :] * 3 * width + d[:, None]
        tl.store(place, grad_q.to(v.dtype), mask=m[None, :] < tokens)
    grad_k *= scale
    tl.store(grad_qkv + width + at, grad_k.to(v.dtype), mask=known)
    tl.store(grad_qkv + 2 * width + at, grad_v.to(v.dtype), mask=known)
    partial += head // heads * 3 * width + head % heads * head_width + d
    # The sum over queries of grad_q, without waiting for it.
    tl.store(partial, tl.sum(total[:, None] * k.to(tl.float32), 0) * scale)
    tl.store(partial + width, tl.sum(grad_k, 0))
    tl.store(partial + 2 * width, tl.sum(grad_v, 0))


@custom_op("vitrail::attention", mutates_args=())
def _attention(
    qkv: Tensor, bias: Tensor, relative: Tensor | None, heads: int, float8: bool
) -> tuple[Tensor, Tensor]:
    """Of query, key and value side by side; and the base-2 logarithm of each row's divisor.

    `relative` is added to the logits.
    """
    b, n, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    out = _empty(qkv[..., :width], float8)
    lse = torch.empty(b, heads, n, device=qkv.device)
    keys = _keys(n)
    rows = min(64, keys)
    # With few heads, several programs share one.
    programs = (b * heads, 1 if b * heads >= 512 else triton.cdiv(n, rows))
    _attention_kernel[programs](
        qkv, relative, out, lse, _LOG2_E.value * (width // heads) ** -0.5, n, *_steps(relative),
        heads, width // heads, rows, keys, relative is not None, num_warps=4 if keys > 32 else 1,
    )  # fmt: skip
    return out, lse


def _keys(tokens: int) -> int:
    """The least that a product takes is 16."""
    return max(16, triton.next_power_of_2(tokens))


def gradient_launch(keys: int) -> tuple[int, dict[str, int]]:
    """Queries at a time, and options of Triton (`benchmarks/kernels.py --only launches`)."""
    return min(32, keys), {"num_warps": 8 if keys > 32 else 1, "num_stages": 2}


def _steps(relative: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if relative is None else relative.stride()


@_attention.register_fake
def _(qkv, bias, relative, heads, float8):
    b, n, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    return _empty(qkv[..., :width], float8), qkv.new_empty(b, heads, n, dtype=torch.float32)


@custom_op("vitrail::attention_gradient", mutates_args=())
def _attention_gradient(
    qkv: Tensor, relative: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv, of the bias in it, and of what is added to the logits."""
    b, n, width = out.shape
    grad_qkv, keys = torch.empty_like(qkv), _keys(n)
    rows, options = gradient_launch(keys)
    partial = torch.empty(b, 3 * width, device=qkv.device)
    grad_relative = qkv.new_empty((b, heads, n, n) if relative is not None else 0)
    _attention_gradient_kernel[(b * heads,)](
        qkv, relative, out, lse, grad, grad_qkv, grad_relative, partial, (width // heads) ** -0.5,
        n, *_steps(relative), heads, width // heads, rows, keys, relative is not None, **options,
    )  # fmt: skip
    return grad_qkv, partial.sum(0), grad_relative


@_attention_gradient.register_fake
def _(qkv, relative, out, lse, grad, heads):
    tokens = qkv.shape[1]
    shape = (len(qkv), heads, tokens, tokens) if relative is not None else 0
    sums = qkv.new_empty(qkv.shape[-1], dtype=torch.float32)
    return torch.empty_like(qkv), sums, qkv.new_empty(shape)


def _save_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[2], *output)
    ctx.heads = inputs[3]


def _attention_backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    qkv, bias, relative = _attention_gradient(*ctx.saved_tensors, grad.contiguous(), ctx.heads)
    return qkv, bias, relative if ctx.saved_tensors[1] is not None else None, None, None


_attention.register_autograd(_attention_backward, setup_context=_save_attention)


# GroupNorm, and the ReLU after it.


def group_norm(
    x: Float[Tensor, "b c y x"], norm: nn.GroupNorm, relu: bool
) -> Float[Tensor, "b c y x"]:
    """With the channels of a pixel side by side in memory, as convolutions prefer them."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    x = x.contiguous(memory_format=torch.channels_last)
    return _group_norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps, relu)[0]


@_kernel
def _sum_groups(x, size: tl.constexpr, block: tl.constexpr):
    """The sum over its group, for each channel."""
    if size >= 32:  # the block is one group
        return tl.zeros((block,), tl.float32) + tl.sum(x, 0)
    group = tl.arange(0, block) // size
    return tl.sum(tl.where(group[:, None] == group, x, 0.0), 1)


@_kernel
def _group_norm_kernel(
    x, y, gamma, beta, stats, area, channels, groups, eps,
    size: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """Some groups of one image, each of `size` channels, in a block of which the rest is empty."""
    image, width = tl.program_id(0).to(tl.int64), block // size * size
    c = tl.arange(0, block)
    channel = tl.program_id(1) * width + c
    inside = (c < width) & (channel < channels)
    x += image * area * channels + channel
    y += image * area * channels + channel
    # Sums of differences from the first pixel lose nothing where the mean is large.
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((rows, block), tl.float32)
    squares = tl.zeros((rows, block), tl.float32)
    for start in range(0, area, rows):
        r = start + tl.arange(0, rows)[:, None]
        known = inside & (r < area)
        value = tl.load(x + r * channels, mask=known, other=0.0).to(tl.float32)
        value = tl.where(known, value - first, 0.0)
        sums += value
        squares += value * value
    along = tl.sum(sums, 0) / area
    spread = tl.sum(squares, 0) - area * along * along
    own = tl.where(inside, first + along, 0.0)
    mean = _sum_groups(own, size, block) / size
    away = tl.where(inside, own - mean, 0.0)
    spread = _sum_groups(tl.where(inside, spread, 0.0) + area * away * away, size, block)
    inverse = tl.rsqrt(tl.maximum(spread, 0.0) / (area * size) + eps)
    group = image * groups + channel // size
    first_of_group = inside & (c % size == 0)
    tl.store(stats + group, mean, mask=first_of_group)
    tl.store(stats + tl.num_programs(0) * groups + group, inverse, mask=first_of_group)
    scale = inverse * tl.load(gamma + channel, mask=inside, other=0.0)
    shift = tl.load(beta + channel, mask=inside, other=0.0)
    for start in range(0, area, rows):
        r = start + tl.arange(0, rows)[:, None]
        known = inside & (r < area)
        value = tl.load(x + r * channels, mask=known, other=0.0).to(tl.float32)
        value = (value - mean) * scale + shift
        if relu:
            value = tl.maximum(value, 0.0)
        tl.store(y + r * channels, value.to(y.dtype.element_ty), mask=known)


@_kernel
def _group_norm_gradient_kernel(
    x, grad, grad_x, gamma, beta, stats, partial, area, channels, groups,
    size: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """Also sums the gradients of gamma and beta over the pixels of an image."""
    image, width = tl.program_id(0).to(tl.int64), block // size * size
    c = tl.arange(0, block)
    channel = tl.program_id(1) * width + c
    inside = (c < width) & (channel < channels)
    at = image * area * channels + channel
    group = image * groups + channel // size
    mean = tl.load(stats + group, mask=inside, other=0.0)
    inverse = tl.load(stats + tl.num_programs(0) * groups + group, mask=inside, other=0.0)
    weight = tl.load(gamma + channel, mask=inside, other=0.0)
    offset = tl.load(beta + channel, mask=inside, other=0.0)
    for_gamma = tl.zeros((rows, block), tl.float32)
    for_beta = tl.zeros((rows, block), tl.float32)
    for start in range(0, area, rows):
        r = start + tl.arange(0, rows)[:, None]
        known = inside & (r < area)
        value = tl.load(x + at + r * channels, mask=known, other=0.0).to(tl.float32)
        change = tl.load(grad + at + r * channels, mask=known, other=0.0).to(tl.float32)
        normed = (value - mean) * inverse
        if relu:
            change = tl.where(normed * weight + offset > 0, change, 0.0)
        for_gamma += normed * change
        for_beta += change
    along, total = tl.sum(for_gamma, 0), tl.sum(for_beta, 0)
    tl.store(partial + image * 2 * channels + channel, along, mask=inside)
    tl.store(partial + image * 2 * channels + channels + channel, total, mask=inside)
    along = _sum_groups(along * weight, size, block) / (area * size)
    total = _sum_groups(total * weight, size, block) / (area * size)
    for start in range(0, area, rows):
        r = start + tl.arange(0, rows)[:, None]
        known = inside & (r < area)
        value = tl.load(x + at + r * channels, mask=known, other=0.0).to(tl.float32)
        change = tl.load(grad + at + r * channels, mask=known, other=0.0).to(tl.float32)
        normed = (value - mean) * inverse
        if relu:
            change = tl.where(normed * weight + offset > 0, change, 0.0)
        change = (change * weight - total - normed * along) * inverse
        tl.store(grad_x + at + r * channels, change.to(grad_x.dtype.element_ty), mask=known)


def _group_blocks(x: Tensor, groups: int) -> tuple[int, int, int]:
    """Channels of a group and of a block, and the blocks of an image."""
    size = x.shape[1] // groups
    block = triton.next_power_of_2(size if size >= 32 else min(64, x.shape[1]))
    return size, block, triton.cdiv(groups, block // size)


@custom_op("vitrail::group_norm", mutates_args=())
def _group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """And the mean and inverse deviation of each group."""
    size, block, blocks = _group_blocks(x, groups)
    y, stats = torch.empty_like(x), torch.empty(2, len(x), groups, device=x.device)
    _group_norm_kernel[(len(x), blocks)](
        x, y, gamma, beta, stats, x.shape[2] * x.shape[3], x.shape[1], groups, eps,
        size, block, max(1, 4096 // block), relu, num_warps=8,
    )  # fmt: skip
    return y, stats


@_group_norm.register_fake
def _(x, gamma, beta, groups, eps, relu):
    return torch.empty_like(x), x.new_empty(2, len(x), groups, dtype=torch.float32)


@custom_op("vitrail::group_norm_gradient", mutates_args=())
def _group_norm_gradient(
    x: Tensor, gamma: Tensor, beta: Tensor, stats: Tensor, grad: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of gamma and beta."""
    groups = stats.shape[2]
    size, block, blocks = _group_blocks(x, groups)
    grad_x, partial = torch.empty_like(x), torch.empty(len(x), 2, x.shape[1], device=x.device)
    _group_norm_gradient_kernel[(len(x), blocks)](
        x, grad, grad_x, gamma, beta, stats, partial, x.shape[2] * x.shape[3], x.shape[1], groups,
        size, block, max(1, 4096 // block), relu, num_warps=8,
    )  # fmt: skip
    return grad_x, partial.sum(0)


@_group_norm_gradient.register_fake
def _(x, gamma, beta, stats, grad, relu):
    return torch.empty_like(x), x.new_empty(2, x.shape[1], dtype=torch.float32)


def _save_group_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.relu = inputs[5]


def _group_norm_backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    grad = grad.contiguous(memory_format=torch.channels_last)
    x, sums = _group_norm_gradient(*ctx.saved_tensors, grad, ctx.relu)
    return x, *sums.unbind(0), None, None, None


_group_norm.register_autograd(_group_norm_backward, setup_context=_save_group_norm)
