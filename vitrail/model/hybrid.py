"""The ResNet under a hybrid: post-activation (v1), GroupNorm, standardised kernels, SAME padding.

It is not the BiT ResNet. Every detail follows the code that made the published files: TensorFlow's
SAME padding (uneven for even sizes), std + 1e-5 in the standardisation, epsilon 1e-6 in the norms.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.model.resnet import GROUPS, StandardisedConv


class SameConv(StandardisedConv):
    """A standardised convolution that halves with TensorFlow's SAME padding."""

    def forward(self, input: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:  # noqa: A002
        kernel, stride = self.kernel_size[0], self.stride[0]
        return F.conv2d(same_pad(input, kernel, stride), self.standardised(), None, stride)

    def standardised(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        return (self.weight - mean) / (variance.sqrt() + 1e-5)


def same_pad(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pads so that the result has ceil(side / stride) rows and columns; the odd one goes last."""
    padding: list[int] = []
    for side in (x.shape[-1], x.shape[-2]):
        total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        padding += [total // 2, total - total // 2]
    return F.pad(x, padding, value=value) if any(padding) else x


def norm(channels: int) -> nn.GroupNorm:
    """GroupNorm as flax has it."""
    return nn.GroupNorm(GROUPS, channels, eps=1e-6)


class Unit(nn.Module):
    """Bottleneck, stride on the 3×3; its last norm starts at zero, so that it starts as a no-op."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.conv1, self.norm1 = SameConv(inputs, middle, 1), norm(middle)
        self.conv2, self.norm2 = SameConv(middle, middle, 3, stride), norm(middle)
        self.conv3, self.norm3 = SameConv(middle, outputs, 1), norm(outputs)
        nn.init.zeros_(self.norm3.weight)
        self.projection = self.projection_norm = None
        if stride != 1 or inputs != outputs:
            self.projection = SameConv(inputs, outputs, 1, stride)
            self.projection_norm = norm(outputs)

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b e v u"]:
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y)).relu()
        y = self.norm3(self.conv3(y))
        if self.projection is not None and self.projection_norm is not None:
            x = self.projection_norm(self.projection(x))
        return (x + y).relu()


class Root(nn.Module):
    """The first convolution and pool: a quarter of the rows and columns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = SameConv(channels, 64, 7, stride=2), norm(64)

    def forward(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d v u"]:
        x = self.norm(self.conv(images)).relu()
        return F.max_pool2d(same_pad(x, 3, 2, float("-inf")), 3, 2)


class Backbone(nn.Sequential):
    """The root, then one stage per entry of `units`; with none, the root alone, as in R+Ti/16."""

    def __init__(self, units: tuple[int, ...], channels: int = 3) -> None:
        super().__init__()
        self.add_module("root", Root(channels))
        self.channels = 64
        for stage, count in enumerate(units):
            middle = 64 * 2**stage
            layers = []
            for unit in range(count):
                layers.append(Unit(self.channels, middle, 2 if stage and not unit else 1))
                self.channels = 4 * middle
            self.add_module(f"stage{stage + 1}", nn.Sequential(*layers))
