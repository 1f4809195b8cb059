"""Attention pooling: the head of the published g, G and So400m models (Zhai et al. 2021)."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.model.block import MLP
from vitrail.model.initialisation import dense, uniform_probe, xavier_stacked


class AttentionPool(nn.Module):
    """One learned query looks at all tokens; an MLP follows, with its own residual."""

    def __init__(self, width: int, heads: int, mlp: int, *, gelu: str, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        self.q = dense(nn.Linear(width, width))
        self.kv = nn.Linear(width, 2 * width)
        self.out = dense(nn.Linear(width, width))
        self.norm = nn.LayerNorm(width, eps=eps)
        self.mlp = MLP(width, mlp, gelu)
        uniform_probe(self.probe)
        xavier_stacked(self.kv.weight, parts=2)
        nn.init.zeros_(self.kv.bias)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q.expand(x.shape[0], -1, -1, -1), k, v)
        y = self.out(rearrange(y, "b h 1 k -> b (h k)"))
        return y + self.mlp(self.norm(y))

    def split(self, x: Float[Tensor, "b n d"]) -> tuple[Tensor, Tensor, Tensor]:
        """The one query (1, h, 1, k), and key and value of every token, each (b, h, n, k)."""
        q = rearrange(self.q(self.probe), "1 n (h k) -> 1 h n k", h=self.heads)
        k, v = rearrange(self.kv(x), "b n (two h k) -> two b h n k", two=2, h=self.heads).unbind(0)
        return q, k, v

    def weights(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b h 1 n"]:
        """How much the query takes from every token."""
        q, k, _ = self.split(x)
        return (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1)
