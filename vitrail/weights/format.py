"""What a checkpoint format is: how to recognise it, what it says, and what it has no place for."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.model.positions import Interpolation, sincos
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import SIZES, Architecture, name
from vitrail.model.vit import ViTArchitecture, grid_for, stride_of
from vitrail.weights.files import Contents
from vitrail.weights.layout import Entry

Size = tuple[int, int]
Tensors = dict[str, Tensor]
Unstated = Literal["heads", "gelu", "pool", "rotary", "antialiasing"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One family of checkpoints."""

    name: str
    gelu: Literal["tanh", "erf"]
    """What a file of this family means, since the weights alone do not say."""
    eps: float
    interpolation: Interpolation
    suffix: str
    """The family's usual container; empty is a folder with config.json."""
    recognise: Callable[[Contents], bool]
    normalise: Callable[[Tensors], Tensors] = lambda tensors: tensors
    """Every dialect of the family under one set of names."""
    describe: Callable[[Contents, Size | None], Architecture]
    """The architecture, read off the tensors; the size of rectangles must be told."""
    stranger: Callable[[Contents], str] = lambda contents: ""
    """Which other family a file belongs to whose names look like this one's; empty for our own."""
    unstated: Callable[[Contents], Collection[Unstated]] = lambda contents: ()
    """What neither the tensors nor the config say, and is assumed."""
    table: Callable[[Architecture], list[Entry]]
    """Our keys and theirs."""
    refusal: Callable[[Architecture], str]
    """Why this format cannot hold that architecture; empty where it can."""
    adapt: Callable[[Architecture, Tensors], tuple[Architecture, Tensors]] = lambda a, t: (a, t)
    """The same function in terms the format has words for."""
    spell: Callable[[Architecture, Tensors], Tensors] = lambda a, tensors: tensors
    """The names as files have them, where those differ from the table's."""
    preprocessing: Callable[[Contents, Architecture], Preprocessing | None]
    labels: Callable[[Contents], tuple[str, ...]] = lambda contents: ()
    exceptions: Callable[[Contents], dict[str, Any]] = lambda contents: {}
    """GELU or epsilon, where the config says something else than the family."""
    sidecars: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]] = lambda model: ({}, {})
    """config.json and preprocessor_config.json of a model."""

    def numerics(self, architecture: Architecture) -> Architecture:
        """The architecture with this family's GELU and epsilon, where it has any."""
        if isinstance(architecture, ViTArchitecture):
            return replace(architecture, gelu=self.gelu, eps=self.eps)
        return architecture


WITH_SLOT, EITHER, WITHOUT_SLOT = (1,), (1, 0), (0,)


@dataclass(frozen=True)
class Patches:
    """How a model cuts its images."""

    side: int
    backbone: tuple[int, ...] | None = None

    def count(self, size: Size) -> int:
        rows, columns = grid_for(size, self.side, self.backbone)
        return rows * columns


def grid_of(
    slots: int, choices: tuple[int, ...], patches: Patches, told: Size | None, wish: Size | None
) -> tuple[Size, int]:
    """Image size and how many leading slots are for other tokens, from a table's length.

    What the file itself has told decides. Otherwise images are taken to be square, as nearly all
    are. Only where that fails may the size that the user wishes for be the one the table was made
    for: mostly it is asked for to change it. A slot for the class token is tried first, being the
    rule.
    """
    if told is not None:
        for slot in choices:
            if slots == patches.count(told) + slot:
                return told, slot
    for slot in choices:
        side = math.isqrt(max(slots - slot, 0))
        if side * side == slots - slot:
            pixels = side * patches.side * stride_of(patches.backbone)
            return (pixels, pixels), slot
        if wish is not None and slots == patches.count(wish) + slot:
            return wish, slot
    raise VitrailError(
        f"{slots} positions are no square grid; say size=(rows, columns) of the images they are for"
    )


def heads_of(contents: Contents, stated: Any, *, width: int, depth: int, mlp: int, key: str) -> int:
    """Heads are not in the tensors of torch formats: from the user, the config, or the table."""
    heads = contents.heads or stated
    if heads is None:
        known = {(row[0], row[1], row[3]): row[2] for row in reversed(SIZES.values())}
        heads = known.get((width, depth, mlp), 0 if width % 64 else width // 64)
    heads = int(heads)
    if heads < 1 or width % heads:
        raise VitrailError(
            f"{contents.path}: cannot tell the number of heads of width {width}; say heads=… "
            f"(convert: --heads), or put a config.json with {key} beside it"
        )
    return heads


def count(tensors: Tensors, template: str) -> int:
    """How many of `template.format(0)`, `template.format(1)`, … there are in a row."""
    i = 0
    while template.format(i) in tensors:
        i += 1
    return i


def units_of(tensors: Tensors, template: str, start: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    """Residual units of each stage, from keys with a stage and a unit, counted from `start`."""
    units: list[int] = []
    while True:
        stage, unit = start[0] + len(units), start[1]
        while template.format(stage, unit) in tensors:
            unit += 1
        if unit == start[1]:
            return tuple(units)
        units.append(unit - start[1])


def resnet_of(
    root: Tensor, units: tuple[int, ...], head: Tensor | None, size: Size | None
) -> ResNetArchitecture:
    """A BiT ResNet from its root kernel (out, in, 7, 7) and its head (classes, …)."""
    return ResNetArchitecture(
        units=units,
        width=root.shape[0] // 64,
        channels=root.shape[1],
        classes=0 if head is None else head.shape[0],
        size=size or (224, 224),
    )


def refuse(owner: str, a: Architecture, lacks: Callable[[ViTArchitecture], dict[str, bool]]) -> str:
    """Why a format cannot hold an architecture: what it lacks, and what none but ours has."""
    if not isinstance(a, ViTArchitecture):
        return f"{owner} has no {name(a)}"
    reasons = lacks(a) | {
        "axial attention": a.axial,
        f"{a.positions} positions": a.positions in ("factorised", "relative"),
        "positions at every layer": a.injection != "stem",
        "patches that are not square": not isinstance(a.patch, int),
    }
    return "; ".join(f"{owner} has no {what}" for what, needed in reasons.items() if needed)


def beyond_the_class_token(a: ViTArchitecture) -> dict[str, bool]:
    """What a format lacks that knows the plain ViT with its class token and nothing else."""
    return {
        "hybrid": a.backbone is not None,
        "LayerScale": a.layer_scale > 0,
        "register tokens": a.registers > 0,
        f"{a.pool} pooling": a.pool != "class",
        "ViT without positions": a.positions == "none",
    } | heads_of_another_width(a)


def heads_of_another_width(a: ViTArchitecture) -> dict[str, bool]:
    """What only Google's files show: that all heads together are not as wide as the tokens."""
    return {f"heads of width {a.head_width}": a.inner != a.width}


def with_every_position(a: Architecture, tensors: Tensors) -> tuple[Architecture, Tensors]:
    """Positions in a learned table, the class token's too, for formats that always have both."""
    if isinstance(a, ViTArchitecture):
        return with_class_slot(*with_learned_positions(a, tensors))
    return a, tensors


def with_learned_positions(a: ViTArchitecture, tensors: Tensors) -> tuple[ViTArchitecture, Tensors]:
    """Fixed waves written out as a table, for formats that know learned positions only."""
    if a.positions != "sincos":
        return a, tensors
    table = sincos(a.grid, a.width, torch.device("cpu"), torch.float32)
    return replace(a, positions="learned"), tensors | {"positions.0.table": table}


def with_class_slot(a: ViTArchitecture, tensors: Tensors) -> tuple[ViTArchitecture, Tensors]:
    """A zero position for the class token, for formats that always have one."""
    if a.class_slot or not a.class_token:
        return a, tensors
    slot = torch.zeros_like(tensors["class_token"])
    return replace(a, class_slot=True), tensors | {"positions.0.class_slot": slot}


def without_class_slot(a: ViTArchitecture, tensors: Tensors) -> tuple[ViTArchitecture, Tensors]:
    """The class token with its position added in: the same sum, made beforehand."""
    if not a.class_slot:
        return a, tensors
    kept = {key: tensor for key, tensor in tensors.items() if key != "positions.0.class_slot"}
    kept["class_token"] = tensors["class_token"] + tensors["positions.0.class_slot"]
    return replace(a, class_slot=False), kept
