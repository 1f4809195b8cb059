"""`vitrail predict`: a stream of predictions for any number of images, in the order given.

Each of several threads decodes a few images, passes them through the model and takes the next few,
so that decoding and inference overlap: Pillow and torch both release the GIL while they compute.
"""

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from vitrail.console import Advance
from vitrail.data.decode import decode, open_image
from vitrail.data.folder import images_below
from vitrail.devices import Devices, cores, devices
from vitrail.errors import VitrailError
from vitrail.evaluation.labels import NEW_HEAD
from vitrail.evaluation.predictor import (
    BatchTooLargeError,
    Predictor,
    PreparedImages,
    collate,
    reason_of,
)
from vitrail.model import Classifier
from vitrail.model.classifier import eval_mode
from vitrail.weights.load import load

_CPU_BATCH, _GPU_BATCH = 8, 64
"""Images of 224 × 224 pixels in a batch. Larger ones gain nothing on a CPU."""
_MAX_THREADS = 16
"""Beside a GPU: beyond that, they wait for each other."""
_STDIN = "-"


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
    """The most likely classes of every image of files and folders, one by one, in order.

    Each is `{"path", "top": [{"label", "probability"}, …]}`, with the vector that the head reads as
    `features` where requested, or `{"path", "error"}`. Zero chooses `batch` and `workers`
    automatically. "-" is standard input.
    """
    loaded = model if isinstance(model, Classifier) else load(model)
    options = PredictOptions(
        top=top, features=features, batch=batch, workers=workers, device=device
    )
    options.check(loaded)
    return predict_files(loaded, find_images(images), options)


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """The options of `vitrail predict`; zero chooses automatically."""

    top: int = 5
    features: bool = False
    batch: int = 0
    workers: int = 0
    device: str = "auto"

    def check(self, model: Classifier) -> None:
        """Reports mistakes before anything is computed."""
        Predictor(model)
        if model.head is None and not self.features:
            raise VitrailError(f"this model has no classes; request features, or {NEW_HEAD}")
        for name, least in (("top", 1), ("batch", 0), ("workers", 0)):
            value = getattr(self, name)
            if value < least:
                raise VitrailError(f"{name} = {value}: expected a whole number from {least} up")

    def batch_size(self, model: Classifier, where: Devices) -> int:
        """Smaller for larger images."""
        if self.batch:
            return self.batch
        rows, columns = model.architecture.size
        usual = _CPU_BATCH if where.device.type == "cpu" else _GPU_BATCH
        return min(4 * usual, max(1, usual * 224 * 224 // (rows * columns)))

    def threads(self, where: Devices) -> int:
        """On a CPU, as many as torch would use itself."""
        if self.workers:
            return self.workers
        on_cpu = where.device.type == "cpu"
        return torch.get_num_threads() if on_cpu else min(cores(), _MAX_THREADS)


@dataclass(frozen=True)
class Files:
    """Images by their paths; a source without classes."""

    names: Sequence[str]
    labels: tuple[str, ...] = ()

    @property
    def targets(self) -> Int[np.ndarray, " n"]:
        return np.zeros(len(self.names), dtype=np.int64)

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return np.zeros(len(self.names), dtype=np.int64)

    def image(self, index: int) -> Image.Image:
        name = self.names[index]
        if name == _STDIN:
            return decode(BytesIO(self._stdin), "standard input")
        if Path(name).is_dir():
            raise VitrailError(f"{name} is a folder without images")
        return open_image(Path(name))

    @cached_property
    def _stdin(self) -> bytes:
        """Read once, however often it is named."""
        return sys.stdin.buffer.read()


def find_images(paths: str | Path | Sequence[str | Path]) -> Files:
    """Every image, in the order given; those of a folder by name, however deep."""
    names: list[str] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        folder = str(path) != _STDIN and Path(path).is_dir()
        below = images_below(Path(path), ".") if folder else []
        names += [str(Path(path) / name) for name in below] or [str(path)]
    if not names:
        raise VitrailError("no images to predict; name files or folders")
    return Files(names)


def predict_files(
    model: Classifier, files: Files, options: PredictOptions, progress: Advance | None = None
) -> Iterator[dict[str, Any]]:
    """What `predict` yields."""
    with devices(options.device, "auto") as where, eval_mode(model):
        predictor = Predictor(model.to(where.device), precision=where.precision)
        batch, total = options.batch_size(model, where), len(files.names)
        starts = range(0, total, batch)
        threads = min(options.threads(where), len(starts))
        worker = _Worker(predictor, files, options, limit=batch)
        waiting: deque[Future[list[dict[str, Any]]]] = deque()
        pool = ThreadPoolExecutor(threads)
        try:
            with split_threads(threads):
                for start in starts:
                    indices = range(start, min(start + batch, total))
                    waiting.append(pool.submit(worker.predict, indices))
                    # Enough work for every thread while the oldest batch is awaited.
                    while len(waiting) > (0 if indices.stop == total else 2 * threads):
                        rows = waiting.popleft().result()
                        yield from rows
                        if progress is not None:
                            progress(len(rows), total=total)
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def split_threads(parts: int) -> Iterator[None]:
    """Divides torch's own threads among as many threads of ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // parts))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Worker:
    """Predicts one batch after the other; all threads share it."""

    predictor: Predictor
    files: Files
    options: PredictOptions
    limit: int
    """Images that fit into memory at once; halved after running out of memory."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def predict(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        images = PreparedImages(self.files, np.asarray(indices), self.predictor.transform)
        batch = collate([images[i] for i in range(len(images))])
        names = self.files.names
        rows = {i: {"error": reason_of(error)} for i, error in batch.errors}
        if batch.pixels is not None:
            # A GPU works for one thread at a time, so memory is that of one batch.
            alone = nullcontext() if self.predictor.device.type == "cpu" else self.lock
            with alone, torch.inference_mode():
                rows |= zip(batch.indices.tolist(), self._fitting(batch.pixels), strict=True)
        return [{"path": names[i]} | rows[i] for i in indices]

    def _fitting(self, pixels: Float[Tensor, "b c y x"]) -> list[dict[str, Any]]:
        """As many at once as memory allows."""
        while True:
            try:
                return [row for part in pixels.split(self.limit) for row in self._rows(part)]
            except BatchTooLargeError:
                tried = min(self.limit, len(pixels))
                if tried == 1:
                    raise
            self.limit = max(1, tried // 2)
            if self.predictor.device.type == "cuda":
                torch.cuda.empty_cache()

    def _rows(self, pixels: Float[Tensor, "b c y x"]) -> list[dict[str, Any]]:
        predictor, top = self.predictor, self.options.top
        if not self.options.features:
            return [{"top": row} for row in predictor.top(predictor.logits(pixels), top)]
        vectors = predictor.features(pixels)
        best: list[list[dict[str, Any]]] = [[] for _ in pixels]
        if predictor.labels:
            best = predictor.top(predictor.classify(vectors), top)
        rows = zip(best, vectors.float().cpu().numpy(), strict=True)
        return [{"top": row, "features": vector} for row, vector in rows]
