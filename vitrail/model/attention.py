"""Self-attention: over all tokens, and along the rows or columns of a grid of tokens.

`forward` uses the fused kernel and never builds the weights; `weights` builds them for whoever
wants to look.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.model.initialisation import dense, xavier_stacked
from vitrail.model.positions import RelativePositions

ALL = slice(None)


class Attention(nn.Module):
    """Multi-head self-attention (appendix A), with relative positions where they are asked for.

    All heads together are as wide as the tokens, unless `inner` says otherwise.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        relative: RelativePositions | None = None,
        inner: int | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        inner = inner or width
        self.qkv = nn.Linear(width, 3 * inner)
        self.out = dense(nn.Linear(inner, width))
        self.relative = relative
        xavier_stacked(self.qkv.weight, parts=3)
        nn.init.zeros_(self.qkv.bias)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        q, k, v = self.split(x)
        # A bias goes in through the mask, which the kernel adds after scaling.
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(q))
        return self.out(y.transpose(1, 2).flatten(2))

    def split(self, x: Float[Tensor, "b n d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of every head, each (b, h, n, k)."""
        # "b n (three h k) -> three b h n k"; at batch 1, einops would cost a few per cent here.
        b, n, _ = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def bias(self, q: Float[Tensor, "b h n k"]) -> Float[Tensor, "b h n n"] | None:
        return None if self.relative is None else self.relative(q)

    def weights(self, x: Float[Tensor, "b n d"], rows: slice = ALL) -> Float[Tensor, "b h r n"]:
        """Who looks at whom: row i says how much token i takes from every token."""
        q, k, _ = self.split(x)
        logits = q[:, :, rows] @ k.mT / k.shape[-1] ** 0.5
        bias = self.bias(q)
        return (logits if bias is None else logits + bias[:, :, rows]).softmax(-1)


class AxialAttention(Attention):
    """Self-attention inside each row, or each column, of a grid of tokens (appendix D.6)."""

    def __init__(
        self, width: int, heads: int, axis: Literal["row", "column"], inner: int | None = None
    ) -> None:
        super().__init__(width, heads, inner=inner)
        self.axis = axis

    def forward(self, x: Float[Tensor, "b y x d"]) -> Float[Tensor, "b y x d"]:
        y = F.scaled_dot_product_attention(*self.split(x))
        back = "b y h x k -> b y x (h k)" if self.axis == "row" else "b x h y k -> b y x (h k)"
        return self.out(rearrange(y, back))

    def split(self, x: Float[Tensor, "b y x d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (b, lines, h, length of a line, k)."""
        lines = "b y h x k" if self.axis == "row" else "b x h y k"
        q, k, v = rearrange(
            self.qkv(x), f"b y x (three h k) -> three {lines}", three=3, h=self.heads
        ).unbind(0)
        return q, k, v

    def weights(self, x: Float[Tensor, "b y x d"], rows: slice = ALL) -> Float[Tensor, "b h r n"]:
        """Who looks at whom among all tokens of the grid: zero off the line."""
        q, k, _ = self.split(x)
        lines = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1)
        return whole_grid(lines, self.axis, rows)


def whole_grid(
    lines: Float[Tensor, "b l h m m"], axis: Literal["row", "column"], rows: slice = ALL
) -> Float[Tensor, "b h r n"]:
    """Attention inside each of l lines as rows of one matrix over all n = l·m tokens."""
    b, count, h, m, _ = lines.shape
    tokens = torch.arange(count * m, device=lines.device)[rows]
    places = torch.arange(m, device=lines.device)
    if axis == "row":
        line, place = tokens // m, tokens % m
        seen = line[:, None] * m + places
    else:
        line, place = tokens % count, tokens // count
        seen = line[:, None] + places * count
    full = lines.new_zeros(b, h, len(tokens), count * m)
    found = rearrange(lines[:, line, :, place], "r b h j -> b h r j")
    return full.scatter(-1, seen.expand(b, h, -1, -1), found)
