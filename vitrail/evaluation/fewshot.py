"""`vitrail fewshot`: linear accuracy after a few images of each class (section 4.1 of the paper).

The closed form is big_vision's: features standardized on the few shown pictures, a constant 100 as
bias, targets −1 and 1, ridge regression of strength 1024 by the eigenvectors of the smaller Gram
matrix, from which every other strength follows at once. All of it in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.console import count_progress, say
from vitrail.devices import cores, devices
from vitrail.errors import VitrailError
from vitrail.evaluation.features import Features, extract, kept_features
from vitrail.evaluation.parts import part_of
from vitrail.files import cache_folder
from vitrail.model import Classifier
from vitrail.weights.load import load

RIDGE = 1024.0
BIAS = 100.0
"""So large that the ridge hardly holds it back."""
SMALLEST_DEVIATION = 1e-5
NEIGHBOURS = 20
TEMPERATURE = 0.07
"""Of the votes of the neighbours, as DINO's."""


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
    """Closed-form linear accuracy on frozen features, after a few pictures of each class of train.

    The split is chosen as in `evaluate`. On train itself, and on all of a folder, it is asked about
    the pictures that were not shown.
    """
    check(shots, seeds, ridges)
    with devices(device, "auto") as where:
        loaded = (model if isinstance(model, Classifier) else load(model)).to(where.device)
        part = part_of(loaded, data, split)
        split, alone = part.split, part.split in ("train", "all")
        if where.main:
            say(f"images   {part.note}")
        parts = {split: part.source}
        if not alone:
            parts["train"] = part_of(loaded, data, "train").source
        options: dict[str, Any] = {
            "precision": where.precision,
            "workers": cores() if where.device.type == "cuda" else 0,
            "kept": kept_features(loaded, where.precision, cache_folder()),
        }
        found = {}
        for name, source in parts.items():
            with count_progress(f"features of {name}", where.main) as advance:
                found[name] = extract(loaded, source, **options, progress=advance)
    results = fit_and_score(
        found[split if alone else "train"],
        None if alone else found[split],
        classes=len(part.source.labels),
        shots=shots,
        seeds=seeds,
        ridges=ridges,
    )
    broken = [list(pair) for features in found.values() for pair in features.broken]
    return {"results": results, "split": split, "data": str(data), "broken": broken}


@dataclass(frozen=True)
class Regression:
    """Ridge regression from features to classes, decomposed: any strength is one product away."""

    mean: Float[Tensor, " d"]
    deviation: Float[Tensor, " d"]
    eigenvalues: Float[Tensor, " m"]
    left: Float[Tensor, "d1 m"]
    right: Float[Tensor, "m classes"]

    def weights(self, ridge: float) -> Float[Tensor, "d1 classes"]:
        """The solution for one strength; the last row is that of the constant feature."""
        return self.left @ (self.right / (self.eigenvalues + ridge)[:, None])

    def scores(self, vectors: Float[Tensor, "n d"], ridge: float) -> Float[Tensor, "n classes"]:
        """What it says about other pictures."""
        return with_bias((vectors.double() - self.mean) / self.deviation) @ self.weights(ridge)


def regress(vectors: Float[Tensor, "n d"], targets: Int[Tensor, " n"], classes: int) -> Regression:
    """Least squares on the few pictures that are shown."""
    vectors = vectors.double()
    mean = vectors.mean(0)
    deviation = vectors.std(0, correction=0) + SMALLEST_DEVIATION
    x = with_bias((vectors - mean) / deviation)
    y = 2.0 * torch.nn.functional.one_hot(targets, classes).double() - 1
    if len(x) >= x.shape[1]:
        eigenvalues, basis = torch.linalg.eigh(x.T @ x)
        return Regression(mean, deviation, eigenvalues, basis, basis.T @ (x.T @ y))
    eigenvalues, basis = torch.linalg.eigh(x @ x.T)
    return Regression(mean, deviation, eigenvalues, x.T @ basis, basis.T @ y)


def with_bias(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d1"]:
    """One more feature, always the same."""
    return torch.nn.functional.pad(x, (0, 1), value=BIAS)


def neighbours(
    shown: Float[Tensor, "n d"],
    targets: Int[Tensor, " n"],
    asked: Float[Tensor, "m d"],
    classes: int,
) -> Float[Tensor, "m classes"]:
    """The votes of the nearest shown pictures by cosine, the nearer the louder."""
    shown, asked = (torch.nn.functional.normalize(x, dim=1) for x in (shown, asked))
    votes = []
    for part in asked.split(4096):
        best = (part @ shown.T).topk(min(NEIGHBOURS, len(shown)))
        loudness = (best.values / TEMPERATURE).exp()
        heard = torch.zeros(len(part), classes)
        votes.append(heard.scatter_add_(1, targets[best.indices], loudness))
    return torch.cat(votes)


def few_per_class(
    targets: Int[Tensor, " n"], shots: int, seed: int, classes: int
) -> Int[Tensor, " few"]:
    """So many pictures of each class, or all there are; fewer shots lie within more."""
    rng = np.random.default_rng(seed)
    numbers = targets.numpy()
    orders = [rng.permutation(np.flatnonzero(numbers == label)) for label in range(classes)]
    return torch.from_numpy(np.concatenate([order[:shots] for order in orders]))


def check(shots: Sequence[int], seeds: int, ridges: Sequence[float]) -> None:
    """Nothing, or what cannot be meant."""
    positive = bool(ridges) and all(0 < ridge < math.inf for ridge in ridges)
    for wrong, told in (
        (min(shots, default=0) < 1, f"shots = {list(shots)}: expected whole numbers from 1 up"),
        (seeds < 1, f"seeds = {seeds}: expected at least one"),
        (not positive, f"ridge = {list(ridges)}: expected positive numbers"),
    ):
        if wrong:
            raise VitrailError(told)


def fit_and_score(
    train: Features,
    test: Features | None,
    *,
    classes: int,
    shots: Sequence[int],
    seeds: int,
    ridges: Sequence[float] = (RIDGE,),
) -> list[dict[str, Any]]:
    """The accuracy for every number of shots, seed and strength.

    Without a `test` part, on the pictures of train that were not shown.
    """
    check(shots, seeds, ridges)
    results = []
    for k in shots:
        for seed in range(seeds):
            chosen = few_per_class(train.targets, k, seed, classes)
            asked = test or without(train, chosen)
            results += measure(train, chosen, asked, classes, ridges, shots=k, seed=seed)
    return results


def measure(
    train: Features,
    chosen: Int[Tensor, " few"],
    asked: Features,
    classes: int,
    ridges: Sequence[float],
    **named: int,
) -> list[dict[str, Any]]:
    """One choice of pictures, at every strength."""
    shown, targets = train.vectors[chosen], train.targets[chosen]
    nearest = accuracy(neighbours(shown, targets, asked.vectors, classes), asked.targets)
    regression = regress(shown, targets, classes)
    return [
        {
            **named,
            "ridge": ridge,
            "accuracy": accuracy(regression.scores(asked.vectors, ridge), asked.targets),
            "knn": nearest,
            "shown": len(chosen),
            "fewest": int(torch.bincount(targets, minlength=classes).min()),
            "n": len(asked.targets),
        }
        for ridge in ridges
    ]


def without(features: Features, left_out: Int[Tensor, " few"]) -> Features:
    """All but some."""
    rest = torch.ones(len(features.targets), dtype=torch.bool)
    rest[left_out] = False
    if not rest.any():
        raise VitrailError("every picture of train was shown, none is left to ask about")
    return Features(
        features.vectors[rest], features.targets[rest], features.indices[rest.numpy()], ()
    )


def accuracy(scores: Float[Tensor, "n classes"], targets: Int[Tensor, " n"]) -> float:
    """The share of pictures whose highest score is the right one's."""
    return (scores.argmax(1) == targets).double().mean().item()
