"""transformers' names: ViT (either generation of names) and BiT."""

import math
import re
from typing import Any, Literal

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError, one_line
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import Architecture
from vitrail.model.vit import ViTArchitecture
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
    resnet_of,
    units_of,
    with_every_position,
)
from vitrail.weights.layout import SLOT, Entry, entry, stacked, torch_module

GELUS = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
# Pillow's numbers for the filters, as preprocessor_config.json has them.
FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}

# Since version 5 the modules of a ViT in memory have other names than its files.
MEMORY_NAMES = (
    (r"^layers\.(\d+)\.attention\.([qkv])_proj\.", r"encoder.layer.\1.attention.attention.\2."),
    (r"^layers\.(\d+)\.attention\.o_proj\.", r"encoder.layer.\1.attention.output.dense."),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."),
    (r"attention\.q\.", "attention.query."),
    (r"attention\.k\.", "attention.key."),
    (r"attention\.v\.", "attention.value."),
)


PATCHES = "embeddings.patch_embeddings.projection.weight"

# What BitConfig may change without a trace in the tensors, and what it has to be.
BIT = {
    "layer_type": "preactivation",
    "hidden_act": "relu",
    "global_padding": None,
    "num_groups": 32,
    "embedding_dynamic_padding": False,
    "output_stride": 32,
}


def recognise(contents: Contents) -> bool:
    """A ViT's embeddings, of whatever family, or a BiT's embedder."""
    keys = normalise(contents.tensors)
    return any(key.endswith(PATCHES) for key in keys) or "embedder.convolution.weight" in keys


def stranger(contents: Contents) -> str:
    """Other models of transformers with a ViT's embeddings."""
    keys = normalise(contents.tensors)
    prefix = next((key.removesuffix(PATCHES) for key in keys if key.endswith(PATCHES)), "")
    kind = str(contents.config.get("model_type") or prefix.strip("."))
    if any(key.endswith("embeddings.distillation_token") for key in keys):
        return "a distilled DeiT, with a second class token and a second head"
    if kind not in ("vit", "deit", "bit", ""):
        return f"transformers' '{one_line(kind)}'; of its models, vit and bit are known"
    if any(key.endswith(".layer_scale1.lambda1") for key in keys):
        return "transformers' Dinov2; DINOv2's own files and timm's are known"
    return ""


def unstated(contents: Contents) -> list[Unstated]:
    """What a file without config.json leaves open."""
    vit = PATCHES in normalise(contents.tensors) and not contents.config.get("model_type")
    wanted: dict[Unstated, str] = {"heads": "num_attention_heads", "gelu": "hidden_act"}
    return [what for what, key in wanted.items() if vit and key not in contents.config]


def normalise(tensors: Tensors) -> Tensors:
    """The names in files, without the prefix of the model inside a classifier."""
    named: Tensors = {}
    for key, x in tensors.items():
        key = re.sub(r"^(vit|deit|bit)\.", "", key)
        for pattern, file_name in MEMORY_NAMES:
            key = re.sub(pattern, file_name, key)
        named[key] = x
    return named


def describe(contents: Contents, size: Size | None) -> Architecture:
    """The architecture, with what config.json says of GELU and epsilon."""
    tensors, config = contents.tensors, contents.config
    if "embedder.convolution.weight" in tensors:
        refuse_fields(contents, BIT)
        units = units_of(tensors, "encoder.stages.{0}.layers.{1}.conv1.weight")
        head = tensors.get("classifier.1.weight")
        size = size or prepared_size(contents)
        return resnet_of(tensors["embedder.convolution.weight"], units, head, size)
    refuse_fields(contents, {"pooler_act": "tanh"} if "pooler.dense.weight" in tensors else {})
    width, channels, patch, _ = tensors[PATCHES].shape
    shape = {
        "width": width,
        "depth": count(tensors, "encoder.layer.{0}.layernorm_before.weight"),
        "mlp": tensors["encoder.layer.0.intermediate.dense.weight"].shape[0],
    }
    # A config.json without the number of heads means ViTConfig's own.
    stated = config.get("num_attention_heads", 12 if "model_type" in config else None)
    told = config.get("image_size")
    told = (told, told) if isinstance(told, int) else told and tuple(told)
    slots = tensors["embeddings.position_embeddings"].shape[1]
    size, slot = grid_of(slots, WITH_SLOT, Patches(patch), contents.size or told, size)
    return ViTArchitecture(
        **shape,
        heads=heads_of(contents, stated, **shape, key="num_attention_heads"),
        patch=patch,
        channels=channels,
        size=size,
        class_slot=bool(slot),
        classes=tensors["classifier.weight"].shape[0] if "classifier.weight" in tensors else 0,
        hidden=tensors["pooler.dense.weight"].shape[0] if "pooler.dense.weight" in tensors else 0,
    )


def refuse_fields(contents: Contents, known: dict[str, Any]) -> None:
    """Stop at a field of config.json that asks for another model than there is here."""
    for field, only in known.items():
        value = contents.config.get(field, only)
        if value != only:
            raise VitrailError(
                f"{contents.path}: {field} = {one_line(value)} in config.json is not supported; "
                f"only {only} is"
            )


def prepared_size(contents: Contents) -> Size | None:
    """Rows and columns that preprocessor_config.json leaves of an image."""
    told = contents.preprocessor
    size = told.get("crop_size") if told.get("do_center_crop") else told.get("size")
    if isinstance(size, dict):
        size = (size["height"], size["width"]) if "height" in size else None
    return (size, size) if isinstance(size, int) else size


def table(a: Architecture) -> list[Entry]:
    """Our keys and theirs."""
    if isinstance(a, ResNetArchitecture):
        return bit_table()
    layer = "encoder.layer.{0}."
    attention = f"{layer}attention."
    qkv = [f"{attention}attention.{part}" for part in ("query", "key", "value")]
    return [
        entry("class_token", "embeddings.cls_token"),
        Entry(
            ("positions.0.class_slot", "positions.0.table"),
            ("embeddings.position_embeddings",),
            SLOT,
        ),
        *torch_module("embedding", "embeddings.patch_embeddings.projection"),
        *torch_module("blocks.#.norm1", f"{layer}layernorm_before"),
        *(
            Entry(
                (f"blocks.#.attention.qkv.{end}",),
                tuple(f"{part}.{end}" for part in qkv),
                stacked(3),
            )
            for end in ("weight", "bias")
        ),
        *torch_module("blocks.#.attention.out", f"{attention}output.dense"),
        *torch_module("blocks.#.norm2", f"{layer}layernorm_after"),
        *torch_module("blocks.#.mlp.fc1", f"{layer}intermediate.dense"),
        *torch_module("blocks.#.mlp.fc2", f"{layer}output.dense"),
        *torch_module("norm", "layernorm"),
        *torch_module("hidden", "pooler.dense"),
        *torch_module("head", "classifier"),
    ]


def bit_table() -> list[Entry]:
    """A BiT ResNet."""
    unit, theirs = "stages.#.#.", "encoder.stages.{0}.layers.{1}."
    found = [
        entry("root.weight", "embedder.convolution.weight"),
        entry(f"{unit}projection.weight", f"{theirs}downsample.conv.weight"),
        *torch_module("norm", "norm"),
        *torch_module("head", "classifier.1"),
    ]
    for i in (1, 2, 3):
        found += [entry(f"{unit}conv{i}.weight", f"{theirs}conv{i}.weight")]
        found += torch_module(f"{unit}norm{i}", f"{theirs}norm{i}")
    return found


def refusal(a: Architecture) -> str:
    """Why transformers has no such model."""
    if isinstance(a, ResNetArchitecture):
        return ""
    return refuse(
        "transformers",
        a,
        lambda vit: (
            beyond_the_class_token(vit)
            | {"hidden layer before a classifier": vit.hidden > 0 and vit.classes > 0}
        ),
    )


def prefix(a: Architecture, tensors: Tensors) -> Tensors:
    """The names of a classifier's files, whose model has a prefix and whose head has none."""
    if not a.classes:
        return tensors
    inner = "bit." if isinstance(a, ResNetArchitecture) else "vit."
    return {key if key.startswith("classifier.") else inner + key: x for key, x in tensors.items()}


def preprocessing(contents: Contents, a: Architecture) -> Preprocessing | None:
    """What preprocessor_config.json says, if it can be followed; else ViTImageProcessor's."""
    told = contents.preprocessor
    half = [0.5] * a.channels
    size = told.get("size", {"height": a.size[0], "width": a.size[1]})
    crop = told.get("crop_size") if told.get("do_center_crop") else size
    edge = size.get("shortest_edge", 0) if isinstance(size, dict) else 0
    steps = all(told.get(f"do_{step}", True) for step in ("resize", "rescale", "normalize"))
    filtered = FILTERS.get(told.get("resample", 2))
    whole = {"height": a.size[0], "width": a.size[1]}
    scaled = math.isclose(told.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3)
    other = any(told.get(step) for step in ("crop_pct", "do_pad", "do_flip_channel_order"))
    if not steps or other or not scaled or filtered is None or crop not in (whole, a.size[0]):
        return None
    return Preprocessing(
        size=a.size,
        short_side=int(edge),
        interpolation=filtered,
        antialias=told.get("antialias", True),
        mean=tuple(told.get("image_mean", half)),
        std=tuple(told.get("image_std", half)),
    )


def labels(contents: Contents) -> tuple[str, ...]:
    """Names of the classes; transformers' own LABEL_0, LABEL_1, … are none."""
    names = contents.config.get("id2label") or {}
    ordered = tuple(str(names[key]) for key in sorted(names, key=int))
    return () if all(label.startswith("LABEL_") for label in ordered) else ordered


def exceptions(contents: Contents) -> dict[str, Any]:
    """What config.json says of GELU and epsilon."""
    act = contents.config.get("hidden_act", "gelu")
    if act not in GELUS:
        raise VitrailError(f"{contents.path}: hidden_act '{act}' is no GELU")
    return {"gelu": GELUS[act], "eps": float(contents.config.get("layer_norm_eps", 1e-12))}


def sidecars(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and preprocessor_config.json."""
    a, pre = model.architecture, model.preprocess
    names = model.labels or [f"LABEL_{i}" for i in range(a.classes)]
    config: dict[str, Any] = {
        "id2label": {str(i): label for i, label in enumerate(names)},
        "label2id": {label: i for i, label in enumerate(names)},
        "num_channels": a.channels,
    }
    if isinstance(a, ViTArchitecture) and model.origin != HUGGINGFACE.name:
        a = HUGGINGFACE.numerics(a)
    config |= bit_config(a) if isinstance(a, ResNetArchitecture) else vit_config(a)
    if pre is None:
        return config, {}
    filters = {kind: number for number, kind in FILTERS.items()}
    height, width = pre.size
    size = {"height": height, "width": width}
    return config, {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": pre.short_side} if pre.short_side else size,
        "do_center_crop": bool(pre.short_side),
        "crop_size": size,
        "resample": filters[pre.interpolation],
        "antialias": pre.antialias,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(pre.mean),
        "image_std": list(pre.std),
    }


def vit_config(a: ViTArchitecture) -> dict[str, Any]:
    """The fields of ViTConfig."""
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification" if a.classes else "ViTModel"],
        "hidden_size": a.width,
        "num_hidden_layers": a.depth,
        "num_attention_heads": a.heads,
        "intermediate_size": a.mlp,
        "hidden_act": "gelu" if a.gelu == "erf" else "gelu_pytorch_tanh",
        "layer_norm_eps": a.eps,
        "image_size": a.size[0] if a.size[0] == a.size[1] else list(a.size),
        "patch_size": a.patch,
        "qkv_bias": True,
        "pooler_output_size": a.hidden or a.width,
        "pooler_act": "tanh",
    }


def bit_config(a: ResNetArchitecture) -> dict[str, Any]:
    """The fields of BitConfig."""
    return {
        "model_type": "bit",
        "architectures": ["BitForImageClassification" if a.classes else "BitModel"],
        "depths": list(a.units),
        "hidden_sizes": [256 * a.width * 2**stage for stage in range(len(a.units))],
        "embedding_size": 64 * a.width,
        "layer_type": "preactivation",
        "global_padding": None,
        "num_groups": 32,
    }


HUGGINGFACE = Format(
    name="huggingface",
    gelu="erf",
    eps=1e-12,
    interpolation="huggingface",
    suffix="",
    recognise=recognise,
    normalise=normalise,
    stranger=stranger,
    unstated=unstated,
    describe=describe,
    table=table,
    refusal=refusal,
    adapt=with_every_position,
    spell=prefix,
    preprocessing=preprocessing,
    labels=labels,
    exceptions=exceptions,
    sidecars=sidecars,
)
