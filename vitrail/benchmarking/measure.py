"""One model on one device: the speed at each batch size, and the largest batch that fits."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.devices import Devices, parallelize, peak_memory, release_memory, reset_peak
from vitrail.errors import FailureError, VitrailError, out_of_memory
from vitrail.model import Classifier

BLOCK_SECONDS = 0.02
"""Calls are timed together until they take this long, so that the clock's resolution is enough."""
ROUNDS = (3, 30)
"""Timed blocks, at least and at most."""
MAX_BATCH = 1 << 15
"""Some kernels number the images of a batch in 16 bits."""
_BATCHES = 16
"""At most, from one image to the largest batch; each gets this share of the remaining time."""
_BATCH_SECONDS = 0.5
"""Measuring for longer than this does not make the median more stable."""
_MIN_SPEEDUP = 1.01
"""The search stops when the last two steps gain less than this."""
_SAME_TIME = 1.25
"""A batch that takes less than this much longer than a smaller one leaves the device idle."""
_ERRORS = {
    "alloc_failed": "memory",
    "integer out of range": "kernel",
    "unable to find an engine": "kernel",
    "unable to find a valid cudnn algorithm": "kernel",
    "invalid configuration argument": "kernel",
}
"""Messages of CUDA for a batch that does not fit in memory, or that no kernel can process."""
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
        """The smallest batch of all processes together; in training, batch norm needs two images in
        each."""
        normed = any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules())
        return self.where.world * (2 if self.train and normed else 1)

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and images: training uses float32 and autocast."""
        return torch.float32 if self.train else self.where.precision

    def prepared(self) -> "Workload":
        """With the model on the device, which processes that train synchronize."""
        model = self.model.to(self.where.device, self.dtype).train(self.train)
        if isinstance(model, Classifier):
            model.fuse(self.where.device, self.where.precision)
        return replace(self, model=parallelize(model, "ddp", self.where) if self.train else model)

    def call(self, batch: int) -> Call:
        """The pass over one batch, of which each process allocates its part now."""
        share = batch // self.where.world
        images = torch.randn(share, *self.shape, device=self.where.device, dtype=self.dtype)
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
    """The time of the slowest process, so that all processes decide by the same figures."""
    where.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    where.synchronize()
    return where.largest((time.perf_counter() - start) / times)


def _seconds_left(end: float, where: Devices) -> float:
    """The same in all processes."""
    return where.largest(end - time.perf_counter())


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
    while len(rounds) < least or (len(rounds) < most and _seconds_left(end, where) > 0):
        rounds.append([_mean_seconds(c, where, n) for c, n in zip(calls, times, strict=True)])
    return rounds


def latency(work: Workload, budget: float) -> float:
    """Median seconds for a single image."""
    call = work.call(1)
    _mean_seconds(call, work.where, 3)
    end = time.perf_counter() + budget
    seconds: list[float] = []
    while len(seconds) < 5 or (len(seconds) < 200 and _seconds_left(end, work.where) > 0):
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
    """The speed at each batch size, or at ever larger ones until that no longer helps.

    Also returns what ended it: memory, kernel, limit, level or time. It ends early when the device
    is out of memory, or when the next batch would take more than `max_bytes` (0: no bound) or more
    than the remaining time. With a bound, the two smallest batches are timed first, to predict the
    memory of larger ones.
    """
    _check_batches(work, batches)
    least = work.min_batch
    probes = {least, 2 * least} if batches and max_bytes else set()
    planned = sorted({*batches, *probes})
    timings: list[Timing] = []
    ended_by, failed = "limit", MAX_BATCH + 1
    end = time.perf_counter() + seconds
    batch = planned[0] if planned else least
    while batch:
        left = _seconds_left(end, work.where)
        if timings and max_bytes and _expected_bytes(timings, batch) > max_bytes:
            ended_by = "memory"
            break
        if timings and not batches and (reason := _enough(timings, batch, left)):
            ended_by = reason
            break
        budget = min(_BATCH_SECONDS, left / _BATCHES)
        timing, failure = attempt(lambda batch=batch, b=budget: _time_batch(work, batch, b))
        if timing is None:
            ended_by, failed = failure, batch
        else:
            timings.append(timing)
        batch = _next_batch(timings, planned, failed)
    smallest = min(batches, default=least)
    if not timings or timings[-1].batch < smallest:
        bound = f" within {max_bytes / 2**30:.1f} GiB" if max_bytes else ""
        hardware = work.where.hardware()
        raise FailureError(f"{FAILURES[ended_by]} batch size {smallest} on {hardware}{bound}")
    return timings, ended_by


def _check_batches(work: Workload, batches: Sequence[int]) -> None:
    least, world = work.min_batch, work.where.world
    if min(batches, default=least) < least and least > world:
        raise VitrailError(f"--batches {min(batches)}: batch norm needs 2 images or more to train")
    for batch in batches:
        if batch % world:
            raise VitrailError(f"--batches {batch}: not divisible by {world} processes")


def _next_batch(timings: Sequence[Timing], planned: Sequence[int], failed: int) -> int:
    """The next of the planned batches, or twice the last, or four times as long as the device is
    not busy; below `failed`, and 0 after the last."""
    last = timings[-1].batch if timings else failed
    if planned:
        return next((batch for batch in planned if last < batch < failed), 0)
    idle = len(timings) > 1 and timings[-1].seconds < _SAME_TIME * timings[-2].seconds
    return next((factor * last for factor in (4, 2)[not idle :] if factor * last < failed), 0)


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


def largest_batch(work: Workload, timings: Sequence[Timing], seconds: float) -> tuple[int, str]:
    """The largest batch that fits on a GPU, to one percent.

    The memory of the timed batches predicts it. Batches around the prediction are tried, in steps
    that double, and the gap between one that fits and one that does not is bisected. Also returns
    what ended the search: memory, kernel or limit. Where the time is too short for the next try, it
    is the prediction (extrapolation), or a lower bound (time) if there is none.
    """
    end = time.perf_counter() + seconds
    low, high, ended_by = timings[-1].batch, MAX_BATCH + 1, "limit"
    predicted = _predicted_batch(timings, _capacity(work.where.device))
    batch, step = predicted or 2 * low, 0
    while high - low > (1 if ended_by == "limit" else max(1, low // 100)):
        batch = batch if low < batch < high else (low + high) // 2
        if batch / timings[-1].speed > end - time.perf_counter():
            best = max(low, min(predicted, high - 1))
            return (best, "extrapolation") if predicted else (low, "time")
        release_memory()
        _, failure = attempt(lambda batch=batch: _mean_seconds(work.call(batch), work.where, 1))
        # Steps in the same direction double; a turn has both ends close.
        step = (1 if failure else -1) * max(1, batch // 100, 2 * abs(step))
        if failure:
            high, ended_by = batch, failure
        else:
            low = batch
        batch -= step
    return low, ended_by


def _predicted_batch(timings: Sequence[Timing], capacity: int) -> int:
    """The batch that fills the memory; 0 if unknown."""
    last, each = timings[-1], _bytes_per_image(timings)
    if not each or not capacity:
        return 0
    return min(MAX_BATCH, last.batch + max(0, int((capacity - last.peak) / each)))


def _capacity(device: torch.device) -> int:
    """Bytes that this process can allocate on a GPU; 0 if unknown."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def extrapolated_batch(timings: Sequence[Timing], max_bytes: int) -> tuple[int | None, str]:
    """The batch at which a CPU would reach its memory budget; it is not tried."""
    each = _bytes_per_image(timings)
    if not each:
        return None, "unknown"
    room = max(0, max_bytes - timings[-1].peak)
    return min(MAX_BATCH, timings[-1].batch + int(room / each)), "extrapolation"
