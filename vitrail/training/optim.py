"""Parameter groups, optimizers, the learning rate schedule and the EMA."""

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitrail.config import Optim
from vitrail.training.optimizers import Lamb, Muon

# Kernels are what multiplies an input: no biases or norms (one axis), no tokens, no tables of
# positions, which are added.
_NOT_KERNELS = r"(^|\.)(class_token|registers|mask_token|positions|offsets|relative)(\.|$)|probe"


def build_optimizer(
    model: nn.Module, settings: Optim, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer over all parameters that require gradients."""
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

    The `matrices` of the blocks are set `apart` where an optimizer treats them otherwise.
    """
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    last = _depth(model) + 1
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in learning.items():
        decays = weight_decay if is_kernel(name, parameter) else 0.0
        # A head alone, on a frozen backbone, has no layers below it.
        scale = layer_decay ** (last - _layer(name, last)) if last > 1 else 1.0
        matrix = apart and "blocks." in name and parameter.ndim == 2 and is_kernel(name, parameter)
        groups[decays, scale, matrix].append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "scale": scale}
        | ({"matrices": True} if matrix else {})
        for (decay, scale, matrix), parameters in groups.items()
    ]


def is_kernel(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix or a convolution."""
    return parameter.ndim >= 2 and not re.search(_NOT_KERNELS, name)


def _depth(model: nn.Module) -> int:
    """How many blocks (or stages, in a convolutional network) lie between stem and head."""
    return max((_layer(name, 0) for name, _ in model.named_parameters()), default=0)


def _layer(name: str, last: int) -> int:
    """The layer a parameter belongs to: 0 is the stem, block k is k + 1, the head is `last`."""
    name = name.removeprefix("model.")  # as an objective holds its model
    if match := re.match(r"(?:blocks|stages)\.(\d+)\.", name):
        return int(match[1]) + 1
    return last if re.match(r"(head|hidden|norm|pool)\b", name) else 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of a run, in updates or as a time budget, and its learning rate: linear warm-up,
    then a decay over what remains."""

    steps: int = 0
    seconds: float = 0.0
    """A time budget, which decides instead of `steps`."""
    peak: float
    warmup: int = 0
    """Updates."""
    decay: Literal["cosine", "linear", "staircase", "constant"] = "cosine"
    floor: float = 0.0
    milestones: tuple[float, ...] = (0.3, 0.6, 0.9)

    def done(self, step: int, seconds: float) -> float:
        """The share of the run that is done."""
        return seconds / self.seconds if self.seconds else step / self.steps

    def total_steps(self, step: int, seconds: float) -> int:
        """Updates of the whole run, estimated from a time budget."""
        if not self.seconds:
            return self.steps
        # The last step of a time budget ends after it.
        share = max(self.done(step, seconds), 1e-9)
        return max(step, round(step / share), 1)

    def lr(self, step: int, done: float) -> float:
        """The learning rate of an update before which a share `done` of the run lies.

        As in the reference code, decay counts from the end of the warm-up, and the warm-up
        multiplies.
        """
        warm = min(1.0, step / self.warmup) if self.warmup else 1.0
        # A staircase falls at shares of the whole run, warm-up included.
        share = done if self.decay == "staircase" else self._after_warmup(step, done)
        return warm * self._decayed(min(max(share, 0.0), 1.0))

    def _after_warmup(self, step: int, done: float) -> float:
        if step <= self.warmup or done <= 0:
            return 0.0
        warm = self.warmup * done / step  # the warm-up as a share of the run
        return (done - warm) / (1 - warm) if warm < 1 else 1.0

    def _decayed(self, done: float) -> float:
        if self.decay == "constant":
            return self.peak
        if self.decay == "staircase":
            return self.peak * 0.1 ** bisect_right(self.milestones, done)
        left = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.floor + (self.peak - self.floor) * left


class EMA:
    """An exponential moving average of a model's parameters and floating-point buffers, the paper's
    Polyak averaging (section 4.1)."""

    def __init__(self, model: nn.Module, factor: float, ramp: bool = True) -> None:
        self.factor, self.ramp = factor, ramp
        self.live = _floating_point(model)
        self.tensors = {name: x.clone() for name, x in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average after update number `step`, counted from zero.

        With a ramp the factor starts small, or the average would stay close to the initial
        weights for thousands of updates.
        """
        factor = min(self.factor, (1 + step) / (10 + step)) if self.ramp else self.factor
        torch._foreach_lerp_(_local(self.tensors), _local(self.live), 1 - factor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights, for as long as the block runs."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges the model's tensors with the averaged ones."""
        for name, live in self.live.items():
            before = live.clone()
            live.copy_(self.tensors[name])
            self.tensors[name].copy_(before)


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """What this process has of each tensor: parameters may be sharded, buffers are whole."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors.values()]


def _floating_point(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: x.detach() for name, x in tensors.items() if x.is_floating_point()}


def hyperrule(images: int, median_side: float) -> dict[str, Any]:
    """BiT's HyperRule (Kolesnikov et al. 2019): transfer settings that follow from the data alone.

    What is the same for all data is in the recipe finetune/bit_hyperrule. Sizes are the paper's,
    384 out of 448 pixels, where the released code has 480 out of 512. The warm-up, which the paper
    leaves out, is the code's.
    """
    steps, warmup = (500, 100) if images < 20_000 else (10_000, 500)
    if images >= 500_000:
        steps = 20_000
    return {
        "train.steps": steps,
        "optim.warmup": warmup,
        "data.size": 128 if median_side < 96 else 384,
        "augment.mixup": 0.0 if images < 20_000 else 0.1,
    }
