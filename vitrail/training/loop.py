"""The only training loop. Objective, batches and hooks are given to it."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.draws import derive_seed
from vitrail.data.loader import TrainingBatch
from vitrail.devices import Devices, WaitClock, drop_graphs, sync_gradients
from vitrail.errors import FailureError, out_of_memory
from vitrail.training.checkpoint import TrainState
from vitrail.training.optim import Schedule


class DivergedError(FailureError):
    """The loss is no longer a number; try other settings."""


@dataclass
class Loop:
    """Updates until the schedule is done, or until `after_step` says to stop."""

    state: TrainState
    schedule: Schedule
    devices: Devices
    batch: int
    """Images per update, over all processes."""
    clip: float
    seed: int
    microbatch: int
    """Images that one process works on at a time; 0 begins with all of its share."""
    reuses_outputs: bool = False
    """Whether each pass may overwrite what the one before returned, as with the CUDA graphs of
    torch.compile."""
    lr: float = 0.0
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))
    waiting: WaitClock = field(init=False)
    """Measures how long the device waits for batches."""

    def __post_init__(self) -> None:
        self.waiting = WaitClock(self.devices.device)

    @property
    def done(self) -> float:
        """The share of the run that is done."""
        counters = self.state.counters
        return self.schedule.done(counters.step, counters.seconds)

    @property
    def total_steps(self) -> int:
        """Updates of the whole run, estimated where the clock decides."""
        counters = self.state.counters
        return self.schedule.total_steps(counters.step, counters.seconds)

    def run(
        self,
        batches: Iterator[TrainingBatch],
        after_step: Callable[["Loop", TrainingBatch], bool],
        blank: TrainingBatch | None = None,
    ) -> None:
        """Goes through the batches; `after_step` logs, validates, saves, and may end the run.

        The passes over a `blank` batch come before the first one is loaded, and change nothing.
        """
        counters = self.state.counters
        began = time.perf_counter() - counters.seconds
        if blank is not None:
            self._pass_through(blank)
        while self.done < 1:
            with self.waiting.measure():
                batch = next(batches)
            self.step(batch)
            elapsed = time.perf_counter() - began
            # The slowest clock decides for all processes, or they would end at different steps.
            budget = self.schedule.seconds > 0
            counters.seconds = self.devices.largest(elapsed) if budget else elapsed
            if after_step(self, batch):
                return

    def step(self, batch: TrainingBatch) -> None:
        """One update."""
        state, step = self.state, self.state.counters.step
        self.lr = self.schedule.lr(step, self.done)
        for group in state.optimizer.param_groups:
            group["lr"] = self.lr * group.get("scale", 1.0)
        self._compute_gradients(batch)
        state.scaler.unscale_(state.optimizer)
        self.norm = nn.utils.clip_grad_norm_(state.wrapped.parameters(), self.clip or math.inf)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        if state.ema is not None:
            state.ema.update(step)
        state.counters.step = step + 1

    @torch.no_grad()
    def _pass_through(self, blank: TrainingBatch) -> None:
        """Records CUDA graphs; running statistics stay as they were."""
        buffers = list(self.state.wrapped.buffers())
        before = [buffer.clone() for buffer in buffers]
        with torch.enable_grad():
            self._compute_gradients(blank)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

    def _compute_gradients(self, batch: TrainingBatch) -> None:
        """Forward and backward, in parts as large as fit into memory."""
        share = len(batch)
        while True:
            self.state.optimizer.zero_grad(set_to_none=True)
            # Dropout and drop path are drawn in each process for itself, but depend on the step
            # alone, so that a resumed run repeats them.
            torch.manual_seed(derive_seed(self.seed, self.state.counters.step, self.devices.rank))
            try:
                self.loss = self._accumulate(batch, min(self.microbatch or share, share))
                return
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            # Not in the handler, where the traceback would keep the activations alive.
            self._halve_microbatch(share)

    def _accumulate(self, batch: TrainingBatch, part: int) -> Tensor:
        """The gradients of the batch's mean loss, and that loss."""
        state, devices, share = self.state, self.devices, len(batch)
        total = torch.zeros((), device=devices.device)
        for start in range(0, share, part):
            rows = slice(start, min(start + part, share))
            inputs, targets = state.objective.prepare(batch, rows)
            if self.reuses_outputs:  # asks for torch's compiler, which takes seconds to import
                torch.compiler.cudagraph_mark_step_begin()
            with sync_gradients(state.wrapped, last=start + part >= share):
                with devices.autocast():
                    loss = state.wrapped(inputs, targets).sum() / share
                state.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _halve_microbatch(self, share: int) -> None:
        """After running out of memory."""
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
        drop_graphs(self.state.objective)
        torch.cuda.empty_cache()

    def check_finite(self) -> None:
        """Stops a run whose loss is no longer a number."""
        loss = self.loss.item()
        # With float16, an infinite gradient only skips an update.
        bounded = self.state.scaler.is_enabled() or bool(self.norm.isfinite())
        if not math.isfinite(loss) or not bounded:
            loss = loss if bounded else math.nan
            raise DivergedError(
                f"loss is {loss} at step {self.state.counters.step}; try a lower optim.lr (now "
                f"{self.schedule.peak:g}), a longer optim.warmup, or system.precision=bfloat16"
            )

    def metrics(self, loss: Tensor) -> dict[str, Any]:
        """The mean loss over the processes, learning rate and gradient norm for a log."""
        loss = self.devices.mean(loss.clone())
        norm = self.norm.full_tensor() if hasattr(self.norm, "full_tensor") else self.norm
        return {"loss": loss.item(), "lr": self.lr, "grad_norm": norm.item()}
