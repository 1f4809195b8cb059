"""What a run costs: arithmetic by the paper's rule, device time, energy and memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vitrail.config import Config
from vitrail.console import duration
from vitrail.devices import Devices, energy, peak_memory, reset_peak
from vitrail.model import Classifier
from vitrail.runs import Run, find_run
from vitrail.training.build import planned_steps
from vitrail.weights.native import COSTS, read_cost
from vitrail.weights.published import model_cost

DAY = 86_400


def exaflops(gmacs: float, images: int) -> float:
    """Compute of a training run by the rule behind the paper's Table 6.

    A multiply-accumulate of the forward pass is two operations, and the backward pass costs twice
    the forward pass: six for every image seen.
    """
    return 6 * gmacs * 1e9 * images / 1e18


_COMPILE_SECONDS = 60.0
"""Seconds to compile a ViT, forward and backward, with an empty cache."""
_COMPILED_GAIN = 0.2
"""Share of the training time that compiling saves."""
UTILIZATION = 0.35
"""Share of a GPU's peak FLOP/s that training without compiling reaches."""
_ASSUMED_FLOPS = 100e12
"""Peak of a GPU that `Devices.peak` does not know, or in float32."""
_LAYER_SECONDS = 2e-4
"""An update takes at least this long for each layer with weights, however small the batch: kernels
must be launched."""


def estimated_seconds(steps: int, flops: float, layers: int, peak: float) -> float:
    """Length of a run on a GPU; `flops` are those of an update."""
    return steps * max(flops / (UTILIZATION * peak), _LAYER_SECONDS * layers)


def plan_compilation(
    config: Config, images: int, model: Classifier, devices: Devices
) -> tuple[bool, str]:
    """Whether to compile the model, and a note for the terminal.

    `system.compile=auto` compiles on a GPU if that saves more time than it takes. Fused kernels
    leave little to gain, except in a ResNet.
    """
    choice, length = config.system.compile, 60 * config.train.minutes
    if config.train.freeze or not choice or (choice == "auto" and devices.device.type != "cuda"):
        return False, ""
    if choice != "auto":
        return True, "compiled"
    if model.fused and getattr(model.architecture, "backbone", ()) is None:
        return False, "fused kernels"
    if not length:
        flops = 6e9 * model_cost(model.architecture).gmacs * config.train.batch
        layers = sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules())
        peak = devices.peak() or devices.world * _ASSUMED_FLOPS
        length = estimated_seconds(planned_steps(config, images), flops, layers, peak)
    compiled = _COMPILED_GAIN * length > _COMPILE_SECONDS
    note = "compiled" if compiled else "not compiled"
    return compiled, f"{note} (auto: about {duration(length)} of training)"


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Measures one session of a run and adds the cost of earlier ones."""

    devices: Devices
    gmacs: float
    """GMACs of one image's forward pass, at the training size."""
    trained_gmacs: float
    """GMACs of the part that is trained: only the head if the backbone is frozen."""
    batch: int
    before: Mapping[str, Any]
    """The cost of earlier sessions, as it is written."""
    joules: Callable[[], float | None]
    """Energy counted so far, from an arbitrary starting point."""
    joules_at_first: float | None
    pretraining: Mapping[str, float] | None = None
    """The cost of the initial weights, if known."""
    began: float = field(default_factory=time.perf_counter)

    def read(self, step: int, features: int = 0) -> dict[str, Any]:
        """The cost of the run up to a step, for run.json; `features` were computed in this session.

        All processes must call it together.
        """
        days = self.devices.world * (time.perf_counter() - self.began) / DAY
        sessions = self.before.get("sessions", 0) + 1
        compute = exaflops(self.trained_gmacs, step * self.batch)
        # Without a backward pass, a third.
        features += self.before.get("features_computed", 0)
        compute += exaflops(self.gmacs, features) / 3
        peak = int(self.devices.largest(float(peak_memory(self.devices.device))))
        spent, earlier = self._joules_spent(), self.before["energy_joules"]
        return {
            "gmacs": self.gmacs,
            "images_seen": step * self.batch,
            "features_computed": features,
            "exaflops": compute,
            "device_days": self.before["device_days"] + days,
            "energy_joules": None if None in (earlier, spent) else round(earlier + spent, 1),
            "peak_memory_bytes": max(peak, self.before.get("peak_memory_bytes", 0)),
            "sessions": sessions,
            "pretraining": None if self.pretraining is None else dict(self.pretraining),
        }

    def _joules_spent(self) -> float | None:
        """Joules of all processes' devices in this session; None unless each of them is known."""
        first, now = self.joules_at_first, self.joules()
        spent = 0.0 if first is None or now is None else now - first
        if self.devices.any(first is None or now is None):
            return None
        return self.devices.total(torch.tensor([spent], dtype=torch.float64)).item()


def start_meter(run: Run, devices: Devices, config: Config, model: Classifier) -> Meter:
    reset_peak(devices.device)
    gmacs = model_cost(model.architecture).gmacs
    frozen = config.train.freeze
    before = earlier_cost(run.info())
    if "pretraining" in before:  # the run it was may have changed since
        pretraining = before["pretraining"]
    else:
        pretraining = cost_of_weights(model) if config.model.init else None
    return Meter(
        devices=devices,
        gmacs=gmacs,
        trained_gmacs=_head_gmacs(model.head) if frozen else gmacs,
        batch=config.train.batch,
        before=before,
        joules=lambda: energy(devices.device),
        joules_at_first=energy(devices.device),
        pretraining=pretraining,
    )


def cost_of_weights(model: Classifier) -> dict[str, float] | None:
    """The compute and time spent on loaded weights, all pre-training included; None if unknown.

    The weights of a run cost all of the run, also if the best of them were saved before its end.
    Elsewhere, the header of the file knows what they had cost when they were saved.
    """
    run = None if model.file is None else find_run(model.file)
    if run is not None:
        info = run.info()
        init = info.get("model", {}).get("init", "")
        if total := total_cost(info.get("cost") or {}, init):
            return total
    return _known_cost(model.training_cost)


def total_cost(cost: Mapping[str, Any], init: str) -> dict[str, float] | None:
    """What a run and the training of its initial weights cost; None if one of them is unknown."""
    own = _known_cost(cost)
    before = _known_cost(cost.get("pretraining")) if init else dict.fromkeys(COSTS, 0.0)
    if own is None or before is None:
        return None
    return {name: own[name] + before[name] for name in COSTS}


def _known_cost(stored: Any) -> dict[str, float] | None:
    """Compute and time, unless a file says something else or nothing."""
    try:
        return read_cost(stored)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _head_gmacs(head: nn.Module | None) -> float:
    """GMACs of a linear head: one multiply-accumulate for each weight."""
    matrices = [] if head is None else [p for p in head.parameters() if p.ndim == 2]
    return sum(p.numel() for p in matrices) / 1e9


def earlier_cost(info: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of a run so far; only its time where it was started before costs were recorded.

    What a killed session did after its last checkpoint is repeated, and counted once.
    """
    if cost := info.get("cost"):
        return cost
    seconds = info.get("seconds", 0.0)
    return {
        "device_days": info.get("processes", 1) * seconds / DAY,
        "energy_joules": None if seconds else 0.0,
    }
