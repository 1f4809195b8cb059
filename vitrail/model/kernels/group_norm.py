"""GroupNorm, and the ReLU after it.

PyTorch's takes float32 alone under autocast, and the channels one after another in memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from torch.library import custom_op

from vitrail.model.kernels import kernel


def group_norm(
    x: Float[Tensor, "b c y x"], norm: nn.GroupNorm, relu: bool
) -> Float[Tensor, "b c y x"]:
    """With the channels of a pixel side by side in memory, as convolutions prefer them."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    x = x.contiguous(memory_format=torch.channels_last)
    return _group_norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps, relu)[0]


@kernel
def _sum_groups(x, size: tl.constexpr, block: tl.constexpr):
    """The sum over its group, for each channel."""
    if size >= 32:  # the block is one group
        return tl.zeros((block,), tl.float32) + tl.sum(x, 0)
    group = tl.arange(0, block) // size
    return tl.sum(tl.where(group[:, None] == group, x, 0.0), 1)


@kernel
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


@kernel
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
    # `len` would fix the number of images where torch compiles for any.
    return torch.empty_like(x), x.new_empty(2, x.shape[0], groups, dtype=torch.float32)


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


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.relu = inputs[5]


def _backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    grad = grad.contiguous(memory_format=torch.channels_last)
    x, sums = _group_norm_gradient(*ctx.saved_tensors, grad, ctx.relu)
    return x, *sums.unbind(0), None, None, None


_group_norm.register_autograd(_backward, setup_context=_save)
