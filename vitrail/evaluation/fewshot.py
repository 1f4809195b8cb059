"""`vitrail fewshot`: linear accuracy after training on a few images per class (section 4.1).

The closed form is big_vision's: features standardized on the support set, a constant 100 as bias,
targets −1 and 1, and ridge regression of strength 1024 by the eigenvectors of the smaller Gram
matrix, from which every other strength follows at once. All of it in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitrail.console import Advance, count_progress, say
from vitrail.data.dataset import Source, Subset
from vitrail.devices import setup_devices
from vitrail.errors import VitrailError
from vitrail.evaluation.features import Features, extract, extract_batches, not_empty, open_cache
from vitrail.evaluation.held_out import select_images
from vitrail.evaluation.predictor import ImageBatches, Predictor
from vitrail.files import cache_folder
from vitrail.model import Classifier
from vitrail.weights.load import load

RIDGE = 1024.0
BIAS = 100.0
"""So large that the ridge hardly shrinks its weight."""
_MIN_STD = 1e-5
NEIGHBORS = 20
TEMPERATURE = 0.07
"""Of the neighbors' votes, as in DINO."""


def fewshot(
    model: str | Path | Classifier,
    data: str | Path,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 3,
    ridges: Sequence[float] = (RIDGE,),
    split: str = "",
    device: str = "auto",
) -> dict[str, Any]:
    """Closed-form linear accuracy on frozen features, fitted on a few training images per class.

    The split is chosen as in `evaluate`. On train itself, and on all of a folder, it is evaluated
    on the images that it was not fitted on.
    """
    _check(shots, seeds, ridges)
    with setup_devices(device, "auto") as devices:
        loaded = model if isinstance(model, Classifier) else load(model)
        loaded.to(devices.device).fuse(devices.device, devices.precision)
        selected = select_images(loaded, data, split)
        split, alone = selected.split, selected.split in ("train", "all")
        if devices.main:
            say(f"images   {selected.note}")
        options: dict[str, Any] = {
            "precision": devices.precision,
            "cache": open_cache(loaded, devices.precision, cache_folder()),
        }
        predictor = Predictor(loaded, **options)
        with count_progress(f"features of {split}", devices.main) as advance:
            queries = extract(loaded, selected.source, **options, progress=advance)
        source, train = selected.source, queries
        if not alone:
            source = select_images(loaded, data, "train").source
            with count_progress("features of train", devices.main) as advance:
                train = extract_support(
                    predictor, source, shots=max(shots), seeds=range(seeds), progress=advance
                )
    results = fit_and_score(
        train,
        None if alone else queries,
        targets=source.targets,
        classes=len(source.labels),
        shots=shots,
        seeds=range(seeds),
        ridges=ridges,
    )
    skipped = [*queries.skipped, *(() if alone else train.skipped)]
    broken = [list(pair) for pair in skipped]
    return {"results": results, "split": split, "data": str(data), "broken": broken}


@dataclass(frozen=True)
class Regression:
    """Ridge regression from features to classes, decomposed: any strength is one product away."""

    mean: Float[Tensor, " d"]
    std: Float[Tensor, " d"]
    eigenvalues: Float[Tensor, " m"]
    left: Float[Tensor, "d1 m"]
    right: Float[Tensor, "m classes"]

    def weights(self, ridge: float) -> Float[Tensor, "d1 classes"]:
        """The solution for one strength; the last row is that of the bias."""
        return self.left @ (self.right / (self.eigenvalues + ridge)[:, None])

    def scores(self, vectors: Float[Tensor, "n d"], ridge: float) -> Float[Tensor, "n classes"]:
        """The predictions for other images."""
        return with_bias((vectors.double() - self.mean) / self.std) @ self.weights(ridge)


def regress(vectors: Float[Tensor, "n d"], targets: Int[Tensor, " n"], classes: int) -> Regression:
    """Least squares on the support set."""
    vectors = vectors.double()
    mean = vectors.mean(0)
    std = vectors.std(0, correction=0) + _MIN_STD
    x = with_bias((vectors - mean) / std)
    y = 2.0 * F.one_hot(targets, classes).double() - 1
    if len(x) >= x.shape[1]:
        eigenvalues, basis = torch.linalg.eigh(x.T @ x)
        return Regression(mean, std, eigenvalues, basis, basis.T @ (x.T @ y))
    eigenvalues, basis = torch.linalg.eigh(x @ x.T)
    return Regression(mean, std, eigenvalues, x.T @ basis, basis.T @ y)


def with_bias(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d1"]:
    return F.pad(x, (0, 1), value=BIAS)


def nearest_neighbors(
    support: Float[Tensor, "n d"],
    targets: Int[Tensor, " n"],
    queries: Float[Tensor, "m d"],
    classes: int,
) -> Float[Tensor, "m classes"]:
    """The votes of the nearest support images by cosine similarity, weighted by it."""
    support, queries = (F.normalize(x, dim=1) for x in (support, queries))
    votes = []
    for part in queries.split(4096):
        best = (part @ support.T).topk(min(NEIGHBORS, len(support)))
        weights = (best.values / TEMPERATURE).exp()
        votes.append(
            torch.zeros(len(part), classes).scatter_add_(1, targets[best.indices], weights)
        )
    return torch.cat(votes)


def few_per_class(
    targets: Int[np.ndarray, " n"],
    shots: int,
    seed: int,
    classes: int,
    usable: Bool[np.ndarray, " n"] | None = None,
) -> Int[np.ndarray, " few"]:
    """Up to `shots` images of each class; fewer shots are a subset of more.

    An image that is not `usable` is replaced by the next of its class.
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount(targets, minlength=classes)
    by_class = np.split(np.argsort(targets, kind="stable"), np.cumsum(counts)[:-1])
    orders = (rng.permutation(indices) for indices in by_class)
    if usable is not None:
        orders = (order[usable[order]] for order in orders)
    return np.concatenate([order[:shots] for order in orders])


def extract_support(
    predictor: Predictor,
    source: Source,
    *,
    shots: int,
    seeds: Sequence[int],
    batch: int = 64,
    workers: int = -1,
    progress: Advance | None = None,
) -> Features:
    """The features of the images that any of the seeds draws, as `few_per_class` does, alone.

    An image that cannot be decoded is replaced by the next of its class in the order of that seed.
    """
    targets, classes = source.targets, len(source.labels)
    usable = np.ones(len(targets), dtype=bool)
    known = np.zeros(len(targets), dtype=bool)
    parts: list[Features] = []
    while True:
        drawn = [few_per_class(targets, shots, seed, classes, usable) for seed in seeds]
        new = np.setdiff1d(np.concatenate(drawn), np.flatnonzero(known))
        if not len(new):
            return not_empty(_merged(parts))
        images = ImageBatches(
            Subset(source, new), predictor.transform, predictor.device, batch, workers, progress
        )
        part = extract_batches(predictor, images)
        parts.append(replace(part, indices=new[part.indices]))
        known[new], usable[new] = True, False
        usable[parts[-1].indices] = True


def _merged(parts: Sequence[Features]) -> Features:
    """All of them, in the order of the source."""
    indices = np.concatenate([part.indices for part in parts])
    order = indices.argsort()
    return Features(
        torch.cat([part.vectors for part in parts])[order],
        torch.cat([part.targets for part in parts])[order],
        indices[order],
        tuple(pair for part in parts for pair in part.skipped),
    )


def _check(shots: Sequence[int], seeds: int, ridges: Sequence[float]) -> None:
    if min(shots, default=0) < 1:
        raise VitrailError(f"shots = {list(shots)}: expected whole numbers from 1 up")
    if seeds < 1:
        raise VitrailError(f"seeds = {seeds}: expected at least one")
    if not ridges or not all(0 < ridge < math.inf for ridge in ridges):
        raise VitrailError(f"ridge = {list(ridges)}: expected positive numbers")


def fit_and_score(
    train: Features,
    test: Features | None,
    *,
    targets: Int[np.ndarray, " n"],
    classes: int,
    shots: Sequence[int],
    seeds: Sequence[int],
    ridges: Sequence[float] = (RIDGE,),
) -> list[dict[str, Any]]:
    """The accuracy for every number of shots, seed and strength.

    `targets` are those of all images that the support sets are drawn from; `train` has the features
    of those that are drawn and can be decoded, at least. Without a `test` split, on the images of
    train that are not in the support set.
    """
    _check(shots, len(seeds), ridges)
    usable = np.zeros(len(targets), dtype=bool)
    usable[train.indices] = True
    results = []
    for k in shots:
        for seed in seeds:
            drawn = few_per_class(targets, k, seed, classes, usable)
            chosen = torch.from_numpy(np.searchsorted(train.indices, drawn))
            vectors, shown = train.vectors[chosen], train.targets[chosen]
            queries = test or _without(train, chosen)
            votes = nearest_neighbors(vectors, shown, queries.vectors, classes)
            regression = regress(vectors, shown, classes)
            results += [
                {
                    "shots": k,
                    "seed": seed,
                    "ridge": ridge,
                    "accuracy": _accuracy(
                        regression.scores(queries.vectors, ridge), queries.targets
                    ),
                    "knn": _accuracy(votes, queries.targets),
                    "shown": len(chosen),
                    "fewest": int(torch.bincount(shown, minlength=classes).min()),
                    "n": len(queries.targets),
                }
                for ridge in ridges
            ]
    return results


def _without(features: Features, left_out: Int[Tensor, " few"]) -> Features:
    rest = torch.ones(len(features.targets), dtype=torch.bool)
    rest[left_out] = False
    if not rest.any():
        raise VitrailError("every image of train is in the support set; none is left to evaluate")
    return Features(
        features.vectors[rest], features.targets[rest], features.indices[rest.numpy()], ()
    )


def _accuracy(scores: Float[Tensor, "n classes"], targets: Int[Tensor, " n"]) -> float:
    return (scores.argmax(1) == targets).double().mean().item()
