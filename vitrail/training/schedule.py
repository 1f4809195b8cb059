"""The learning rate as a function of how far a run has come: there is no state to resume."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then a decay over what remains of the run."""

    peak: float
    warmup: int = 0
    """Updates."""
    decay: Literal["cosine", "linear", "staircase", "constant"] = "cosine"
    floor: float = 0.0
    milestones: tuple[float, ...] = (0.3, 0.6, 0.9)

    def __call__(self, step: int, done: float) -> float:
        """The rate at an update, of which `done` says what share of the run lies before it.

        As in the reference: `done` counts from the end of the warm-up, and the warm-up multiplies.
        """
        warm = min(1.0, step / self.warmup) if self.warmup else 1.0
        # With w of the run in the warm-up, a staircase still falls at shares of the whole run.
        behind = done if self.decay == "staircase" else self.after_warmup(step, done)
        return warm * self.falling(min(max(behind, 0.0), 1.0))

    def after_warmup(self, step: int, done: float) -> float:
        """The share of what follows the warm-up that is done."""
        if step <= self.warmup or done <= 0:
            return 0.0
        warm = self.warmup * done / step  # the warm-up as a share of the run
        return (done - warm) / (1 - warm) if warm < 1 else 1.0

    def falling(self, done: float) -> float:
        """The rate without the warm-up."""
        if self.decay == "constant":
            return self.peak
        if self.decay == "staircase":
            return self.peak * 0.1 ** bisect_right(self.milestones, done)
        left = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.floor + (self.peak - self.floor) * left
