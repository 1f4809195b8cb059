"""`vitrail predict`: a stream of predictions for any number of images, in the order given.

Each of several threads decodes a few images, passes them through the model and takes the next few,
so that decoding and inference overlap: Pillow and torch both release the GIL while they compute.
"""

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitrail.console import plural, say
from vitrail.data.dataset import IndexedSource
from vitrail.data.decode import decode, open_image
from vitrail.data.folder import images_below
from vitrail.devices import cores, limited_threads, setup_devices
from vitrail.errors import VitrailError
from vitrail.evaluation.fast import MAX_IMAGES, choose_form
from vitrail.evaluation.labels import NEW_HEAD
from vitrail.evaluation.predictor import (
    BatchTooLargeError,
    Predictor,
    PreparedImages,
    collate,
    skip_reason,
)
from vitrail.model import Classifier
from vitrail.model.classifier import eval_mode
from vitrail.weights.exported import ExportedModel, open_model

_CPU_BATCH, _GPU_BATCH = 8, 64
"""Images of 224 × 224 pixels in a batch. Larger ones gain nothing on a CPU."""
_MAX_THREADS = 16
"""With a GPU, more threads would only wait for each other."""
_STDIN = "-"
_TRIAL_SHARE = 8
"""`fast` tries the forms on the first images, one in this many."""
_MIN_TRIAL = 16
_MIN_TO_COMPILE = 20_000
"""The number of images from which compiling a form can pay off."""


def predict(  # noqa: PLR0913
    model: str | Path | Classifier | ExportedModel,
    images: "str | Path | Sequence[str | Path] | Files",
    *,
    top: int = 5,
    features: bool = False,
    batch: int = 0,
    workers: int = 0,
    device: str = "auto",
    fast: bool = False,
) -> Iterator[dict[str, Any]]:
    """The most likely classes of every image of files and folders, one by one, in order.

    Each is `{"path", "top": [{"label", "probability"}, …]}`, with the vector that the head reads as
    `features` where requested, or `{"path", "error"}`. Zero chooses `batch` and `workers`
    automatically. "-" is standard input. `fast` takes the fastest form of the model that decides
    as the model itself does on the first images; a line on stderr says which.
    """
    loaded = open_model(model) if isinstance(model, (str, Path)) else model
    if isinstance(loaded, ExportedModel):
        device = _for_exported(loaded, features, device, fast)
    Predictor(loaded)  # reports what the model lacks before anything is computed
    if loaded.head is None and not features:
        raise VitrailError(f"this model has no classes; request features, or {NEW_HEAD}")
    for name, value, least in (("top", top, 1), ("batch", batch, 0), ("workers", workers, 0)):
        if value < least:
            raise VitrailError(f"{name} = {value}: expected a whole number from {least} up")
    files = images if isinstance(images, Files) else find_images(images)
    return _PredictionJob(loaded, files, top, features, batch, workers, fast).run(device)


def _for_exported(model: ExportedModel, features: bool, device: str, fast: bool) -> str:
    """The device that an exported file runs on; an error says what it cannot do."""
    if features and model.head is not None:
        raise VitrailError(f"{model.file} gives no features; use the model it was exported from")
    if device not in ("auto", "cpu"):
        raise VitrailError(f"--device {device}: exported files run on the CPU")
    if fast:
        raise VitrailError(f"{model.file} has a single form; remove --fast")
    return "cpu"


class Files(IndexedSource):
    """Images by their paths, without classes."""

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
        below = images_below(Path(path), ".", undecodable=True) if folder else []
        names += [str(Path(path) / name) for name in below] or [str(path)]
    if not names:
        raise VitrailError("no images to predict; name files or folders")
    return Files((), np.zeros(len(names), dtype=np.int64), names)


@dataclass
class _PredictionJob:
    """Predicts one batch after the other; all threads share it."""

    model: Classifier | ExportedModel
    files: Files
    top: int
    features: bool
    batch: int
    workers: int
    fast: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, device: str) -> Iterator[dict[str, Any]]:
        """What `predict` yields."""
        with setup_devices(device, "auto") as devices, eval_mode(self.model):
            self.model.to(devices.device)
            if isinstance(self.model, Classifier):
                self.model.fuse(devices.device, devices.precision)
            self.predictor = Predictor(self.model, precision=devices.precision)
            on_cpu = devices.device.type == "cpu"
            rows, columns = self.model.architecture.size
            usual = _CPU_BATCH if on_cpu else _GPU_BATCH
            batch = self.batch or min(4 * usual, max(1, usual * 224 * 224 // (rows * columns)))
            # Images that fit into memory at once; halved after running out of memory.
            self.limit = batch
            starts = range(0, len(self.files.names), batch)
            # On a CPU, as many as torch would use itself.
            threads = torch.get_num_threads() if on_cpu else min(cores(), _MAX_THREADS)
            threads = min(self.workers or threads, len(starts))
            with limited_threads(torch.get_num_threads() // threads):
                if self.fast:
                    self._speed_up(min(batch, usual))
                for done in self._batches_in_order(starts, threads):
                    yield from done

    def _speed_up(self, batch: int) -> None:
        """Use the fastest form, chosen on the first images, if there are enough to gain by it."""
        trial = min(MAX_IMAGES, len(self.files.names) // _TRIAL_SHARE)
        if trial < _MIN_TRIAL:
            count = plural(len(self.files.names), "image")
            say(
                f"fast     not used: with {count}, finding a faster form takes longer than it saves"
            )
            return
        images = PreparedImages(self.files, np.arange(trial), self.predictor.transform)
        pixels = collate([images[i] for i in range(trial)]).pixels
        if pixels is not None:
            enough = len(self.files.names) >= _MIN_TO_COMPILE
            what = "of these images"
            self.predictor = choose_form(self.predictor, pixels, batch, what, compiled=enough)

    def _batches_in_order(self, starts: range, threads: int) -> Iterator[list[dict[str, Any]]]:
        """The rows of each batch, computed by threads."""
        waiting: deque[Future[list[dict[str, Any]]]] = deque()
        pool = ThreadPoolExecutor(threads)
        try:
            for start in starts:
                waiting.append(pool.submit(self._predict, start, start + starts.step))
                # Enough work for every thread while the oldest batch is awaited.
                while len(waiting) > (0 if start == starts[-1] else 2 * threads):
                    yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _predict(self, start: int, stop: int) -> list[dict[str, Any]]:
        names = self.files.names[start:stop]
        indices = np.arange(start, start + len(names))
        images = PreparedImages(self.files, indices, self.predictor.transform)
        batch = collate([images[i] for i in range(len(images))])
        rows = {i: {"error": skip_reason(error)} for i, error in batch.errors}
        if batch.pixels is not None:
            # A GPU works for one thread at a time, so memory is that of one batch.
            alone = nullcontext() if self.predictor.device.type == "cpu" else self.lock
            with alone, torch.inference_mode():
                rows |= zip(batch.indices.tolist(), self._fitting(batch.pixels), strict=True)
        return [{"path": name} | rows[i] for i, name in enumerate(names, start)]

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
        predictor = self.predictor
        if not self.features:
            return [{"top": row} for row in predictor.top(predictor.logits(pixels), self.top)]
        vectors = predictor.features(pixels)
        best: list[list[dict[str, Any]]] = [[] for _ in pixels]
        if predictor.labels:
            best = predictor.top(predictor.classify(vectors), self.top)
        rows = zip(best, vectors.float().cpu().numpy(), strict=True)
        return [{"top": row, "features": vector} for row, vector in rows]
