"""Google's .npz files: vision_transformer (both naming generations), big_vision, hybrids, BiT.

Everything is read into the older names, which the published ViT files have, and written in them
where they suffice: timm and vision_transformer read those. Attention pooling and a class token
without a position of its own exist only in the newer (Linen) names.
"""

import re
from typing import Any

from vitrail.data.preprocessing import Preprocessing
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import Architecture
from vitrail.model.vit import ViTArchitecture
from vitrail.weights.layout import (
    CONV,
    DENSE,
    POINTWISE_CONV,
    Format,
    Size,
    Tensors,
    WeightEntry,
    entry,
    grid_of,
    merged,
    positions_with_slot,
    projection_biases,
    projections,
    resnet_of,
)
from vitrail.weights.read import Contents

_PREFIXES = ("opt/target/", "params/img/", "params/", "")
_POSITIONS = "Transformer/posembed_input/pos_embedding"
_BLOCK = "Transformer/encoderblock_{0}/"
_LINEN = "params/"
_BIT_ROOT = "resnet/root_block/standardized_conv2d/kernel"

GENERATIONS = (
    ("MultiHeadDotProductAttention_0/", "MultiHeadDotProductAttention_1/"),
    ("LayerNorm_1/", "LayerNorm_2/"),
    ("MlpBlock_0/", "MlpBlock_3/"),
)
"""Linen numbers the modules of a block per class, its predecessor across all of them."""


class _Google(Format):
    name = "google"
    owner = "google's format"
    gelu = "tanh"
    eps = 1e-6
    interpolation = "google"
    suffix = ".npz"

    def recognize(self, contents: Contents) -> bool:
        keys = contents.tensors
        vit = any(f"{prefix}embedding/kernel" in keys for prefix in _PREFIXES)
        return vit or any(key.startswith("resnet/root_block/") for key in keys)

    def normalize(self, tensors: Tensors) -> Tensors:
        if any(key.startswith("resnet/") for key in tensors):
            # Some BiT files number the convolutions of the graph they came from.
            return {
                re.sub(r"(standardized_conv2d)_\d+", r"\1", key): x for key, x in tensors.items()
            }
        prefix = next(prefix for prefix in _PREFIXES if f"{prefix}embedding/kernel" in tensors)
        stack = "Transformer/encoderblock/"
        named: Tensors = {}
        for key, x in tensors.items():
            # Beside the weights there may be an optimizer's state or a text tower.
            if not key.startswith(prefix):
                continue
            key = key.removeprefix(prefix)
            if key.startswith(stack):  # blocks stacked along a leading depth axis
                part = key.removeprefix(stack)
                named |= {_older(_BLOCK.format(i) + part): layer for i, layer in enumerate(x)}
            else:
                # Some files have GroupNorm's vectors as (1, 1, 1, c).
                flat = re.search(r"gn(\d+|_root|_proj)/", key)
                named[_older(key)] = x.flatten() if flat else x
        return named

    def describe(self, contents: Contents, size: Size | None) -> Architecture:
        tensors = contents.tensors
        if _BIT_ROOT in tensors:
            units = contents.units("resnet/block{0}/unit{1:02d}/a/group_norm/gamma", start=(1, 1))
            root = tensors[_BIT_ROOT].permute(3, 2, 0, 1)
            return resnet_of(root, units, contents.rows("resnet/head/conv2d/bias"), size)
        patch, _, channels, width = tensors["embedding/kernel"].shape
        backbone = None
        if "conv_root/kernel" in tensors:
            backbone = contents.units("block{0}/unit{1}/conv1/kernel", start=(1, 1))
            channels = tensors["conv_root/kernel"].shape[2]
        block = _BLOCK.format(0)
        # JAX keeps heads on an axis of their own, so that even their number is in the shapes.
        _, heads, head_width = tensors[f"{block}MultiHeadDotProductAttention_1/query/kernel"].shape
        pooled = "attention" if "MAPHead_0/probe" in tensors else "mean"
        known: dict[str, Any] = {
            "width": width,
            "depth": contents.count(_BLOCK + "LayerNorm_0/scale"),
            "heads": heads,
            "head_width": 0 if heads * head_width == width else head_width,
            "mlp": tensors[f"{block}MlpBlock_3/Dense_0/kernel"].shape[1],
            "patch": patch,
            "channels": channels,
            "backbone": backbone,
            "classes": contents.rows("head/bias"),
            "class_token": "cls" in tensors,
            "pool": "class" if "cls" in tensors else pooled,
            "hidden": contents.rows("pre_logits/bias"),
        }
        if _POSITIONS not in tensors:  # sin-cos positions are not stored
            size = size or (224, 224)
            return ViTArchitecture(**known, positions="sincos", class_slot=False, size=size)
        slots = tensors[_POSITIONS].shape[1]
        choices = (1, 0) if "cls" in tensors else (0,)
        size, slot = grid_of(slots, choices, patch, backbone, stated=contents.size, requested=size)
        return ViTArchitecture(**known, class_slot=bool(slot), size=size)

    def table(self, a: Architecture) -> list[WeightEntry]:
        if isinstance(a, ResNetArchitecture):
            return _bit_table()
        if not isinstance(a, ViTArchitecture):
            return []
        return [
            *_stem_table(),
            *_block_table(a.heads),
            *_pool_table(a.heads),
            *_norm("norm", "Transformer/encoder_norm"),
            *_dense("hidden", "pre_logits"),
            *_dense("head", "head"),
        ]

    def lacks(self, a: ViTArchitecture) -> dict[str, bool]:
        return {
            "LayerScale": a.layer_scale > 0,
            "register tokens": a.registers > 0,
            "norm after the pooling": a.norm_after_pool,
            f"{a.pool} pooling beside a class token": a.class_token and a.pool != "class",
            "ViT without positions": a.positions == "none",
        }

    def file_names(self, a: Architecture, tensors: Tensors) -> Tensors:
        linen = isinstance(a, ViTArchitecture) and (
            a.pool == "attention" or (a.class_token and not a.class_slot)
        )
        return {_newer(key): x for key, x in tensors.items()} if linen else tensors

    def preprocessing(self, contents: Contents, a: Architecture) -> Preprocessing:
        """The reference: resized to the size as a whole, bilinear, no antialiasing, -1 to 1."""
        half = (0.5,) * a.channels
        return Preprocessing(size=a.size, antialias=False, mean=half, std=half)


GOOGLE = _Google()


def _older(key: str) -> str:
    if key in ("pos_embedding", "Transformer/pos_embedding"):
        return _POSITIONS
    # The first attention-pooled files had the pooling's parts at the top.
    if re.match(r"probe$|(MultiHeadDotProductAttention|LayerNorm|MlpBlock)_\d+/", key):
        return f"MAPHead_0/{key}"
    if re.match(r"Transformer/encoderblock_\d+/", key):
        for linen, older in GENERATIONS:
            key = key.replace(linen, older)
    return key


def _newer(key: str) -> str:
    if key == _POSITIONS:
        return f"{_LINEN}pos_embedding"
    if key.startswith("Transformer/encoderblock_"):
        for linen, older in GENERATIONS:
            key = key.replace(older, linen)
    return _LINEN + key


def _dense(ours: str, theirs: str) -> list[WeightEntry]:
    weight = entry(f"{ours}.weight", f"{theirs}/kernel", DENSE)
    return [weight, entry(f"{ours}.bias", f"{theirs}/bias")]


def _norm(ours: str, theirs: str, scale: str = "scale", bias: str = "bias") -> list[WeightEntry]:
    return [entry(f"{ours}.weight", f"{theirs}/{scale}"), entry(f"{ours}.bias", f"{theirs}/{bias}")]


def _projection(ours: str, theirs: list[str], heads: int) -> list[WeightEntry]:
    """One matrix of ours, one matrix of theirs for each of query, key and value."""
    kernels, biases = (tuple(f"{part}/{end}" for part in theirs) for end in ("kernel", "bias"))
    return [
        WeightEntry((f"{ours}.weight",), kernels, projections(heads, len(theirs))),
        WeightEntry((f"{ours}.bias",), biases, projection_biases(heads, len(theirs))),
    ]


def _stem_table() -> list[WeightEntry]:
    """Everything before the encoder, a hybrid's ResNet included."""
    unit, theirs = "backbone.stage#.#.", "block{0}/unit{1:1}/"
    table = [
        entry("class_token", "cls"),
        positions_with_slot(_POSITIONS),
        entry("positions.0.table", _POSITIONS),
        entry("embedding.weight", "embedding/kernel", CONV),
        entry("embedding.bias", "embedding/bias"),
        entry("backbone.root.conv.weight", "conv_root/kernel", CONV),
        *_norm("backbone.root.norm", "gn_root"),
        entry(f"{unit}projection.weight", f"{theirs}conv_proj/kernel", CONV),
        *_norm(f"{unit}projection_norm", f"{theirs}gn_proj"),
    ]
    for i in (1, 2, 3):
        table += [entry(f"{unit}conv{i}.weight", f"{theirs}conv{i}/kernel", CONV)]
        table += _norm(f"{unit}norm{i}", f"{theirs}gn{i}")
    return table


def _block_table(heads: int) -> list[WeightEntry]:
    attention = f"{_BLOCK}MultiHeadDotProductAttention_1"
    parts = [f"{attention}/{part}" for part in ("query", "key", "value")]
    return [
        *_norm("blocks.#.norm1", f"{_BLOCK}LayerNorm_0"),
        *_projection("blocks.#.attention.qkv", parts, heads),
        entry("blocks.#.attention.out.weight", f"{attention}/out/kernel", merged(heads)),
        entry("blocks.#.attention.out.bias", f"{attention}/out/bias"),
        *_norm("blocks.#.norm2", f"{_BLOCK}LayerNorm_2"),
        *_dense("blocks.#.mlp.fc1", f"{_BLOCK}MlpBlock_3/Dense_0"),
        *_dense("blocks.#.mlp.fc2", f"{_BLOCK}MlpBlock_3/Dense_1"),
    ]


def _pool_table(heads: int) -> list[WeightEntry]:
    attention = "MAPHead_0/MultiHeadDotProductAttention_0"
    return [
        entry("pool.probe", "MAPHead_0/probe"),
        *_projection("pool.q", [f"{attention}/query"], heads),
        *_projection("pool.kv", [f"{attention}/key", f"{attention}/value"], heads),
        entry("pool.out.weight", f"{attention}/out/kernel", merged(heads)),
        entry("pool.out.bias", f"{attention}/out/bias"),
        *_norm("pool.norm", "MAPHead_0/LayerNorm_0"),
        *_dense("pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
        *_dense("pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
    ]


def _bit_table() -> list[WeightEntry]:
    unit, theirs = "stages.#.#.", "resnet/block{0:1}/unit{1:01}/"
    table = [
        entry("root.weight", _BIT_ROOT, CONV),
        *_norm("norm", "resnet/group_norm", "gamma", "beta"),
        entry("head.weight", "resnet/head/conv2d/kernel", POINTWISE_CONV),
        entry("head.bias", "resnet/head/conv2d/bias"),
        entry(f"{unit}projection.weight", f"{theirs}a/proj/standardized_conv2d/kernel", CONV),
    ]
    for i, letter in enumerate("abc", start=1):
        kernel = f"{theirs}{letter}/standardized_conv2d/kernel"
        table += [entry(f"{unit}conv{i}.weight", kernel, CONV)]
        table += _norm(f"{unit}norm{i}", f"{theirs}{letter}/group_norm", "gamma", "beta")
    return table
