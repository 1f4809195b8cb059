"""Classifier and labeled pictures → answers and what they are worth, every picture once."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitrail.console import Advance
from vitrail.data.dataset import Source
from vitrail.data.loader import quietly
from vitrail.devices import rank_and_world
from vitrail.errors import FailureError, VitrailError, one_line, out_of_memory
from vitrail.evaluation.matching import ADVICE, advice, class_order
from vitrail.evaluation.metrics import Predictions, measure
from vitrail.evaluation.mistakes import mistakes, with_examples
from vitrail.model.classifier import Activation, log_probabilities, losses

Transform = Callable[[Image.Image], Tensor]
Broken = list[tuple[str, str]]
"""The name of each picture that could not be read, and why."""


class Batch(NamedTuple):
    """Pictures on their way to the model, by their number in the source."""

    indices: Int[Tensor, " b"]
    pixels: Float[Tensor, "b c y x"] | None
    broken: Sequence[Sequence[Any]]
    """Number and `VitrailError` of what could not be read."""


class Answers(NamedTuple):
    """What the model said about a batch."""

    indices: Int[Tensor, " b"]
    guesses: Int[Tensor, "b best"]
    probabilities: Float[Tensor, "b best"]
    loss: Float[Tensor, " b"]


@dataclass(frozen=True)
class Pictures(Dataset[Any]):
    """Some pictures of a source, ready for the model; in place of a broken one, what is wrong."""

    source: Source
    indices: Int[np.ndarray, " n"]
    transform: Transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[int, Tensor | VitrailError]:
        number = int(self.indices[index])
        try:
            return number, self.transform(self.source.image(number))
        except VitrailError as error:
            return number, error


class TooManyError(VitrailError):
    """The device had too little memory for so many pictures at once."""


class Judge:
    """A model and the classes that the data ask it about."""

    def __init__(
        self, model: nn.Module, labels: tuple[str, ...], precision: torch.dtype | None
    ) -> None:
        if labels and getattr(unwrapped(model), "head", model) is None:
            raise VitrailError(f"this model has no classes; {ADVICE}")
        weights = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0))
        order = class_order(known_labels(model), labels)
        self.model, self.labels, self.classes = model, labels, len(labels)
        self.activation: Activation = getattr(unwrapped(model), "activation", "softmax")
        self.device, self.dtype = weights.device, weights.dtype
        self.precision = None if precision == torch.float32 else precision
        self.order = None if order is None else torch.tensor(order, device=self.device)

    def answers(self, batch: Batch, targets: Int[Tensor, " n"]) -> Answers:
        """The best guesses, left on the device so that nothing waits for it."""
        assert batch.pixels is not None
        logits = self.ordered(self.compute(self.model, batch.pixels))
        best = log_probabilities(logits, self.activation).topk(min(5, self.classes))
        loss = losses(logits, targets[batch.indices].to(self.device), self.activation)
        return Answers(batch.indices, best.indices, best.values.exp(), loss)

    def log_probabilities(self, pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        """In the order of the data's classes."""
        return self.likely(self.compute(self.model, pixels))

    def compute(self, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """A part of the model, on its device and in the precision that was asked for."""
        inputs = inputs.to(self.device, self.dtype, non_blocking=True)
        try:
            with torch.autocast(self.device.type, self.precision, self.precision is not None):
                return function(inputs)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise TooManyError(
                f"out of memory with {len(inputs)} pictures at once; try a smaller batch"
            ) from None

    def likely(self, logits: Float[Tensor, "b model"]) -> Float[Tensor, "b classes"]:
        """The logarithms of probabilities."""
        return log_probabilities(self.ordered(logits), self.activation)

    def ordered(self, logits: Float[Tensor, "b model"]) -> Float[Tensor, "b classes"]:
        """The logits of the data's classes."""
        if logits.shape[-1] != self.classes:
            found = f"this model knows {logits.shape[-1]} classes"
            told = advice(logits.shape[-1], self.labels)
            raise VitrailError(f"{found}, the data set has {self.classes}; {told}")
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if self.order is None else logits[:, self.order]


def evaluate(
    model: nn.Module,
    source: Source,
    *,
    data: str,
    split: str,
    model_name: str,
    judged: Callable[[Predictions], Predictions] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """All that `vitrail evaluate` has to say, as plain values; the options are `predict`'s.

    `judged` may change what counts as the truth, once the answers are known.
    """
    start = time.perf_counter()
    class_order(known_labels(model), source.labels, data)
    predictions, broken = predict(model, source, **options)
    if broken and not len(predictions):
        name, reason = broken[0]
        raise VitrailError(f"no picture of {data} ({split}) can be read; {name}: {reason}")
    if judged is not None:
        predictions = judged(predictions)
    measured = measure(predictions)
    return measured | {
        "confused": with_examples(measured["confused"], predictions, source),
        "broken": [list(pair) for pair in broken],
        "split": split,
        "data": data,
        "model": model_name,
        "mistakes": mistakes(predictions, source),
        "seconds": time.perf_counter() - start,
    }


def predict(
    model: nn.Module,
    source: Source,
    *,
    transform: Transform | None = None,
    batch: int = 64,
    precision: torch.dtype | None = None,
    workers: int = 0,
    progress: Advance | None = None,
) -> tuple[Predictions, Broken]:
    """The model's answer to every picture, once and in the source's order, and what was broken.

    The model stays on its device. `transform` is the model's own preprocessing unless given;
    `precision` is autocast's, None for the weights' own. The processes of `torch.distributed`
    share the pictures, and each of them gets all answers.
    """
    if batch < 1:
        raise VitrailError(f"batch = {batch}: expected a whole number from 1 up")
    transform = own_preprocessing(model) if transform is None else transform
    judge = Judge(model, source.labels, precision)
    rank, world = rank_and_world()
    targets = torch.tensor(source.targets, dtype=torch.int64)
    share = Pictures(source, np.arange(rank, len(targets), world), transform)
    # Sharded models exchange weights in each pass, so all processes must run equally many.
    passes = math.ceil(math.ceil(len(targets) / world) / batch)
    batches = chain(loader(share, batch, workers, judge.device), repeat(collate([])))
    found: list[Answers] = []
    broken: list[tuple[int, str]] = []
    with evaluating(model):
        for pictures in islice(batches, passes):
            broken += [(index, why(error)) for index, error in pictures.broken]
            if pictures.pixels is not None:
                found.append(judge.answers(pictures, targets))
            elif world > 1:
                judge.log_probabilities(transform(Image.new("RGB", (64, 64)))[None])
            if progress is not None:
                progress(len(pictures.indices) + len(pictures.broken), total=len(share))
    return merge(gather(found, broken), source)


def why(error: VitrailError) -> str:
    """What is wrong with a picture; a network that fails is no fault of the picture's."""
    if isinstance(error, FailureError):
        # A new one: kept alive by this frame, the old one would keep the workers waiting too.
        raise FailureError(str(error))
    return one_line(error)


def loader(pictures: Pictures, batch: int, workers: int, device: torch.device) -> DataLoader[Any]:
    """Batches in order, the last one as long as it is."""
    return DataLoader(
        pictures,
        batch_size=batch,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        worker_init_fn=quietly,
        # The common one belongs to training, whose course must not depend on being measured.
        generator=torch.Generator(),
    )


def collate(items: Sequence[tuple[int, Tensor | VitrailError]]) -> Batch:
    """What can be read, stacked, and apart from it what cannot."""
    good = [(index, pixels) for index, pixels in items if isinstance(pixels, Tensor)]
    broken = [(index, error) for index, error in items if isinstance(error, VitrailError)]
    indices = torch.tensor([index for index, _ in good], dtype=torch.int64)
    return Batch(indices, torch.stack([pixels for _, pixels in good]) if good else None, broken)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients.

    Not `inference_mode`: what a sharded model allocates in it cannot be trained afterwards.
    """
    with in_eval_mode(model), torch.no_grad():
        yield


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout; afterwards each part of the model is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def gather(
    found: Sequence[Answers], broken: list[tuple[int, str]]
) -> tuple[list[Answers], list[tuple[int, str]]]:
    """What all processes found, in each of them."""
    mine = [Answers(*(column.cpu() for column in answers)) for answers in found], broken
    _, world = rank_and_world()
    if world == 1:
        return mine
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, mine)
    return [a for part, _ in parts for a in part], [b for _, part in parts for b in part]


def merge(
    parts: tuple[list[Answers], list[tuple[int, str]]], source: Source
) -> tuple[Predictions, Broken]:
    """Everything in the source's order."""
    found, broken = parts
    best = min(5, len(source.labels))
    whole, real = torch.zeros(0, best, dtype=torch.int64), torch.zeros(0, best)
    empty = Answers(whole[:, 0], whole, real, real[:, 0])
    columns = [torch.cat(column).numpy() for column in zip(empty, *found, strict=True)]
    order = np.argsort(columns[0])
    indices, guesses, probabilities, loss = (column[order] for column in columns)
    names = source.names
    lost = np.flatnonzero(~np.isfinite(loss))
    if len(lost):
        said = f"the model's answer to {names[indices[lost[0]]]} is not a number"
        raise VitrailError(f"{said}; its weights are damaged, or float32 is needed")
    predictions = Predictions(
        names=[names[index] for index in indices],
        targets=source.targets[indices],
        guesses=guesses,
        probabilities=probabilities,
        loss=loss,
        labels=source.labels,
    )
    return predictions, [(names[index], reason) for index, reason in sorted(broken)]


def known_labels(model: nn.Module) -> tuple[str, ...]:
    """The classes that a model names; none where it names none."""
    return tuple(getattr(unwrapped(model), "labels", ()))


def own_preprocessing(model: nn.Module) -> Transform:
    """How the model itself wants its pictures."""
    preprocess = getattr(unwrapped(model), "preprocess", None)
    if preprocess is None:
        raise VitrailError("this model has no preprocessing; load it with vitrail.load(...)")
    return preprocess


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, which hides labels and preprocessing."""
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model
