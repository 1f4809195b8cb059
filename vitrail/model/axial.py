"""AxialResNet (appendix D.6): a ResNet whose 3×3 convolutions are attention along columns and rows.

The attention is that of Axial-DeepLab (Wang et al. 2020), which the paper names as its source:
relative positions for query, key and value, and a batch norm on every term.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.model.classifier import Classifier, check_fields, zero_head
from vitrail.model.positions import resize_line
from vitrail.model.resnet import ROOT_CONV, Root, stride_of
from vitrail.model.vit import ALL, whole_grid

GROUPS = 8


@dataclass(frozen=True, kw_only=True)
class AxialResNetArchitecture:
    """An AxialResNet: residual units of each stage, and the factor on all widths."""

    units: tuple[int, ...]
    width: float = 1.0
    root: Root = "imagenet"
    size: tuple[int, int] = (224, 224)
    """Rows and columns of the images that the relative positions are stored for."""
    channels: int = 3
    classes: int = 1000
    head_bias: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if GROUPS * self.width % 1:
            raise VitrailError(
                f"width = {self.width}: channels divide by {GROUPS} heads only at multiples of "
                f"{1 / GROUPS}"
            )

    @property
    def stride(self) -> int:
        """Pixels per cell of the last map."""
        return stride_of(self.units, self.root)


class LineAttention(nn.Module):
    """Attention inside each column or row of a map, with relative positions throughout.

    Query and key have half the width of the value; each of the three has an embedding for every
    offset between two places of a line of `span` places.
    """

    heads = GROUPS

    def __init__(self, channels: int, span: int, axis: Literal["row", "column"]) -> None:
        super().__init__()
        self.axis: Literal["row", "column"] = axis
        self.key, self.value = channels // GROUPS // 2, channels // GROUPS
        self.qkv = nn.Conv1d(channels, 2 * channels, 1, bias=False)
        self.qkv_norm = nn.BatchNorm1d(2 * channels)
        self.logits_norm = nn.BatchNorm2d(3 * GROUPS)
        self.output_norm = nn.BatchNorm1d(2 * channels)
        self.offsets = nn.Parameter(torch.empty(2 * span - 1, 2 * self.key + self.value))
        nn.init.normal_(self.qkv.weight, std=channels**-0.5)
        nn.init.normal_(self.offsets, std=self.value**-0.5)

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c y x"]:
        lines = "(b y) c x" if self.axis == "row" else "(b x) c y"
        q, k, v, rq, rk, rv = self._terms(rearrange(x, f"b c y x -> {lines}"))
        weights = self._line_weights(q, k, rq, rk)
        content = torch.einsum("b g i j, b g c j -> b g c i", weights, v)
        place = torch.einsum("b g i j, i j c -> b g c i", weights, rv)
        y = self.output_norm(torch.stack([content, place], 3).flatten(1, 3))
        y = y.unflatten(1, (-1, 2)).sum(2)
        return rearrange(y, f"{lines} -> b c y x", b=x.shape[0])

    def _terms(self, lines: Float[Tensor, "l c m"]) -> tuple[Tensor, ...]:
        """Query, key and value (l, g, c, m), and their embeddings by pair of places (m, m, c)."""
        qkv = self.qkv_norm(self.qkv(lines)).unflatten(1, (GROUPS, -1))
        sizes = [self.key, self.key, self.value]
        m = lines.shape[-1]
        place = torch.arange(m, device=lines.device)
        pairs = resize_line(self.offsets, 2 * m - 1)[place[:, None] - place[None, :] + m - 1]
        return (*qkv.split(sizes, 2), *pairs.split(sizes, -1))

    def _line_weights(self, q: Tensor, k: Tensor, rq: Tensor, rk: Tensor) -> Tensor:
        """Softmax over the sum of three normalized terms: content, query offset, key offset."""
        content = torch.einsum("b g c i, b g c j -> b g i j", q, k)
        query = torch.einsum("b g c i, i j c -> b g i j", q, rq)
        key = torch.einsum("b g c j, j i c -> b g i j", k, rk)  # the offset as the key sees it
        logits = self.logits_norm(torch.cat([content, query, key], 1))
        return logits.unflatten(1, (3, GROUPS)).sum(1).softmax(-1)

    def weights(self, x: Float[Tensor, "b c y x"], rows: slice = ALL) -> Float[Tensor, "b h r n"]:
        """Attention weights among all places of the map: zero off the line."""
        lines = "(b y) c x" if self.axis == "row" else "(b x) c y"
        q, k, _, rq, rk, _ = self._terms(rearrange(x, f"b c y x -> {lines}"))
        weights = self._line_weights(q, k, rq, rk)
        weights = rearrange(weights, "(b l) g i j -> b l g i j", b=x.shape[0])
        return whole_grid(weights, self.axis, rows)


class _AxialUnit(nn.Module):
    """Bottleneck of expansion 2: columns, then rows; the stride is a mean after both."""

    def __init__(self, inputs: int, middle: int, span: tuple[int, int], stride: int) -> None:
        super().__init__()
        outputs = 2 * middle
        self.down, self.down_norm = nn.Conv2d(inputs, middle, 1, bias=False), nn.BatchNorm2d(middle)
        self.columns = LineAttention(middle, span[0], "column")
        self.rows = LineAttention(middle, span[1], "row")
        self.stride = stride
        self.up, self.up_norm = nn.Conv2d(middle, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.up_norm.weight)
        self.projection = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.projection = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:
        y = self.down_norm(self.down(x)).relu()
        y = self.rows(self.columns(y))
        if self.stride != 1:
            # Rounds odd sides up, as the strided shortcut does.
            y = F.avg_pool2d(y, self.stride, self.stride, ceil_mode=True)
        y = self.up_norm(self.up(y.relu()))
        return ((x if self.projection is None else self.projection(x)) + y).relu()


class AxialResNet(Classifier):
    """The convolutional stem of ResNet, then four stages of axial units."""

    def __init__(self, architecture: AxialResNetArchitecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        channels = int(64 * a.width)
        kernel, stride = ROOT_CONV[a.root]
        self.stem = nn.Sequential(
            nn.Conv2d(a.channels, channels, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        if a.root == "imagenet":
            self.stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        # Each halving of the stem rounds up.
        halved = stride_of((), a.root)
        span = (-(-a.size[0] // halved), -(-a.size[1] // halved))
        self.stages = nn.ModuleList()
        for stage, count in enumerate(a.units):
            middle = int(128 * a.width) * 2**stage
            units = []
            for unit in range(count):
                stride = 2 if stage and not unit else 1
                units.append(_AxialUnit(channels, middle, span, stride))
                span = (-(-span[0] // stride), -(-span[1] // stride))
                channels = 2 * middle
            self.stages.append(nn.Sequential(*units))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.feature_width = channels
        self.head = zero_head(channels, a.classes, a.head_bias)

    def tokens(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n d"]:
        x = self.stem(images)
        for stage in self.stages:
            x = self.run(stage, x)
        return x.flatten(2).mT

    def attention_layers(self) -> list[nn.Module]:
        """Two per unit: along the columns, then along the rows."""
        return [module for module in self.modules() if isinstance(module, LineAttention)]
