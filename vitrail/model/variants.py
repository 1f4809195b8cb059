"""The table of variants: from a name to an architecture, and from that to a model.

B/16        ViT-Base, 16-pixel patches; any size of the table with any patch
R50+B/16    hybrid: ResNet-50 below; the suffix counts pixels of the image per token
R50x1       BiT ResNet: depth, and the factor on all widths; any depth of the table with any
Axial-B/16  Axial-ViT; Axial-R50 is AxialResNet-50
ResNet50    torchvision's classic ResNet with batch norm

R50x0.5+B/16 and Axial-R50x0.5 have narrower ResNets. A name is the shape with ImageNet's root; with
root="small", a hybrid has a quarter of the pixels per token.
"""

import re
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vitrail import aliases
from vitrail.errors import VitrailError, did_you_mean, one_line
from vitrail.model.axial import AxialResNet, AxialResNetArchitecture
from vitrail.model.classic import ClassicArchitecture, ClassicResNet
from vitrail.model.classifier import Classifier, as_size
from vitrail.model.resnet import ResNet, ResNetArchitecture
from vitrail.model.vit import ViT, ViTArchitecture

Architecture = ViTArchitecture | ResNetArchitecture | AxialResNetArchitecture | ClassicArchitecture

_FAMILIES: dict[str, tuple[type[Any], type[Classifier]]] = {
    "vit": (ViTArchitecture, ViT),
    "resnet": (ResNetArchitecture, ResNet),
    "axial-resnet": (AxialResNetArchitecture, AxialResNet),
    "classic-resnet": (ClassicArchitecture, ClassicResNet),
}

# width, depth, heads, MLP width. B, L, H: the paper's Table 1; Ti, S: AugReg; So400m, g, G: Zhai et
# al. 2021 and Alabdulmohsin et al. 2023; gopt: SigLIP 2 (Tschannen et al. 2025); b: B with every
# hidden width halved (Figure 4), that of a head too, which is what tells it from S.
SIZES = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "b": (384, 12, 12, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "So400m": (1152, 27, 16, 4304),
    "g": (1408, 40, 16, 6144),
    "gopt": (1536, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
}

# Residual units of each stage, by the number of layers.
UNITS = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}

# The ResNet under a hybrid (depth, pixels per token) → units and patch side on its map. At 16 the
# fourth stage's units join the third. R+Ti/16 is the root alone; its root halves twice, so that its
# 8-cell patches are really 32 pixels apart, whatever the published name says.
_BACKBONES: dict[tuple[str, int], tuple[tuple[int, ...], int]] = {
    ("R", 16): ((), 8),
    **{(f"R{depth}", 32): (units, 1) for depth, units in UNITS.items()},
    **{(f"R{depth}", 16): ((*units[:2], sum(units[2:])), 1) for depth, units in UNITS.items()},
}

# Units and width of the AxialResNets: 50 keeps ResNet-50's widths; 26 is the published small one,
# and 14 a smaller one.
_AXIAL_RESNETS = {14: ((1, 1, 1, 1), 0.5), 26: ((1, 2, 4, 1), 0.5), 50: ((3, 4, 6, 3), 1.0)}

NAMED = (
    *("Ti/16", "S/32", "S/16", "b/32", "B/32", "B/16", "B/8", "L/32", "L/16", "H/14"),
    *("So400m/14", "g/14", "G/14"),
    *("R+Ti/16", "R26+S/32", "R26+B/32", "R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16"),
    *("R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4", "R200x3"),
    *("Axial-B/32", "Axial-B/16", "Axial-R26", "Axial-R50"),
    *("ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152"),
)
"""The variants that `vitrail models` lists; the grammar above allows many more."""


def create(
    variant: str, classes: int = 1000, size: int | tuple[int, int] = 224, **options: Any
) -> Classifier:
    """A new model of that name, initialized as in the reference implementation.

    `size` is in pixels, one side or (rows, columns). `options` are fields of the variant's
    architecture, such as depth=8, pool="mean" or dropout=0.1.
    """
    return build(parse_variant(variant, classes=classes, size=size, **options))


def build(architecture: Architecture) -> Classifier:
    """The model that an architecture describes, newly initialized."""
    return _FAMILIES[_family(architecture)][1](architecture)  # type: ignore[call-arg]


def build_meta(architecture: Architecture) -> Classifier:
    """The model that an architecture describes, on the meta device: shapes without values."""
    with torch.device("meta"), _WithoutDraws():
        return build(architecture)


class _WithoutDraws(TorchFunctionMode):
    """Skips initial values: on the meta device, drawing them makes torch import its compiler, which
    takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "erfinv_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _family(architecture: Architecture) -> str:
    """The family's name in files."""
    return next(name for name, (kind, _) in _FAMILIES.items() if isinstance(architecture, kind))


def parse_variant(
    variant: str, *, size: int | tuple[int, int] = 224, **options: Any
) -> Architecture:
    """The architecture of a variant, with options applied."""
    kind, row = _parse(variant)
    known = [field.name for field in fields(kind)]
    for name in options:
        if name not in known:
            raise VitrailError(f"{variant} has no option '{name}'{did_you_mean(name, known)}")
    if options.get("hidden") is True:  # the paper's hidden layer is as wide as its tokens
        options["hidden"] = options.get("width", row["width"])
    row |= options | {"size": as_size(size)}
    if kind is ViTArchitecture:
        row = token_defaults(row)
    return kind(**row)


def token_defaults(row: dict[str, Any]) -> dict[str, Any]:
    """Only the class-token head needs a class token, and only learned positions have its slot.

    Axial attention works on the grid alone, so it pools by the mean: appendix D.3 finds that as
    good as the class token, and the paper does not say how a class token would take part.
    """
    pool = row.setdefault("pool", "mean" if row.get("axial") else "class")
    row.setdefault("class_token", pool == "class")
    learned = row.get("positions", "learned") == "learned"
    row.setdefault("class_slot", row["class_token"] and learned)
    return row


_FACTOR = r"x(\d+(?:\.\d+)?)"


def _parse(variant: str) -> tuple[type[Any], dict[str, Any]]:
    """The class of architecture that a name stands for, and its fields."""
    hybrid = rf"(R\d*)(?:{_FACTOR})?\+"
    if match := re.fullmatch(rf"(?:{hybrid}|(Axial)-)?([A-Za-z0-9]+)/(\d+)", variant):
        backbone, factor, axial, size, patch = match.groups()
        if size in SIZES and int(patch) and (not backbone or (backbone, int(patch)) in _BACKBONES):
            row: dict[str, Any] = dict(
                zip(("width", "depth", "heads", "mlp"), SIZES[size], strict=True)
            )
            row |= {"patch": int(patch), "axial": bool(axial)}
            if backbone:
                row["backbone"], row["patch"] = _BACKBONES[backbone, int(patch)]
                row["backbone_width"] = float(factor or 1)
            return ViTArchitecture, row
    if (match := re.fullmatch(rf"R(\d+){_FACTOR}", variant)) and int(match[1]) in UNITS:
        return ResNetArchitecture, {"units": UNITS[int(match[1])], "width": float(match[2])}
    axial_resnet = re.fullmatch(rf"Axial-R(\d+)(?:{_FACTOR})?", variant)
    if axial_resnet and int(axial_resnet[1]) in _AXIAL_RESNETS:
        units, width = _AXIAL_RESNETS[int(axial_resnet[1])]
        return AxialResNetArchitecture, {"units": units, "width": float(axial_resnet[2] or width)}
    if match := re.fullmatch(r"ResNet(18|34|50|101|152)", variant):
        return ClassicArchitecture, {"depth": int(match[1])}
    hint = did_you_mean(variant, NAMED) or "; `vitrail models` lists them"
    raise VitrailError(f"unknown variant '{variant}'{hint}")


def variant_name(architecture: Architecture) -> str:
    """The variant's name if the tables have one, otherwise its numbers.

    A small root is named, and the suffix of a hybrid counts the pixels that it then has per token.
    """
    if isinstance(architecture, ClassicArchitecture):
        return f"ResNet{architecture.depth}"
    root = "" if architecture.root == "imagenet" else f" ({architecture.root} root)"
    if isinstance(architecture, ViTArchitecture):
        return _vit_name(architecture) + root
    if isinstance(architecture, AxialResNetArchitecture):
        return _axial_resnet_name(architecture) + root
    depth = next((depth for depth, units in UNITS.items() if units == architecture.units), None)
    return f"R{depth or list(architecture.units)}x{architecture.width}{root}"


def _axial_resnet_name(a: AxialResNetArchitecture) -> str:
    for depth, (units, width) in _AXIAL_RESNETS.items():
        if units == a.units:
            return f"Axial-R{depth}" + ("" if a.width == width else f"x{a.width:g}")
    return f"AxialResNet {a.units}x{a.width:g}"


def _vit_name(a: ViTArchitecture) -> str:
    """`B/16`, `R50+B/16` and so on; `ViT 8x1024/32` where the table has no such row."""
    shape = (a.width, a.depth, a.heads, a.mlp)
    named = (key for key, known in SIZES.items() if known == shape and a.inner == a.width)
    size = next(named, f"ViT {a.depth}x{a.width}")
    if a.backbone is None:
        patch = a.patch if isinstance(a.patch, int) else f"{a.patch[0]}x{a.patch[1]}"
        return f"{'Axial-' if a.axial else ''}{size}/{patch}"
    known: dict[Any, tuple[str, int]] = {row: key for key, row in _BACKBONES.items()}
    depth, pixels = known.get((a.backbone, a.patch), (f"R{list(a.backbone)}", a.stride))
    width = "" if a.backbone_width == 1 else f"x{a.backbone_width}"
    return f"{depth}{width}+{size}/{pixels if a.root == 'imagenet' else a.stride}"


def to_dict(architecture: Architecture) -> dict[str, Any]:
    """The architecture as plain values, for a file's metadata."""
    return {"family": _family(architecture)} | asdict(architecture)


def from_dict(values: dict[str, Any]) -> Architecture:
    """The architecture that `to_dict` wrote; strict, since a file may hold anything."""
    values = {
        key: aliases.VALUES.get(value, value) if isinstance(value, str) else value
        for key, value in values.items()
    }
    kind = _FAMILIES.get(values.pop("family", ""), (None, None))[0]
    if kind is None or not set(values) <= {field.name for field in fields(kind)}:
        raise VitrailError("the file describes an architecture that this version does not know")
    tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    try:
        return kind(**values | tuples)
    except TypeError as error:
        raise VitrailError(f"the file's architecture is broken: {one_line(error)}") from None
