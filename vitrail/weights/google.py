"""Google's .npz files: vision_transformer (both naming generations), big_vision, hybrids, BiT.

Everything is read into the older names, in which the published ViT files are, and written in them
where they suffice: timm and vision_transformer read those. Attention pooling and a class token
without a position of its own exist only in the newer (Linen) names.
"""

import re
from typing import Any

from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import Architecture
from vitrail.model.vit import ViTArchitecture
from vitrail.weights.files import Contents
from vitrail.weights.format import (
    EITHER,
    WITHOUT_SLOT,
    Format,
    Patches,
    Size,
    Tensors,
    count,
    grid_of,
    refuse,
    units_of,
)
from vitrail.weights.layout import (
    CONV,
    DENSE,
    POINTWISE_CONV,
    SAME,
    SLOT,
    Entry,
    entry,
    merged,
    projection_biases,
    projections,
)

PREFIXES = ("opt/target/", "params/img/", "params/", "")
POSITIONS = "Transformer/posembed_input/pos_embedding"
BLOCK = "Transformer/encoderblock_{0}/"
LINEN = "params/"

# Linen numbers the parts of a block within each class, its predecessor across all of them.
GENERATIONS = (
    ("MultiHeadDotProductAttention_0/", "MultiHeadDotProductAttention_1/"),
    ("LayerNorm_1/", "LayerNorm_2/"),
    ("MlpBlock_0/", "MlpBlock_3/"),
)


def recognise(contents: Contents) -> bool:
    """Slashes in the keys, and a patch embedding or a BiT root."""
    keys = contents.tensors
    vit = any(f"{prefix}embedding/kernel" in keys for prefix in PREFIXES)
    return vit or any(key.startswith("resnet/root_block/") for key in keys)


def normalise(tensors: Tensors) -> Tensors:
    """One set of names for every generation, prefix and layout."""
    if any(key.startswith("resnet/") for key in tensors):
        # Some BiT files number the convolutions of the graph they came from.
        return {re.sub(r"(standardized_conv2d)_\d+", r"\1", key): x for key, x in tensors.items()}
    prefix = next(prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in tensors)
    # Beside the weights there may be an optimiser's state or a text tower: not this model's.
    named = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
    named = unstack(named)
    return {rename(key): flat_norm(key, x) for key, x in named.items()}


def unstack(tensors: Tensors) -> Tensors:
    """Blocks stacked along a leading depth axis, taken apart."""
    stack = "Transformer/encoderblock/"
    apart: Tensors = {}
    for key, x in tensors.items():
        if key.startswith(stack):
            part = key.removeprefix(stack)
            apart |= {BLOCK.format(i) + part: layer for i, layer in enumerate(x)}
        else:
            apart[key] = x
    return apart


def rename(key: str) -> str:
    """The older name of a key."""
    if key in ("pos_embedding", "Transformer/pos_embedding"):
        return POSITIONS
    # The first attention-pooled files had the pooling's parts at the top.
    if re.match(r"probe$|(MultiHeadDotProductAttention|LayerNorm|MlpBlock)_\d+/", key):
        return f"MAPHead_0/{key}"
    if re.match(r"Transformer/encoderblock_\d+/", key):
        for newer, older in GENERATIONS:
            key = key.replace(newer, older)
    return key


def flat_norm(key: str, x: Tensor) -> Tensor:
    """GroupNorm's vectors, which some files keep as (1, 1, 1, c)."""
    return x.flatten() if re.search(r"gn(\d+|_root|_proj)/", key) else x


def newer(key: str) -> str:
    """The Linen name of an older key."""
    if key == POSITIONS:
        return f"{LINEN}pos_embedding"
    if key.startswith("Transformer/encoderblock_"):
        for linen, older in GENERATIONS:
            key = key.replace(older, linen)
    return LINEN + key


def describe(contents: Contents, size: Size | None) -> Architecture:
    """The architecture; JAX keeps heads apart, so that even their number is in the shapes."""
    tensors = contents.tensors
    if "resnet/root_block/standardized_conv2d/kernel" in tensors:
        return describe_bit(tensors, size)
    patch, _, channels, width = tensors["embedding/kernel"].shape
    backbone = None
    if "conv_root/kernel" in tensors:
        backbone = units_of(tensors, "block{0}/unit{1}/conv1/kernel", start=(1, 1))
        channels = tensors["conv_root/kernel"].shape[2]
    block = BLOCK.format(0)
    _, heads, head_width = tensors[f"{block}MultiHeadDotProductAttention_1/query/kernel"].shape
    known: dict[str, Any] = {
        "width": width,
        "depth": count(tensors, BLOCK + "LayerNorm_0/scale"),
        "heads": heads,
        "head_width": 0 if heads * head_width == width else head_width,
        "mlp": tensors[f"{block}MlpBlock_3/Dense_0/kernel"].shape[1],
        "patch": patch,
        "channels": channels,
        "backbone": backbone,
        "classes": tensors["head/bias"].shape[0] if "head/bias" in tensors else 0,
        "class_token": "cls" in tensors,
        "hidden": tensors["pre_logits/bias"].shape[0] if "pre_logits/bias" in tensors else 0,
    }
    pooled = "attention" if "MAPHead_0/probe" in tensors else "mean"
    known["pool"] = "class" if "cls" in tensors else pooled
    if POSITIONS not in tensors:  # fixed waves are not stored
        size = size or (224, 224)
        return ViTArchitecture(**known, positions="sincos", class_slot=False, size=size)
    slots = tensors[POSITIONS].shape[1]
    choices = EITHER if "cls" in tensors else WITHOUT_SLOT
    size, slot = grid_of(slots, choices, Patches(patch, backbone), contents.size, size)
    return ViTArchitecture(**known, class_slot=bool(slot), size=size)


def describe_bit(tensors: Tensors, size: Size | None) -> ResNetArchitecture:
    """A BiT ResNet from its root and its units."""
    root = tensors["resnet/root_block/standardized_conv2d/kernel"]
    bias = tensors.get("resnet/head/conv2d/bias")
    return ResNetArchitecture(
        units=units_of(tensors, "resnet/block{0}/unit{1:02d}/a/group_norm/gamma", start=(1, 1)),
        width=root.shape[3] // 64,
        channels=root.shape[2],
        classes=0 if bias is None else bias.shape[0],
        size=size or (224, 224),
    )


def dense(ours: str, theirs: str) -> list[Entry]:
    """A dense layer."""
    weight = entry(f"{ours}.weight", f"{theirs}/kernel", DENSE)
    return [weight, entry(f"{ours}.bias", f"{theirs}/bias")]


def norm(ours: str, theirs: str, scale: str = "scale", bias: str = "bias") -> list[Entry]:
    """A norm's two vectors."""
    return [entry(f"{ours}.weight", f"{theirs}/{scale}"), entry(f"{ours}.bias", f"{theirs}/{bias}")]


def table(a: Architecture) -> list[Entry]:
    """Our keys and theirs."""
    if isinstance(a, ResNetArchitecture):
        return bit_table()
    if not isinstance(a, ViTArchitecture):
        return []
    found = [*stem_table(), *block_table(a.heads), *pool_table(a.heads)]
    found += [*norm("norm", "Transformer/encoder_norm")]
    found += [*dense("hidden", "pre_logits"), *dense("head", "head")]
    return found


def spell(a: Architecture, tensors: Tensors) -> Tensors:
    """The Linen names, for what only they can say."""
    linen = isinstance(a, ViTArchitecture) and (
        a.pool == "attention" or (a.class_token and not a.class_slot)
    )
    return {newer(key): x for key, x in tensors.items()} if linen else tensors


def stem_table() -> list[Entry]:
    """Everything before the encoder, a hybrid's ResNet included."""
    found = [
        entry("class_token", "cls"),
        Entry(("positions.0.class_slot", "positions.0.table"), (POSITIONS,), SLOT),
        entry("positions.0.table", POSITIONS),
        entry("embedding.weight", "embedding/kernel", CONV),
        entry("embedding.bias", "embedding/bias"),
        entry("backbone.root.conv.weight", "conv_root/kernel", CONV),
        *norm("backbone.root.norm", "gn_root"),
    ]
    unit, theirs = "backbone.stage#.#.", "block{0}/unit{1:1}/"
    for i in (1, 2, 3):
        found += [entry(f"{unit}conv{i}.weight", f"{theirs}conv{i}/kernel", CONV)]
        found += norm(f"{unit}norm{i}", f"{theirs}gn{i}")
    found += [entry(f"{unit}projection.weight", f"{theirs}conv_proj/kernel", CONV)]
    return found + norm(f"{unit}projection_norm", f"{theirs}gn_proj")


def block_table(heads: int) -> list[Entry]:
    """One encoder block."""
    attention = f"{BLOCK}MultiHeadDotProductAttention_1/"
    parts = [f"{attention}{part}/" for part in ("query", "key", "value")]
    return [
        *norm("blocks.#.norm1", f"{BLOCK}LayerNorm_0"),
        *split_projection("blocks.#.attention.qkv", parts, heads),
        entry("blocks.#.attention.out.weight", f"{attention}out/kernel", merged(heads)),
        entry("blocks.#.attention.out.bias", f"{attention}out/bias"),
        *norm("blocks.#.norm2", f"{BLOCK}LayerNorm_2"),
        *dense("blocks.#.mlp.fc1", f"{BLOCK}MlpBlock_3/Dense_0"),
        *dense("blocks.#.mlp.fc2", f"{BLOCK}MlpBlock_3/Dense_1"),
    ]


def pool_table(heads: int) -> list[Entry]:
    """Attention pooling."""
    attention = "MAPHead_0/MultiHeadDotProductAttention_0/"
    return [
        entry("pool.probe", "MAPHead_0/probe"),
        *split_projection("pool.q", [f"{attention}query/"], heads),
        *split_projection("pool.kv", [f"{attention}key/", f"{attention}value/"], heads),
        entry("pool.out.weight", f"{attention}out/kernel", merged(heads)),
        entry("pool.out.bias", f"{attention}out/bias"),
        *norm("pool.norm", "MAPHead_0/LayerNorm_0"),
        *dense("pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
        *dense("pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
    ]


def split_projection(ours: str, theirs: list[str], heads: int) -> list[Entry]:
    """Our one matrix, their one matrix for each of query, key and value."""
    kernels, biases = (tuple(f"{part}{end}" for part in theirs) for end in ("kernel", "bias"))
    return [
        Entry((f"{ours}.weight",), kernels, projections(heads, len(theirs))),
        Entry((f"{ours}.bias",), biases, projection_biases(heads, len(theirs))),
    ]


def bit_table() -> list[Entry]:
    """A BiT ResNet."""
    found = [
        entry("root.weight", "resnet/root_block/standardized_conv2d/kernel", CONV),
        *norm("norm", "resnet/group_norm", "gamma", "beta"),
        entry("head.weight", "resnet/head/conv2d/kernel", POINTWISE_CONV),
        entry("head.bias", "resnet/head/conv2d/bias", SAME),
    ]
    unit, theirs = "stages.#.#.", "resnet/block{0:1}/unit{1:01}/"
    for i, letter in enumerate("abc", start=1):
        kernel = f"{theirs}{letter}/standardized_conv2d/kernel"
        found += [entry(f"{unit}conv{i}.weight", kernel, CONV)]
        found += norm(f"{unit}norm{i}", f"{theirs}{letter}/group_norm", "gamma", "beta")
    projection = f"{theirs}a/proj/standardized_conv2d/kernel"
    return [*found, entry(f"{unit}projection.weight", projection, CONV)]


def refusal(a: Architecture) -> str:
    """Why there is no Google file of this architecture."""
    if isinstance(a, ResNetArchitecture):
        return ""
    return refuse(
        "google's format",
        a,
        lambda vit: {
            "LayerScale": vit.layer_scale > 0,
            "register tokens": vit.registers > 0,
            "norm after the pooling": vit.norm_after_pool,
            f"{vit.pool} pooling beside a class token": vit.class_token and vit.pool != "class",
            "ViT without positions": vit.positions == "none",
        },
    )


def preprocessing(contents: Contents, a: Architecture) -> Preprocessing:
    """The reference's evaluation: squeezed to the size, bilinear, not smoothed, from -1 to 1."""
    half = (0.5,) * a.channels
    return Preprocessing(size=a.size, antialias=False, mean=half, std=half)


GOOGLE = Format(
    name="google",
    gelu="tanh",
    eps=1e-6,
    interpolation="google",
    suffix=".npz",
    recognise=recognise,
    normalise=normalise,
    describe=describe,
    table=table,
    refusal=refusal,
    spell=spell,
    preprocessing=preprocessing,
)
