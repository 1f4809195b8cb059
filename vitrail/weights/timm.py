"""timm's names for ViT, hybrids and BiT; DeiT, DeiT-III and DINOv2 use them too."""

import re
from dataclasses import replace
from typing import Any

from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.errors import VitrailError, one_line
from vitrail.model.classic import ClassicArchitecture
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import Architecture, variant_name
from vitrail.model.vit import ViTArchitecture
from vitrail.weights.layout import (
    POINTWISE,
    Format,
    Size,
    Tensors,
    Unstated,
    WeightEntry,
    bottlenecks,
    entry,
    grid_of,
    head_width,
    heads_of,
    positions_with_slot,
    resnet_of,
    torch_module,
    with_learned_positions,
)
from vitrail.weights.read import Contents

_PATCHES = "patch_embed.proj.weight"
_BACKBONE = "patch_embed.backbone."
_GELUS = {"gelu": "erf", "gelu_tanh": "tanh"}
_POOLS = {"token": "class", "avg": "mean", "map": "attention"}

# The BiT ResNets that timm has a name for.
_RESNETS = {"R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"}

# SigLIP models with the tanh GELU; and their width and patch, which no other models without a class
# token have.
_TANH_NAMES = (
    r"(base_patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip(_gap)?_512"
)
_TANH_SHAPES = {(768, 32), (1152, 16), (1536, 16)}

# Heads, by name or by width, depth and MLP width, where neither the table nor 64 per head holds.
_HEADS: dict[object, int] = {"vit_base_patch16_gap_224": 16, (64, 6, 192): 2}

# Architectures whose name determines heads and activation.
_NAMED = (
    r"(vit|deit3?|flexivit|eva)_(tiny|wee|little|small|medium|mediumd|betwixt|base|so150m2?|large|huge|"
    r"so400m|giant|giantopt|gigantic)(_|$)|test_vit$"
)

# Constructor arguments that the tensors show, that inference does not use, or that are supported
# here. Any other would silently change the result.
_ARGUMENTS = {
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "mlp_ratio"),
    *("qkv_bias", "qk_norm", "proj_bias", "init_values", "class_token", "pos_embed"),
    *("no_embed_class", "reg_tokens", "pre_norm", "final_norm", "fc_norm"),
    *("scale_attn_norm", "scale_mlp_norm", "dynamic_img_size", "strict_img_size"),
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate"),
    *("drop_path_rate", "drop_block_rate", "weight_init", "fix_init", "zero_init_last"),
    *("num_heads", "act_layer", "global_pool"),
}


class _Timm(Format):
    name = "timm"
    owner = "timm"
    gelu = "erf"
    eps = 1e-6
    interpolation = "timm"
    suffix = ".safetensors"

    def recognize(self, contents: Contents) -> bool:
        keys = contents.tensors
        vit = _PATCHES in keys and "blocks.0.norm1.weight" in keys
        return vit or "stages.0.blocks.0.conv1.weight" in keys

    def normalize(self, tensors: Tensors) -> Tensors:
        # DINOv2's and DeiT-III's own files differ in a few names; classifiers have no mask token.
        renamed = {"register_tokens": "reg_token"}
        named = {renamed.get(key, key): x for key, x in tensors.items() if key != "mask_token"}
        return {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", key): x for key, x in named.items()}

    def unsupported(self, contents: Contents) -> str:
        tensors, named = contents.tensors, str(contents.config.get("architecture", ""))
        gate, down = (tensors.get(f"blocks.0.mlp.fc{i}.weight") for i in (1, 2))
        packed = gate is not None and down is not None and len(gate) == 2 * down.shape[1]
        scaled = "blocks.0.gamma_1" in tensors
        distilled = "a distilled DeiT, with a second class token and a second head"
        signs = {
            "a BEiT or EVA, without a bias of its keys": "blocks.0.attn.q_bias" in tensors,
            distilled: "dist_token" in tensors,
            "a ViT with rotary positions": (
                "rope" in named
                or any(key.startswith("rope.") for key in tensors)
                or (scaled and "pos_embed" not in tensors)
            ),
            "a ViT with SwiGLU, as DINOv2's giant": packed
            or any(f"blocks.0.mlp.{part}.weight" in tensors for part in ("w1", "w12", "fc1_g")),
            "a ViT with a norm before its blocks, as CLIP": "norm_pre.weight" in tensors,
        }
        return next((family for family, seen in signs.items() if seen), "")

    def unstated(self, contents: Contents) -> list[Unstated]:
        tensors, config = contents.tensors, contents.config
        if _PATCHES not in tensors:
            return []
        args = model_args(contents)
        pool = supported_pool(contents, tuple(_POOLS))
        if re.match(_NAMED, str(config.get("architecture", ""))):
            return []
        missing: dict[Unstated, bool] = {
            "heads": not (args.get("num_heads") or config.get("num_heads")),
            # Vitrail's own files say the number of heads, and the GELU where it is not timm's.
            "gelu": not (args.get("act_layer") or config.get("num_heads")),
            "pool": pool is None and "attn_pool.latent" not in tensors,
            # DeiT-III's own files, and timm's with rotary besides learned positions, look the same.
            "rotary": "blocks.0.gamma_1" in tensors,
        }
        return [what for what, unknown in missing.items() if unknown]

    def describe(self, contents: Contents, size: Size | None) -> Architecture:
        tensors, config = contents.tensors, contents.config
        args = model_args(contents)
        if _PATCHES not in tensors:
            supported_pool(contents, ("avg",))
            units = contents.units("stages.{0}.blocks.{1}.conv1.weight")
            classes = contents.rows("head.fc.weight")
            size = size or config_size(contents)
            return resnet_of(tensors["stem.conv.weight"], units, classes, size)
        width, channels, patch, _ = tensors[_PATCHES].shape
        backbone = None
        for root in (f"{_BACKBONE}conv.weight", f"{_BACKBONE}stem.conv.weight"):
            if root in tensors:
                backbone = contents.units(_BACKBONE + "stages.{0}.blocks.{1}.conv1.weight")
                channels = tensors[root].shape[1]
        shape = {
            "width": width,
            "depth": contents.count("blocks.{0}.norm1.weight"),
            "mlp": tensors["blocks.0.mlp.fc1.weight"].shape[0],
        }
        known_heads = _HEADS.get(str(config.get("architecture"))) or _HEADS.get((*shape.values(),))
        stated = args.get("num_heads") or config.get("num_heads") or known_heads
        known: dict[str, Any] = shape | {
            "heads": heads_of(contents, stated, **shape, key="num_heads"),
            "patch": patch,
            "channels": channels,
            "backbone": backbone,
            "classes": contents.rows("head.weight"),
            "hidden": contents.rows("pre_logits.fc.bias"),
            "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in tensors else 0.0,
            "registers": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
            "class_token": "cls_token" in tensors,
            "norm_after_pool": "fc_norm.weight" in tensors,
            "pool": _pool_of(contents),
        }
        if "pos_embed" not in tensors:
            size = size or (224, 224)
            return ViTArchitecture(**known, positions="none", class_slot=False, size=size)
        size, slot = _grid(contents, patch, backbone, known["registers"], size)
        return ViTArchitecture(**known, class_slot=slot, size=size)

    def table(self, a: Architecture) -> list[WeightEntry]:
        if isinstance(a, ResNetArchitecture):
            return [
                entry("root.weight", "stem.conv.weight"),
                *bottlenecks("stages.#.#.", "stages.{0}.blocks.{1}."),
                *torch_module("norm", "norm"),
                entry("head.weight", "head.fc.weight", POINTWISE),
                entry("head.bias", "head.fc.bias"),
            ]
        if not isinstance(a, ViTArchitecture):
            return []
        block, theirs = "blocks.#.", "blocks.{0}."
        return [
            entry("class_token", "cls_token"),
            entry("registers", "reg_token"),
            positions_with_slot("pos_embed"),
            entry("positions.0.table", "pos_embed"),
            *torch_module("embedding", "patch_embed.proj"),
            *_backbone_table(a),
            *torch_module(f"{block}norm1", f"{theirs}norm1"),
            *torch_module(f"{block}attention.qkv", f"{theirs}attn.qkv"),
            *torch_module(f"{block}attention.out", f"{theirs}attn.proj"),
            entry(f"{block}scale1", f"{theirs}ls1.gamma"),
            *torch_module(f"{block}norm2", f"{theirs}norm2"),
            *torch_module(f"{block}mlp.fc1", f"{theirs}mlp.fc1"),
            *torch_module(f"{block}mlp.fc2", f"{theirs}mlp.fc2"),
            entry(f"{block}scale2", f"{theirs}ls2.gamma"),
            *torch_module("norm", "fc_norm" if a.norm_after_pool else "norm"),
            entry("pool.probe", "attn_pool.latent"),
            *torch_module("pool.q", "attn_pool.q"),
            *torch_module("pool.kv", "attn_pool.kv"),
            *torch_module("pool.out", "attn_pool.proj"),
            *torch_module("pool.norm", "attn_pool.norm"),
            *torch_module("pool.mlp.fc1", "attn_pool.mlp.fc1"),
            *torch_module("pool.mlp.fc2", "attn_pool.mlp.fc2"),
            *torch_module("hidden", "pre_logits.fc"),
            *torch_module("head", "head"),
        ]

    def lacks(self, a: ViTArchitecture) -> dict[str, bool]:
        return {
            "hidden layer in the head": a.hidden > 0,
            "attention pooling of other tokens": a.pool == "attention" and a.prefix > 0,
        } | head_width(a)

    def adapt(self, a: Architecture, tensors: Tensors) -> tuple[Architecture, Tensors]:
        if not isinstance(a, ViTArchitecture):
            return a, tensors
        a, tensors = with_learned_positions(a, tensors)
        if a.class_slot and a.registers:
            # Beside registers timm gives the class token no position: the sum is made beforehand.
            tensors = dict(tensors)
            slot = tensors.pop("positions.0.class_slot")
            tensors["class_token"] = tensors["class_token"] + slot
            a = replace(a, class_slot=False)
        return a, tensors

    def preprocessing(self, contents: Contents, a: Architecture) -> Preprocessing | None:
        """That of the config, if supported; without one, what timm uses for Google's weights."""
        stated = contents.config.get("pretrained_cfg") or contents.config
        classic = isinstance(a, ClassicArchitecture) and a.channels == 3
        mean = IMAGENET_MEAN if classic else (0.5,) * a.channels
        std = IMAGENET_STD if classic else mean
        crop = float(stated.get("crop_pct", 0.9 if max(a.size) < 300 else 1.0))
        interpolation = stated.get("interpolation", "bicubic")
        squeezed = stated.get("crop_mode", "center") == "squash" and crop == 1
        known = squeezed or stated.get("crop_mode", "center") == "center"
        if not known or not 0 < crop <= 1 or interpolation not in ("bilinear", "bicubic"):
            return None
        return Preprocessing(
            size=a.size,
            short_side=0 if squeezed else int(min(a.size) / crop),
            interpolation=interpolation,
            antialias=contents.config.get("antialias", stated.get("antialias", True)),
            mean=tuple(stated.get("mean", mean)),
            std=tuple(stated.get("std", std)),
        )

    def labels(self, contents: Contents) -> tuple[str, ...]:
        return tuple(map(str, contents.config.get("label_names") or ()))

    def exceptions(self, contents: Contents) -> dict[str, Any]:
        """Some models have the tanh GELU: known by name, or by shape in a file without a config."""
        stated = model_args(contents).get("act_layer")
        if stated is not None:
            if stated not in _GELUS:
                raise VitrailError(
                    f"{contents.path}: act_layer = '{one_line(stated)}' is not supported"
                )
            return {"gelu": _GELUS[stated]}
        if contents.config:
            named = str(contents.config.get("architecture", ""))
            return {"gelu": "tanh"} if re.search(_TANH_NAMES, named) else {}
        tensors = contents.tensors
        if _PATCHES not in tensors or "cls_token" in tensors:
            return {}
        width, _, patch, _ = tensors[_PATCHES].shape
        large = (width, patch) == (1024, 16) and tensors["pos_embed"].shape[1] == 32 * 32
        return {"gelu": "tanh"} if large or (width, patch) in _TANH_SHAPES else {}

    def sidecars(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """config.json, as timm's hub repositories have it."""
        a, pre = model.architecture, model.preprocess
        pretrained: dict[str, Any] = {"input_size": [a.channels, *a.size]}
        config: dict[str, Any] = {"num_classes": a.classes, "num_features": model.feature_width}
        config["pretrained_cfg"] = pretrained
        if isinstance(a, ViTArchitecture):
            config |= {"global_pool": _pool_name(a), "num_heads": a.heads}
        if pre is not None:
            side = min(pre.size)
            # timm rounds size / share down, so aim between two pixels.
            cropped = pre.short_side not in (0, side)
            pretrained |= {
                "crop_pct": side / (pre.short_side + 0.5) if cropped else 1.0,
                "crop_mode": "center" if pre.short_side else "squash",
                "interpolation": pre.interpolation,
                "mean": list(pre.mean),
                "std": list(pre.std),
            }
            if not pre.antialias:
                config["antialias"] = False  # timm refuses what it does not know in there
        known, arguments = _constructor(a)
        if model.origin == self.name and isinstance(a, ViTArchitecture) and a.gelu == "tanh":
            arguments["act_layer"] = "gelu_tanh"
        config |= {"architecture": known} if known else {}
        config |= {"model_args": arguments} if arguments else {}
        if model.labels:
            config["label_names"] = list(model.labels)
        return config, {}


TIMM = _Timm()


def model_args(contents: Contents) -> dict[str, Any]:
    """The constructor arguments in config.json; an error names one that is not supported."""
    given = dict(contents.config.get("model_args") or {})
    for key, value in given.items():
        if value and key not in _ARGUMENTS:  # settings that are off or empty are the defaults
            raise VitrailError(
                f"{contents.path}: {key} = {one_line(value)} in config.json's model_args is not "
                "supported"
            )
    return given


def supported_pool(contents: Contents, known: tuple[str, ...]) -> str | None:
    """The config's global_pool, if there is one; an error unless it is one of `known`."""
    pool = model_args(contents).get("global_pool", contents.config.get("global_pool"))
    if pool not in (None, *known):
        raise VitrailError(f"{contents.path}: global_pool = '{one_line(pool)}' is not supported")
    return pool


def config_size(contents: Contents) -> Size | None:
    """The image size that the config states, which matters for rectangles."""
    stated = (contents.config.get("pretrained_cfg") or contents.config).get("input_size")
    return None if stated is None else (stated[-2], stated[-1])


def _pool_of(contents: Contents) -> str:
    """What the head reads: by the config, else by the tokens there are."""
    tensors = contents.tensors
    stated = supported_pool(contents, tuple(_POOLS))
    if "attn_pool.latent" in tensors:
        if "cls_token" in tensors or "reg_token" in tensors:
            raise VitrailError(
                f"{contents.path}: attention pooling that leaves out a class token or registers is "
                "not supported"
            )
        return "attention"
    if "cls_token" not in tensors:
        return "mean"
    return _POOLS[stated] if stated else "mean" if "fc_norm.weight" in tensors else "class"


def _pool_name(a: ViTArchitecture) -> str:
    return next(theirs for theirs, ours in _POOLS.items() if ours == a.pool)


def _grid(
    contents: Contents,
    patch: int,
    backbone: tuple[int, ...] | None,
    registers: int,
    size: Size | None,
) -> tuple[Size, bool]:
    """Image size, and whether the class token has a position."""
    class_token = "cls_token" in contents.tensors
    choices = (1, 0) if class_token else (0,)
    prefix = class_token + registers
    size, slot = grid_of(
        contents.tensors["pos_embed"].shape[1],
        (*choices, prefix) if registers else choices,
        patch,
        backbone,
        stated=contents.size or config_size(contents),
        requested=size,
    )
    if registers and slot == prefix:
        raise VitrailError(
            f"{contents.path} is a ViT whose registers have positions, as timm's so150m, which is "
            "not supported"
        )
    return size, bool(slot)


def _backbone_table(a: ViTArchitecture) -> list[WeightEntry]:
    """A hybrid's ResNet; the root alone has no `stem` in its names."""
    root = f"{_BACKBONE}stem." if a.backbone else _BACKBONE
    unit, theirs = "backbone.stage#.#.", _BACKBONE + "stages.{0:-1}.blocks.{1}."
    return [
        entry("backbone.root.conv.weight", f"{root}conv.weight"),
        *torch_module("backbone.root.norm", f"{root}norm"),
        *bottlenecks(unit, theirs),
        *torch_module(f"{unit}projection_norm", f"{theirs}downsample.norm"),
    ]


def _constructor(a: Architecture) -> tuple[str, dict[str, Any]]:
    """A model name of timm, or an empty string, and the arguments of its constructor."""
    if isinstance(a, ViTArchitecture) and a.backbone is None:
        return "vit_base_patch16_224", {
            "img_size": list(a.size),
            "patch_size": a.patch,
            "in_chans": a.channels,
            "embed_dim": a.width,
            "depth": a.depth,
            "num_heads": a.heads,
            "mlp_ratio": a.mlp / a.width,
            "class_token": a.class_token,
            "reg_tokens": a.registers,
            "no_embed_class": not a.class_slot,
            "init_values": a.layer_scale or None,
            "global_pool": _pool_name(a),
            "fc_norm": a.norm_after_pool,
        }
    ours = variant_name(a)
    return (f"resnetv2_{ours[1:]}_bit" if ours in _RESNETS else ""), {}
