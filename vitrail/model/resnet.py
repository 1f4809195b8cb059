"""ResNet (BiT), the paper's convolutional baseline (Kolesnikov et al. 2019).

Pre-activation ResNet-v2 with GroupNorm and weight-standardised convolutions; the width factor
multiplies every channel.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.model.checks import check_fields
from vitrail.model.classifier import Classifier, zero_head
from vitrail.model.initialisation import lecun_normal

GROUPS = 32


@dataclass(frozen=True, kw_only=True)
class ResNetArchitecture:
    """A BiT ResNet: residual units of each stage, and the factor on all widths."""

    units: tuple[int, ...]
    width: int = 1
    size: tuple[int, int] = (224, 224)
    """What it was trained on; any other size works as well."""
    channels: int = 3
    classes: int = 1000
    head_bias: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


class StandardisedConv(nn.Conv2d):
    """A convolution whose kernel has zero mean and unit variance for each output channel."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        lecun_normal(self.weight)

    def forward(self, input: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:  # noqa: A002
        return F.conv2d(input, self.standardised(), None, self.stride, self.padding)

    def standardised(self) -> Tensor:
        # What LayerNorm does to a vector, and its one kernel does it faster than four.
        return F.layer_norm(self.weight, self.weight.shape[1:], eps=1e-10)


class PreActivationUnit(nn.Module):
    """Norm and ReLU come before each convolution; the shortcut is projected from behind them."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.norm1 = nn.GroupNorm(GROUPS, inputs)
        self.conv1 = StandardisedConv(inputs, middle, 1)
        self.norm2 = nn.GroupNorm(GROUPS, middle)
        self.conv2 = StandardisedConv(middle, middle, 3, stride)
        self.norm3 = nn.GroupNorm(GROUPS, middle)
        self.conv3 = StandardisedConv(middle, outputs, 1)
        self.projection = None
        if stride != 1 or inputs != outputs:
            self.projection = StandardisedConv(inputs, outputs, 1, stride)

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:
        y = self.norm1(x).relu()
        shortcut = x if self.projection is None else self.projection(y)
        y = self.conv1(y)
        y = self.conv2(self.norm2(y).relu())
        y = self.conv3(self.norm3(y).relu())
        return shortcut + y


class ResNet(Classifier):
    """Root, four stages, a last norm, the mean over the map, a linear head."""

    def __init__(self, architecture: ResNetArchitecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        channels = 64 * a.width
        self.root = StandardisedConv(a.channels, channels, 7, stride=2)
        self.stages = nn.ModuleList()
        for stage, units in enumerate(a.units):
            middle = 64 * a.width * 2**stage
            layers = []
            for unit in range(units):
                stride = 2 if stage and not unit else 1
                layers.append(PreActivationUnit(channels, middle, stride))
                channels = 4 * middle
            self.stages.append(nn.Sequential(*layers))
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.feature_width = channels
        self.head = zero_head(channels, a.classes, a.head_bias)

    def tokens(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n d"]:
        # The zero border is part of the published models: a pool that pads by itself would ignore
        # it, and so differ where all of a window is negative.
        x = F.max_pool2d(F.pad(self.root(images), (1, 1, 1, 1)), 3, 2)
        for stage in self.stages:
            x = self.run(stage, x)
        return self.norm(x).relu().flatten(2).mT
