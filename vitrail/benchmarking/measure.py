"""One model on one device: the speed at each batch size, and the largest batch that fits."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.devices import Devices, peak_memory, reset_peak
from vitrail.errors import FailureError, VitrailError, out_of_memory

BLOCK_SECONDS = 0.02
"""Calls are timed together until they take this long, so that the clock's resolution is enough."""
ROUNDS = (3, 30)
"""Timed blocks, at least and at most."""
MAX_BATCH = 1 << 15
"""Some kernels number the images of a batch in 16 bits."""
_DOUBLINGS = 16
"""From one image to the largest batch; each gets this share of the remaining time."""
_MIN_SPEEDUP = 1.01
"""Doubling stops when two doublings bring less than this."""
_ERRORS = {
    "alloc_failed": "memory",
    "integer out of range": "kernel",
    "unable to find an engine": "kernel",
    "unable to find a valid cudnn algorithm": "kernel",
    "invalid configuration argument": "kernel",
}
"""What CUDA reports for a batch that has no room, or no kernel."""
FAILURES = {"memory": "out of memory at", "kernel": "no kernel for"}

Call = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """A model's pass over random images: forward, or forward and backward as in training."""

    model: nn.Module
    where: Devices
    shape: tuple[int, int, int]
    """Channels, rows and columns of an image."""
    train: bool = False

    @property
    def min_batch(self) -> int:
        """In training, batch norm needs two images."""
        normed = any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules())
        return 2 if self.train and normed else 1

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and images: training uses float32 and autocast."""
        return torch.float32 if self.train else self.where.precision

    def prepared(self) -> "Workload":
        """Move the model to the device."""
        self.model.to(self.where.device, self.dtype).train(self.train)
        return self

    def call(self, batch: int) -> Call:
        """The pass over one batch, which is allocated now."""
        images = torch.randn(batch, *self.shape, device=self.where.device, dtype=self.dtype)
        return lambda: self._step(images) if self.train else self._forward(images)

    @torch.inference_mode()
    def _forward(self, images: Tensor) -> None:
        self.model(images)

    def _step(self, images: Tensor) -> None:
        self.model.zero_grad(set_to_none=True)
        with self.where.autocast():
            logits = self.model(images)
        targets = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        F.cross_entropy(logits.float(), targets).backward()


@dataclass(frozen=True)
class Timing:
    """The measurement of one batch size."""

    batch: int
    seconds: float
    peak: int
    """Bytes."""

    @property
    def speed(self) -> float:
        """Images per second."""
        return self.batch / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "images_per_second": round(self.speed, 2),
            "peak_memory_bytes": self.peak,
        }


def _mean_seconds(call: Call, where: Devices, times: int) -> float:
    where.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    where.synchronize()
    return (time.perf_counter() - start) / times


def interleaved_seconds(calls: Sequence[Call], where: Devices, budget: float) -> list[list[float]]:
    """Seconds of each call in every round; the calls alternate, so that noise affects all of them.

    The first calls warm up: kernels are chosen and memory is allocated.
    """
    for call in calls:
        _mean_seconds(call, where, 1)
    first = [_mean_seconds(call, where, 1) for call in calls]
    times = [max(1, math.ceil(BLOCK_SECONDS / max(seconds, 1e-6))) for seconds in first]
    rounds: list[list[float]] = []
    end = time.perf_counter() + budget
    least, most = ROUNDS
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() < end):
        rounds.append([_mean_seconds(c, where, n) for c, n in zip(calls, times, strict=True)])
    return rounds


def latency(work: Workload, budget: float) -> float:
    """Median seconds for a single image."""
    call = work.call(1)
    _mean_seconds(call, work.where, 3)
    end = time.perf_counter() + budget
    seconds: list[float] = []
    while len(seconds) < 5 or (len(seconds) < 200 and time.perf_counter() < end):
        seconds.append(_mean_seconds(call, work.where, 1))
    return statistics.median(seconds)


def _time_batch(work: Workload, batch: int, budget: float) -> Timing:
    reset_peak(work.where.device)
    rounds = interleaved_seconds([work.call(batch)], work.where, budget)
    seconds = statistics.median(row[0] for row in rounds)
    return Timing(batch, seconds, peak_memory(work.where.device))


def time_batches(
    work: Workload, batches: Sequence[int], seconds: float, max_bytes: int
) -> tuple[list[Timing], str]:
    """The speed at each batch size, or at doubled ones until that no longer helps.

    Also returns what ended it: memory, kernel, limit, level or time. It ends early when the device
    is out of memory, or when the next batch would take more than `max_bytes` (0: no bound) or more
    than the remaining time. With a bound, the two smallest batches are timed first, to predict the
    memory of larger ones.
    """
    least = work.min_batch
    if min(batches, default=least) < least:
        raise VitrailError(f"--batches {min(batches)}: batch norm needs 2 images or more to train")
    doubled = [least * 2**k for k in range(_DOUBLINGS) if least * 2**k <= MAX_BATCH]
    probes = {least, 2 * least} if batches and max_bytes else set()
    timings: list[Timing] = []
    ended_by = "limit"
    end = time.perf_counter() + seconds
    for batch in sorted({*batches, *probes}) or doubled:
        left = end - time.perf_counter()
        if timings and max_bytes and _expected_bytes(timings, batch) > max_bytes:
            ended_by = "memory"
            break
        if timings and not batches and (reason := _enough(timings, batch, left)):
            ended_by = reason
            break
        timing, failure = attempt(
            lambda batch=batch, left=left: _time_batch(work, batch, min(1.0, left / _DOUBLINGS))
        )
        if timing is None:
            ended_by = failure
            break
        timings.append(timing)
    smallest = min(batches, default=least)
    if not timings or timings[-1].batch < smallest:
        bound = f" within {max_bytes / 2**30:.1f} GiB" if max_bytes else ""
        hardware = work.where.hardware()
        raise FailureError(f"{FAILURES[ended_by]} batch size {smallest} on {hardware}{bound}")
    return timings, ended_by


def _enough(timings: Sequence[Timing], batch: int, left: float) -> str:
    """Why a larger batch is not worth timing; empty if it is."""
    speeds = [timing.speed for timing in timings]
    if len(speeds) > 3 and max(speeds[-2:]) < _MIN_SPEEDUP * max(speeds[:-2]):
        return "level"
    return "time" if 5 * batch / speeds[-1] > left else ""


def _bytes_per_image(timings: Sequence[Timing]) -> float:
    """How much the peak grew with each image; zero if unknown."""
    first, last = timings[0], timings[-1]
    return max(0.0, (last.peak - first.peak) / max(1, last.batch - first.batch))


def _expected_bytes(timings: Sequence[Timing], batch: int) -> float:
    last = timings[-1]
    return last.peak + (batch - last.batch) * _bytes_per_image(timings)


def attempt(act: Callable[[], T]) -> tuple[T | None, str]:
    """The result of `act`; or None, and whether the device lacks memory or a kernel for it."""
    try:
        return act(), ""
    except RuntimeError as error:
        text = str(error).lower()
        failure = next((kind for known, kind in _ERRORS.items() if known in text), "")
        failure = "memory" if out_of_memory(error) else failure
        if not failure:
            raise
    # Not in the handler, where the traceback would keep the tensors alive.
    release_memory()
    return None, failure


def release_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest_batch(work: Workload, fits: int, seconds: float) -> tuple[int, str]:
    """The largest batch that fits on a GPU, to one percent, by doubling and then bisection.

    Also returns what ended the search: memory, kernel, limit or time. `fits` is known to fit.
    """
    end = time.perf_counter() + seconds
    low, high, ended_by = fits, 0, ""
    while not high or high - low > max(1, low // 100):
        if not high and 2 * low > MAX_BATCH:
            return low, "limit"
        if time.perf_counter() > end:
            return low, "time"
        batch = (low + high) // 2 if high else 2 * low
        release_memory()
        _, failure = attempt(lambda batch=batch: _mean_seconds(work.call(batch), work.where, 1))
        if failure:
            high, ended_by = batch, failure
        else:
            low = batch
    return low, ended_by


def extrapolated_batch(timings: Sequence[Timing], max_bytes: int) -> tuple[int | None, str]:
    """The batch at which a CPU would reach its memory budget; it is not tried."""
    each = _bytes_per_image(timings)
    if not each:
        return None, "unknown"
    room = max(0, max_bytes - timings[-1].peak)
    return min(MAX_BATCH, timings[-1].batch + int(room / each)), "extrapolation"
