"""From images to predictions: the one place for validation, `evaluate`, `predict`, `serve` and
`export`."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitrail.console import Advance
from vitrail.data.dataset import Source
from vitrail.data.loader import Transform, init_worker
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.store import equal_images
from vitrail.devices import decoding_processes, rank_and_world
from vitrail.errors import FailureError, VitrailError, one_line, out_of_memory
from vitrail.evaluation.labels import NEW_HEAD, class_order, other_classes_hint
from vitrail.evaluation.metrics import Predictions
from vitrail.model.classifier import (
    NO_PREPROCESSING,
    Activation,
    eval_mode,
    log_probabilities,
    losses,
)

if TYPE_CHECKING:
    from vitrail.evaluation.features import FeatureCache

Skipped = list[tuple[str, str]]
"""The name of each image that could not be read, and the reason."""
TOP = 5
"""Classes that are kept of each prediction."""


class BatchTooLargeError(VitrailError):
    """The device ran out of memory; fewer images may fit."""


class Predictor:
    """A model, its preprocessing and its classes: pixels in, features or logits out.

    Logits come in the order of `labels`, the classes of the data; by default the model's own.
    `precision` is autocast's, None for the weights' own. `transform` replaces the model's
    preprocessing. With a `cache`, only images that it does not hold pass through the backbone.
    """

    def __init__(
        self,
        model: nn.Module,
        labels: Sequence[str] | None = None,
        *,
        precision: torch.dtype | None = None,
        transform: Transform | None = None,
        cache: "FeatureCache | None" = None,
        data: str = "the dataset",
    ) -> None:
        # DistributedDataParallel hides labels and preprocessing.
        inner: Any = getattr(model, "module", model)
        has_head = getattr(inner, "head", model) is not None
        if labels and not has_head:
            raise VitrailError(f"this model has no classes; {NEW_HEAD}")
        transform = transform or getattr(inner, "preprocess", None)
        if transform is None:
            raise VitrailError(NO_PREPROCESSING)
        own = tuple(getattr(inner, "labels", ()))
        if labels is None:
            classes = inner.architecture.classes if has_head else 0
            labels = own or tuple(f"class {i}" for i in range(classes))
        weights = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0))
        self.model, self.transform, self.labels, self.cache = model, transform, labels, cache
        self.device, self.dtype = weights.device, weights.dtype
        self.precision = None if precision == torch.float32 else precision
        self.activation: Activation = getattr(inner, "activation", "softmax")
        order = class_order(own, labels, data)
        self.order = None if order is None else torch.tensor(order, device=self.device)

    def logits(self, pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        """In the order of `labels`."""
        if self.cache is not None:
            return self.classify(self.features(pixels))
        return self._in_order(self._run(self.model, pixels))

    def features(self, pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d"]:
        """What the head reads."""
        function: Any = self.model.features
        if self.cache is None:
            return self._run(function, pixels)
        return self.cache.lookup(pixels, lambda new: self._run(function, new).float().cpu())

    def classify(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b classes"]:
        """The logits that the head gives for features."""
        head: Any = self.model.head
        return self._in_order(self._run(head, features))

    def log_probabilities(self, logits: Float[Tensor, "b classes"]) -> Float[Tensor, "b classes"]:
        """By the activation that the model was trained with."""
        return log_probabilities(logits, self.activation)

    def top(self, logits: Float[Tensor, "b classes"], count: int) -> list[list[dict[str, Any]]]:
        """The most likely classes of each image by name, best first."""
        best = self.log_probabilities(logits).topk(min(count, len(self.labels)))
        if not best.values.isfinite().all():
            raise VitrailError(
                "the model's output is NaN or infinite; its weights may be corrupt, or it needs "
                "float32"
            )
        return [
            [
                {"label": self.labels[number], "probability": probability}
                for number, probability in zip(*row, strict=True)
            ]
            for row in zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
        ]

    def _run(self, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.device, self.dtype, non_blocking=True)
        try:
            # A thread begins with the first GPU as its own: kernels and graphs would go there.
            with (
                torch.cuda.device_of(inputs),
                torch.autocast(self.device.type, self.precision, self.precision is not None),
            ):
                return function(inputs)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise BatchTooLargeError(
                f"out of memory with {len(inputs)} images at once; try a smaller batch"
            ) from None

    def _in_order(self, logits: Float[Tensor, "b model"]) -> Float[Tensor, "b classes"]:
        if logits.shape[-1] != len(self.labels):
            raise VitrailError(
                f"this model has {logits.shape[-1]} classes, the dataset has {len(self.labels)}; "
                f"{other_classes_hint(logits.shape[-1], self.labels)}"
            )
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if self.order is None else logits[:, self.order]


def predict_dataset(
    predictor: Predictor,
    source: Source,
    *,
    batch: int = 64,
    workers: int = -1,
    progress: Advance | None = None,
) -> tuple[Predictions, Skipped]:
    """A prediction for every image, once and in the source's order, and what could not be read.

    The processes of `torch.distributed` share the images, and each of them gets all predictions.
    For `workers`, see `ImageBatches`.
    """
    transform, device = predictor.transform, predictor.device
    return predict_batches(
        predictor, ImageBatches(source, transform, device, batch, workers, progress)
    )


def predict_batches(predictor: Predictor, images: "ImageBatches") -> tuple[Predictions, Skipped]:
    """`predict_dataset` for images that are read more than once, by the same worker processes."""
    source, device = images.source, predictor.device
    targets = torch.tensor(source.targets, dtype=torch.int64)
    rows = []
    with eval_mode(predictor.model), torch.no_grad():
        for part in images:
            logits = predictor.logits(part.pixels)
            if not len(part.indices):
                continue
            best = predictor.log_probabilities(logits).topk(min(TOP, len(source.labels)))
            # Nothing here waits for the device, where the rows are left.
            truth = targets[part.indices].to(device, non_blocking=True)
            loss = losses(logits, truth, predictor.activation)
            rows.append((part.indices, best.indices, best.values.exp(), loss))
    if predictor.cache is not None:
        predictor.cache.save()
    empty = torch.zeros(0, min(TOP, len(source.labels)))
    columns, skipped = gather(rows, images.skipped)
    columns = columns or [empty[:, 0].long(), empty.long(), empty, empty[:, 0]]
    indices, guesses, probabilities, loss = (column.numpy() for column in columns)
    names = source.names
    if len(lost := np.flatnonzero(~np.isfinite(loss))):
        raise VitrailError(
            f"the model's output for {names[indices[lost[0]]]} is NaN or infinite; its weights may "
            "be corrupt, or it needs float32"
        )
    predictions = Predictions(
        names=[names[index] for index in indices],
        targets=source.targets[indices],
        guesses=guesses,
        probabilities=probabilities,
        loss=loss,
        labels=source.labels,
    )
    return predictions, [(names[index], reason) for index, reason in skipped]


@dataclass(frozen=True)
class PreparedImages(Dataset[Any]):
    """Images of a source as tensors; for one that cannot be read, its error."""

    source: Source
    indices: Int[np.ndarray, " n"]
    transform: Transform

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def stored(self) -> tuple[UInt8[np.ndarray, "n y x 3"], Int[np.ndarray, " m"]] | None:
        """The images of a packed store, if the transform only normalizes them: read in batches,
        they need no worker processes."""
        found = equal_images(self.source)
        if found is None or not isinstance(self.transform, Preprocessing):
            return None
        return found if self.transform.only_normalizes(found[0].shape[1:3]) else None

    def __getitems__(self, places: list[int]) -> Any:
        numbers = self.indices[places]
        if self.stored is None or not isinstance(self.transform, Preprocessing):
            return [self[place] for place in places]
        images, rows = self.stored
        pixels = self.transform.normalized(images[rows[numbers]])
        return PreparedBatch(torch.from_numpy(numbers), pixels)

    def __getitem__(self, index: int) -> tuple[int, Tensor | VitrailError]:
        number = int(self.indices[index])
        try:
            return number, self.transform(self.source.image(number))
        except VitrailError as error:
            return number, error


class PreparedBatch(NamedTuple):
    """Tensors of some images, which `indices` gives by their number in the source."""

    indices: Int[Tensor, " b"]
    pixels: Any
    """Stacked; None where no image could be read."""
    errors: Sequence[tuple[int, VitrailError]] = ()


def collate(items: Sequence[tuple[int, Tensor | VitrailError]] | PreparedBatch) -> PreparedBatch:
    """Stacks what could be read and sets the errors apart."""
    if isinstance(items, PreparedBatch):
        return items
    good = [(index, pixels) for index, pixels in items if isinstance(pixels, Tensor)]
    errors = [(index, error) for index, error in items if isinstance(error, VitrailError)]
    indices = torch.tensor([index for index, _ in good], dtype=torch.int64)
    return PreparedBatch(indices, torch.stack([x for _, x in good]) if good else None, errors)


@dataclass
class ImageBatches:
    """Every image of a source, in order; of several processes, each has its share.

    Sharded models exchange weights in each pass, so all processes get equally many batches: where
    one has no image left, a blank one with no indices.
    """

    source: Source
    transform: Transform
    device: torch.device
    batch: int = 64
    workers: int = -1
    """Processes that decode; -1 uses all cores with a GPU, unless there are only a few batches, and
    none on a CPU."""
    progress: Advance | None = None
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Number of each image that could not be read in the last pass, and the reason."""
    keep: int = 0
    """Prepared images stay on the device for another pass if they take no more bytes than this."""
    _kept: list[PreparedBatch] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise VitrailError(f"batch = {self.batch}: expected a whole number from 1 up")

    @cached_property
    def _loader(self) -> DataLoader[Any]:
        """Its workers stay for another pass."""
        rank, world = rank_and_world()
        indices = np.arange(rank, len(self.source.targets), world)
        images = PreparedImages(self.source, indices, self.transform)
        workers = self.workers if images.stored is None else 0
        if workers < 0:
            # Processes take longer to start than a few batches take to decode.
            workers = min(decoding_processes(self.device), len(indices) // self.batch)
        return DataLoader(
            images,
            batch_size=self.batch,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=collate,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=init_worker,
            # The global one belongs to training, which must not depend on evaluation.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[PreparedBatch]:
        self.skipped = []
        _, world = rank_and_world()
        total = len(self.source.targets)
        share = math.ceil(total / world)
        passes = math.ceil(share / self.batch)
        for part in islice(chain(self._batches(), repeat(collate([]))), passes):
            self.skipped += [(index, skip_reason(error)) for index, error in part.errors]
            if part.pixels is not None:
                yield part
            elif world > 1:
                yield part._replace(pixels=self.transform(Image.new("RGB", (64, 64)))[None])
            if self.progress is not None:
                self.progress(len(part.indices) + len(part.errors), total=share)

    def _batches(self) -> Iterator[PreparedBatch]:
        if self._kept:
            yield from self._kept
            return
        parts, room = [], self.keep
        for part in self._loader:
            if part.pixels is not None:
                room -= part.pixels.nbytes
                if room >= 0:
                    part = part._replace(pixels=part.pixels.to(self.device, non_blocking=True))
            parts = [*parts, part] if room >= 0 else []
            if len(parts) == len(self._loader):
                self._kept = parts  # not after the last one, which nobody may wait for
            yield part


def skip_reason(error: VitrailError) -> str:
    """Why an image is skipped; a network that fails is not the image's fault."""
    if isinstance(error, FailureError):
        # A new one: kept alive by this frame, the old one would keep the workers waiting too.
        raise FailureError(str(error))
    return one_line(error)


def gather(
    rows: Sequence[Sequence[Tensor]], skipped: list[tuple[int, str]]
) -> tuple[list[Tensor], list[tuple[int, str]]]:
    """The rows of all processes as columns, sorted by the first; no columns without rows."""
    mine = [[column.cpu() for column in row] for row in rows], skipped
    _, world = rank_and_world()
    parts: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(parts, mine)
    merged = [row for part, _ in parts for row in part]
    columns = [torch.cat(column) for column in zip(*merged, strict=True)]
    order = columns[0].argsort() if columns else None
    return [column[order] for column in columns], sorted(one for _, part in parts for one in part)
