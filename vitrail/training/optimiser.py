"""Which parameters learn, how fast, and which of them decay."""

import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from vitrail.config import Optim
from vitrail.training.lamb import Lamb
from vitrail.training.muon import Muon

# Kernels are what multiplies an input: no biases or norms (one axis), no tokens, no tables of
# positions, which are added.
NOT_KERNELS = r"(^|\.)(class_token|registers|mask_token|positions|offsets|relative)(\.|$)|probe"


def build(model: nn.Module, settings: Optim, device: torch.device) -> torch.optim.Optimizer:
    """The optimiser over all parameters that learn."""
    groups = parameter_groups(
        model, settings.weight_decay, settings.layer_decay, apart=settings.name == "muon"
    )
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "lamb": Lamb,
        "muon": Muon,
        "sgd": torch.optim.SGD,
    }
    options: dict[str, Any] = {"lr": settings.lr}
    if settings.name in ("sgd", "muon"):
        options["momentum"] = settings.momentum
    if settings.name != "sgd":
        options["betas"] = (settings.beta1, settings.beta2)
    if settings.name in ("adam", "adamw") and device.type == "cuda":
        options["fused"] = True
    return kinds[settings.name](groups, **options)


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float, apart: bool = False
) -> list[dict[str, Any]]:
    """Parameters with the same decay and the same factor (`scale`) on the learning rate.

    The `matrices` of the blocks are set `apart` where an optimiser treats them otherwise.
    """
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    last = depth_of(model) + 1
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in learning.items():
        decays = weight_decay if is_kernel(name, parameter) else 0.0
        # A head alone, on a frozen backbone, has no layers below it.
        scale = layer_decay ** (last - layer_of(name, last)) if last > 1 else 1.0
        matrix = apart and "blocks." in name and parameter.ndim == 2 and is_kernel(name, parameter)
        groups[decays, scale, matrix].append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "scale": scale}
        | ({"matrices": True} if matrix else {})
        for (decay, scale, matrix), parameters in groups.items()
    ]


def is_kernel(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix or a convolution."""
    return parameter.ndim >= 2 and not re.search(NOT_KERNELS, name)


def depth_of(model: nn.Module) -> int:
    """How many blocks (or stages, in a convolutional network) lie between stem and head."""
    return max((layer_of(name, 0) for name, _ in model.named_parameters()), default=0)


def layer_of(name: str, last: int) -> int:
    """The layer a parameter belongs to: 0 is the stem, block k is k + 1, the head is `last`."""
    name = name.removeprefix("model.")  # as an objective holds its model
    if match := re.match(r"(?:blocks|stages)\.(\d+)\.", name):
        return int(match[1]) + 1
    return last if re.match(r"(head|hidden|norm|pool)\b", name) else 0
