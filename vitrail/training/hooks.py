"""What happens between two updates: logging, evaluation, checkpoints, and the end of a run."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitrail.console import TrainingBar
from vitrail.data.loader import TrainingBatch
from vitrail.runs import Run
from vitrail.training import checkpoint
from vitrail.training.loop import Loop
from vitrail.training.tracking import Track

NAMED_BROKEN = 5
"""Broken pictures that are named on the terminal; run.json names them all."""


@dataclass
class Signals:
    """Whether someone asked this process to stop."""

    asked: str = ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM become a wish that the loop sees; a second Ctrl-C interrupts."""

        def note(number: int, frame: Any) -> None:
            self.asked = signal.Signals(number).name
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


@dataclass
class Hooks:
    """Called after every update; says when to stop."""

    run: Run
    images: int
    """In the training set."""
    evaluations: int
    patience: int
    validate: Callable[[], dict[str, Any]] | None
    keep_best: bool
    balanced: bool
    """Whether all classes count alike in choosing the best evaluation."""
    log_steps: int
    checkpoint_steps: int
    checkpoint_seconds: float
    bar: TrainingBar
    track: Track
    signals: Signals
    first: Callable[[TrainingBatch], None] = lambda batch: None
    """Sees the first batch of a run."""
    keep: Callable[[], None] = lambda: None
    """Writes the present weights as the model."""
    flops_per_image: float = 0.0
    cost: Callable[[int], dict[str, Any]] = lambda step: {}
    """What the run has cost at a step; all processes must ask together."""
    broken: dict[str, str] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    done: float = 0.0
    """The share of the run that lay behind at the last look."""
    logged: float = field(default_factory=time.perf_counter)
    saved: float = field(default_factory=time.perf_counter)

    def __call__(self, loop: Loop, batch: TrainingBatch) -> bool:
        counters = loop.counters
        done_before, self.done = self.done, loop.length.done(counters)
        if counters.step == 1:
            self.first(batch)
        self.note_broken(batch.broken)
        self.losses.append(loop.loss)
        self.bar.step(counters.step, loop.length.total(counters), counters.seconds)
        # Processes may only confer at steps that all of them know.
        meeting = counters.step % self.log_steps == 0 or self.done >= 1
        if meeting:
            self.log(loop)
        pause = time.perf_counter()
        before, now = (int(x * self.evaluations + 1e-9) for x in (done_before, self.done))
        evaluating = now > before
        if evaluating and self.validate is not None:
            self.evaluate(loop)
        stopping = self.stopping(loop, meeting)
        if evaluating or stopping or self.due(loop, meeting):
            self.save(loop)
        # Looking and writing are not learning: the speed leaves them out.
        self.logged += time.perf_counter() - pause
        return stopping

    def note_broken(self, pictures: Sequence[tuple[str, str]]) -> None:
        """Names pictures that could not be decoded, once each."""
        for name, reason in pictures:
            if name not in self.broken:
                self.broken[name] = reason
                if len(self.broken) <= NAMED_BROKEN:
                    self.run.say(f"skipped  {reason}")

    def log(self, loop: Loop) -> None:
        """One line of metrics."""
        loop.check()
        counters = loop.counters
        loop.loss = torch.stack(self.losses).mean()
        loop.devices.synchronize()
        now = time.perf_counter()
        speed = len(self.losses) * loop.batch / max(now - self.logged, 1e-9)
        peak = loop.devices.peak()
        figures = {
            "event": "train",
            "step": counters.step,
            "epoch": self.epoch(loop),
            "seconds": round(counters.seconds, 3),
            **loop.figures(),
            "images_per_second": round(speed, 1),
            # The backward pass costs twice the forward pass.
            "mfu": round(3 * self.flops_per_image * speed / peak, 4) if peak else None,
        }
        self.losses.clear()
        self.logged = now
        self.run.event(**figures)
        self.track(figures)
        self.bar.update(counters.step, loop.length.total(counters), figures)

    def epoch(self, loop: Loop) -> float:
        """Passes over the training set so far."""
        return round(loop.counters.step * loop.batch / self.images, 4)

    def evaluate(self, loop: Loop) -> None:
        """Looks at val, and keeps the weights where they are the best so far."""
        assert self.validate is not None
        loop.check()
        counters = loop.counters
        with loop.learner.averaged():
            found = self.validate()
            self.note_broken(found.pop("broken", ()))
            better = self.better(loop, found)
        told = {"event": "val", "step": counters.step, "epoch": self.epoch(loop)}
        told |= {"seconds": round(counters.seconds, 3), **found}
        self.run.event(**told)
        self.track(told)
        best = counters.best or found
        line = (
            f"{self.bar.heading(counters.step, loop.length.total(counters))}  "
            f"epoch {told['epoch']:.1f}  val loss {found['loss']:.3f}"
        )
        if "top1" in found:
            line += f"  val {100 * found['top1']:.2f} %"
            if self.balanced:
                line += f"  balanced {100 * found['balanced_accuracy']:.2f} %"
            line += f"  best {100 * best['top1']:.2f} %"
        self.run.say(line + "  *" * better)

    def better(self, loop: Loop, found: dict[str, Any]) -> bool:
        """Whether this is the best evaluation so far; if so, it and its weights are kept."""
        counters = loop.counters
        better = counters.best is None or (
            score(found, self.balanced) > score(counters.best, self.balanced)
        )
        if better:
            counters.best = {"step": counters.step, "epoch": self.epoch(loop), **found}
            counters.since_best = 0
            if self.keep_best:
                self.keep()
        else:
            counters.since_best += 1
        return better

    def stopping(self, loop: Loop, meeting: bool) -> bool:
        """Whether to end before time: asked to, or no longer getting better."""
        if self.patience and loop.counters.since_best >= self.patience and self.done < 1:
            loop.counters.stopped_early = True
            return True
        if loop.devices.world == 1:
            return bool(self.signals.asked)
        if meeting and loop.devices.any(bool(self.signals.asked)):
            self.signals.asked = self.signals.asked or "SIGTERM"
            return True
        return False

    def due(self, loop: Loop, meeting: bool) -> bool:
        """Whether it is time for a checkpoint."""
        if self.done >= 1:
            return True
        if self.checkpoint_steps:
            return loop.counters.step % self.checkpoint_steps == 0
        late = time.perf_counter() - self.saved > self.checkpoint_seconds
        return meeting and loop.devices.any(late)

    def save(self, loop: Loop) -> None:
        """Writes last.pt, unless the weights are beyond repair."""
        loop.check()
        state = loop.learner.state()
        cost = self.cost(loop.counters.step)
        broken = loop.devices.union(self.broken)
        if self.run.writes:
            checkpoint.write(
                self.run.checkpoint, self.run.previous_checkpoint, state, loop.counters
            )
            self.run.update(
                step=loop.counters.step,
                seconds=round(loop.counters.spent, 1),
                best=loop.counters.best,
                cost=cost,
            )
            self.run.name_broken(broken)
        loop.devices.wait()
        self.saved = time.perf_counter()


def score(found: Mapping[str, Any], balanced: bool = False) -> tuple[float, float]:
    """What the best evaluation has most of: accuracy, then the least loss, since a small val part
    often ties on accuracy. Without labels there is only the loss.

    With class weights, accuracy is that of all classes alike: weighted training gives up right
    answers in large classes for others in small ones.
    """
    accuracy = found.get("balanced_accuracy") if balanced else None
    return found.get("top1", 0.0) if accuracy is None else accuracy, -found["loss"]
