"""A residual sum and the LayerNorm after it."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from vitrail.model.kernels import empty, kernel, programs


@kernel
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


@kernel
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
def sum_norm(
    x: Tensor, y: Tensor | None, scale: Tensor | None, bias: Tensor | None, gamma: Tensor,
    beta: Tensor, eps: float, float8: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum, its normalization, and mean and inverse deviation of each row."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    total, h = torch.empty_like(x), empty(x, float8)
    stats = torch.empty(2, rows, device=x.device)
    height = 4
    _sum_norm_kernel[(triton.cdiv(rows, height),)](
        x, y, scale, gamma, beta, total, h, stats, rows, x.shape[1], eps,
        width, triton.next_power_of_2(width), height, y is not None, scale is not None,
    )  # fmt: skip
    return total, h, stats


@sum_norm.register_fake
def _(x, y, scale, bias, gamma, beta, eps, float8):
    return (
        torch.empty_like(x),
        empty(x, float8),
        x.new_empty(2, x.numel() // x.shape[-1], dtype=torch.float32),
    )


@custom_op("vitrail::sum_norm_gradient", mutates_args=())
def sum_norm_gradient(
    total: Tensor, stats: Tensor, gamma: Tensor, scale: Tensor | None, grad_total: Tensor,
    grad_h: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, of y where it is scaled, and of bias, gamma and beta."""
    rows, width = stats.shape[1], total.shape[-1]
    grad_x = torch.empty_like(total)
    grad_y = torch.empty_like(total) if scale is not None else total.new_empty(0)
    block = triton.next_power_of_2(width)
    each, height, warps = gradient_launch(block)
    count = programs(total, each, rows)
    partial = torch.empty(count, 3, width, device=total.device)
    _sum_norm_gradient_kernel[(count,)](
        total, stats, gamma, scale, grad_total, grad_h, grad_x, grad_y, partial, rows,
        total.shape[1], width, block, height, scale is not None, num_warps=warps,
    )  # fmt: skip
    return grad_x, grad_y, partial.sum(0)


def gradient_launch(block: int) -> tuple[int, int, int]:
    """Programs on a multiprocessor, rows at a time, and warps, of which one has a row of up to
    1,024 numbers: sums along rows then need no barrier."""
    return 16 if block < 1024 else 8, max(1, min(2, 512 // block)), max(1, block // 1024)


@sum_norm_gradient.register_fake
def _(total, stats, gamma, scale, grad_total, grad_h):
    grad_y = torch.empty_like(total) if scale is not None else total.new_empty(0)
    sums = total.new_empty(3, total.shape[-1], dtype=torch.float32)
    return torch.empty_like(total), grad_y, sums


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[0], output[2], inputs[4], inputs[2])


def _backward(ctx: Any, grad_total: Tensor, grad_h: Tensor, _: Any) -> Any:
    total, stats, gamma, scale = ctx.saved_tensors
    grad_x, grad_y, sums = sum_norm_gradient(
        total, stats, gamma, scale, grad_total.contiguous(), grad_h.contiguous()
    )
    bias, for_gamma, for_beta = sums.unbind(0)
    needs_y, needs_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    grad_y = (grad_x if scale is None else grad_y) if needs_y else None
    return grad_x, grad_y, None, bias if needs_bias else None, for_gamma, for_beta, None, None


sum_norm.register_autograd(_backward, setup_context=_save)
