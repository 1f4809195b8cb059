"""transformers' names: ViT (either generation of names) and BiT."""

import math
import re
from typing import Any, Literal

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError, one_line
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import Architecture
from vitrail.model.vit import ViTArchitecture
from vitrail.weights.layout import (
    Format,
    Size,
    Tensors,
    Unstated,
    WeightEntry,
    beyond_class_token,
    bottlenecks,
    entry,
    grid_of,
    heads_of,
    positions_with_slot,
    resnet_of,
    stacked,
    torch_module,
    with_every_position,
)
from vitrail.weights.read import Contents

_PATCHES = "embeddings.patch_embeddings.projection.weight"
_BIT_ROOT = "embedder.convolution.weight"
_GELUS = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
# Pillow's numbers for the filters, as preprocessor_config.json has them.
_FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}

# Since version 5, the modules of a ViT in memory have other names than in its files.
_MEMORY_NAMES = (
    (r"^layers\.(\d+)\.attention\.([qkv])_proj\.", r"encoder.layer.\1.attention.attention.\2."),
    (r"^layers\.(\d+)\.attention\.o_proj\.", r"encoder.layer.\1.attention.output.dense."),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."),
    (r"attention\.q\.", "attention.query."),
    (r"attention\.k\.", "attention.key."),
    (r"attention\.v\.", "attention.value."),
)

# Fields of BitConfig that the tensors do not show, and the only supported value of each.
_BIT_FIELDS = {
    "layer_type": "preactivation",
    "hidden_act": "relu",
    "global_padding": None,
    "num_groups": 32,
    "embedding_dynamic_padding": False,
    "output_stride": 32,
}


class _HuggingFace(Format):
    name = "huggingface"
    owner = "transformers"
    gelu = "erf"
    eps = 1e-12
    interpolation = "huggingface"
    suffix = ""

    def recognize(self, contents: Contents) -> bool:
        keys = self.normalize(contents.tensors)
        return any(key.endswith(_PATCHES) for key in keys) or _BIT_ROOT in keys

    def normalize(self, tensors: Tensors) -> Tensors:
        named: Tensors = {}
        for key, x in tensors.items():
            key = re.sub(r"^(vit|deit|bit)\.", "", key)  # the model inside a classifier
            for pattern, file_name in _MEMORY_NAMES:
                key = re.sub(pattern, file_name, key)
            named[key] = x
        return named

    def unsupported(self, contents: Contents) -> str:
        keys = self.normalize(contents.tensors)
        prefix = next((key.removesuffix(_PATCHES) for key in keys if key.endswith(_PATCHES)), "")
        kind = str(contents.config.get("model_type") or prefix.strip("."))
        if any(key.endswith("embeddings.distillation_token") for key in keys):
            return "a distilled DeiT, with a second class token and a second head"
        if kind not in ("vit", "deit", "bit", ""):
            return f"transformers' '{one_line(kind)}'; of its models, vit and bit are known"
        if any(key.endswith(".layer_scale1.lambda1") for key in keys):
            return "transformers' Dinov2; DINOv2's own files and timm's are known"
        return ""

    def unstated(self, contents: Contents) -> list[Unstated]:
        config = contents.config
        if _PATCHES not in self.normalize(contents.tensors) or config.get("model_type"):
            return []
        fields: dict[Unstated, str] = {"heads": "num_attention_heads", "gelu": "hidden_act"}
        return [what for what, key in fields.items() if key not in config]

    def describe(self, contents: Contents, size: Size | None) -> Architecture:
        tensors, config = contents.tensors, contents.config
        if _BIT_ROOT in tensors:
            _check_fields(contents, _BIT_FIELDS)
            units = contents.units("encoder.stages.{0}.layers.{1}.conv1.weight")
            classes = contents.rows("classifier.1.weight")
            return resnet_of(tensors[_BIT_ROOT], units, classes, size or _prepared_size(contents))
        hidden = contents.rows("pooler.dense.weight")
        _check_fields(contents, {"pooler_act": "tanh"} if hidden else {})
        width, channels, patch, _ = tensors[_PATCHES].shape
        shape = {
            "width": width,
            "depth": contents.count("encoder.layer.{0}.layernorm_before.weight"),
            "mlp": tensors["encoder.layer.0.intermediate.dense.weight"].shape[0],
        }
        # A config.json without the number of heads means ViTConfig's default.
        heads = config.get("num_attention_heads", 12 if "model_type" in config else None)
        stated = config.get("image_size")
        stated = (stated, stated) if isinstance(stated, int) else stated and tuple(stated)
        slots = tensors["embeddings.position_embeddings"].shape[1]
        stated = contents.size or stated
        size, slot = grid_of(slots, (1,), patch, None, stated=stated, requested=size)
        return ViTArchitecture(
            **shape,
            heads=heads_of(contents, heads, **shape, key="num_attention_heads"),
            patch=patch,
            channels=channels,
            size=size,
            class_slot=bool(slot),
            classes=contents.rows("classifier.weight"),
            hidden=hidden,
        )

    def table(self, a: Architecture) -> list[WeightEntry]:
        if isinstance(a, ResNetArchitecture):
            return [
                entry("root.weight", _BIT_ROOT),
                *bottlenecks("stages.#.#.", "encoder.stages.{0}.layers.{1}."),
                *torch_module("norm", "norm"),
                *torch_module("head", "classifier.1"),
            ]
        layer = "encoder.layer.{0}."
        qkv = [f"{layer}attention.attention.{part}" for part in ("query", "key", "value")]
        return [
            entry("class_token", "embeddings.cls_token"),
            positions_with_slot("embeddings.position_embeddings"),
            *torch_module("embedding", "embeddings.patch_embeddings.projection"),
            *torch_module("blocks.#.norm1", f"{layer}layernorm_before"),
            *(
                WeightEntry(
                    (f"blocks.#.attention.qkv.{end}",),
                    tuple(f"{part}.{end}" for part in qkv),
                    stacked(3),
                )
                for end in ("weight", "bias")
            ),
            *torch_module("blocks.#.attention.out", f"{layer}attention.output.dense"),
            *torch_module("blocks.#.norm2", f"{layer}layernorm_after"),
            *torch_module("blocks.#.mlp.fc1", f"{layer}intermediate.dense"),
            *torch_module("blocks.#.mlp.fc2", f"{layer}output.dense"),
            *torch_module("norm", "layernorm"),
            *torch_module("hidden", "pooler.dense"),
            *torch_module("head", "classifier"),
        ]

    def lacks(self, a: ViTArchitecture) -> dict[str, bool]:
        hidden = {"hidden layer before a classifier": a.hidden > 0 and a.classes > 0}
        return beyond_class_token(a) | hidden

    def adapt(self, a: Architecture, tensors: Tensors) -> tuple[Architecture, Tensors]:
        return with_every_position(a, tensors)

    def file_names(self, a: Architecture, tensors: Tensors) -> Tensors:
        """In a classifier's files the model has a prefix, the head has none."""
        if not a.classes:
            return tensors
        prefix = "bit." if isinstance(a, ResNetArchitecture) else "vit."
        return {
            key if key.startswith("classifier.") else prefix + key: x for key, x in tensors.items()
        }

    def preprocessing(self, contents: Contents, a: Architecture) -> Preprocessing | None:
        """That of preprocessor_config.json, if supported; the default is ViTImageProcessor's."""
        stated = contents.preprocessor
        half = [0.5] * a.channels
        whole = {"height": a.size[0], "width": a.size[1]}
        size = stated.get("size", whole)
        crop = stated.get("crop_size") if stated.get("do_center_crop") else size
        edge = size.get("shortest_edge", 0) if isinstance(size, dict) else 0
        steps = all(stated.get(f"do_{step}", True) for step in ("resize", "rescale", "normalize"))
        resample = _FILTERS.get(stated.get("resample", 2))
        scaled = math.isclose(stated.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3)
        other = any(stated.get(step) for step in ("crop_pct", "do_pad", "do_flip_channel_order"))
        if not steps or other or not scaled or resample is None or crop not in (whole, a.size[0]):
            return None
        return Preprocessing(
            size=a.size,
            short_side=int(edge),
            interpolation=resample,
            antialias=stated.get("antialias", True),
            mean=tuple(stated.get("image_mean", half)),
            std=tuple(stated.get("image_std", half)),
        )

    def labels(self, contents: Contents) -> tuple[str, ...]:
        names = contents.config.get("id2label") or {}
        ordered = tuple(str(names[key]) for key in sorted(names, key=int))
        # LABEL_0, LABEL_1, … are placeholders.
        return () if all(label.startswith("LABEL_") for label in ordered) else ordered

    def exceptions(self, contents: Contents) -> dict[str, Any]:
        act = contents.config.get("hidden_act", "gelu")
        if act not in _GELUS:
            raise VitrailError(f"{contents.path}: hidden_act '{act}' is not a GELU")
        return {"gelu": _GELUS[act], "eps": float(contents.config.get("layer_norm_eps", 1e-12))}

    def sidecars(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        a, pre = model.architecture, model.preprocess
        names = model.labels or [f"LABEL_{i}" for i in range(a.classes)]
        config: dict[str, Any] = {
            "id2label": {str(i): label for i, label in enumerate(names)},
            "label2id": {label: i for i, label in enumerate(names)},
            "num_channels": a.channels,
        }
        if model.origin != self.name:
            a = self.numerics(a)
        config |= _bit_config(a) if isinstance(a, ResNetArchitecture) else _vit_config(a)
        if pre is None:
            return config, {}
        size = {"height": pre.size[0], "width": pre.size[1]}
        return config, {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": pre.short_side} if pre.short_side else size,
            "do_center_crop": bool(pre.short_side),
            "crop_size": size,
            "resample": {kind: number for number, kind in _FILTERS.items()}[pre.interpolation],
            "antialias": pre.antialias,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(pre.mean),
            "image_std": list(pre.std),
        }


HUGGINGFACE = _HuggingFace()


def _check_fields(contents: Contents, required: dict[str, Any]) -> None:
    """Stop at a field of config.json that describes an unsupported model."""
    for field, only in required.items():
        value = contents.config.get(field, only)
        if value != only:
            raise VitrailError(
                f"{contents.path}: {field} = {one_line(value)} in config.json is not supported; "
                f"only {only} is"
            )


def _prepared_size(contents: Contents) -> Size | None:
    """The image size that preprocessor_config.json produces."""
    stated = contents.preprocessor
    size = stated.get("crop_size") if stated.get("do_center_crop") else stated.get("size")
    if isinstance(size, dict):
        size = (size["height"], size["width"]) if "height" in size else None
    return (size, size) if isinstance(size, int) else size


def _vit_config(a: ViTArchitecture) -> dict[str, Any]:
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


def _bit_config(a: ResNetArchitecture) -> dict[str, Any]:
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
