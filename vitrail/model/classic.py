"""The classic ResNet with batch norm: torchvision's own, behind the common interface."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from vitrail.model.classifier import Classifier, check_fields, zero_head

Depth = Literal[18, 34, 50, 101, 152]


@dataclass(frozen=True, kw_only=True)
class ClassicArchitecture:
    """One of torchvision's ResNets."""

    depth: Depth
    size: tuple[int, int] = (224, 224)
    """What it was trained on; any other size works as well."""
    channels: int = 3
    classes: int = 1000
    head_bias: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def stride(self) -> int:
        """Pixels per cell of the last map."""
        return 32


class ClassicResNet(Classifier):
    """ResNet-v1.5 (He et al. 2015) as torchvision builds and initializes it, with a zero head."""

    def __init__(self, architecture: ClassicArchitecture) -> None:
        from torchvision.models import resnet  # the import takes a second

        super().__init__()
        a = self.architecture = architecture
        net = getattr(resnet, f"resnet{a.depth}")()
        if a.channels != 3:
            net.conv1 = nn.Conv2d(a.channels, 64, 7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
        self.stages = nn.ModuleList([net.layer1, net.layer2, net.layer3, net.layer4])
        self.feature_width = net.fc.in_features
        self.head = zero_head(self.feature_width, a.classes, a.head_bias)

    def tokens(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n d"]:
        x = self.stem(images)
        for stage in self.stages:
            x = self.run(stage, x)
        return x.flatten(2).mT
