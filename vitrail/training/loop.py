"""The only training loop; objective, batches and hooks are given to it."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.loader import TrainingBatch, derive
from vitrail.devices import Devices, syncing
from vitrail.errors import FailureError, out_of_memory
from vitrail.training.checkpoint import Counters, Learner
from vitrail.training.optim import Schedule

Prepare = Callable[[TrainingBatch, slice], tuple[Float[Tensor, "r ..."], Tensor]]
"""From some rows of a batch to what the objective takes: normalized, perhaps mixed or masked."""


class DivergedError(FailureError):
    """The loss is no longer a number; other settings may do better."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is: a number of updates, or a time budget that ends it."""

    steps: int = 0
    seconds: float = 0.0

    def done(self, counters: Counters) -> float:
        """The share of the run that lies behind."""
        if self.seconds:
            return counters.seconds / self.seconds
        return counters.step / self.steps

    def less(self, seconds: float) -> "Length":
        """What is left of a time budget after the time spent before the first update; at least a
        tenth, or a budget that features used up would leave an untrained head."""
        return replace(self, seconds=max(self.seconds - seconds, 0.1 * self.seconds))

    def total(self, counters: Counters) -> int:
        """Updates in all, estimated where the clock decides."""
        if not self.seconds:
            return self.steps
        # The last step of a time budget ends after it.
        share = max(self.done(counters), 1e-9)
        return max(counters.step, round(counters.step / share), 1)


@dataclass
class Loop:
    """Updates until the run is long enough, or until `after_step` says to stop."""

    learner: Learner
    devices: Devices
    schedule: Schedule
    length: Length
    batch: int
    """Images per update, over all processes."""
    clip: float
    seed: int
    microbatch: int
    """Images that one process works on at a time; 0 begins with all of its share."""
    prepare: Prepare
    counters: Counters = field(default_factory=Counters)
    lr: float = 0.0
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))

    def run(
        self, batches: Iterator[TrainingBatch], after_step: Callable[["Loop", TrainingBatch], bool]
    ) -> None:
        """Goes through the batches; `after_step` logs, evaluates, saves, and may end the run."""
        began = time.perf_counter() - self.counters.seconds
        while self.length.done(self.counters) < 1:
            batch = next(batches)
            self.step(batch)
            elapsed = time.perf_counter() - began
            # The clock of one process decides for all, or they would end at different steps.
            budget = self.length.seconds > 0
            self.counters.seconds = self.devices.largest(elapsed) if budget else elapsed
            if after_step(self, batch):
                return

    def step(self, batch: TrainingBatch) -> None:
        """One update."""
        step = self.counters.step
        self.lr = self.schedule(step, self.length.done(self.counters))
        for group in self.learner.optimizer.param_groups:
            group["lr"] = self.lr * group.get("scale", 1.0)
        self.gradients(batch)
        scaler = self.learner.scaler
        scaler.unscale_(self.learner.optimizer)
        parameters = self.learner.task.parameters()
        self.norm = nn.utils.clip_grad_norm_(parameters, self.clip or math.inf)
        scaler.step(self.learner.optimizer)
        scaler.update()
        if self.learner.ema is not None:
            self.learner.ema.update(step)
        self.counters.step = step + 1

    def gradients(self, batch: TrainingBatch) -> None:
        """Forward and backward, in parts as large as fit into memory."""
        share = len(batch)
        while True:
            self.learner.optimizer.zero_grad(set_to_none=True)
            # Dropout and drop path are drawn in each process for itself, but depend on the step
            # alone, so that a resumed run repeats them.
            torch.manual_seed(derive(self.seed, self.counters.step, self.devices.rank))
            try:
                self.loss = self.accumulate(batch, min(self.microbatch or share, share))
                return
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                self.shrink(share)

    def accumulate(self, batch: TrainingBatch, part: int) -> Tensor:
        """The gradients of the batch's mean loss, and that loss."""
        share = len(batch)
        task, devices = self.learner.task, self.devices
        total = torch.zeros((), device=devices.device)
        for start in range(0, share, part):
            inputs, targets = self.prepare(batch, slice(start, min(start + part, share)))
            # What a recorded graph gave last time may now be written over.
            torch.compiler.cudagraph_mark_step_begin()
            with syncing(task, last=start + part >= share):
                with devices.autocast():
                    loss = task(inputs, targets).sum() / share
                self.learner.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def shrink(self, share: int) -> None:
        """Halves what is worked on at a time, after an out-of-memory."""
        before = min(self.microbatch or share, share)
        if before == 1 or self.devices.world > 1:
            # Other processes may be waiting for this one's gradients: there is no way back.
            advice = "use a smaller model or data.size, or system.recompute=true"
            if before > 1:
                advice = f"set system.microbatch={before // 2}"
            raise FailureError(
                f"out of memory with {before} images at a time on {self.devices.hardware()}; "
                f"{advice}"
            )
        self.microbatch = before // 2
        torch.cuda.empty_cache()

    def check(self) -> None:
        """Stops a run whose loss is no longer a number."""
        loss = self.loss.item()
        # With float16, a gradient beyond all bounds only skips an update.
        bounded = self.learner.scaler.is_enabled() or bool(self.norm.isfinite())
        if not math.isfinite(loss) or not bounded:
            loss = loss if bounded else math.nan
            raise DivergedError(
                f"loss is {loss} at step {self.counters.step}; try a lower optim.lr (now "
                f"{self.schedule.peak:g}), a longer optim.warmup, or system.precision=bfloat16"
            )

    def figures(self) -> dict[str, Any]:
        """Where the run is, for a log."""
        loss = self.devices.mean(self.loss.clone())
        norm = self.norm.full_tensor() if hasattr(self.norm, "full_tensor") else self.norm
        return {"loss": loss.item(), "lr": self.lr, "grad_norm": norm.item()}
