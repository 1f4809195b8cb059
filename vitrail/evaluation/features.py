"""The vectors that a head reads, computed once for every image and cached on disk.

They are cached by content: by the model's weights, its preprocessing and the very pixels that it
gets. A renamed image, another split or another dataset with the same image finds them.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.console import Advance, say
from vitrail.data.dataset import Source
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import FailureError, VitrailError
from vitrail.evaluation.predictor import ImageBatches, Predictor, gather
from vitrail.files import write_bytes
from vitrail.model import Classifier
from vitrail.model.classifier import eval_mode
from vitrail.model.variants import to_dict

_DIGEST = 16
"""Length in bytes of the digest that identifies an image."""
_FLUSH = 4096
"""New vectors that are worth a file: no more than these are lost to a crash."""


@dataclass(frozen=True)
class Features:
    """The vectors of those images of a source that can be decoded."""

    vectors: Float[Tensor, "n d"]
    targets: Int[Tensor, " n"]
    indices: Int[np.ndarray, " n"]
    """Number of each image in its source."""
    skipped: tuple[tuple[str, str], ...]


@dataclass
class FeatureCache:
    """The features of one model on disk: a folder of files that are only ever added to.

    Vectors stay in their files, mapped into memory, until they are used.
    """

    folder: Path
    places: dict[bytes, tuple[np.ndarray, int]] = field(default_factory=dict)
    """The table and the row of each known image."""
    new: dict[bytes, Float[np.ndarray, " d"]] = field(default_factory=dict)
    """Not yet on disk."""
    computed: int = 0
    """Images that passed through the model."""

    def lookup(
        self, pixels: Float[Tensor, "b c y x"], compute: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "b d"]:
        """The features of a batch; only images that are not cached are computed."""
        keys = [_digest(image) for image in pixels]
        missing = [i for i, key in enumerate(keys) if key not in self.places]
        if missing:
            vectors = compute(pixels if len(missing) == len(keys) else pixels[missing]).numpy()
            self.computed += len(missing)
            for row, i in enumerate(missing):
                self.places[keys[i]] = vectors, row
                self.new[keys[i]] = vectors[row]
        places = [self.places[key] for key in keys]
        if len(self.new) >= _FLUSH:
            self.save()
        return torch.from_numpy(np.stack([table[row] for table, row in places]))

    def save(self) -> None:
        """Writes what is new; a full disk costs the time again, not the result."""
        if not self.new:
            return
        keys = np.frombuffer(b"".join(self.new), dtype=np.uint8).reshape(-1, _DIGEST)
        name = hashlib.blake2b(keys.data, digest_size=_DIGEST).hexdigest()
        vectors = np.stack(list(self.new.values()))
        self.new.clear()
        try:
            # Keys last: vectors without keys do no harm, keys without vectors would.
            for kind, table in (("vectors", vectors), ("keys", keys)):
                path = self.folder / f"{name}.{kind}.npy"
                write_bytes(path, lambda file, table=table: np.save(file, table))
        except FailureError as error:
            say(f"features are not cached: {error}")


def open_cache(model: Classifier, precision: torch.dtype | None, root: Path) -> FeatureCache:
    """The cache of this very model, with what it holds already."""
    cache = FeatureCache(root / "features" / identity(model, precision))
    with suppress(OSError):
        for path in sorted(cache.folder.glob("*.keys.npy")):
            # What a crash left incomplete is computed again.
            with suppress(OSError, ValueError, EOFError):
                keys = _read(path)
                vectors = _read(path.with_name(f"{path.name[:-9]}.vectors.npy"))
                if keys.shape == (len(vectors), _DIGEST):
                    cache.places |= {bytes(key): (vectors, i) for i, key in enumerate(keys)}
    return cache


def existing_cache(
    model: Classifier, precision: torch.dtype | None, root: Path
) -> FeatureCache | None:
    """The cache of this model if it holds something.

    Frozen runs and `fewshot` fill one; features of other models would seldom be used again.
    """
    if not (root / "features").is_dir():
        return None  # which saves the time to hash all weights
    cache = open_cache(model, precision, root)
    return cache if cache.places else None


def extract(
    model: Classifier,
    source: Source,
    *,
    precision: torch.dtype | None = None,
    batch: int = 64,
    workers: int = -1,
    cache: FeatureCache | None = None,
    progress: Advance | None = None,
) -> Features:
    """The features of every image, in the source's order; processes share the work."""
    predictor = Predictor(model, precision=precision, cache=cache)
    device = predictor.device
    images = ImageBatches(source, predictor.transform, device, batch, workers, progress)
    return not_empty(extract_batches(predictor, images))


def not_empty(features: Features) -> Features:
    """The same features, or an error if no image could be decoded."""
    if len(features.indices):
        return features
    reason = features.skipped[0][1] if features.skipped else "there are none"
    raise VitrailError(f"no image can be decoded; {reason}")


def extract_batches(predictor: Predictor, images: ImageBatches) -> Features:
    """`extract` for images that are read more than once, by the same worker processes; there may
    be none that can be decoded."""
    model: Any = predictor.model
    rows = []
    with eval_mode(model), torch.no_grad():
        for part in images:
            features = predictor.features(part.pixels)
            if len(part.indices):
                rows.append((part.indices, features.float().cpu()))
    if predictor.cache is not None:
        predictor.cache.save()
    columns, skipped = gather(rows, images.skipped)
    names = images.source.names
    named = tuple((names[index], reason) for index, reason in skipped)
    columns = columns or [torch.zeros(0, dtype=torch.int64), torch.zeros(0, model.feature_width)]
    indices, vectors = columns[0].numpy(), columns[1]
    return Features(vectors, torch.as_tensor(images.source.targets)[indices], indices, named)


def identity(model: Classifier, precision: torch.dtype | None) -> str:
    """A digest of all that the features of a model depend on."""
    pre = model.preprocess
    architecture = to_dict(model.architecture)
    for name in ("classes", "head_bias", "dropout", "embedding_dropout", "drop_path"):
        architecture.pop(name, None)  # of no effect on features
    facts = {
        "architecture": architecture,
        "preprocessing": pre.to_dict() if isinstance(pre, Preprocessing) else repr(pre),
        # Kernels of another device round differently.
        "arithmetic": [str(precision), next(model.parameters()).device.type],
    } | ({"kernels": "fused"} if model.fused else {})
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=_DIGEST)
    for name, tensor in model.state_dict().items():
        if not name.startswith("head."):
            digest.update(name.encode())
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(tensor.contiguous().numpy().data, digest_size=_DIGEST).digest()


def _read(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)
