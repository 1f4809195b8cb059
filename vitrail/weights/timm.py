"""timm's names, for ViT, hybrids and BiT; DeiT, DeiT-III and DINOv2 have them too."""

import re
from typing import Any

from vitrail.data.preprocessing import Preprocessing
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import Architecture
from vitrail.model.variants import name as variant_name
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
    heads_of,
    refuse,
    resnet_of,
    units_of,
    with_learned_positions,
    without_class_slot,
)
from vitrail.weights.layout import POINTWISE, SLOT, Entry, entry, torch_module

BACKBONE = "patch_embed.backbone."
RESNETS = {"R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"}
"""Those that timm has a name for."""
TANH_GELU = r"(base_patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip(_gap)?_512"


def recognise(contents: Contents) -> bool:
    """A patch embedding with blocks, or ResNetV2's stages."""
    keys = contents.tensors
    vit = "patch_embed.proj.weight" in keys and "blocks.0.norm1.weight" in keys
    return vit or "stages.0.blocks.0.conv1.weight" in keys


def normalise(tensors: Tensors) -> Tensors:
    """DINOv2's and DeiT-III's own files differ in a few names; a mask token is no classifier's."""
    renamed = {"register_tokens": "reg_token"}
    named = {renamed.get(key, key): x for key, x in tensors.items() if key != "mask_token"}
    return {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", key): x for key, x in named.items()}


def describe(contents: Contents, size: Size | None) -> Architecture:
    """The architecture; the number of heads is in the config or taken from the table."""
    tensors = contents.tensors
    if "patch_embed.proj.weight" not in tensors:
        units = units_of(tensors, "stages.{0}.blocks.{1}.conv1.weight")
        return resnet_of(tensors["stem.conv.weight"], units, tensors.get("head.fc.weight"), size)
    width, channels, patch, _ = tensors["patch_embed.proj.weight"].shape
    backbone = None
    if roots := [
        key for key in (f"{BACKBONE}stem.conv.weight", f"{BACKBONE}conv.weight") if key in tensors
    ]:
        backbone = units_of(tensors, BACKBONE + "stages.{0}.blocks.{1}.conv1.weight")
        channels = tensors[roots[0]].shape[1]
    depth = count(tensors, "blocks.{0}.norm1.weight")
    known: dict[str, Any] = {
        "width": width,
        "depth": depth,
        "heads": heads_of(width, depth, contents, "num_heads"),
        "mlp": tensors["blocks.0.mlp.fc1.weight"].shape[0],
        "patch": patch,
        "channels": channels,
        "backbone": backbone,
        "classes": tensors["head.weight"].shape[0] if "head.weight" in tensors else 0,
        "hidden": tensors["pre_logits.fc.bias"].shape[0] if "pre_logits.fc.bias" in tensors else 0,
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in tensors else 0.0,
        "registers": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        "class_token": "cls_token" in tensors,
        "norm_after_pool": "fc_norm.weight" in tensors,
        "pool": pool_of(contents),
    }
    if "pos_embed" not in tensors:
        return ViTArchitecture(**known, positions="none", class_slot=False, size=size or (224, 224))
    slots = tensors["pos_embed"].shape[1]
    choices = EITHER if "cls_token" in tensors else WITHOUT_SLOT
    size, slot = grid_of(
        slots, choices, Patches(patch, backbone), contents.size or told_size(contents), size
    )
    return ViTArchitecture(**known, class_slot=slot, size=size)


def pool_of(contents: Contents) -> str:
    """Which vector the head reads: from the config, else from the tokens there are."""
    tensors = contents.tensors
    if "attn_pool.latent" in tensors:
        return "attention"
    told = contents.config.get("global_pool")
    if "cls_token" not in tensors or "fc_norm.weight" in tensors or told == "avg":
        return "mean"
    return "class"


def told_size(contents: Contents) -> Size | None:
    """The size that the config or the header names, which matters for rectangles."""
    told = contents.config.get("pretrained_cfg", contents.config).get("input_size")
    return None if told is None else (told[-2], told[-1])


def table(a: Architecture) -> list[Entry]:
    """Our keys and theirs."""
    if isinstance(a, ResNetArchitecture):
        head = [
            entry("head.weight", "head.fc.weight", POINTWISE),
            entry("head.bias", "head.fc.bias"),
        ]
        stem = entry("root.weight", "stem.conv.weight")
        return [
            stem,
            *units_table("stages.#.#.", "stages.{0}.blocks.{1}."),
            *head,
            *torch_module("norm", "norm"),
        ]
    if not isinstance(a, ViTArchitecture):
        return []
    block, theirs = "blocks.#.", "blocks.{0}."
    return [
        entry("class_token", "cls_token"),
        entry("registers", "reg_token"),
        Entry(("positions.0.class_slot", "positions.0.table"), ("pos_embed",), SLOT),
        entry("positions.0.table", "pos_embed"),
        *torch_module("embedding", "patch_embed.proj"),
        *backbone_table(a),
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


def backbone_table(a: ViTArchitecture) -> list[Entry]:
    """A hybrid's ResNet; the root alone has no `stem` in its names."""
    root = f"{BACKBONE}stem." if a.backbone else BACKBONE
    unit, theirs = "backbone.stage#.#.", BACKBONE + "stages.{0:-1}.blocks.{1}."
    return [
        entry("backbone.root.conv.weight", f"{root}conv.weight"),
        *torch_module("backbone.root.norm", f"{root}norm"),
        *units_table(unit, theirs),
        *torch_module(f"{unit}projection_norm", f"{theirs}downsample.norm"),
    ]


def units_table(unit: str, theirs: str) -> list[Entry]:
    """A residual unit, of either kind."""
    found = [entry(f"{unit}projection.weight", f"{theirs}downsample.conv.weight")]
    for i in (1, 2, 3):
        found += [entry(f"{unit}conv{i}.weight", f"{theirs}conv{i}.weight")]
        found += torch_module(f"{unit}norm{i}", f"{theirs}norm{i}")
    return found


def refusal(a: Architecture) -> str:
    """Why timm has no such model."""
    if isinstance(a, ResNetArchitecture):
        return ""
    return refuse("timm", a, lambda vit: {"hidden layer in the head": vit.hidden > 0})


def adapt(a: Architecture, tensors: Tensors) -> tuple[Architecture, Tensors]:
    """Waves become a table; beside registers timm gives the class token no position."""
    if not isinstance(a, ViTArchitecture):
        return a, tensors
    a, tensors = with_learned_positions(a, tensors)
    return without_class_slot(a, tensors) if a.registers else (a, tensors)


def preprocessing(contents: Contents, a: Architecture) -> Preprocessing | None:
    """What the config says, if it can be followed; without one, timm's for Google's weights."""
    told = contents.config.get("pretrained_cfg", contents.config)
    half = [0.5] * a.channels
    crop = float(told.get("crop_pct", 0.9 if max(a.size) < 300 else 1.0))
    interpolation = told.get("interpolation", "bicubic")
    squeezed = told.get("crop_mode", "center") == "squash" and crop == 1
    known = squeezed or told.get("crop_mode", "center") == "center"
    if not known or not 0 < crop <= 1 or interpolation not in ("bilinear", "bicubic"):
        return None
    return Preprocessing(
        size=a.size,
        short_side=0 if squeezed else int(min(a.size) / crop),
        interpolation=interpolation,
        antialias=contents.config.get("antialias", told.get("antialias", True)),
        mean=tuple(told.get("mean", half)),
        std=tuple(told.get("std", half)),
    )


def crop_of(pre: Preprocessing) -> float:
    """The share that is kept; timm rounds size / share down, so aim between two pixels."""
    side = min(pre.size)
    return 1.0 if pre.short_side in (0, side) else side / (pre.short_side + 0.5)


def labels(contents: Contents) -> tuple[str, ...]:
    """Names of the classes, where the config has them."""
    names = contents.config.get("label_names") or ()
    return tuple(str(label) for label in names)


def exceptions(contents: Contents) -> dict[str, Any]:
    """Some of timm's models have the tanh GELU, which only their name tells."""
    named = str(contents.config.get("architecture", ""))
    told = (contents.config.get("model_args") or {}).get("act_layer")
    return {"gelu": "tanh"} if told == "gelu_tanh" or re.search(TANH_GELU, named) else {}


def sidecars(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json, as timm's hub repositories have it."""
    a, pre = model.architecture, model.preprocess
    config: dict[str, Any] = {"num_classes": a.classes, "num_features": model.feature_width}
    config |= {"pretrained_cfg": {"input_size": [a.channels, *a.size]}}
    if isinstance(a, ViTArchitecture):
        config |= {"global_pool": {"class": "token", "mean": "avg", "attention": "map"}[a.pool]}
        config |= {"num_heads": a.heads}
    if pre is not None:
        config["pretrained_cfg"] |= {
            "crop_pct": crop_of(pre),
            "crop_mode": "center" if pre.short_side else "squash",
            "interpolation": pre.interpolation,
            "mean": list(pre.mean),
            "std": list(pre.std),
        }
        if not pre.antialias:
            config["antialias"] = False  # timm refuses what it does not know in there
    known, arguments = model_for_timm(a)
    if model.origin == TIMM.name and isinstance(a, ViTArchitecture) and a.gelu == "tanh":
        arguments["act_layer"] = "gelu_tanh"
    config |= {"architecture": known} if known else {}
    config |= {"model_args": arguments} if arguments else {}
    if model.labels:
        config["label_names"] = list(model.labels)
    return config, {}


def model_for_timm(a: Architecture) -> tuple[str, dict[str, Any]]:
    """A name that timm knows, empty where it has none, and what its constructor is to change."""
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
            "global_pool": {"class": "token", "mean": "avg", "attention": "map"}[a.pool],
            "fc_norm": a.norm_after_pool,
        }
    ours = variant_name(a)
    return (f"resnetv2_{ours[1:]}_bit" if ours in RESNETS else ""), {}


TIMM = Format(
    name="timm",
    gelu="erf",
    eps=1e-6,
    interpolation="timm",
    suffix=".safetensors",
    recognise=recognise,
    normalise=normalise,
    describe=describe,
    table=table,
    refusal=refusal,
    adapt=adapt,
    preprocessing=preprocessing,
    labels=labels,
    exceptions=exceptions,
    sidecars=sidecars,
)
