"""What a checkpoint format is, and what the formats share.

A format's table says which of our tensors become which of theirs, and how the numbers are laid out
under each name. `#` in our key stands for a number, which theirs repeats as `{0}` (the same),
`{0:1}` (one more), `{0:01}` (one more, two digits) or `{0:-1}` (one less). The same table serves
reading and writing.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.model.positions import Interpolation, sincos
from vitrail.model.resnet import ResNetArchitecture, stride_of
from vitrail.model.variants import SIZES, Architecture, variant_name
from vitrail.model.vit import ViTArchitecture, grid_for
from vitrail.weights.read import Contents

Size = tuple[int, int]
Tensors = dict[str, Tensor]
Unstated = Literal["heads", "gelu", "pool", "rotary", "antialiasing"]


class Format:
    """One family of checkpoints; see docs/weights.md for what distinguishes them."""

    name: str
    owner: str
    """How messages name the family."""
    gelu: Literal["tanh", "erf"]
    """The GELU of the family's models, which the weights do not show; likewise `eps`."""
    eps: float
    interpolation: Interpolation
    suffix: str
    """The family's usual container; empty is a folder with config.json."""
    resnet: type[Architecture] = ResNetArchitecture
    """The family's ResNet."""

    def recognize(self, contents: Contents) -> bool:
        """Whether the names of the tensors are this family's."""
        raise NotImplementedError

    def normalize(self, tensors: Tensors) -> Tensors:
        """Rename the tensors of every version of the family to one set of names."""
        return tensors

    def unsupported(self, contents: Contents) -> str:
        """What a model is that has this family's names but computes something else; else empty."""
        return ""

    def unstated(self, contents: Contents) -> Collection[Unstated]:
        """What neither the tensors nor the config state, so that it has to be assumed."""
        return ()

    def describe(self, contents: Contents, size: Size | None) -> Architecture:
        """The architecture, from the normalized tensors and the config; `size` is what the user
        requested, which rectangles may need."""
        raise NotImplementedError

    def table(self, a: Architecture) -> list["WeightEntry"]:
        """The weight table: our keys and theirs."""
        raise NotImplementedError

    def lacks(self, a: ViTArchitecture) -> dict[str, bool]:
        """Features that the format has no place for, and whether this ViT has them."""
        raise NotImplementedError

    def refusal(self, a: Architecture) -> str:
        """Why this format cannot hold that architecture; empty if it can."""
        small = {"small root": getattr(a, "root", "imagenet") == "small"}
        if isinstance(a, self.resnet):
            width = getattr(a, "width", 1)
            return self._without(small | {f"ResNet of width x{width}": width % 1 > 0})
        if not isinstance(a, ViTArchitecture):
            return f"{self.owner} has no {variant_name(a)}"
        return self._without(
            self.lacks(a)
            | small
            | {
                f"hybrid of width x{a.backbone_width}": a.backbone_width != 1,
                "axial attention": a.axial,
                f"{a.positions} positions": a.positions in ("factorized", "relative"),
                "positions at every layer": a.injection != "stem",
                "patches that are not square": not isinstance(a.patch, int),
            }
        )

    def _without(self, reasons: dict[str, bool]) -> str:
        return "; ".join(
            f"{self.owner} has no {what}" for what, needed in reasons.items() if needed
        )

    def adapt(self, a: Architecture, tensors: Tensors) -> tuple[Architecture, Tensors]:
        """An equivalent model in terms of what the format has."""
        return a, tensors

    def file_names(self, a: Architecture, tensors: Tensors) -> Tensors:
        """Rename tensors as in files, if those differ from the table."""
        return tensors

    def preprocessing(self, contents: Contents, a: Architecture) -> Preprocessing | None:
        """How images are prepared for the model; None if that is not supported."""
        raise NotImplementedError

    def labels(self, contents: Contents) -> tuple[str, ...]:
        """Names of the classes, if the config has them."""
        return ()

    def exceptions(self, contents: Contents) -> dict[str, Any]:
        """GELU or epsilon, if they are not the family's."""
        return {}

    def sidecars(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """config.json and preprocessor_config.json of a model."""
        return {}, {}

    def numerics(self, a: Architecture) -> Architecture:
        """The architecture with this family's GELU and epsilon."""
        return replace(a, gelu=self.gelu, eps=self.eps) if isinstance(a, ViTArchitecture) else a


@dataclass(frozen=True)
class Layout:
    """How their tensors become ours, and back; both only move numbers."""

    read: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    write: Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _one(read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> Layout:
    return Layout(lambda t: [read(t[0])], lambda t: [write(t[0])])


_SAME = Layout(lambda t: t, lambda t: t)
DENSE = _one(lambda t: t.mT, lambda t: t.mT)
CONV = _one(lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))
# Their head is a 1×1 convolution, ours a linear layer.
POINTWISE = _one(lambda t: t[:, :, 0, 0], lambda t: t[:, :, None, None])
POINTWISE_CONV = _one(lambda t: t[0, 0].mT, lambda t: t.mT[None, None])
_SLOT = Layout(lambda t: [t[0][:, :1], t[0][:, 1:]], lambda t: [torch.cat(list(t), 1)])


def stacked(parts: int) -> Layout:
    """Several of their tensors are one of ours, one after the other: query, key, value."""
    return Layout(lambda t: [torch.cat(list(t))], lambda t: t[0].chunk(parts))


def projections(heads: int, parts: int) -> Layout:
    """JAX has query, key and value apart, (width, heads, head width) each."""
    return Layout(
        lambda t: [torch.cat([rearrange(x, "d h k -> (h k) d") for x in t])],
        lambda t: [rearrange(x, "(h k) d -> d h k", h=heads) for x in t[0].chunk(parts)],
    )


def projection_biases(heads: int, parts: int) -> Layout:
    """The same for the biases, (heads, head width) each."""
    return Layout(
        lambda t: [torch.cat([x.flatten() for x in t])],
        lambda t: [rearrange(x, "(h k) -> h k", h=heads) for x in t[0].chunk(parts)],
    )


def merged(heads: int) -> Layout:
    """JAX's output projection takes (heads, head width)."""
    return _one(
        lambda t: rearrange(t, "h k d -> d (h k)"),
        lambda t: rearrange(t, "d (h k) -> h k d", h=heads),
    )


class WeightEntry(NamedTuple):
    """Our key or keys, their key or keys, and the layout between them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout


def entry(ours: str, theirs: str, layout: Layout = _SAME) -> WeightEntry:
    """One tensor to one tensor."""
    return WeightEntry((ours,), (theirs,), layout)


def positions_with_slot(theirs: str) -> WeightEntry:
    """A table of positions whose first row is the class token's."""
    return WeightEntry(("positions.0.class_slot", "positions.0.table"), (theirs,), _SLOT)


def torch_module(ours: str, theirs: str) -> list[WeightEntry]:
    """Weight and bias of a module that is the same in another torch format."""
    return [entry(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


def bottlenecks(ours: str, theirs: str) -> list[WeightEntry]:
    """A residual unit of a ResNet, as timm and transformers name its parts."""
    table = [entry(f"{ours}projection.weight", f"{theirs}downsample.conv.weight")]
    for i in (1, 2, 3):
        table += [entry(f"{ours}conv{i}.weight", f"{theirs}conv{i}.weight")]
        table += torch_module(f"{ours}norm{i}", f"{theirs}norm{i}")
    return table


class _Index(int):
    """A number in a key, formatted as a template wants it."""

    def __format__(self, spec: str) -> str:
        shown = {"": self, "1": self + 1, "-1": self - 1, "01": self + 1}[spec]
        return f"{int(shown):02d}" if spec == "01" else str(int(shown))


def match(table: Sequence[WeightEntry], keys: Iterable[str]) -> tuple[list[WeightEntry], list[str]]:
    """The table's entries for these keys of ours, numbers filled in; and the keys without one."""
    waiting = dict.fromkeys(keys)
    matched: list[WeightEntry] = []
    for template in table:
        pattern = re.escape(template.ours[0]).replace(r"\#", r"(\d+)")
        for key in list(waiting):
            if not (numbers := re.fullmatch(pattern, key)):
                continue
            filled = [_Index(number) for number in numbers.groups()]
            ours = tuple(part.replace("#", "{}").format(*filled) for part in template.ours)
            if all(part in waiting for part in ours):
                theirs = tuple(part.format(*filled) for part in template.theirs)
                matched.append(WeightEntry(ours, theirs, template.layout))
                for part in ours:
                    del waiting[part]
    return matched, list(waiting)


def to_ours(matched: Sequence[WeightEntry], theirs: Tensors) -> Tensors:
    """Our state dict from theirs."""
    ours: Tensors = {}
    for names, keys, layout in matched:
        ours |= zip(names, layout.read([theirs[key] for key in keys]), strict=True)
    return ours


def to_theirs(matched: Sequence[WeightEntry], ours: Tensors) -> Tensors:
    """Their state dict from ours."""
    theirs: Tensors = {}
    for names, keys, layout in matched:
        theirs |= zip(keys, layout.write([ours[key] for key in names]), strict=True)
    return theirs


# What formats infer from tensors and configs


def grid_of(
    slots: int,
    choices: tuple[int, ...],
    patch: int,
    backbone: tuple[int, ...] | None,
    *,
    stated: Size | None,
    requested: Size | None,
) -> tuple[Size, int]:
    """Image size, and how many of a table's `slots` are for other tokens: one of `choices`.

    The size that the file states decides. Otherwise images are taken to be square, as nearly all
    are. Only where that fails may the requested size be the one the table was made for: usually it
    is requested in order to change it. Choices are tried in their order.
    """

    def patches(size: Size) -> int:
        return math.prod(grid_for(size, patch, stride_of(backbone)))

    if stated is not None:
        for slot in choices:
            if slots == patches(stated) + slot:
                return stated, slot
    for slot in choices:
        side = math.isqrt(max(slots - slot, 0))
        if side * side == slots - slot:
            pixels = side * patch * stride_of(backbone)
            return (pixels, pixels), slot
        if requested is not None and slots == patches(requested) + slot:
            return requested, slot
    raise VitrailError(
        f"{slots} positions are not a square grid; pass size=(rows, columns) of the images"
    )


def heads_of(contents: Contents, stated: Any, *, width: int, depth: int, mlp: int, key: str) -> int:
    """The number of heads, which torch tensors do not show: from the user, the config, or the
    table of variants."""
    heads = contents.heads or stated
    if heads is None:
        known = {(row[0], row[1], row[3]): row[2] for row in reversed(SIZES.values())}
        heads = known.get((width, depth, mlp), 0 if width % 64 else width // 64)
    heads = int(heads)
    if heads < 1 or width % heads:
        raise VitrailError(
            f"{contents.path}: cannot tell the number of heads of width {width}; pass heads=… "
            f"(convert: --heads), or put a config.json with {key} beside it"
        )
    return heads


def resnet_of(
    root: Tensor, units: tuple[int, ...], classes: int, size: Size | None
) -> ResNetArchitecture:
    """A BiT ResNet from its root kernel (out, in, 7, 7)."""
    return ResNetArchitecture(
        units=units,
        width=root.shape[0] // 64,
        channels=root.shape[1],
        classes=classes,
        size=size or (224, 224),
    )


# What formats lack, and how to write it anyway


def head_width(a: ViTArchitecture) -> dict[str, bool]:
    """Only Google's files show that all heads together are not as wide as the tokens."""
    return {f"heads of width {a.head_width}": a.inner != a.width}


def beyond_class_token(a: ViTArchitecture) -> dict[str, bool]:
    """Features beyond the plain ViT with its class token."""
    return {
        "hybrid": a.backbone is not None,
        "LayerScale": a.layer_scale > 0,
        "register tokens": a.registers > 0,
        f"{a.pool} pooling": a.pool != "class",
        "ViT without positions": a.positions == "none",
    } | head_width(a)


def with_learned_positions(a: ViTArchitecture, tensors: Tensors) -> tuple[ViTArchitecture, Tensors]:
    """Sin-cos positions as a learned table."""
    if a.positions != "sincos":
        return a, tensors
    table = sincos(a.grid, a.width, torch.device("cpu"), torch.float32)
    return replace(a, positions="learned"), tensors | {"positions.0.table": table}


def with_every_position(a: Architecture, tensors: Tensors) -> tuple[Architecture, Tensors]:
    """A learned table of positions, with zeros for a class token that has none."""
    if not isinstance(a, ViTArchitecture):
        return a, tensors
    a, tensors = with_learned_positions(a, tensors)
    if a.class_slot or not a.class_token:
        return a, tensors
    slot = torch.zeros_like(tensors["class_token"])
    return replace(a, class_slot=True), tensors | {"positions.0.class_slot": slot}
