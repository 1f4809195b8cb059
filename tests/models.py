"""One small member of every family, and weights that make every part of it matter."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import vitrail
from vitrail import Classifier

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("Ti/16", {"depth": 2}),
    "vit-b": ("b/16", {"depth": 2}),
    "vit-gap": ("Ti/16", {"depth": 2, "pool": "mean"}),
    "vit-hidden": ("Ti/16", {"depth": 2, "hidden": 40}),
    "vit-attention-pool": ("Ti/16", {"depth": 2, "pool": "attention"}),
    "vit-deit3": ("Ti/16", {"depth": 2, "layer_scale": 1e-4, "class_slot": False}),
    "vit-registers": ("Ti/16", {"depth": 2, "registers": 4, "class_slot": False}),
    "vit-no-positions": ("Ti/16", {"depth": 2, "positions": "none"}),
    "vit-factorized": ("Ti/16", {"depth": 2, "positions": "factorized"}),
    "vit-sincos": ("Ti/16", {"depth": 2, "positions": "sincos"}),
    "vit-relative": ("Ti/16", {"depth": 2, "positions": "relative"}),
    "vit-every": ("Ti/16", {"depth": 2, "injection": "every"}),
    "vit-shared": ("Ti/16", {"depth": 2, "injection": "shared"}),
    "vit-factorized-every": (
        "Ti/16",
        {"depth": 2, "positions": "factorized", "injection": "every"},
    ),
    "vit-factorized-shared": (
        "Ti/16",
        {"depth": 2, "positions": "factorized", "injection": "shared"},
    ),
    "hybrid-root": ("R+Ti/16", {"depth": 2}),
    "hybrid": ("R26+S/32", {"depth": 2, "backbone": (1, 1, 1, 1)}),
    "hybrid-16": ("R50+B/16", {"depth": 1, "backbone": (1, 1, 2), "width": 192, "heads": 3}),
    "axial-vit": ("Axial-B/16", {"depth": 1, "width": 192, "heads": 3, "mlp": 384}),
    "resnet": ("R50x1", {"units": (1, 2, 1, 1)}),
    "resnet-wide": ("R50x2", {"units": (1, 1, 1, 1)}),
    "axial-resnet": ("Axial-R26", {"units": (1, 1, 1, 1)}),
    "classic-resnet": ("ResNet18", {}),
    "hybrid-small-root": ("R14x0.25+Ti/32", {"depth": 2, "root": "small"}),
    "resnet-small-root": ("R14x0.25", {"root": "small"}),
    "axial-resnet-small-root": ("Axial-R14x0.25", {"root": "small"}),
}


def small(kind: str, size: int | tuple[int, int] = 64, classes: int = 7, **more: Any) -> Classifier:
    """A small model whose zeros (head, class token, last norms) are filled with noise."""
    variant, options = SMALL[kind]
    return noisy(vitrail.create(variant, classes=classes, size=size, **options | more))


def noisy(model: Any) -> Any:
    """Every parameter moved a little, so that a lost or swapped tensor changes the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer += 0.1 * torch.randn_like(buffer)
            if name.endswith("running_var"):
                buffer *= 1 + torch.rand_like(buffer)
    return model.eval()


def attentive(model: nn.Module) -> nn.Module:
    """Queries and keys so large that attention is not uniform: wrong heads change the logits."""
    with torch.no_grad():
        for name, parameter in noisy(model).named_parameters():
            if re.search(r"(qkv|in_proj|query|key|[qk]_proj)(\.|_)weight$", name):
                parameter.normal_(std=2 / parameter.shape[1] ** 0.5)
    return model.eval()


def timm_checkpoint(path: Path, **options: Any) -> Path:
    """timm's ViT-Ti/16 of ImageNet's classes with random weights, as a file."""
    import timm

    torch.manual_seed(0)
    model = attentive(timm.create_model("vit_tiny_patch16_224", **options))
    save_file(model.state_dict(), path)
    return path
