"""timm's names, for ViT, hybrids and BiT; DeiT, DeiT-III and DINOv2 have them too."""

import re
from typing import Any

from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.errors import VitrailError, one_line
from vitrail.model.classic import ClassicArchitecture
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
    Unstated,
    count,
    grid_of,
    heads_of,
    heads_of_another_width,
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
TANH_SHAPES = {(768, 32), (1152, 16), (1536, 16)}
"""Width and patch of those models, which are the only ones of their shape without a class token."""
GELUS = {"gelu": "erf", "gelu_tanh": "tanh"}
POOLS = {"token": "class", "avg": "mean", "map": "attention"}
HEADS: dict[object, int] = {"vit_base_patch16_gap_224": 16, (64, 6, 192): 2}
"""Heads by name, or by width, depth and MLP width, that neither the table nor 64 a head gives."""
NAMED = (
    r"(vit|deit3?|flexivit|eva)_(tiny|wee|little|small|medium|mediumd|betwixt|base|so150m2?|large|huge|"
    r"so400m|giant|giantopt|gigantic)(_|$)|test_vit$"
)
"""Architectures whose name says heads and activation."""

# What a model's constructor was given: what the tensors show or inference does not use, and what is
# obeyed here. Anything else changes the result unseen.
ARGUMENTS = {
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "mlp_ratio"),
    *("qkv_bias", "qk_norm", "proj_bias", "init_values", "class_token", "pos_embed"),
    *(
        "no_embed_class",
        "reg_tokens",
        "pre_norm",
        "final_norm",
        "fc_norm",
        "scale_attn_norm",
        "scale_mlp_norm",
    ),
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate"),
    *("drop_path_rate", "drop_block_rate", "weight_init", "fix_init", "zero_init_last"),
    *("dynamic_img_size", "strict_img_size", "num_heads", "act_layer", "global_pool"),
}


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


def arguments(contents: Contents) -> dict[str, Any]:
    """What config.json gives a model's constructor, or one line about what is not supported."""
    given = dict(contents.config.get("model_args") or {})
    # Settings that are off or empty are the defaults.
    odd = [key for key, value in given.items() if value and key not in ARGUMENTS]
    if odd:
        raise VitrailError(
            f"{contents.path}: {odd[0]} = {one_line(given[odd[0]])} in config.json's model_args is "
            "not supported"
        )
    return given


def stranger(contents: Contents) -> str:
    """Models that share names with the plain ViT but compute something else."""
    tensors, named = contents.tensors, str(contents.config.get("architecture", ""))
    gate, down = (tensors.get(f"blocks.0.mlp.fc{i}.weight") for i in (1, 2))
    packed = gate is not None and down is not None and len(gate) == 2 * down.shape[1]
    scaled = "blocks.0.gamma_1" in tensors
    signs = {
        "a BEiT or EVA, without a bias of its keys": "blocks.0.attn.q_bias" in tensors,
        "a distilled DeiT, with a second class token and a second head": "dist_token" in tensors,
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


def unstated(contents: Contents) -> list[Unstated]:
    """What a file without config.json leaves open, or one whose architecture is not known."""
    config = contents.config
    if "patch_embed.proj.weight" not in contents.tensors:
        return []
    named = re.match(NAMED, str(config.get("architecture", "")))
    said = arguments(contents)
    heads = named or said.get("num_heads") or config.get("num_heads")
    gelu = named or said.get("act_layer") or config.get("num_heads")
    missing: dict[Unstated, bool] = {
        "heads": not heads,
        "gelu": not gelu,
        "pool": not named
        and refuse_pool(contents, tuple(POOLS)) is None
        and "attn_pool.latent" not in contents.tensors,
        # DeiT-III's own files, and timm's with rotary besides learned positions, look the same.
        "rotary": not named and "blocks.0.gamma_1" in contents.tensors,
    }
    return [what for what, open_ in missing.items() if open_]


def describe(contents: Contents, size: Size | None) -> Architecture:
    """The architecture; the number of heads is in the config or taken from the table."""
    tensors = contents.tensors
    said = arguments(contents)
    if "patch_embed.proj.weight" not in tensors:
        refuse_pool(contents, ("avg",))
        units = units_of(tensors, "stages.{0}.blocks.{1}.conv1.weight")
        root, head = tensors["stem.conv.weight"], tensors.get("head.fc.weight")
        return resnet_of(root, units, head, size or told_size(contents))
    width, channels, patch, _ = tensors["patch_embed.proj.weight"].shape
    backbone = None
    if roots := [
        key for key in (f"{BACKBONE}stem.conv.weight", f"{BACKBONE}conv.weight") if key in tensors
    ]:
        backbone = units_of(tensors, BACKBONE + "stages.{0}.blocks.{1}.conv1.weight")
        channels = tensors[roots[0]].shape[1]
    config = contents.config
    shape = {
        "width": width,
        "depth": count(tensors, "blocks.{0}.norm1.weight"),
        "mlp": tensors["blocks.0.mlp.fc1.weight"].shape[0],
    }
    known_heads = HEADS.get(str(config.get("architecture"))) or HEADS.get((*shape.values(),))
    stated = said.get("num_heads") or config.get("num_heads") or known_heads
    known: dict[str, Any] = shape | {
        "heads": heads_of(contents, stated, **shape, key="num_heads"),
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
    ahead = int("cls_token" in tensors) + known["registers"]
    size, slot = grid_of(
        slots,
        (*choices, ahead) if known["registers"] else choices,
        Patches(patch, backbone),
        contents.size or told_size(contents),
        size,
    )
    if known["registers"] and slot == ahead:
        raise VitrailError(
            f"{contents.path} is a ViT whose registers have positions, as timm's so150m, which is "
            "not supported"
        )
    return ViTArchitecture(**known, class_slot=bool(slot), size=size)


def pool_of(contents: Contents) -> str:
    """Which vector the head reads: from the config, else from the tokens there are."""
    tensors = contents.tensors
    told = refuse_pool(contents, tuple(POOLS))
    if "attn_pool.latent" in tensors:
        if "cls_token" in tensors or "reg_token" in tensors:
            raise VitrailError(
                f"{contents.path}: attention pooling that leaves out a class token or registers is "
                "not supported"
            )
        return "attention"
    if "cls_token" not in tensors:
        return "mean"
    return POOLS[told] if told else "mean" if "fc_norm.weight" in tensors else "class"


def refuse_pool(contents: Contents, known: tuple[str, ...]) -> str | None:
    """The config's global_pool, if there is one, and it is known here."""
    told = arguments(contents).get("global_pool", contents.config.get("global_pool"))
    if told not in (None, *known):
        raise VitrailError(f"{contents.path}: global_pool = '{one_line(told)}' is not supported")
    return told


def told_size(contents: Contents) -> Size | None:
    """The size that the config or the header names, which matters for rectangles."""
    told = (contents.config.get("pretrained_cfg") or contents.config).get("input_size")
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
    return refuse(
        "timm",
        a,
        lambda vit: (
            {
                "hidden layer in the head": vit.hidden > 0,
                "attention pooling of other tokens": vit.pool == "attention" and vit.prefix > 0,
            }
            | heads_of_another_width(vit)
        ),
    )


def adapt(a: Architecture, tensors: Tensors) -> tuple[Architecture, Tensors]:
    """Waves become a table; beside registers timm gives the class token no position."""
    if not isinstance(a, ViTArchitecture):
        return a, tensors
    a, tensors = with_learned_positions(a, tensors)
    return without_class_slot(a, tensors) if a.registers else (a, tensors)


def preprocessing(contents: Contents, a: Architecture) -> Preprocessing | None:
    """What the config says, if it can be followed; without one, timm's for Google's weights."""
    told = contents.config.get("pretrained_cfg") or contents.config
    classic = isinstance(a, ClassicArchitecture) and a.channels == 3
    mean = IMAGENET_MEAN if classic else (0.5,) * a.channels
    std = IMAGENET_STD if classic else mean
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
        mean=tuple(told.get("mean", mean)),
        std=tuple(told.get("std", std)),
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
    """Some of timm's models have the tanh GELU: their name tells, or in a bare file their shape."""
    told = arguments(contents).get("act_layer")
    if told is not None:
        if told not in GELUS:
            raise VitrailError(f"{contents.path}: act_layer = '{one_line(told)}' is not supported")
        return {"gelu": GELUS[told]}
    if contents.config:
        named = str(contents.config.get("architecture", ""))
        return {"gelu": "tanh"} if re.search(TANH_GELU, named) else {}
    tensors = contents.tensors
    if "patch_embed.proj.weight" not in tensors or "cls_token" in tensors:
        return {}
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    large = (width, patch) == (1024, 16) and tensors["pos_embed"].shape[1] == 32 * 32
    return {"gelu": "tanh"} if large or (width, patch) in TANH_SHAPES else {}


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
    stranger=stranger,
    unstated=unstated,
    describe=describe,
    table=table,
    refusal=refusal,
    adapt=adapt,
    preprocessing=preprocessing,
    labels=labels,
    exceptions=exceptions,
    sidecars=sidecars,
)
