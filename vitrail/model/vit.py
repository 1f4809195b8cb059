"""The Vision Transformer (Dosovitskiy et al. 2020), its hybrids and its axial variant.

An image is cut into patches, each patch becomes a token, the tokens go through a plain encoder,
and a head reads the class token. Hybrids cut a convolutional network's feature map instead.

Weights are initialized as in the reference, in JAX; torch's defaults differ in every one of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.model.classifier import (
    Classifier,
    check_fields,
    lecun_normal,
    runs_kernels,
    takes_kernels,
    zero_head,
)
from vitrail.model.positions import (
    FactorizedPositions,
    Grid,
    Interpolation,
    LearnedPositions,
    Positions,
    RelativePositions,
    SinCosPositions,
)
from vitrail.model.resnet import Backbone, Factor, Root, fuse_norms, stride_of, width_factor

ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class ViTArchitecture:
    """Everything that distinguishes one Vision Transformer from another (Table 1 and beyond)."""

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int | tuple[int, int]
    """Side of a patch: in pixels, or in cells of the backbone's feature map; rows and columns where
    they differ."""
    size: tuple[int, int] = (224, 224)
    """Rows and columns of the images that the positions are stored for."""
    channels: int = 3
    classes: int = 1000
    """Zero leaves the head out: logits are then the features."""
    backbone: tuple[int, ...] | None = None
    """Hybrids: residual units of each stage of the ResNet below; empty is the root alone."""
    backbone_width: Factor = 1
    """Factor on all widths of that ResNet."""
    root: Root = "imagenet"
    """Its first layers."""
    axial: bool = False
    """Attend along rows, then along columns, in place of attending to all tokens."""
    positions: Literal["learned", "factorized", "relative", "sincos", "none"] = "learned"
    injection: Literal["stem", "every", "shared"] = "stem"
    """Where positions are added: once; at every layer its own; at every layer the same ones."""
    interpolation: Interpolation = "google"
    class_token: bool = True
    class_slot: bool = True
    """Whether the class token has a learned position too."""
    registers: int = 0
    pool: Literal["class", "mean", "attention"] = "class"
    norm_after_pool: bool = False
    """Normalize the pooled vector instead of the tokens (timm's average pooling)."""
    hidden: int = 0
    """Width of the tanh layer before the logits, as in pre-training; zero leaves it out. `create`
    also takes True: as wide as the tokens."""
    head_bias: float = 0.0
    layer_scale: float = 0.0
    """Initial value of LayerScale; zero leaves it out."""
    gelu: Literal["tanh", "erf"] = "tanh"
    eps: float = 1e-6
    """Epsilon of every LayerNorm."""
    head_width: int = 0
    """Width of one head; zero is the paper's width / heads."""
    dropout: float = 0.0
    embedding_dropout: float | None = None
    """Dropout after adding the positions, where it is not the same as everywhere else."""
    drop_path: float = 0.0
    """Rate at the last block; it grows linearly from zero at the first."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(sides_of(self.patch))) == 1:  # one spelling for a square
            object.__setattr__(self, "patch", sides_of(self.patch)[0])
        factor = width_factor("backbone_width", self.backbone_width)
        object.__setattr__(self, "backbone_width", factor)
        for message, wrong in self._contradictions().items():
            if wrong:
                raise VitrailError(message)

    def _contradictions(self) -> dict[str, bool]:
        at_stem, learned = self.injection == "stem", self.positions == "learned"
        divided = self.head_width == 0 or self.pool == "attention"
        sincos = self.positions == "sincos"
        stride = stride_of(self.backbone, self.root)
        patch = "x".join(map(str, dict.fromkeys(side * stride for side in sides_of(self.patch))))
        return {
            f"width {self.width} is not a multiple of heads {self.heads}": (
                divided and self.width % self.heads != 0
            ),
            f"images of {self.size[0]}x{self.size[1]} are smaller than a patch of {patch} pixels": (
                min(self.grid) < 1
            ),
            f"hybrids need square patches, not {patch}": (
                self.backbone is not None and not isinstance(self.patch, int)
            ),
            "root and backbone_width describe the ResNet of a hybrid; this ViT has none": (
                self.backbone is None and (self.root, self.backbone_width) != ("imagenet", 1)
            ),
            "factorized positions need an even width": (
                self.positions == "factorized" and self.width % 2 != 0
            ),
            "sincos positions need a width divisible by 4, from 8 up": (
                sincos and (self.width % 4 != 0 or self.width < 8)
            ),
            f"{self.positions} positions are not added at every layer": (
                not at_stem and self.positions not in ("learned", "factorized")
            ),
            "pool='class' needs a class token; try pool='mean'": (
                self.pool == "class" and not self.class_token
            ),
            "class_slot needs a class token and learned positions": (
                self.class_slot and not (self.class_token and learned)
            ),
            "axial attention needs tokens on a grid, without class token or registers": self.axial
            and self.prefix > 0,
            "axial attention needs absolute positions, added at the stem": (
                self.axial and not (at_stem and self.positions != "relative")
            ),
        }

    @property
    def stride(self) -> int:
        """Pixels between neighboring tokens."""
        rows, columns = sides_of(self.patch)
        if rows != columns:
            raise VitrailError(f"this needs square patches; the model has {rows}x{columns}")
        return rows * stride_of(self.backbone, self.root)

    @property
    def inner(self) -> int:
        """Total width of all heads."""
        return self.heads * self.head_width or self.width

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches; what is left over at the right and bottom is not seen."""
        return grid_for(self.size, self.patch, stride_of(self.backbone, self.root))

    @property
    def prefix(self) -> int:
        """Tokens before the patches: the class token, then the registers."""
        return int(self.class_token) + self.registers


def sides_of(patch: int | tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of one patch."""
    return (patch, patch) if isinstance(patch, int) else patch


def grid_for(size: tuple[int, int], patch: int | tuple[int, int], stride: int) -> Grid:
    """Rows and columns of patches on a map of that stride: SAME padding rounds a ResNet's map up,
    patches round down."""
    height, width = sides_of(patch)
    return -(-size[0] // stride) // height, -(-size[1] // stride) // width


class Attention(nn.Module):
    """Multi-head self-attention (appendix A, Eq. 5 to 8), optionally with relative positions.

    All heads together are as wide as the tokens, unless `inner` says otherwise. `forward` uses the
    fused kernel and never builds the weights; `weights` builds them for inspection.
    """

    kernel: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)

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
        self.out = _xavier(nn.Linear(inner, width))
        self.relative = relative
        _xavier_stacked(self.qkv, parts=3)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        q, k, v = self.split(x)
        # Relative positions go in through the mask, which the kernel adds after scaling.
        y = self.kernel(q, k, v, attn_mask=self._bias(q))
        return self.out(y.transpose(1, 2).flatten(2))

    def split(self, x: Float[Tensor, "b n d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of every head, each (b, h, n, k)."""
        # "b n (three h k) -> three b h n k"; at batch 1, einops would cost a few percent here.
        b, n, _ = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def _bias(self, q: Float[Tensor, "b h n k"]) -> Float[Tensor, "b h n n"] | None:
        return None if self.relative is None else self.relative(q)

    def weights(self, x: Float[Tensor, "b n d"], rows: slice = ALL) -> Float[Tensor, "b h r n"]:
        """Attention weights: row i is how much token i takes from every token."""
        q, k, _ = self.split(x)
        logits = q[:, :, rows] @ k.mT / k.shape[-1] ** 0.5
        bias = self._bias(q)
        return (logits if bias is None else logits + bias[:, :, rows]).softmax(-1)


class MLP(nn.Module):
    """Two dense layers with GELU between them, dropout after both."""

    def __init__(self, width: int, hidden: int, gelu: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = _xavier(nn.Linear(width, hidden), bias_std=1e-6)
        self.activation = nn.GELU(approximate="tanh" if gelu == "tanh" else "none")
        self.dropout1 = nn.Dropout(dropout)
        self.fc2 = _xavier(nn.Linear(hidden, width), bias_std=1e-6)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.dropout2(self.fc2(self.dropout1(self.activation(self.fc1(x)))))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, skips the branch of random images."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "b *n d"]) -> Float[Tensor, "b *n d"]:
        if not self.training:
            return x
        kept = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.p)
        return x * kept.div_((1 - self.p) or 1.0)


class Block(nn.Module):
    """Pre-norm residual block (Eq. 2 and 3). LayerScale and drop path came later; the paper has
    neither."""

    def __init__(self, a: ViTArchitecture, attention: Attention, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(a.width, eps=a.eps)
        self.attention = attention
        self.dropout = nn.Dropout(a.dropout)
        self.norm2 = nn.LayerNorm(a.width, eps=a.eps)
        self.mlp = MLP(a.width, a.mlp, a.gelu, a.dropout)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.scale1 = self.scale2 = None
        if a.layer_scale:
            self.scale1 = nn.Parameter(torch.full((a.width,), a.layer_scale))
            self.scale2 = nn.Parameter(torch.full((a.width,), a.layer_scale))

    def forward(self, x: Float[Tensor, "b *n d"]) -> Float[Tensor, "b *n d"]:
        y = self.dropout(self.attention(self.norm1(x)))
        x = x + self.drop_path(y if self.scale1 is None else self.scale1 * y)
        y = self.mlp(self.norm2(x))
        return x + self.drop_path(y if self.scale2 is None else self.scale2 * y)


class AttentionPool(nn.Module):
    """One learned query attends to all tokens; an MLP follows, with its own residual.

    The head of the published g, G and So400m models (Zhai et al. 2021).
    """

    def __init__(self, a: ViTArchitecture) -> None:
        super().__init__()
        self.heads = a.heads
        self.probe = nn.Parameter(torch.empty(1, 1, a.width))
        self.q = _xavier(nn.Linear(a.width, a.width))
        self.kv = nn.Linear(a.width, 2 * a.width)
        self.out = _xavier(nn.Linear(a.width, a.width))
        self.norm = nn.LayerNorm(a.width, eps=a.eps)
        self.mlp = MLP(a.width, a.mlp, a.gelu)
        # Xavier-uniform, JAX counting the probe as one input and d outputs.
        bound = math.sqrt(6 / (1 + a.width))
        nn.init.uniform_(self.probe, -bound, bound)
        _xavier_stacked(self.kv, parts=2)

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


class ViT(Classifier):
    """The paper's model; every field of `ViTArchitecture` defaults to the paper's choice."""

    def __init__(self, architecture: ViTArchitecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.backbone = None
        if a.backbone is not None:
            self.backbone = Backbone(a.backbone, a.channels, a.backbone_width, a.root)
        inputs = a.channels if self.backbone is None else self.backbone.channels
        self.embedding = nn.Conv2d(inputs, a.width, a.patch, a.patch)
        lecun_normal(self.embedding.weight)
        nn.init.zeros_(self.embedding.bias)  # type: ignore[arg-type]
        self.class_token = nn.Parameter(torch.zeros(1, 1, a.width)) if a.class_token else None
        self.registers = None
        if a.registers:
            self.registers = nn.Parameter(torch.empty(1, a.registers, a.width))
            nn.init.normal_(self.registers, std=1e-6)
        self.positions = nn.ModuleList(_positions(a))
        rate = a.dropout if a.embedding_dropout is None else a.embedding_dropout
        self.dropout = nn.Dropout(rate)
        self.blocks = nn.ModuleList(_blocks(a))
        self.norm = nn.LayerNorm(a.width, eps=a.eps)
        self.pool = AttentionPool(a) if a.pool == "attention" else None
        self.hidden = nn.Linear(a.width, a.hidden) if a.hidden else None
        if self.hidden is not None:
            lecun_normal(self.hidden.weight)
            nn.init.zeros_(self.hidden.bias)
        self.feature_width = a.width
        self.head = zero_head(a.hidden or a.width, a.classes, a.head_bias)

    def tokens(
        self, images: Float[Tensor, "b c y x"], corrupt: Callable[[Tensor], Tensor] | None = None
    ) -> Float[Tensor, "b n d"]:
        """The encoder's output: class token, registers, then the patches row by row.

        `corrupt` may change the projected patches before positions are added.
        """
        x, grid = self.embed(images, corrupt)
        x = self.encode(x, grid)
        return x if self.architecture.norm_after_pool else self.norm(x)

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d"]:
        a = self.architecture
        if not self.fused or a.pool != "class" or a.norm_after_pool:
            return super().features(images)
        # Only the class token needs the last norm.
        return self.pool_tokens(self.norm(self.encode(*self.embed(images))[:, :1]))

    def embed(
        self, images: Float[Tensor, "b c y x"], corrupt: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Grid]:
        """The sequence that enters the encoder (Eq. 1), and the grid of its patches."""
        x = images
        if self.backbone is not None:
            x = self.run(self.backbone, x)
        if self._uses_kernels(x):
            from vitrail.model.kernels import encoder

            x = encoder.embed(x, self.embedding)
        else:
            x = self.embedding(x)
        grid = (x.shape[-2], x.shape[-1])
        x = rearrange(x, "b d y x -> b (y x) d")
        if corrupt is not None:
            x = corrupt(x)
        prefix = [token for token in (self.class_token, self.registers) if token is not None]
        x = torch.cat([*(token.expand(x.shape[0], -1, -1) for token in prefix), x], 1)
        for stem in self.positions[:1]:
            x = stem(x, grid)
        return self.dropout(x), grid

    def encode(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        """The sequence after every block (Eq. 2 and 3), with positions added again in some models
        (Table 8)."""
        a = self.architecture
        if self._uses_kernels(x):
            from vitrail.model.kernels import encoder

            return encoder.encode(x, self, grid)
        if a.axial:
            x = rearrange(x, "b (y x) d -> b y x d", y=grid[0])
        for i, block in enumerate(self.blocks):
            if positions := self.positions_before(i):
                x = positions(x, grid)
            x = self.run(block, x)
        return x.flatten(1, 2) if a.axial else x

    def positions_before(self, layer: int) -> nn.Module | None:
        """The positions that are added again before a layer, if any are."""
        injection = self.architecture.injection
        if not layer or injection == "stem":
            return None
        return self.positions[layer if injection == "every" else 0]

    def pool_tokens(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b e"]:
        """The vector that the head reads (Eq. 4), after the hidden layer of a pre-training head."""
        x = self.pooled(tokens)
        if self.architecture.norm_after_pool:
            x = self.norm(x)
        return x if self.hidden is None else self.hidden(x).tanh()

    def pooled(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
        """One vector for the image: class token, mean of the patches, or attention pooling."""
        if self.pool is not None:
            return self.pool(x)
        if self.architecture.pool == "class":
            return x[:, 0]
        return x[:, self.architecture.prefix :].mean(1)

    def attention_layers(self) -> list[nn.Module]:
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    def fuse(self, device: torch.device, precision: torch.dtype) -> bool:
        capable = runs_kernels(device, precision)
        if self.backbone is not None:
            fuse_norms(self.backbone, capable)
        if capable and not self.activation_checkpointing:
            from vitrail.model.kernels import encoder

            self.fused = encoder.supports(self.architecture)
        return self.fused

    def _uses_kernels(self, x: Tensor) -> bool:
        return self.fused and takes_kernels(x)

    def replace_head(self, classes: int, bias: float = 0.0) -> None:
        """Replace the pre-training head, with its hidden layer, by a zero linear one."""
        self.hidden = None
        self.architecture = replace(self.architecture, hidden=0)
        super().replace_head(classes, bias)


def _positions(a: ViTArchitecture) -> list[Positions]:
    """The modules that add positions: none, one, or one for every layer."""

    def module() -> Positions:
        if a.positions == "learned":
            return LearnedPositions(
                a.grid,
                a.width,
                prefix=a.prefix,
                class_slot=a.class_slot,
                interpolation=a.interpolation,
            )
        kind = FactorizedPositions if a.positions == "factorized" else SinCosPositions
        return kind(a.grid, a.width, prefix=a.prefix)

    if a.positions in ("relative", "none"):
        return []
    return [module() for _ in range(a.depth if a.injection == "every" else 1)]


def _blocks(a: ViTArchitecture) -> list[Block]:
    """The encoder: one block per layer, or a row block and a column block where it is axial."""
    tokens = a.prefix + a.grid[0] * a.grid[1]
    blocks = []
    for layer in range(a.depth):
        drop_path = a.drop_path * layer / max(a.depth - 1, 1)
        if a.axial:
            for axis in ("row", "column"):
                attention = AxialAttention(a.width, a.heads, axis, a.inner)
                blocks.append(Block(a, attention, drop_path))
        else:
            relative = RelativePositions(tokens, a.inner) if a.positions == "relative" else None
            blocks.append(Block(a, Attention(a.width, a.heads, relative, a.inner), drop_path))
    return blocks


class AxialAttention(Attention):
    """Self-attention inside each row, or each column, of a grid of tokens (appendix D.6)."""

    def __init__(
        self, width: int, heads: int, axis: Literal["row", "column"], inner: int | None = None
    ) -> None:
        super().__init__(width, heads, inner=inner)
        self.axis = axis
        self._lines = "b y h x k" if axis == "row" else "b x h y k"

    def forward(self, x: Float[Tensor, "b y x d"]) -> Float[Tensor, "b y x d"]:
        y = F.scaled_dot_product_attention(*self.split(x))
        return self.out(rearrange(y, f"{self._lines} -> b y x (h k)"))

    def split(self, x: Float[Tensor, "b y x d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (b, lines, h, length of a line, k)."""
        q, k, v = rearrange(
            self.qkv(x), f"b y x (three h k) -> three {self._lines}", three=3, h=self.heads
        ).unbind(0)
        return q, k, v

    def weights(self, x: Float[Tensor, "b y x d"], rows: slice = ALL) -> Float[Tensor, "b h r n"]:
        """Attention weights among all tokens of the grid: zero off the line."""
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
    weights = rearrange(lines[:, line, :, place], "r b h j -> b h r j")
    return full.scatter(-1, seen.expand(b, h, -1, -1), weights)


def _xavier(layer: nn.Linear, bias_std: float = 0.0) -> nn.Linear:
    nn.init.xavier_uniform_(layer.weight)
    if bias_std:
        nn.init.normal_(layer.bias, std=bias_std)
    else:
        nn.init.zeros_(layer.bias)
    return layer


def _xavier_stacked(layer: nn.Linear, parts: int) -> nn.Linear:
    """Xavier-uniform for each of the matrices stacked in one fused weight.

    Drawn for the fused matrix as a whole, the bound would count all outputs and be too small (by √2
    for query, key and value).
    """
    for part in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(part)
    nn.init.zeros_(layer.bias)
    return layer
