"""The batches of training, and the worker processes that decode images.

Everything random is a function of the seed and of a position in one endless stream of images, so
the number of workers and of processes changes nothing, and resuming starts the stream later.
torch's samplers know neither positions nor shards.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vitrail.console import Advance
from vitrail.data.dataset import Broken, Source, image_or_reason, pixels_or_reason
from vitrail.data.decode import Pixels
from vitrail.data.draws import derive_seed
from vitrail.errors import FailureError, VitrailError

_WINDOW = 16
"""Blocks that are mixed with each other when images are stored in blocks (shards)."""
_CHUNK = 128
"""The most images that one worker prepares at a time."""

Transform = Callable[[Any], Tensor]
"""Of a Pillow image; in training of its pixels."""


class ShuffledOrder:
    """An endless sequence of indices: one shuffled pass over the source after another."""

    def __init__(
        self,
        targets: Int[np.ndarray, " n"],
        blocks: Int[np.ndarray, " n"],
        seed: int,
        balanced: bool = False,
    ) -> None:
        self.targets = targets
        self.blocks = blocks
        self.seed = seed
        self.balanced = balanced
        self._current: tuple[int, Int[np.ndarray, " n"]] | None = None

    def __getitem__(self, position: int) -> int:
        return int(self.indices(np.array([position]))[0])

    def indices(self, positions: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
        """The image at each position."""
        epochs, places = np.divmod(positions, len(self.targets))
        found = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            if self._current is None or self._current[0] != epoch:
                self._current = epoch, self.permutation(epoch)
            chosen = epochs == epoch
            found[chosen] = self._current[1][places[chosen]]
        return found

    def permutation(self, epoch: int) -> Int[np.ndarray, " n"]:
        rng = np.random.default_rng(derive_seed(self.seed, epoch))
        if self.balanced:
            return self._balanced(rng)
        if not self.blocks.any():
            return rng.permutation(len(self.targets))
        shuffled = rng.permutation(np.unique(self.blocks))
        windows = [shuffled[i : i + _WINDOW] for i in range(0, len(shuffled), _WINDOW)]
        return np.concatenate(
            [rng.permutation(np.flatnonzero(np.isin(self.blocks, window))) for window in windows]
        )

    def _balanced(self, rng: np.random.Generator) -> Int[np.ndarray, " n"]:
        """As many draws as there are images, every class equally often."""
        total = len(self.targets)
        groups = [np.flatnonzero(self.targets == label) for label in np.unique(self.targets)]
        share = -(-total // len(groups))
        drawn = [
            np.concatenate([rng.permutation(group) for _ in range(-(-share // len(group)))])[:share]
            for group in groups
        ]
        return rng.permutation(np.concatenate(drawn))[:total]


def decodable(source: Source, index: int, side: int = 0) -> tuple[Pixels, int, list[Broken]]:
    """The pixels of an image and its index, or of the next one that can be decoded, so that batches
    keep their size; and those that cannot. For `side`, see `read_pixels`."""
    broken: list[Broken] = []
    total = len(source.targets)
    for other in range(index, index + total):
        pixels = pixels_or_reason(source, other % total, side)
        if not isinstance(pixels, str):
            return pixels, other % total, broken
        broken.append(Broken(source.names[other % total], pixels))
    raise VitrailError(f"none of the {total} training images can be decoded")


class Augmented(Dataset[Any]):
    """Training images by (position, index); the position seeds the augmentation."""

    def __init__(self, source: Source, transform: Transform, seed: int) -> None:
        self.source = source
        self.targets = source.targets
        self.transform = transform
        self.seed = seed

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, int, list[Broken]]:
        position, requested = index
        pixels, number, broken = decodable(self.source, requested)
        state = torch.get_rng_state() if get_worker_info() is None else None
        torch.default_generator.manual_seed(derive_seed(self.seed, position))
        augmented = self.transform(pixels)
        if state is not None:
            torch.set_rng_state(state)
        return augmented, int(self.targets[number]), broken


@dataclass(frozen=True)
class RankBatchSampler:
    """Samples the part of each batch that one process (rank) trains on.

    It yields chunks of a batch, one for a worker at a time; `training_batches` puts
    `chunks_per_step` of them together.
    """

    order: ShuffledOrder
    batch: int
    rank: int
    world: int
    start: int
    """The first step."""
    mixing: bool = False
    """Images are mixed with the one before them, so each process also needs the one before its
    first. One process alone has it already: the batch is a ring."""

    @property
    def size(self) -> int:
        return self.batch // self.world

    @property
    def overlap(self) -> int:
        """Additional images, from another process's part."""
        return int(self.mixing and self.world > 1)

    @property
    def chunks_per_step(self) -> int:
        return -(-(self.size + self.overlap) // _CHUNK)

    def first(self, step: int) -> int:
        """The position of this process's first image of a step."""
        return step * self.batch + self.rank * self.size

    def positions(self, step: int) -> Int[np.ndarray, " b"]:
        """The positions of this process's images of a step."""
        first = self.first(step)
        mine = np.arange(first, first + self.size)
        if not self.overlap:
            return mine
        return np.append(mine, first - 1 if self.rank else first + self.batch - 1)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in count(self.start):
            for part in np.array_split(self.positions(step), self.chunks_per_step):
                yield list(zip(part.tolist(), self.order.indices(part).tolist(), strict=True))


@dataclass(frozen=True)
class TrainingBatch:
    """One process's part of the images of an update."""

    images: Tensor
    targets: Int[Tensor, " b"]
    broken: Sequence[Broken] = ()
    first: int = 0
    """The position of its first image."""
    overlap: int = 0
    """1 if the last row is an extra one: the image before the first, to mix with."""

    def __len__(self) -> int:
        return len(self.targets) - self.overlap

    def preceded(self, rows: slice) -> tuple[Tensor, Int[Tensor, " r"]]:
        """The rows, followed by the row before them in the batch of all processes."""
        before = slice(rows.start - 1, rows.start or None)  # the last row precedes the first
        parts = [(x[rows], x[before]) for x in (self.images, self.targets)]
        images, targets = (torch.cat(pair) for pair in parts)
        return images, targets


Chunk = tuple[Tensor, Int[Tensor, " b"], list[Broken]]
"""Images, their classes, and images that could not be decoded."""


def training_batches(
    dataset: Dataset[Any],
    sampler: RankBatchSampler,
    *,
    workers: int,
    device: torch.device,
    finish: Callable[[Any], Chunk] | None = None,
) -> Iterator[TrainingBatch]:
    """Endless batches on the device, from step `sampler.start` on.

    A dataset that reads several images at a time returns chunks that `finish` completes on the
    device.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,  # type: ignore[arg-type]  # torch asks for a length it never uses
        num_workers=workers,
        collate_fn=_collate if finish is None else _as_is,
        pin_memory=device.type == "cuda",
        worker_init_fn=init_worker,
        prefetch_factor=4 if workers else None,
        # Not the global one, which the model draws from.
        generator=torch.Generator(),
    )
    chunks = iter(loader)
    for step in count(sampler.start):
        parts = [next(chunks) for _ in range(sampler.chunks_per_step)]
        parts = parts if finish is None else [finish(part) for part in parts]
        images = [images.to(device, non_blocking=True) for images, _, _ in parts]
        targets = [targets.to(device, non_blocking=True) for _, targets, _ in parts]
        yield TrainingBatch(
            images=images[0] if len(images) == 1 else torch.cat(images),
            targets=targets[0] if len(targets) == 1 else torch.cat(targets),
            broken=[pair for _, _, broken in parts for pair in broken],
            first=sampler.first(step),
            overlap=sampler.overlap,
        )


def _collate(items: list[tuple[Tensor, int, list[Broken]]]) -> Chunk:
    images, targets, broken = zip(*items, strict=True)
    return torch.stack(images), torch.tensor(targets), [pair for pairs in broken for pair in pairs]


def _as_is(chunk: Any) -> Any:
    return chunk


def prepared_ahead(
    batches: Iterator[TrainingBatch], device: torch.device
) -> Iterator[TrainingBatch]:
    """Each batch is prepared on a CUDA stream of its own, while the one before is trained on."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)

    def prepare() -> tuple[TrainingBatch, Any]:
        with torch.cuda.stream(stream):
            return next(batches), stream.record_event()

    ahead = prepare()
    while True:
        batch, ready = ahead
        ahead = prepare()
        current = torch.cuda.current_stream(device)
        current.wait_event(ready)
        for tensor in (batch.images, batch.targets):
            tensor.record_stream(current)
        yield batch


def init_worker(worker: int) -> None:
    """Ignores Ctrl-C and SIGTERM in workers: the main process has a checkpoint to write."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


# Every image once, for statistics.

CHUNK = 32


@dataclass(frozen=True)
class _Mapped(Dataset[Any]):
    """Applies a function to each image; disk and network errors are returned, so that they can be
    raised in one line."""

    source: Source
    function: Callable[[Any], Any]
    side: int | None

    def __getitem__(self, index: int) -> Any:
        try:
            if self.side is None:
                found: Any = image_or_reason(self.source, index)
            else:
                found = pixels_or_reason(self.source, index, self.side)
        except FailureError as error:
            return error
        if isinstance(found, str):
            return Broken(self.source.names[index], found)
        return self.function(found)


def read_all(
    source: Source,
    function: Callable[[Any], Any],
    *,
    side: int | None = None,
    workers: int = 0,
    progress: Advance | None = None,
) -> Iterator[tuple[int, Any]]:
    """The index of each image with `function` of it, or `Broken`, in the order of the blocks.

    With a `side`, the function gets the pixels of `read_pixels`, else a Pillow image.
    """
    order = np.argsort(source.blocks, kind="stable")
    chunks = [order[start : start + CHUNK].tolist() for start in range(0, len(order), CHUNK)]
    loader: DataLoader[Any] = DataLoader(
        _Mapped(source, function, side),
        batch_sampler=chunks,
        num_workers=min(workers, len(chunks)),
        collate_fn=list,
        worker_init_fn=init_worker,
        generator=torch.Generator(),
    )
    try:
        for chunk, results in zip(chunks, loader, strict=True):
            for index, result in zip(chunk, results, strict=True):
                if isinstance(result, FailureError):
                    raise FailureError(str(result))
                yield index, result
            if progress is not None:
                progress(len(chunk))
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise FailureError(
            "a worker process died, perhaps out of memory; try fewer workers"
        ) from None
