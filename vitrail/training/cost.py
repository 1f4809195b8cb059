"""What a run costs: arithmetic by the paper's rule, device time, energy and memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vitrail.config import Config
from vitrail.devices import Devices, energy, peak_memory, reset_peak
from vitrail.model import Classifier
from vitrail.runs import Run
from vitrail.weights.published import count

DAY = 86_400


def exaflops(gmacs: float, images: int) -> float:
    """Compute of a training run by the rule behind the paper's Table 6.

    A multiply-accumulate of the forward pass is two operations, and the backward pass costs twice
    the forward pass: six for every image seen.
    """
    return 6 * gmacs * 1e9 * images / 1e18


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Runs while one session trains, and adds to what earlier sessions cost."""

    where: Devices
    gmacs: float
    """Of one image's forward pass, at the size of training."""
    trained_gmacs: float
    """The part of it that learns: the head's alone where the backbone is frozen."""
    features: int = 0
    """Images whose fixed features this session computed; those of earlier runs are kept."""
    batch: int
    before: Mapping[str, Any]
    """The cost of earlier sessions, as it is written."""
    joules: Callable[[], float | None]
    """Energy counted so far, from any beginning."""
    joules_at_first: float | None
    began: float = field(default_factory=time.perf_counter)

    def read(self, step: int) -> dict[str, Any]:
        """The cost of a run that has come so far, for run.json. All processes must ask together."""
        days = self.where.world * (time.perf_counter() - self.began) / DAY
        sessions = self.before.get("sessions", 0) + 1
        compute = exaflops(self.trained_gmacs, step * self.batch)
        # Without a backward pass, a third.
        features = self.before.get("features_computed", 0) + self.features
        compute += exaflops(self.gmacs, features) / 3
        peak = int(self.where.largest(float(peak_memory(self.where.device))))
        spent, earlier = self.spent(), self.before["energy_joules"]
        return {
            "gmacs": self.gmacs,
            "images_seen": step * self.batch,
            "features_computed": features,
            "exaflops": compute,
            "device_days": self.before["device_days"] + days,
            "energy_joules": None if None in (earlier, spent) else round(earlier + spent, 1),
            "peak_memory_bytes": max(peak, self.before.get("peak_memory_bytes", 0)),
            "sessions": sessions,
        }

    def spent(self) -> float | None:
        """Joules of all processes' devices in this session; None unless each of them is known."""
        first, now = self.joules_at_first, self.joules()
        spent = 0.0 if first is None or now is None else now - first
        if self.where.any(first is None or now is None):
            return None
        return self.where.total(torch.tensor([spent], dtype=torch.float64)).item()


def start(run: Run, where: Devices, config: Config, model: Classifier) -> Meter:
    """A meter for the session that begins now."""
    reset_peak(where.device)
    gmacs = count(model.architecture).gmacs
    frozen = config.train.freeze
    return Meter(
        where=where,
        gmacs=gmacs,
        trained_gmacs=head_gmacs(model.head) if frozen else gmacs,
        batch=config.train.batch,
        before=earlier(run.info()),
        joules=lambda: energy(where.device),
        joules_at_first=energy(where.device),
    )


def head_gmacs(head: nn.Module | None) -> float:
    """Of a linear head: one multiply-accumulate for each weight."""
    matrices = [] if head is None else [p for p in head.parameters() if p.ndim == 2]
    return sum(p.numel() for p in matrices) / 1e9


def earlier(info: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says a run has cost; its time alone where it was begun before costs were kept.

    What a killed session did after its last checkpoint is done again, and counted once.
    """
    if found := info.get("cost"):
        return found
    seconds = info.get("seconds", 0.0)
    return {
        "device_days": info.get("processes", 1) * seconds / DAY,
        "energy_joules": None if seconds else 0.0,
    }
