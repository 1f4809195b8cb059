"""The encoder's block (Eq. 2 and 3): attention, then an MLP, each normalised first and added."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitrail.model.attention import Attention
from vitrail.model.initialisation import dense


class MLP(nn.Module):
    """Two dense layers with GELU between them, dropout after both (R9, R14)."""

    def __init__(self, width: int, hidden: int, gelu: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = dense(nn.Linear(width, hidden), bias_std=1e-6)
        self.activation = nn.GELU(approximate="tanh" if gelu == "tanh" else "none")
        self.dropout1 = nn.Dropout(dropout)
        self.fc2 = dense(nn.Linear(hidden, width), bias_std=1e-6)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.dropout2(self.fc2(self.dropout1(self.activation(self.fc1(x)))))


class Block(nn.Module):
    """Pre-norm residual block. LayerScale and drop path are later additions, off in the paper."""

    def __init__(
        self,
        attention: Attention,
        mlp: MLP,
        *,
        width: int,
        eps: float,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = attention
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp
        self.drop_path = StochasticDepth(drop_path, mode="row") if drop_path else nn.Identity()
        self.scale1 = self.scale2 = None
        if layer_scale:
            self.scale1 = nn.Parameter(torch.full((width,), layer_scale))
            self.scale2 = nn.Parameter(torch.full((width,), layer_scale))

    def forward(self, x: Float[Tensor, "b *n d"]) -> Float[Tensor, "b *n d"]:
        y = self.dropout(self.attention(self.norm1(x)))
        x = x + self.drop_path(y if self.scale1 is None else self.scale1 * y)
        y = self.mlp(self.norm2(x))
        return x + self.drop_path(y if self.scale2 is None else self.scale2 * y)
