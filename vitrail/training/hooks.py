"""What happens between two updates: logging, validation, checkpoints, and the end of a run."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.console import TrainingBar
from vitrail.data.dataset import Splits
from vitrail.data.loader import TrainingBatch
from vitrail.runs import Run
from vitrail.training import checkpoint
from vitrail.training.inputs import image_sheet
from vitrail.training.loop import Loop
from vitrail.training.tracking import Track

SKIPPED_SHOWN = 5
"""Images that cannot be decoded are named up to this number; run.json lists all of them."""
_SHEET = 32
"""Images on the sheet of augmented training images."""


@dataclass
class Hooks:
    """Called after every update; returns whether to stop."""

    run: Run
    config: Config
    data: Splits
    save_model: Callable[[Path], None]
    """Writes the current weights; all processes must call it together."""
    fewshot: Callable[[], dict[str, Any]] | None
    """Few-shot accuracy of the current weights; all processes must call it together."""
    cost: Callable[[int], dict[str, Any]]
    """The cost of the run at a step; all processes must call it together."""
    flops_per_image: float
    bar: TrainingBar
    track: Track
    skipped: dict[str, str]
    """Images that could not be decoded, and the reason."""
    done: float
    """The share of the run that was done at the last call."""
    stop_signal: str = ""
    """The signal that stops this process."""
    losses: list[Tensor] = field(default_factory=list)
    logged: float = field(default_factory=time.perf_counter)
    saved: float = field(default_factory=time.perf_counter)

    def __call__(self, loop: Loop, batch: TrainingBatch) -> bool:
        counters = loop.state.counters
        done_before, self.done = self.done, loop.done
        if counters.step == 1:
            self._draw_sheet(loop, batch)
        self.note_skipped(batch.broken)
        self.losses.append(loop.loss)
        self.bar.step(counters.step, loop.total_steps, counters.seconds)
        # Processes may only communicate at steps that all of them agree on.
        is_sync_step = counters.step % self.config.system.log_steps == 0 or self.done >= 1
        if is_sync_step:
            self._log(loop)
        pause = time.perf_counter()
        evaluations = self.config.train.evaluations
        before, now = (int(x * evaluations + 1e-9) for x in (done_before, self.done))
        if now > before and self.data.val is not None:
            self.validate(loop)
        stopping = self._is_stopping(loop, is_sync_step)
        if now > before or stopping or self._checkpoint_due(loop, is_sync_step):
            self.save(loop)
        # Validation and writing are not training: the speed leaves them out.
        self.logged += time.perf_counter() - pause
        return stopping

    @contextmanager
    def watch_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM stop the run after the current update; a second Ctrl-C interrupts."""

        def note(number: int, frame: Any) -> None:
            self.stop_signal = signal.Signals(number).name
            signal.signal(signal.SIGINT, signal.default_int_handler)

        try:
            before = {sig: signal.signal(sig, note) for sig in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: a notebook server's, say
            yield
            return
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def note_skipped(self, images: Sequence[tuple[str, str]]) -> None:
        """Names images that could not be decoded, once each."""
        for name, reason in images:
            if name not in self.skipped:
                self.skipped[name] = reason
                if len(self.skipped) <= SKIPPED_SHOWN:
                    self.run.say(f"skipped  {reason}")

    def _draw_sheet(self, loop: Loop, batch: TrainingBatch) -> None:
        """The first training images, as the model gets them."""
        objective = loop.state.objective
        if self.run.writes and objective.inputs is not None:
            images, _ = objective.prepare(batch, slice(0, min(_SHEET, len(batch))))
            sheet = image_sheet(images, objective.inputs.preprocessing)
            sheet.save(self.run.folder / "augmented.jpg", quality=85)

    def _log(self, loop: Loop) -> None:
        loop.check_finite()
        counters = loop.state.counters
        loop.devices.synchronize()
        now = time.perf_counter()
        passed = max(now - self.logged, 1e-9)
        speed = len(self.losses) * loop.batch / passed
        waited = loop.waiting.read()
        counters.waited += waited
        peak = loop.devices.peak()
        event = {
            "event": "train",
            "step": counters.step,
            "epoch": self._epoch(loop),
            "seconds": round(counters.seconds, 3),
            **loop.metrics(torch.stack(self.losses).mean()),
            "images_per_second": round(speed, 1),
            # The backward pass costs twice the forward pass.
            "mfu": round(3 * self.flops_per_image * speed / peak, 4) if peak else None,
            "input_wait": round(min(waited / passed, 1.0), 4),
        }
        self.losses.clear()
        self.logged = now
        self.run.log_event(**event)
        self.track(event)
        self.bar.update(counters.step, loop.total_steps, event)

    def _epoch(self, loop: Loop) -> float:
        images = len(self.data.part("train").targets)
        return round(loop.state.counters.step * loop.batch / images, 4)

    def validate(self, loop: Loop) -> None:
        """Evaluates on val; with `train.keep=best`, saves the model if it is the best so far."""
        loop.check_finite()
        counters, train = loop.state.counters, self.config.train
        balanced = train.class_weights == "balanced"
        with loop.state.averaged():
            metrics = self._measure(loop)
            best = counters.best
            better = best is None or score(metrics, balanced) > score(best, balanced)
            counters.since_best = 0 if better else counters.since_best + 1
            if better:
                counters.best = {"step": counters.step, "epoch": self._epoch(loop), **metrics}
                if train.keep == "best":
                    self.save_model(self.run.weights)
            if train.keep_all:
                self.save_model(self.run.weights_at(counters.step))
        event = {"event": "val", "step": counters.step, "epoch": self._epoch(loop)}
        event |= {"seconds": round(counters.seconds, 3), **metrics}
        self.run.log_event(**event)
        self.track(event)
        line = (
            f"{self.bar.heading(counters.step, loop.total_steps)}  "
            f"epoch {event['epoch']:.1f}  val loss {metrics['loss']:.3f}"
        )
        if "fewshot" in metrics:
            line += f"  {train.fewshot}-shot {100 * metrics['fewshot']:.2f}%"
        if "top1" in metrics and counters.best is not None:
            line += f"  val {100 * metrics['top1']:.2f}%"
            if balanced:
                line += f"  balanced {100 * metrics['balanced_accuracy']:.2f}%"
            line += f"  best {100 * counters.best['top1']:.2f}%"
        self.run.say(line + "  *" * better)

    def _measure(self, loop: Loop) -> dict[str, Any]:
        """The figures of the current weights on val."""
        metrics = loop.state.objective.validate()
        self.note_skipped(metrics.pop("skipped", ()))
        if self.fewshot is not None:
            metrics |= self.fewshot()
            self.note_skipped(metrics.pop("skipped"))
        return metrics

    def _is_stopping(self, loop: Loop, is_sync_step: bool) -> bool:
        """Whether to end early: by a signal, or because val no longer improves."""
        counters, patience = loop.state.counters, self.config.train.patience
        if patience and counters.since_best >= patience and self.done < 1:
            counters.stopped_early = True
            return True
        if loop.devices.world == 1:
            return bool(self.stop_signal)
        if is_sync_step and loop.devices.any(bool(self.stop_signal)):
            self.stop_signal = self.stop_signal or "SIGTERM"
            return True
        return False

    def _checkpoint_due(self, loop: Loop, is_sync_step: bool) -> bool:
        system = self.config.system
        if self.done >= 1:
            return True
        if system.checkpoint_steps:
            return loop.state.counters.step % system.checkpoint_steps == 0
        late = time.perf_counter() - self.saved > 60 * system.checkpoint_minutes
        return is_sync_step and loop.devices.any(late)

    def save(self, loop: Loop) -> None:
        """Writes last.pt, unless the loss is no longer a number."""
        loop.check_finite()
        run, counters = self.run, loop.state.counters
        tensors = loop.state.tensors()
        cost = self.cost(counters.step)
        skipped = loop.devices.union(self.skipped)
        if run.writes:
            checkpoint.write(run.checkpoint, run.previous_checkpoint, tensors, counters)
            seconds = round(counters.spent, 1)
            run.update(step=counters.step, seconds=seconds, best=counters.best, cost=cost)
            run.record_broken_images(skipped)
        loop.devices.barrier()
        self.saved = time.perf_counter()


def score(metrics: Mapping[str, Any], balanced: bool = False) -> tuple[float, float]:
    """Sort key for the best evaluation: highest accuracy, then lowest loss, since a small val split
    often ties on accuracy. Without labels there is only the loss.

    With class weights, accuracy is balanced accuracy: weighted training gives up correct
    predictions in large classes for others in small ones.
    """
    accuracy = metrics.get("balanced_accuracy") if balanced else None
    return metrics.get("top1", 0.0) if accuracy is None else accuracy, -metrics["loss"]
