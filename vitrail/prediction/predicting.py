"""Any number of pictures → the model's answers, in the order given.

Each of several threads decodes a few pictures and judges them, then takes the next few: decoding
goes on beside inference, and nothing waits for anything. Pillow and torch both let other threads
run while they compute.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.console import Advance
from vitrail.devices import Devices, cores, devices
from vitrail.errors import VitrailError
from vitrail.evaluation.classify import (
    Judge,
    Pictures,
    TooManyError,
    collate,
    in_eval_mode,
    own_preprocessing,
    why,
)
from vitrail.evaluation.matching import ADVICE
from vitrail.model import Classifier
from vitrail.prediction.files import Files, find
from vitrail.weights.load import load

ON_CPU, ON_ACCELERATOR = 8, 64
"""Pictures of 224 × 224 that a thread judges at a time. More gain nothing on a CPU."""
MOST_THREADS = 16
"""Beside an accelerator: beyond that, they wait for each other."""


def predict(
    model: str | Path | Classifier,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    features: bool = False,
    batch: int = 0,
    workers: int = 0,
    device: str = "auto",
) -> Iterator[dict[str, Any]]:
    """The best guesses for every picture of files and folders, one after the other, in order.

    Each is `{"path", "top": [{"label", "probability"}, …]}`, with the vector that the head reads as
    `features` where asked for, or `{"path", "error"}`. Zero lets the machine decide on `batch` and
    `workers`. "-" is standard input.
    """
    loaded = model if isinstance(model, Classifier) else load(model)
    asked = Options(top=top, features=features, batch=batch, workers=workers, device=device)
    asked.check(loaded)
    return stream(loaded, find(images), asked)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is wanted, and how the machine is used for it."""

    top: int = 5
    features: bool = False
    batch: int = 0
    workers: int = 0
    device: str = "auto"

    def check(self, model: Classifier) -> None:
        """Mistakes show before anything is computed."""
        own_preprocessing(model)
        if model.head is None and not self.features:
            raise VitrailError(f"this model has no classes; ask for features, or {ADVICE}")
        for name, least in (("top", 1), ("batch", 0), ("workers", 0)):
            value = getattr(self, name)
            if value < least:
                raise VitrailError(f"{name} = {value}: expected a whole number from {least} up")

    def pictures_at_a_time(self, model: Classifier, where: Devices) -> int:
        """Fewer where they are larger."""
        if self.batch:
            return self.batch
        rows, columns = model.architecture.size
        usual = ON_CPU if where.device.type == "cpu" else ON_ACCELERATOR
        return min(4 * usual, max(1, usual * 224 * 224 // (rows * columns)))

    def threads(self, where: Devices) -> int:
        """As many as torch would use itself on a CPU, else one for each core."""
        if self.workers:
            return self.workers
        on_cpu = where.device.type == "cpu"
        return torch.get_num_threads() if on_cpu else min(cores(), MOST_THREADS)


def stream(
    model: Classifier, files: Files, asked: Options, progress: Advance | None = None
) -> Iterator[dict[str, Any]]:
    """What `predict` yields."""
    with devices(asked.device, "auto") as where, in_eval_mode(model):
        model.to(where.device)
        batch = asked.pictures_at_a_time(model, where)
        starts = range(0, len(files.names), batch)
        lanes = min(asked.threads(where), len(starts))
        lane = Lane(model, files, asked, where, limit=batch)
        waiting: deque[Future[list[dict[str, Any]]]] = deque()
        pool = ThreadPoolExecutor(lanes)
        try:
            with shared_cores(lanes):
                for start in starts:
                    indices = range(start, min(start + batch, len(files.names)))
                    waiting.append(pool.submit(lane.answer, indices))
                    # Enough to do for every thread, while the first of them is being waited for.
                    while len(waiting) > (0 if indices.stop == len(files.names) else 2 * lanes):
                        rows = waiting.popleft().result()
                        yield from rows
                        if progress is not None:
                            progress(len(rows), total=len(files.names))
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def shared_cores(lanes: int) -> Iterator[None]:
    """Each thread with its part of torch's own: together they are just as many."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // lanes))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Lane:
    """What each of the threads does."""

    model: Classifier
    files: Files
    asked: Options
    where: Devices
    limit: int
    """Pictures that fit into memory at once; halved when they turn out not to."""
    turn: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        head = self.model.head
        classes = 0 if head is None else self.model.architecture.classes
        self.labels = self.model.labels or tuple(f"class {i}" for i in range(classes))
        self.judge = Judge(self.model, self.labels, self.where.precision)
        number = np.arange(len(self.files.names))
        self.pictures = Pictures(self.files, number, own_preprocessing(self.model))

    def answer(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Reads some pictures and judges them."""
        batch = collate([self.pictures[index] for index in indices])
        names = self.files.names
        rows = {i: {"path": names[i], "error": why(error)} for i, error in batch.broken}
        if batch.pixels is not None:
            # An accelerator works for one thread at a time: memory is that of one batch.
            alone = nullcontext() if self.where.device.type == "cpu" else self.turn
            with alone, torch.inference_mode():
                found = self.judged(batch.pixels)
            rows |= dict(zip(batch.indices.tolist(), found, strict=True))
        return [{"path": names[i]} | rows[i] for i in indices]

    def judged(self, pixels: Float[Tensor, "b c y x"]) -> list[dict[str, Any]]:
        """As many at once as memory allows."""
        while True:
            try:
                return [row for part in pixels.split(self.limit) for row in self.rows(part)]
            except TooManyError:
                tried = min(self.limit, len(pixels))
                if tried == 1:
                    raise
            self.limit = max(1, tried // 2)
            if self.where.device.type == "cuda":
                torch.cuda.empty_cache()

    def rows(self, pixels: Float[Tensor, "b c y x"]) -> list[dict[str, Any]]:
        """The answers to a few pictures."""
        if not self.asked.features:
            return self.guesses(self.judge.log_probabilities(pixels))
        vectors = self.judge.compute(self.model.features, pixels)
        rows: list[dict[str, Any]] = [{"top": []} for _ in pixels]
        if (head := self.model.head) is not None:
            rows = self.guesses(self.judge.likely(self.judge.compute(head, vectors)))
        kept = vectors.float().cpu().numpy()
        return [row | {"features": vector} for row, vector in zip(rows, kept, strict=True)]

    def guesses(self, likely: Float[Tensor, "b classes"]) -> list[dict[str, Any]]:
        """The best of them by name."""
        if not likely.isfinite().all():
            raise VitrailError(
                "the model's answer is not a number; its weights are damaged, or float32 is needed"
            )
        best = likely.topk(min(self.asked.top, likely.shape[-1]))
        return [
            {
                "top": [
                    {"label": self.labels[number], "probability": probability}
                    for number, probability in zip(numbers, probabilities, strict=True)
                ]
            }
            for numbers, probabilities in zip(
                best.indices.tolist(), best.values.exp().tolist(), strict=True
            )
        ]
