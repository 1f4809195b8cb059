"""The paper's two ResNets: BiT, the convolutional baseline, and the stem of the hybrids.

BiT (Kolesnikov et al. 2019) is a pre-activation ResNet-v2 with GroupNorm and weight-standardized
convolutions. The hybrids' ResNet is another one: post-activation (v1), with every detail of the
code that made the published files, such as TensorFlow's SAME padding (uneven for even sizes),
std + 1e-5 in the standardization and epsilon 1e-6 in the norms.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
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

Root = Literal["imagenet", "small"]
"""The layers before the first stage: a strided convolution and a pool, or, for images of about 32
pixels, a convolution that keeps their resolution."""
ROOT_CONV: dict[Root, tuple[int, int]] = {"imagenet": (7, 2), "small": (3, 1)}
"""Kernel and stride of the root's convolution."""
Factor = int | float
"""On all widths; whole ones are int, since R50x1 is not R50x1.0."""
_GROUPS = 32


@dataclass(frozen=True, kw_only=True)
class ResNetArchitecture:
    """A BiT ResNet: residual units of each stage, and the factor on all widths."""

    units: tuple[int, ...]
    width: Factor = 1
    root: Root = "imagenet"
    size: tuple[int, int] = (224, 224)
    """What it was trained on; any other size works as well."""
    channels: int = 3
    classes: int = 1000
    head_bias: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "width", width_factor("width", self.width))

    @property
    def stride(self) -> int:
        """Pixels per cell of the last map."""
        return stride_of(self.units, self.root)


def width_factor(name: str, factor: Factor) -> Factor:
    """A factor that makes a whole number of the 64 channels of the root."""
    if 64 * factor % 1:
        raise VitrailError(f"{name} = {factor}: 64 times that is not a whole number of channels")
    return factor if factor % 1 else int(factor)


def stride_of(units: tuple[int, ...] | None, root: Root = "imagenet") -> int:
    """Pixels per cell of a ResNet's map: ImageNet's root quarters, stages after the first halve.

    Empty units are the root alone; None is no ResNet at all.
    """
    if units is None:
        return 1
    return (4 if root == "imagenet" else 1) * 2 ** max(len(units) - 1, 0)


def _groups(channels: int) -> int:
    """As many as the published models have, unless a group would be a single channel."""
    most = max(1, min(_GROUPS, channels // 2))
    return next(count for count in range(most, 0, -1) if channels % count == 0)


class Norm(nn.GroupNorm):
    """GroupNorm, and a ReLU unless the sum with a shortcut comes first: on a GPU, one kernel."""

    fused = False

    def __init__(self, channels: int, eps: float = 1e-5, *, relu: bool = True) -> None:
        super().__init__(_groups(channels), channels, eps)
        self.relu = relu

    def forward(self, input: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c y x"]:  # noqa: A002
        if self.fused and takes_kernels(input):
            from vitrail.model.kernels.group_norm import group_norm

            return group_norm(input, self, self.relu)
        y = super().forward(input)
        return y.relu() if self.relu else y


def fuse_norms(module: nn.Module, fused: bool) -> None:
    for norm in module.modules():
        if isinstance(norm, Norm):
            norm.fused = fused


class StandardizedConv(nn.Conv2d):
    """A convolution whose kernel has zero mean and unit variance for each output channel."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        lecun_normal(self.weight)

    def forward(self, input: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:  # noqa: A002
        return F.conv2d(input, self.standardized(), None, self.stride, self.padding)

    def standardized(self) -> Tensor:
        # The same as LayerNorm of a vector, in one kernel rather than four.
        return F.layer_norm(self.weight, self.weight.shape[1:], eps=1e-10)


class _PreActivationUnit(nn.Module):
    """Norm and ReLU before each convolution; the shortcut is projected after the first of them."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.norm1 = Norm(inputs)
        self.conv1 = StandardizedConv(inputs, middle, 1)
        self.norm2 = Norm(middle)
        self.conv2 = StandardizedConv(middle, middle, 3, stride)
        self.norm3 = Norm(middle)
        self.conv3 = StandardizedConv(middle, outputs, 1)
        self.projection = None
        if stride != 1 or inputs != outputs:
            self.projection = StandardizedConv(inputs, outputs, 1, stride)

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:
        y = self.norm1(x)
        shortcut = x if self.projection is None else self.projection(y)
        return shortcut + self.conv3(self.norm3(self.conv2(self.norm2(self.conv1(y)))))


class ResNet(Classifier):
    """BiT: root, four stages, a last norm, the mean over the map, a linear head."""

    def __init__(self, architecture: ResNetArchitecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        channels = int(64 * a.width)
        self.root = StandardizedConv(a.channels, channels, *ROOT_CONV[a.root])
        self.stages = nn.ModuleList()
        for stage, units in enumerate(a.units):
            self.stages.append(_stage(_PreActivationUnit, channels, stage, units, a.width))
            channels = int(256 * a.width) * 2**stage
        self.norm = Norm(channels)
        self.feature_width = channels
        self.head = zero_head(channels, a.classes, a.head_bias)

    def tokens(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n d"]:
        x = self.root(images)
        if self.architecture.root == "imagenet":
            # The zero border is part of the published models: a pool that pads by itself would
            # ignore it, and so differ where all of a window is negative.
            x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
        for stage in self.stages:
            x = self.run(stage, x)
        return self.norm(x).flatten(2).mT

    def fuse(self, device: torch.device, precision: torch.dtype) -> bool:
        self.fused = runs_kernels(device, precision)
        fuse_norms(self.stages, self.fused)  # the last one is small, and keeps float32
        return self.fused


class SameConv(StandardizedConv):
    """A standardized convolution with TensorFlow's SAME padding."""

    def forward(self, input: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:  # noqa: A002
        kernel, stride = self.kernel_size[0], self.stride[0]
        return F.conv2d(same_pad(input, kernel, stride), self.standardized(), None, stride)

    def standardized(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        return (self.weight - mean) / (variance.sqrt() + 1e-5)


def same_pad(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad so that the output has ceil(side / stride) rows and columns; the odd one goes last."""
    padding: list[int] = []
    for side in (x.shape[-1], x.shape[-2]):
        total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        padding += [total // 2, total - total // 2]
    return F.pad(x, padding, value=value) if any(padding) else x


_EPS = 1e-6
"""Flax's epsilon."""


class _PostActivationUnit(nn.Module):
    """Bottleneck, stride on the 3×3; the last norm starts at zero, so that it starts as a no-op."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.conv1, self.norm1 = SameConv(inputs, middle, 1), Norm(middle, _EPS)
        self.conv2, self.norm2 = SameConv(middle, middle, 3, stride), Norm(middle, _EPS)
        self.conv3, self.norm3 = SameConv(middle, outputs, 1), Norm(outputs, _EPS, relu=False)
        nn.init.zeros_(self.norm3.weight)
        self.projection = self.projection_norm = None
        if stride != 1 or inputs != outputs:
            self.projection = SameConv(inputs, outputs, 1, stride)
            self.projection_norm = Norm(outputs, _EPS, relu=False)

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        y = self.norm3(self.conv3(y))
        if self.projection is not None and self.projection_norm is not None:
            x = self.projection_norm(self.projection(x))
        return (x + y).relu()


class _Root(nn.Module):
    """The first convolution, and the pool of ImageNet's root."""

    def __init__(self, inputs: int, outputs: int, root: Root) -> None:
        super().__init__()
        self.conv, self.norm = SameConv(inputs, outputs, *ROOT_CONV[root]), Norm(outputs, _EPS)
        self.pools = root == "imagenet"

    def forward(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d v u"]:
        x = self.norm(self.conv(images))
        return F.max_pool2d(same_pad(x, 3, 2, float("-inf")), 3, 2) if self.pools else x


class Backbone(nn.Sequential):
    """The stem of a hybrid: the root, then one stage per entry of `units`; with none, the root
    alone, as in R+Ti/16."""

    def __init__(
        self,
        units: tuple[int, ...],
        channels: int = 3,
        width: Factor = 1,
        root: Root = "imagenet",
    ) -> None:
        super().__init__()
        self.channels = int(64 * width)
        self.add_module("root", _Root(channels, self.channels, root))
        for stage, count in enumerate(units):
            layers = _stage(_PostActivationUnit, self.channels, stage, count, width)
            self.add_module(f"stage{stage + 1}", layers)
            self.channels = int(256 * width) * 2**stage


def _stage(
    unit: type[_PreActivationUnit | _PostActivationUnit],
    inputs: int,
    stage: int,
    units: int,
    width: Factor,
) -> nn.Sequential:
    """Residual units, the first of which halves the map in all stages but stage 0."""
    middle = int(64 * width) * 2**stage
    first = unit(inputs, middle, 2 if stage else 1)
    return nn.Sequential(first, *(unit(4 * middle, middle, 1) for _ in range(units - 1)))
