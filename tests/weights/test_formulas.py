"""What is counted, against sums done by hand from the descriptions of the models."""

import json

import pytest

from vitrail.model.axial import AxialResNetArchitecture
from vitrail.model.classic import ClassicArchitecture
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import NAMED, UNITS, parse_variant
from vitrail.model.vit import ViTArchitecture
from vitrail.weights.published import COSTS

KEPT = json.loads(COSTS.read_text(encoding="utf-8"))


def bottlenecks(units: tuple[int, ...], width: int, side: int, inputs: int) -> tuple[int, int]:
    """1×1, 3×3 and 1×1 convolutions, stride on the 3×3; and the side of the last map."""
    macs = 0
    for stage, count in enumerate(units):
        middle = 64 * width * 2**stage
        for unit in range(count):
            out = side // 2 if stage and not unit else side
            macs += side**2 * inputs * middle
            macs += out**2 * (9 * middle * middle + middle * 4 * middle)
            if not unit:
                macs += out**2 * inputs * 4 * middle
            side, inputs = out, 4 * middle
    return macs, side


def root(width: int) -> int:
    """7×7, stride 2, on 224 pixels."""
    return 112**2 * 49 * 3 * 64 * width


def encoder(a: ViTArchitecture, tokens: int, seen: int) -> int:
    """Of each token: four D×D matrices, the MLP, and scores and sums over the tokens it sees."""
    d = a.width
    return tokens * (4 * d * d + 2 * d * a.mlp + 2 * seen * d)


def vit(a: ViTArchitecture) -> int:
    side, inputs, macs = 224, 3, 0
    if a.backbone is not None:
        macs, side = bottlenecks(a.backbone, 1, 56, 64)
        macs += root(1)
        inputs = 64 * 2 ** (len(a.backbone) + 1) if a.backbone else 64
    side //= a.patch
    patches = side**2
    macs += patches * inputs * a.patch**2 * a.width
    if a.axial:  # a row block and a column block in each layer, and no class token
        macs += 2 * a.depth * encoder(a, patches, side)
    else:
        macs += a.depth * encoder(a, patches + 1, patches + 1)
    return macs + a.width * a.classes


def resnet(a: ResNetArchitecture) -> int:
    macs, _ = bottlenecks(a.units, a.width, 56, 64 * a.width)
    return macs + root(a.width) + 64 * a.width * 2 ** (len(a.units) + 1) * a.classes


def classic(a: ClassicArchitecture) -> int:
    if a.depth >= 50:
        return bottlenecks(UNITS[a.depth], 1, 56, 64)[0] + root(1) + 2048 * a.classes
    macs, side, inputs = root(1), 56, 64
    for stage, count in enumerate({18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}[a.depth]):
        for unit in range(count):
            width = 64 * 2**stage
            side = side // 2 if stage and not unit else side
            macs += side**2 * 9 * (inputs + width) * width
            macs += side**2 * inputs * width if inputs != width else 0
            inputs = width
    return macs + 512 * a.classes


def line_attention(channels: int, side: int) -> int:
    """Query, key, value; then for every pair of places of a line: three terms of scores, two of
    sums. Query and key are half as wide as the value."""
    pairs = side * side * side
    return side**2 * channels * 2 * channels + pairs * (3 * channels // 2 + 2 * channels)


def axial_resnet(a: AxialResNetArchitecture) -> int:
    inputs, side = int(64 * a.width), 56
    macs = 112**2 * 49 * 3 * inputs
    for stage, count in enumerate(a.units):
        middle = int(128 * a.width) * 2**stage
        for unit in range(count):
            out = side // 2 if stage and not unit else side
            macs += side**2 * inputs * middle + 2 * line_attention(middle, side)
            macs += out**2 * middle * 2 * middle
            macs += out**2 * inputs * 2 * middle if not unit else 0
            side, inputs = out, 2 * middle
    return macs + inputs * a.classes


FORMULAS = {
    ViTArchitecture: vit,
    ResNetArchitecture: resnet,
    ClassicArchitecture: classic,
    AxialResNetArchitecture: axial_resnet,
}


@pytest.mark.parametrize("name", NAMED)
def test_every_variant_costs_what_its_description_says(name):
    architecture = parse_variant(name)
    macs = FORMULAS[type(architecture)](architecture)
    assert KEPT[name]["gmacs"] == pytest.approx(macs / 1e9, abs=1e-4)
