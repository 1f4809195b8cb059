"""What a model makes of every picture before its head, computed once and kept.

Vectors are kept by content: by the model's weights, its preprocessing and the very pixels that it
is shown. A renamed picture, another split or another data set with the same picture finds them.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitrail.console import Advance, say
from vitrail.data.dataset import Source
from vitrail.data.preprocessing import Preprocessing
from vitrail.devices import rank_and_world
from vitrail.errors import FailureError, VitrailError
from vitrail.evaluation.classify import Pictures, evaluating, loader, why
from vitrail.files import atomic_write
from vitrail.model import Classifier
from vitrail.model.variants import to_dict

DIGEST = 16
"""Bytes that tell pictures apart."""
ENOUGH = 4096
"""New vectors that are worth a file: no more than these are lost to a crash."""


@dataclass(frozen=True)
class Features:
    """What a backbone makes of the pictures of a source that can be decoded."""

    vectors: Float[Tensor, "n d"]
    targets: Int[Tensor, " n"]
    indices: Int[np.ndarray, " n"]
    """Number of each picture in its source."""
    broken: tuple[tuple[str, str], ...]


def extract(
    model: Classifier,
    source: Source,
    *,
    precision: torch.dtype | None = None,
    batch: int = 64,
    workers: int = 0,
    kept: "Kept | None" = None,
    progress: Advance | None = None,
) -> Features:
    """The features of every picture, in the source's order; processes share the work.

    `precision` is autocast's, None for the weights' own.
    """
    if model.preprocess is None:
        raise VitrailError("this model has no preprocessing; load it with vitrail.load(...)")
    device = next(model.parameters()).device
    rank, world = rank_and_world()
    pictures = Pictures(source, np.arange(rank, len(source.targets), world), model.preprocess)
    found: list[tuple[Any, Any]] = []
    broken: list[tuple[int, str]] = []
    autocast = torch.autocast(device.type, precision, precision not in (None, torch.float32))

    def vectors_of(pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d"]:
        return model.features(pixels.to(device, non_blocking=True)).float().cpu()

    with evaluating(model), autocast:
        for part in loader(pictures, batch, workers, device):
            broken += [(index, why(error)) for index, error in part.broken]
            if part.pixels is not None:
                vectors = kept.through(part.pixels, vectors_of) if kept else vectors_of(part.pixels)
                found.append((part.indices, vectors))
            if progress is not None:
                progress(len(part.indices) + len(part.broken), total=len(pictures))
    if kept is not None:
        kept.save()
    return merged(found, broken, source, world)


def merged(found: Any, broken: Any, source: Source, world: int) -> Features:
    """What all processes found, in the source's order."""
    parts: list[Any] = [(found, broken)]
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, (found, broken))
    pairs = [pair for part, _ in parts for pair in part]
    names = source.names
    told = tuple((names[i], reason) for _, part in parts for i, reason in sorted(part))
    if not pairs:
        raise VitrailError(f"no picture can be decoded; {told[0][1] if told else 'there are none'}")
    indices = torch.cat([indices for indices, _ in pairs])
    vectors = torch.cat([vectors for _, vectors in pairs])
    order = indices.argsort()
    numbers = indices[order].numpy()
    return Features(vectors[order], torch.as_tensor(source.targets)[numbers], numbers, told)


@dataclass
class Kept:
    """The features of one model on disk: a folder of files that are only ever added to.

    Vectors stay in their files, mapped into memory, until they are asked for.
    """

    folder: Path
    places: dict[bytes, tuple[np.ndarray, int]] = field(default_factory=dict)
    """The table and the row of each known picture."""
    fresh: dict[bytes, Float[np.ndarray, " d"]] = field(default_factory=dict)
    """Not yet on disk."""
    computed: int = 0
    """Pictures that the model was shown."""

    def through(self, pixels: Float[Tensor, "b c y x"], compute: Any) -> Float[Tensor, "b d"]:
        """The features of a batch; the model sees only pictures it has not seen before."""
        keys = [digest_of(image) for image in pixels]
        new = [i for i, key in enumerate(keys) if key not in self.places]
        if new:
            found = compute(pixels if len(new) == len(keys) else pixels[new]).numpy()
            self.computed += len(new)
            for row, i in enumerate(new):
                self.places[keys[i]] = found, row
                self.fresh[keys[i]] = found[row]
        places = [self.places[key] for key in keys]
        if len(self.fresh) >= ENOUGH:
            self.save()
        return torch.from_numpy(np.stack([table[row] for table, row in places]))

    def save(self) -> None:
        """Writes what is new; a disk that is full costs the time again, not the result."""
        if not self.fresh:
            return
        keys = np.frombuffer(b"".join(self.fresh), dtype=np.uint8).reshape(-1, DIGEST)
        name = hashlib.blake2b(keys.data, digest_size=DIGEST).hexdigest()
        vectors = np.stack(list(self.fresh.values()))
        self.fresh.clear()
        try:
            # Keys last: vectors without keys are no harm, keys without vectors would be.
            write(self.folder / f"{name}.vectors.npy", vectors)
            write(self.folder / f"{name}.keys.npy", keys)
        except FailureError as error:
            say(f"features are not kept: {error}")


def kept_features(model: Classifier, precision: torch.dtype | None, root: Path) -> Kept:
    """What is already known about pictures as this very model sees them."""
    kept = Kept(root / "features" / identity(model, precision))
    with suppress(OSError):
        for path in sorted(kept.folder.glob("*.keys.npy")):
            # What a crash left is computed again.
            with suppress(OSError, ValueError, EOFError):
                keys, vectors = read(path), read(path.with_name(f"{path.name[:-9]}.vectors.npy"))
                if keys.shape == (len(vectors), DIGEST):
                    kept.places |= {bytes(key): (vectors, i) for i, key in enumerate(keys)}
    return kept


class Cached(nn.Module):
    """A model that takes its features from those kept on disk and computes the missing ones."""

    def __init__(self, model: Classifier, kept: Kept) -> None:
        super().__init__()
        self.module = model  # the name under which labels and preprocessing are looked for
        self.kept = kept

    def forward(self, pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        def compute(new: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d"]:
            return self.module.features(new.to(pixels)).float().cpu()

        vectors = self.kept.through(pixels.float().cpu(), compute).to(pixels)
        return vectors if self.module.head is None else self.module.head(vectors)


@contextmanager
def cached(
    model: Classifier, precision: torch.dtype | None, root: Path, begin: bool = False
) -> Iterator[nn.Module]:
    """The model, with its features from disk where it has some there; `begin` starts to keep them.

    Frozen runs begin, and `fewshot` does: features of other models would seldom be used again.
    """
    # Without any features on disk, the time to hash all weights is saved.
    known = begin or (root / "features").is_dir()
    kept = kept_features(model, precision, root) if known else None
    if kept is None or not (begin or kept.places):
        yield model
        return
    yield Cached(model, kept)
    kept.save()


def write(path: Path, table: np.ndarray) -> None:
    """A table into a file."""

    def save(part: Path) -> None:
        with part.open("wb") as file:
            np.save(file, table)

    atomic_write(path, save)


def read(path: Path) -> np.ndarray:
    """A table in a file, mapped into memory."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def digest_of(tensor: Tensor) -> bytes:
    """Tells contents apart."""
    return hashlib.blake2b(tensor.contiguous().numpy().data, digest_size=DIGEST).digest()


def identity(model: Classifier, precision: torch.dtype | None) -> str:
    """Tells models apart by all that their features depend on."""
    pre = model.preprocess
    architecture = to_dict(model.architecture)
    for name in ("classes", "head_bias", "dropout", "embedding_dropout", "drop_path"):
        architecture.pop(name, None)  # of no effect on features
    told = {
        "architecture": architecture,
        "preprocessing": pre.to_dict() if isinstance(pre, Preprocessing) else repr(pre),
        # Kernels of another device round otherwise.
        "arithmetic": [str(precision), next(model.parameters()).device.type],
    }
    digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=DIGEST)
    for name, tensor in model.state_dict().items():
        if not name.startswith("head."):
            digest.update(name.encode())
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()
