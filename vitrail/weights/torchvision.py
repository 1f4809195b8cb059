"""torchvision's names: its ViT, and the classic ResNet with batch norm (timm's, too)."""

import re

from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.errors import VitrailError, one_line
from vitrail.model.classic import ClassicArchitecture, Depth
from vitrail.model.variants import Architecture, variant_name
from vitrail.model.vit import ViTArchitecture
from vitrail.weights.layout import (
    Format,
    Size,
    Tensors,
    Unstated,
    WeightEntry,
    beyond_class_token,
    entry,
    grid_of,
    heads_of,
    positions_with_slot,
    torch_module,
    with_every_position,
)
from vitrail.weights.published import PUBLISHED, Published
from vitrail.weights.read import Contents
from vitrail.weights.timm import TIMM, config_size, model_args, supported_pool

_LAYER = "encoder.layers.encoder_layer_{0}."

# timm's names of the ResNets that torchvision has too.
_PLAIN = r"(\w+_)?resnet(18|34|50|101|152)(_v1b)?"

# Residual units, and whether a unit is a bottleneck → layers.
_DEPTHS: dict[tuple[tuple[int, ...], bool], Depth] = {
    ((2, 2, 2, 2), False): 18,
    ((3, 4, 6, 3), False): 34,
    ((3, 4, 6, 3), True): 50,
    ((3, 4, 23, 3), True): 101,
    ((3, 8, 36, 3), True): 152,
}


class _Torchvision(Format):
    name = "torchvision"
    owner = "torchvision"
    gelu = "erf"
    eps = 1e-6
    interpolation = "torchvision"
    suffix = ".pth"
    resnet = ClassicArchitecture

    def recognize(self, contents: Contents) -> bool:
        keys = contents.tensors
        resnet = "bn1.weight" in keys and "layer1.0.conv1.weight" in keys
        return "conv_proj.weight" in keys or resnet

    def normalize(self, tensors: Tensors) -> Tensors:
        # The MLP's layers had names before they had numbers.
        return {
            key.replace("mlp.linear_1.", "mlp.0.").replace("mlp.linear_2.", "mlp.3."): x
            for key, x in tensors.items()
        }

    def unsupported(self, contents: Contents) -> str:
        # timm's ResNets with other poolings or paddings have the same tensor names.
        named = str(contents.config.get("architecture") or "resnet50")
        return "" if re.fullmatch(_PLAIN, named) else f"timm's {one_line(named)}"

    def unstated(self, contents: Contents) -> list[Unstated]:
        # torchvision's own files are known by their name, which ends in a hash.
        own = re.fullmatch(r"(vit|resnet)[a-z\d_]+-[\da-f]{8}\.pth", contents.path.name)
        if own or contents.config:
            return []
        return ["heads" if "conv_proj.weight" in contents.tensors else "antialiasing"]

    def describe(self, contents: Contents, size: Size | None) -> Architecture:
        tensors = contents.tensors
        model_args(contents)  # refuses what is not supported
        if "conv_proj.weight" not in tensors:
            return _describe_resnet(contents, size)
        width, channels, patch, _ = tensors["conv_proj.weight"].shape
        shape = {
            "width": width,
            "depth": contents.count(f"{_LAYER}ln_1.weight"),
            "mlp": tensors[f"{_LAYER.format(0)}mlp.0.weight"].shape[0],
        }
        slots = tensors["encoder.pos_embedding"].shape[1]
        size, slot = grid_of(slots, (1,), patch, None, stated=contents.size, requested=size)
        return ViTArchitecture(
            **shape,
            heads=heads_of(contents, contents.config.get("num_heads"), **shape, key="num_heads"),
            patch=patch,
            channels=channels,
            size=size,
            class_slot=bool(slot),
            hidden=contents.rows("heads.pre_logits.bias"),
            classes=contents.rows("heads.head.bias"),
        )

    def table(self, a: Architecture) -> list[WeightEntry]:
        if isinstance(a, ClassicArchitecture):
            return _resnet_table()
        attention = f"{_LAYER}self_attention."
        return [
            entry("class_token", "class_token"),
            positions_with_slot("encoder.pos_embedding"),
            *torch_module("embedding", "conv_proj"),
            *torch_module("blocks.#.norm1", f"{_LAYER}ln_1"),
            entry("blocks.#.attention.qkv.weight", f"{attention}in_proj_weight"),
            entry("blocks.#.attention.qkv.bias", f"{attention}in_proj_bias"),
            *torch_module("blocks.#.attention.out", f"{attention}out_proj"),
            *torch_module("blocks.#.norm2", f"{_LAYER}ln_2"),
            *torch_module("blocks.#.mlp.fc1", f"{_LAYER}mlp.0"),
            *torch_module("blocks.#.mlp.fc2", f"{_LAYER}mlp.3"),
            *torch_module("norm", "encoder.ln"),
            *torch_module("hidden", "heads.pre_logits"),
            *torch_module("head", "heads.head"),
        ]

    def lacks(self, a: ViTArchitecture) -> dict[str, bool]:
        return beyond_class_token(a) | {
            "images that are not square": a.size[0] != a.size[1],
            "ViT without classes": not a.classes,
            f"{a.channels} input channels": a.channels != 3,
        }

    def adapt(self, a: Architecture, tensors: Tensors) -> tuple[Architecture, Tensors]:
        return with_every_position(a, tensors)

    def preprocessing(self, contents: Contents, a: Architecture) -> Preprocessing | None:
        """That of timm's config.json, if any; else what torchvision uses for such a file."""
        if contents.config:
            return TIMM.preprocessing(contents, a)
        gray = (0.5,) * a.channels
        row = _published_like(contents, a)
        crop = row.crop if row is not None and row.crop else 224 / 256
        return Preprocessing(
            size=a.size,
            short_side=round(min(a.size) / crop),
            interpolation="bilinear" if row is None else row.interpolation,
            mean=IMAGENET_MEAN if a.channels == 3 else gray,
            std=IMAGENET_STD if a.channels == 3 else gray,
        )

    def labels(self, contents: Contents) -> tuple[str, ...]:
        return TIMM.labels(contents)


TORCHVISION = _Torchvision()


def _describe_resnet(contents: Contents, size: Size | None) -> ClassicArchitecture:
    tensors = contents.tensors
    units = contents.units("layer{0}.{1}.conv1.weight", start=(1, 0))
    depth = _DEPTHS.get((units, "layer1.0.conv3.weight" in tensors))
    if depth is None:
        raise VitrailError(f"{contents.path}: torchvision has no ResNet of units {list(units)}")
    supported_pool(contents, ("avg",))
    return ClassicArchitecture(
        depth=depth,
        channels=tensors["conv1.weight"].shape[1],
        size=size or config_size(contents) or (224, 224),
        classes=contents.rows("fc.bias"),
    )


def _resnet_table() -> list[WeightEntry]:
    def norm(ours: str, theirs: str) -> list[WeightEntry]:
        parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return [entry(f"{ours}.{part}", f"{theirs}.{part}") for part in parts]

    unit, theirs = "stages.#.#.", "layer{0:1}.{1}."
    table = [
        entry("stem.0.weight", "conv1.weight"),
        *norm("stem.1", "bn1"),
        entry(f"{unit}downsample.0.weight", f"{theirs}downsample.0.weight"),
        *norm(f"{unit}downsample.1", f"{theirs}downsample.1"),
        *torch_module("head", "fc"),
    ]
    for i in (1, 2, 3):
        table += [entry(f"{unit}conv{i}.weight", f"{theirs}conv{i}.weight")]
        table += norm(f"{unit}bn{i}", f"{theirs}bn{i}")
    return table


def _published_like(contents: Contents, a: Architecture) -> Published | None:
    """The published file of this name; else one of this shape, if all such are evaluated alike."""
    rows = [row for row in PUBLISHED if row.source.startswith("https://download.pytorch.org/")]
    named = [row for row in rows if row.source.endswith(f"/{contents.path.name}")]
    shaped = [
        row for row in rows if (row.variant, (row.size, row.size)) == (variant_name(a), a.size)
    ]
    if named or len({(row.crop, row.interpolation) for row in shaped}) == 1:
        return (named or shaped)[0]
    return None
