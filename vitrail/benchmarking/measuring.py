"""One model on one device: the speed at each batch size, and the largest batch that fits."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.devices import Devices, peak_memory, reset_peak
from vitrail.errors import FailureError, VitrailError, out_of_memory

BLOCK = 0.02
"""Seconds: calls are timed together until they take so long, so that the clock does not matter."""
ROUNDS = (3, 30)
"""Blocks that are timed, at least and at most."""
LIMIT = 1 << 15
"""No batch is larger; some kernels number the images of a batch in 16 bits."""
DOUBLINGS = 16
"""From one image to the limit: a batch size may take such a part of the time that is left."""
LEVEL = 1.01
"""Two doublings that bring less than this are no longer worth their time."""

LACKS = {
    "alloc_failed": "memory",
    "integer out of range": "kernel",
    "unable to find an engine": "kernel",
    "unable to find a valid cudnn algorithm": "kernel",
    "invalid configuration argument": "kernel",
}
"""What a GPU says of a batch that it has no room, or no kernel, for."""
SAID = {"memory": "out of memory with", "kernel": "no kernel for"}
"""What is said of it here."""

Call = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """A model's pass over noise: forward alone, or forward and backward as in training."""

    model: nn.Module
    where: Devices
    shape: tuple[int, int, int]
    """Channels, rows and columns of an image."""
    train: bool = False

    @property
    def least(self) -> int:
        """The smallest batch: a batch norm learns from the differences between images."""
        normed = any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules())
        return 2 if self.train and normed else 1

    def prepared(self) -> "Work":
        """With the model on the device: half-precision weights, or full ones to train."""
        dtype = torch.float32 if self.train else self.where.precision
        self.model.to(self.where.device, dtype).train(self.train)
        return self

    def call(self, batch: int) -> Call:
        """The pass over one batch, which is made now."""
        device, dtype = self.where.device, self.where.precision
        images = torch.randn(
            batch, *self.shape, device=device, dtype=torch.float32 if self.train else dtype
        )
        return lambda: self.learn(images) if self.train else self.answer(images)

    @torch.inference_mode()
    def answer(self, images: Tensor) -> None:
        """The forward pass."""
        self.model(images)

    def learn(self, images: Tensor) -> None:
        """Forward and backward."""
        self.model.zero_grad(set_to_none=True)
        with self.where.autocast():
            logits = self.model(images)
        targets = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        F.cross_entropy(logits.float(), targets).backward()


@dataclass(frozen=True)
class Timing:
    """What one batch size took."""

    batch: int
    seconds: float
    peak: int
    """Bytes."""

    @property
    def speed(self) -> float:
        """Images per second."""
        return self.batch / self.seconds


def block_seconds(call: Call, where: Devices, times: int) -> float:
    """Seconds of one call, as the mean of some in a row."""
    where.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    where.synchronize()
    return (time.perf_counter() - start) / times


def typical_seconds(calls: Sequence[Call], where: Devices, budget: float) -> list[list[float]]:
    """Seconds of each call in every round, taken by turns so that a disturbance falls on all.

    The first calls are not counted: kernels are chosen and memory is fetched then.
    """
    for call in calls:
        block_seconds(call, where, 1)
    first = [block_seconds(call, where, 1) for call in calls]
    times = [max(1, math.ceil(BLOCK / max(seconds, 1e-6))) for seconds in first]
    rounds: list[list[float]] = []
    end = time.perf_counter() + budget
    least, most = ROUNDS
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() < end):
        rounds.append([block_seconds(c, where, n) for c, n in zip(calls, times, strict=True)])
    return rounds


def latency(work: Work, budget: float) -> float:
    """Median seconds from one image to its answer, one at a time."""
    call = work.call(1)
    block_seconds(call, work.where, 3)
    end = time.perf_counter() + budget
    found: list[float] = []
    while len(found) < 5 or (len(found) < 200 and time.perf_counter() < end):
        found.append(block_seconds(call, work.where, 1))
    return statistics.median(found)


def timing(work: Work, batch: int, budget: float) -> Timing:
    """The speed at a batch size, and the most memory that it took."""
    reset_peak(work.where.device)
    rounds = typical_seconds([work.call(batch)], work.where, budget)
    return Timing(
        batch, statistics.median(row[0] for row in rounds), peak_memory(work.where.device)
    )


def timings(
    work: Work, batches: Sequence[int], seconds: float, most_bytes: int
) -> tuple[list[Timing], str]:
    """The speed at each of the batch sizes, or at doubled ones until that no longer helps; and
    what ended it: memory, a kernel, the limit, that it was level, or the time.

    Ends early when the device is out of memory, when the next batch would take more than
    `most_bytes` (0: no bound), or would not be done in what is left of the time. With a bound, the
    two smallest come first, to know what more will take.
    """
    if min(batches, default=work.least) < work.least:
        raise VitrailError(f"--batches {min(batches)}: a batch norm learns from 2 images or more")
    found: list[Timing] = []
    by = "limit"
    end = time.perf_counter() + seconds
    probes = {work.least, 2 * work.least} if batches and most_bytes else set()
    for batch in sorted({*batches, *probes}) or doubled(work.least):
        left = end - time.perf_counter()
        if found and most_bytes and expected_bytes(found, batch) > most_bytes:
            by = "memory"
            break
        if found and not batches and (enough := level(found) or too_long(found, batch, left)):
            by = enough
            break
        one, lacks = attempted(
            lambda batch=batch, left=left: timing(work, batch, min(1.0, left / DOUBLINGS))
        )
        if one is None:
            by = lacks
            break
        found.append(one)
    if not found or (batches and found[-1].batch < min(batches)):
        many = f"{min(batches, default=work.least)} images at a time"
        bound = f" within {most_bytes / 2**30:.1f} GiB" if most_bytes else ""
        raise FailureError(f"{SAID[by]} {many} on {work.where.hardware()}{bound}")
    return found, by


def doubled(batch: int) -> Iterator[int]:
    """A batch size, twice that, and so on up to the limit."""
    while batch <= LIMIT:
        yield batch
        batch *= 2


def level(found: Sequence[Timing]) -> str:
    """Says so if the last two batch sizes were hardly faster than the best before them."""
    speeds = [one.speed for one in found]
    flat = len(speeds) > 3 and max(speeds[-2:]) < LEVEL * max(speeds[:-2])
    return "level" if flat else ""


def too_long(found: Sequence[Timing], batch: int, left: float) -> str:
    """Says so if a batch would not be done in what is left of the time."""
    return "time" if 5 * batch / found[-1].speed > left else ""


def bytes_per_image(found: Sequence[Timing]) -> float:
    """By how much the peak rose with each image; zero where that is not known."""
    first, last = found[0], found[-1]
    return max(0.0, (last.peak - first.peak) / max(1, last.batch - first.batch))


def expected_bytes(found: Sequence[Timing], batch: int) -> float:
    """The peak that a larger batch will have."""
    return found[-1].peak + (batch - found[-1].batch) * bytes_per_image(found)


def attempted(act: Callable[[], T]) -> tuple[T | None, str]:
    """What it gives; or None, and whether the device lacks memory or a kernel for it."""
    try:
        return act(), ""
    except RuntimeError as error:
        lacks = lack_of(error)
        if not lacks:
            raise
    # Not inside the handler: there the error would keep all that it passed through alive.
    release()
    return None, lacks


def lack_of(error: RuntimeError) -> str:
    """What was too small for a batch: the memory, or the numbers that a kernel counts with."""
    said = str(error).lower()
    return "memory" if out_of_memory(error) else next((LACKS[x] for x in LACKS if x in said), "")


def release() -> None:
    """Gives memory that is no longer used back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest_batch(work: Work, fits: int, seconds: float) -> tuple[int, str]:
    """The largest batch that a GPU takes, to one per cent, and what ended the search: memory, a
    kernel, the limit or the time.

    Doubling finds the first that is too large, bisection the edge. `fits` is known to.
    """
    end = time.perf_counter() + seconds

    def lacking(batch: int) -> str:
        release()
        return attempted(lambda: block_seconds(work.call(batch), work.where, 1))[1]

    low, high, by = fits, 0, ""
    while not high:
        if 2 * low > LIMIT:
            return low, "limit"
        if time.perf_counter() > end:
            return low, "time"
        by = lacking(2 * low)
        low, high = (low, 2 * low) if by else (2 * low, 0)
    while high - low > max(1, low // 100):
        if time.perf_counter() > end:
            return low, "time"
        middle = (low + high) // 2
        lacks = lacking(middle)
        low, high, by = (low, middle, lacks) if lacks else (middle, high, by)
    return low, by


def extrapolated_batch(found: Sequence[Timing], most_bytes: int) -> tuple[int | None, str]:
    """The batch at which a processor's memory would reach a budget: it is not tried out."""
    each = bytes_per_image(found)
    if not each:
        return None, "unknown"
    room = max(0, most_bytes - found[-1].peak)
    return min(LIMIT, found[-1].batch + int(room / each)), "extrapolation"
