"""torchvision's names: its ViT, and the classic ResNet with batch norm."""

import re

from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.errors import VitrailError, one_line
from vitrail.model.classic import ClassicArchitecture, Depth
from vitrail.model.variants import Architecture, name
from vitrail.model.vit import ViTArchitecture
from vitrail.weights import timm
from vitrail.weights.files import Contents
from vitrail.weights.format import (
    WITH_SLOT,
    Format,
    Patches,
    Size,
    Tensors,
    Unstated,
    beyond_the_class_token,
    count,
    grid_of,
    heads_of,
    refuse,
    units_of,
    with_every_position,
)
from vitrail.weights.layout import SLOT, Entry, entry, torch_module
from vitrail.weights.published import PUBLISHED, Published

PYTORCH = "https://download.pytorch.org/models"
LAYER = "encoder.layers.encoder_layer_{0}."
BLOCKS = "encoder.layers.encoder_layer_{0}.ln_1.weight"

# Residual units and whether a unit is a bottleneck → layers.
PLAIN = r"(\w+_)?resnet(18|34|50|101|152)(_v1b)?"
"""timm's names of the ResNets that torchvision has too."""

CLASSIC: dict[tuple[tuple[int, ...], bool], Depth] = {
    ((2, 2, 2, 2), False): 18,
    ((3, 4, 6, 3), False): 34,
    ((3, 4, 6, 3), True): 50,
    ((3, 4, 23, 3), True): 101,
    ((3, 8, 36, 3), True): 152,
}


def recognise(contents: Contents) -> bool:
    """A ViT's conv_proj, or a ResNet's bn1 and layer1."""
    keys = contents.tensors
    return "conv_proj.weight" in keys or ("bn1.weight" in keys and "layer1.0.conv1.weight" in keys)


def normalise(tensors: Tensors) -> Tensors:
    """The MLP's layers had names before they had numbers."""
    renamed = {"mlp.linear_1.": "mlp.0.", "mlp.linear_2.": "mlp.3."}
    named: Tensors = {}
    for key, x in tensors.items():
        for old, new in renamed.items():
            key = key.replace(old, new)
        named[key] = x
    return named


def stranger(contents: Contents) -> str:
    """timm's ResNets with other poolings or paddings, whose tensors are named alike."""
    named = str(contents.config.get("architecture") or "resnet50")
    return "" if re.fullmatch(PLAIN, named) else f"timm's {one_line(named)}"


def unstated(contents: Contents) -> list[Unstated]:
    """A ViT's heads; of a ResNet, that nothing smooths before its strides."""
    if published(contents) or contents.config:
        return []
    return ["heads" if "conv_proj.weight" in contents.tensors else "antialiasing"]


def published(contents: Contents) -> bool:
    """Whether the file has the name of one of torchvision's own, which ends in its hash."""
    return re.fullmatch(r"(vit|resnet)[a-z\d_]+-[\da-f]{8}\.pth", contents.path.name) is not None


def describe(contents: Contents, size: Size | None) -> Architecture:
    """The architecture; the number of heads is taken from the table."""
    tensors = contents.tensors
    classes = {
        key: x.shape[0] for key, x in tensors.items() if key in ("heads.head.bias", "fc.bias")
    }
    known = {"classes": next(iter(classes.values()), 0)}
    timm.arguments(contents)
    if "conv_proj.weight" not in tensors:
        units = units_of(tensors, "layer{0}.{1}.conv1.weight", start=(1, 0))
        depth = CLASSIC.get((units, "layer1.0.conv3.weight" in tensors))
        channels = tensors["conv1.weight"].shape[1]
        if depth is None:
            raise VitrailError(f"{contents.path}: torchvision has no ResNet of units {list(units)}")
        timm.refuse_pool(contents, ("avg",))
        size = size or timm.told_size(contents) or (224, 224)
        return ClassicArchitecture(depth=depth, channels=channels, size=size, **known)  # type: ignore
    width, channels, patch, _ = tensors["conv_proj.weight"].shape
    shape = {
        "width": width,
        "depth": count(tensors, BLOCKS),
        "mlp": tensors[f"{LAYER.format(0)}mlp.0.weight"].shape[0],
    }
    hidden = tensors.get("heads.pre_logits.bias")
    slots = tensors["encoder.pos_embedding"].shape[1]
    size, slot = grid_of(slots, WITH_SLOT, Patches(patch), contents.size, size)
    return ViTArchitecture(
        **shape,
        heads=heads_of(contents, contents.config.get("num_heads"), **shape, key="num_heads"),
        patch=patch,
        channels=channels,
        size=size,
        class_slot=bool(slot),
        hidden=0 if hidden is None else hidden.shape[0],
        **known,
    )


def table(a: Architecture) -> list[Entry]:
    """Our keys and theirs."""
    if isinstance(a, ClassicArchitecture):
        return classic_table()
    attention = f"{LAYER}self_attention."
    return [
        entry("class_token", "class_token"),
        Entry(("positions.0.class_slot", "positions.0.table"), ("encoder.pos_embedding",), SLOT),
        *torch_module("embedding", "conv_proj"),
        *torch_module("blocks.#.norm1", f"{LAYER}ln_1"),
        entry("blocks.#.attention.qkv.weight", f"{attention}in_proj_weight"),
        entry("blocks.#.attention.qkv.bias", f"{attention}in_proj_bias"),
        *torch_module("blocks.#.attention.out", f"{attention}out_proj"),
        *torch_module("blocks.#.norm2", f"{LAYER}ln_2"),
        *torch_module("blocks.#.mlp.fc1", f"{LAYER}mlp.0"),
        *torch_module("blocks.#.mlp.fc2", f"{LAYER}mlp.3"),
        *torch_module("norm", "encoder.ln"),
        *torch_module("hidden", "heads.pre_logits"),
        *torch_module("head", "heads.head"),
    ]


def classic_table() -> list[Entry]:
    """A ResNet with batch norm, whose statistics are tensors too."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    unit, theirs = "stages.#.#.", "layer{0:1}.{1}."
    found = [
        entry("stem.0.weight", "conv1.weight"),
        *(entry(f"stem.1.{part}", f"bn1.{part}") for part in norm),
        entry(f"{unit}downsample.0.weight", f"{theirs}downsample.0.weight"),
        *(entry(f"{unit}downsample.1.{part}", f"{theirs}downsample.1.{part}") for part in norm),
        *torch_module("head", "fc"),
    ]
    for i in (1, 2, 3):
        found += [entry(f"{unit}conv{i}.weight", f"{theirs}conv{i}.weight")]
        found += [entry(f"{unit}bn{i}.{part}", f"{theirs}bn{i}.{part}") for part in norm]
    return found


def refusal(a: Architecture) -> str:
    """Why torchvision has no such model."""
    if isinstance(a, ClassicArchitecture):
        return ""
    return refuse(
        "torchvision",
        a,
        lambda vit: (
            beyond_the_class_token(vit)
            | {
                "images that are not square": vit.size[0] != vit.size[1],
                "ViT without classes": not vit.classes,
                f"{vit.channels} input channels": vit.channels != 3,
            }
        ),
    )


def preprocessing(contents: Contents, a: Architecture) -> Preprocessing | None:
    """timm's config.json where there is one, else what torchvision publishes for such a file."""
    if contents.config:
        return timm.preprocessing(contents, a)
    grey = (0.5,) * a.channels
    row = evaluation(contents, a)
    crop = row.crop if row is not None and row.crop else 224 / 256
    return Preprocessing(
        size=a.size,
        short_side=round(min(a.size) / crop),
        interpolation="bilinear" if row is None else row.interpolation,
        mean=IMAGENET_MEAN if a.channels == 3 else grey,
        std=IMAGENET_STD if a.channels == 3 else grey,
    )


def evaluation(contents: Contents, a: Architecture) -> Published | None:
    """The published file of this name, or the one that all of this shape are evaluated like."""
    rows = [row for row in PUBLISHED if row.source.startswith(PYTORCH)]
    named = [row for row in rows if row.source.endswith(f"/{contents.path.name}")]
    alike = [row for row in rows if (row.variant, (row.size, row.size)) == (name(a), a.size)]
    if named or len({(row.crop, row.interpolation) for row in alike}) == 1:
        return (named or alike)[0]
    return None


TORCHVISION = Format(
    name="torchvision",
    gelu="erf",
    eps=1e-6,
    interpolation="torchvision",
    suffix=".pth",
    recognise=recognise,
    normalise=normalise,
    stranger=stranger,
    unstated=unstated,
    describe=describe,
    table=table,
    refusal=refusal,
    adapt=with_every_position,
    preprocessing=preprocessing,
    labels=timm.labels,
)
