"""The Vision Transformer (Dosovitskiy et al. 2020), its hybrids and its axial variant.

An image is cut into patches, each patch becomes a token, the tokens go through a plain encoder,
and a head reads the class token. Hybrids cut a convolutional network's feature map instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.model.attention import Attention, AxialAttention
from vitrail.model.block import MLP, Block
from vitrail.model.checks import check_fields
from vitrail.model.classifier import Classifier, zero_head
from vitrail.model.heads import AttentionPool
from vitrail.model.hybrid import Backbone
from vitrail.model.initialisation import lecun_normal
from vitrail.model.positions import (
    FactorisedPositions,
    Grid,
    Interpolation,
    LearnedPositions,
    Positions,
    RelativePositions,
    SinCosPositions,
)


def stride_of(backbone: tuple[int, ...] | None) -> int:
    """Pixels per cell of the map that is cut: a ResNet's root quarters, later stages halve."""
    return 1 if backbone is None else 4 * 2 ** max(len(backbone) - 1, 0)


def sides_of(patch: int | tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of one patch."""
    return (patch, patch) if isinstance(patch, int) else patch


def grid_for(
    size: tuple[int, int], patch: int | tuple[int, int], backbone: tuple[int, ...] | None
) -> Grid:
    """Rows and columns of patches: SAME padding rounds a ResNet's map up, patches round down."""
    stride, (height, width) = stride_of(backbone), sides_of(patch)
    return -(-size[0] // stride) // height, -(-size[1] // stride) // width


@dataclass(frozen=True, kw_only=True)
class ViTArchitecture:
    """Everything that distinguishes one Vision Transformer from another."""

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
    axial: bool = False
    """Attend along rows, then along columns, in place of attending to all tokens."""
    positions: Literal["learned", "factorised", "relative", "sincos", "none"] = "learned"
    injection: Literal["stem", "every", "shared"] = "stem"
    """Where positions are added: once; at every layer its own; at every layer the same ones."""
    interpolation: Interpolation = "google"
    class_token: bool = True
    class_slot: bool = True
    """Whether the class token has a learned position too."""
    registers: int = 0
    pool: Literal["class", "mean", "attention"] = "class"
    norm_after_pool: bool = False
    """Normalise the pooled vector instead of the tokens (timm's average pooling)."""
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
        for wrong, message in self.contradictions():
            if wrong:
                raise VitrailError(message)

    def contradictions(self) -> list[tuple[bool, str]]:
        """What cannot be built, and what to say about it."""
        per_patch = self.positions in ("learned", "factorised")
        axial_positions = self.positions != "relative" and self.injection == "stem"
        slot = self.class_token and self.positions == "learned"
        height, width = self.size
        sides = dict.fromkeys(side * stride_of(self.backbone) for side in sides_of(self.patch))
        patch = "x".join(map(str, sides))
        divided = self.head_width == 0 or self.pool == "attention"
        return [
            (
                divided and self.width % self.heads != 0,
                f"width {self.width} is not a multiple of heads {self.heads}",
            ),
            (
                min(self.grid) < 1,
                f"images of {height}x{width} hold no patch of {patch} pixels",
            ),
            (
                self.backbone is not None and not isinstance(self.patch, int),
                f"hybrids need square patches, not {patch}",
            ),
            (
                self.positions == "factorised" and self.width % 2 != 0,
                "factorised positions need an even width",
            ),
            (
                self.positions == "sincos" and (self.width % 4 != 0 or self.width < 8),
                "sincos positions need a width divisible by 4, from 8 up",
            ),
            (
                self.injection != "stem" and not per_patch,
                f"{self.positions} positions are not added at every layer",
            ),
            (
                self.pool == "class" and not self.class_token,
                "pool='class' needs a class token; try pool='mean'",
            ),
            (self.class_slot and not slot, "class_slot needs a class token and learned positions"),
            (
                self.axial and self.prefix > 0,
                "axial attention has no place for tokens off the grid",
            ),
            (self.axial and not axial_positions, "axial attention takes its positions at the stem"),
        ]

    @property
    def stride(self) -> int:
        """Pixels between neighbouring tokens, where they are as many in both directions."""
        rows, columns = sides_of(self.patch)
        if rows != columns:
            raise VitrailError(f"this needs square patches; the model has {rows}x{columns}")
        return rows * stride_of(self.backbone)

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_width or self.width

    @property
    def grid(self) -> Grid:
        """Rows and columns of tokens. Where patches do not fit, the rest of the image is unseen."""
        return grid_for(self.size, self.patch, self.backbone)

    @property
    def prefix(self) -> int:
        """Tokens ahead of the patches: the class token, then the registers."""
        return int(self.class_token) + self.registers


class ViT(Classifier):
    """The paper's model; every switch of `ViTArchitecture` at its default is the paper's choice."""

    def __init__(self, architecture: ViTArchitecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.backbone = None if a.backbone is None else Backbone(a.backbone, a.channels)
        inputs = a.channels if self.backbone is None else self.backbone.channels
        self.embedding = nn.Conv2d(inputs, a.width, a.patch, a.patch)
        lecun_normal(self.embedding.weight)
        nn.init.zeros_(self.embedding.bias)  # type: ignore[arg-type]
        self.class_token = nn.Parameter(torch.zeros(1, 1, a.width)) if a.class_token else None
        self.registers = None
        if a.registers:
            self.registers = nn.Parameter(torch.empty(1, a.registers, a.width))
            nn.init.normal_(self.registers, std=1e-6)
        self.positions = nn.ModuleList(positions(a))
        rate = a.dropout if a.embedding_dropout is None else a.embedding_dropout
        self.dropout = nn.Dropout(rate)
        self.blocks = nn.ModuleList(blocks(a))
        self.norm = nn.LayerNorm(a.width, eps=a.eps)
        self.pool = None
        if a.pool == "attention":
            self.pool = AttentionPool(a.width, a.heads, a.mlp, gelu=a.gelu, eps=a.eps)
        self.hidden = nn.Linear(a.width, a.hidden) if a.hidden else None
        if self.hidden is not None:
            lecun_normal(self.hidden.weight)
            nn.init.zeros_(self.hidden.bias)
        self.feature_width = a.width
        self.head = zero_head(a.hidden or a.width, a.classes, a.head_bias)

    def summary(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b e"]:
        x = self.pooled(tokens)
        if self.architecture.norm_after_pool:
            x = self.norm(x)
        return x if self.hidden is None else self.hidden(x).tanh()

    def tokens(
        self, images: Float[Tensor, "b c y x"], corrupt: Callable[[Tensor], Tensor] | None = None
    ) -> Float[Tensor, "b n d"]:
        """The encoder's output: class token, registers, then the patches row by row.

        `corrupt` may change the projected patches before positions are added.
        """
        x, grid = self.embed(images, corrupt)
        x = self.encode(x, grid)
        return x if self.architecture.norm_after_pool else self.norm(x)

    def embed(
        self, images: Float[Tensor, "b c y x"], corrupt: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Grid]:
        """The sequence that enters the encoder (Eq. 1), and the grid its patches lie on."""
        x = images
        if self.backbone is not None:
            x = self.run(self.backbone, x)
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
        """The sequence through every block, with positions added again where that is asked for."""
        a = self.architecture
        if a.axial:
            x = rearrange(x, "b (y x) d -> b y x d", y=grid[0])
        for i, block in enumerate(self.blocks):
            if i and a.injection != "stem":
                x = self.positions[i if a.injection == "every" else 0](x, grid)
            x = self.run(block, x)
        return x.flatten(1, 2) if a.axial else x

    def pooled(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
        """One vector for the whole image."""
        if self.pool is not None:
            return self.pool(x)
        if self.architecture.pool == "class":
            return x[:, 0]
        return x[:, self.architecture.prefix :].mean(1)

    def attention_layers(self) -> list[nn.Module]:
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    def replace_head(self, classes: int, bias: float = 0.0) -> None:
        """Drop the whole pre-training head, hidden layer included, for a zero linear one."""
        self.hidden = None
        self.architecture = replace(self.architecture, hidden=0)
        super().replace_head(classes, bias)


def positions(a: ViTArchitecture) -> list[Positions]:
    """The modules that add positions: none, one, or one for every layer."""
    count = a.depth if a.injection == "every" else 1
    if a.positions == "learned":
        return [
            LearnedPositions(
                a.grid,
                a.width,
                prefix=a.prefix,
                class_slot=a.class_slot,
                interpolation=a.interpolation,
            )
            for _ in range(count)
        ]
    kinds = {"factorised": FactorisedPositions, "sincos": SinCosPositions}
    if a.positions not in kinds:
        return []
    return [kinds[a.positions](a.grid, a.width, prefix=a.prefix) for _ in range(count)]


def blocks(a: ViTArchitecture) -> list[Block]:
    """The encoder: one block per layer, or a row block and a column block where it is axial."""
    axes = ("row", "column") if a.axial else (None,)
    tokens = a.prefix + a.grid[0] * a.grid[1]

    def block(layer: int, axis: Literal["row", "column"] | None) -> Block:
        if axis is not None:
            attention = AxialAttention(a.width, a.heads, axis, a.inner)
        else:
            relative = RelativePositions(tokens, a.inner) if a.positions == "relative" else None
            attention = Attention(a.width, a.heads, relative, a.inner)
        return Block(
            attention,
            MLP(a.width, a.mlp, a.gelu, a.dropout),
            width=a.width,
            eps=a.eps,
            dropout=a.dropout,
            drop_path=a.drop_path * layer / max(a.depth - 1, 1),
            layer_scale=a.layer_scale,
        )

    return [block(layer, axis) for layer in range(a.depth) for axis in axes]
