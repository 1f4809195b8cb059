"""Attention of a few tokens."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from vitrail.model.kernels import empty, kernel

MAX_TOKENS = 256
"""Keys and values of a longer sequence do not fit into one multiprocessor."""
HEAD_WIDTHS = (16, 32, 64)
_LOG2_E = tl.constexpr(1.4426950408889634)


@kernel
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


@kernel
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
def attend(
    qkv: Tensor, bias: Tensor, relative: Tensor | None, heads: int, float8: bool
) -> tuple[Tensor, Tensor]:
    """Of query, key and value side by side; and the base-2 logarithm of each row's divisor.

    `relative` is added to the logits.
    """
    b, n, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    out = empty(qkv[..., :width], float8)
    lse = torch.empty(b, heads, n, device=qkv.device)
    keys = _keys(n)
    rows = forward_rows(keys, relative is not None)
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


def forward_rows(keys: int, biased: bool) -> int:
    """Queries at a time: with more, the logits and what is added to them do not fit into
    registers."""
    return min(32 if biased and keys > 64 else 64, keys)


def gradient_launch(keys: int) -> tuple[int, dict[str, int]]:
    """Queries at a time, and options of Triton (`benchmarks/kernels.py --only launches`)."""
    return min(32, keys), {"num_warps": 8 if keys > 32 else 1, "num_stages": 2}


def _steps(relative: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if relative is None else relative.stride()


@attend.register_fake
def _(qkv, bias, relative, heads, float8):
    b, n, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    return empty(qkv[..., :width], float8), qkv.new_empty(b, heads, n, dtype=torch.float32)


@custom_op("vitrail::attention_gradient", mutates_args=())
def attend_gradient(
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


@attend_gradient.register_fake
def _(qkv, relative, out, lse, grad, heads):
    images, tokens = qkv.shape[:2]
    shape = (images, heads, tokens, tokens) if relative is not None else 0
    sums = qkv.new_empty(qkv.shape[-1], dtype=torch.float32)
    return torch.empty_like(qkv), sums, qkv.new_empty(shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[2], *output)
    ctx.heads = inputs[3]


def _backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    qkv, bias, relative = attend_gradient(*ctx.saved_tensors, grad.contiguous(), ctx.heads)
    return qkv, bias, relative if ctx.saved_tensors[1] is not None else None, None, None


attend.register_autograd(_backward, setup_context=_save)
