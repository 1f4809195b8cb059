"""GELU and the linear layer after it."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from vitrail.model.kernels import empty, kernel, programs


@kernel
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


@kernel
def _gelu_kernel(x, y, size, tanh: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    share, _ = _gelu_parts(value, tanh)
    tl.store(y + at, (value * share).to(y.dtype.element_ty), mask=at < size)


@kernel
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
def gelu_linear(
    x: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor, approximate: str
) -> Tensor:
    """Keeps x alone: its GELU is computed again in the backward pass."""
    return F.linear(gelu(x, approximate, False), weight, bias)


@custom_op("vitrail::gelu", mutates_args=())
def gelu(x: Tensor, approximate: str, float8: bool) -> Tensor:
    y, block = empty(x, float8), 2048
    _gelu_kernel[(triton.cdiv(x.numel(), block),)](
        x, y, x.numel(), approximate == "tanh", block, num_warps=4
    )
    return y


@gelu.register_fake
def _(x, approximate, float8):
    return empty(x, float8)


@gelu_linear.register_fake
def _(x, x_bias, weight, bias, approximate):
    return x.new_empty(*x.shape[:-1], len(weight))


@custom_op("vitrail::gelu_gradient", mutates_args=())
def _gelu_gradient(x: Tensor, grad_y: Tensor, approximate: str) -> tuple[Tensor, Tensor, Tensor]:
    """GELU, the gradient of x, and that of the bias in it."""
    rows, width, block = x.numel() // x.shape[-1], x.shape[-1], 256
    columns = triton.cdiv(width, block)
    count = max(1, programs(x, 8, rows) // columns)
    y, grad_x = torch.empty_like(x), torch.empty_like(x)
    partial = torch.empty(count, width, device=x.device)
    _gelu_gradient_kernel[(count, columns)](
        x, grad_y, y, grad_x, partial, rows, width, approximate == "tanh", 8, block
    )
    return y, grad_x, partial.sum(0)


@_gelu_gradient.register_fake
def _(x, grad_y, approximate):
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, weight, _, ctx.approximate = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    y, grad_x, sums = _gelu_gradient(x, grad @ weight, ctx.approximate)
    grad_weight = grad.flatten(0, -2).T @ y.flatten(0, -2)
    return grad_x, sums, grad_weight, None, None


gelu_linear.register_autograd(_backward, setup_context=_save)
