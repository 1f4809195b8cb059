"""Predictions → numbers: accuracy in all its forms, calibration, and how sure each number is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vitrail.errors import VitrailError

Interval = list[float]
"""Both ends of a 95% confidence interval."""

BINS = 15
"""Of the calibration diagram, as in Guo et al. 2017 (arXiv 1706.04599)."""
LARGEST_CONFUSION = 1000
"""Classes up to which the whole confusion matrix is kept."""
CHUNK = 1_000_000
"""Numbers that the bootstrap draws at once: they should stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """Predictions for n images, with only the most likely classes of each: the logits of 50,000
    images and 21,843 classes would not fit into memory."""

    names: Sequence[str]
    targets: Int[np.ndarray, " n"]
    """The true class of each image."""
    guesses: Int[np.ndarray, "n best"]
    """The five most likely classes, best first; all of them where there are fewer."""
    probabilities: Float[np.ndarray, "n best"]
    """Of the guesses."""
    loss: Float[np.ndarray, " n"]
    """Cross-entropy as in training, without label smoothing and class weights."""
    labels: tuple[str, ...]
    """Names of the classes."""

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class Counts:
    """How often each class was right, true and guessed; an axis of resamples may come first."""

    right: Int[np.ndarray, "*resamples classes"]
    true: Int[np.ndarray, "*resamples classes"]
    guessed: Int[np.ndarray, "*resamples classes"]

    def precision(self) -> Float[np.ndarray, "*resamples classes"]:
        return _ratio(self.right, self.guessed)

    def recall(self) -> Float[np.ndarray, "*resamples classes"]:
        return _ratio(self.right, self.true)

    def f1(self) -> Float[np.ndarray, "*resamples classes"]:
        return _ratio(2 * self.right, self.true + self.guessed)

    def balanced_accuracy(self) -> Float[np.ndarray, "*resamples"] | float:
        """Mean recall of the classes that occur in the data."""
        return self.recall().sum(-1) / (self.true > 0).sum(-1)

    def macro_f1(self) -> Float[np.ndarray, "*resamples"] | float:
        """Mean F1 of the classes that occur in the data or among the guesses, as scikit-learn
        has it: a class that is only ever guessed counts, with F1 0."""
        return self.f1().sum(-1) / (self.true + self.guessed > 0).sum(-1)


def measure(predictions: Predictions) -> dict[str, Any]:
    """Every metric as plain numbers, fractions of one, with 95% intervals.

    Intervals of proportions are Wilson's; those of macro-F1 and balanced accuracy come from a
    seeded bootstrap over images. What is undefined is 0, as in scikit-learn's
    `zero_division=0`: the precision of a class never guessed, the recall of a class without
    images. Classes without images are left out of balanced accuracy.
    """
    n = len(predictions)
    if not n:
        raise VitrailError("there are no images to evaluate; the data is empty or none can be read")
    truth, guess = predictions.targets, predictions.guesses[:, 0]
    counts = count(truth, guess, len(predictions.labels))
    hits = int(counts.right.sum())
    near = int((predictions.guesses == truth[:, None]).any(-1).sum())
    bins = _calibration(predictions.probabilities[:, 0], guess == truth)
    return {
        "top1": hits / n,
        "top5": near / n,
        "n": n,
        "ece": sum(b["n"] * abs(b["accuracy"] - b["confidence"]) for b in bins) / n,
        "loss": float(predictions.loss.mean(dtype=np.float64)),
        "balanced_accuracy": float(counts.balanced_accuracy()),
        "macro_f1": float(counts.macro_f1()),
        "intervals": {"top1": wilson(hits, n), "top5": wilson(near, n)}
        | bootstrap(truth, guess, len(predictions.labels)),
        "per_class": _per_class(counts, predictions.labels),
        "confusion": _confusion(truth, guess, len(predictions.labels)),
        "confused": _confused(truth, guess, predictions.labels),
        "calibration": bins,
    }


def summary(
    guesses: Int[np.ndarray, "n best"],
    targets: Int[np.ndarray, " n"],
    loss: Float[np.ndarray, " n"],
    classes: int,
) -> dict[str, Any]:
    """The few numbers by which training follows val and chooses."""
    hits = guesses == targets[:, None]
    return {
        "loss": float(loss.mean()),
        "top1": float(hits[:, 0].mean()),
        "top5": float(hits.any(1).mean()),
        "balanced_accuracy": float(count(targets, guesses[:, 0], classes).balanced_accuracy()),
        "n": len(hits),
    }


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The quotient, and 0 where there is nothing to divide by."""
    return np.divide(part, whole, out=np.zeros(whole.shape), where=whole > 0)


def count(truth: Int[np.ndarray, " n"], guess: Int[np.ndarray, " n"], classes: int) -> Counts:
    """Right, true and guessed, class by class."""
    parts = (truth[truth == guess], truth, guess)
    return Counts(*(np.bincount(part, minlength=classes) for part in parts))


def _per_class(counts: Counts, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Precision, recall with its interval, and F1 of each class; n counts its images."""
    columns = (counts.precision(), counts.recall(), counts.f1(), counts.true, counts.right)
    return [
        {
            "name": name,
            "precision": precision,
            "recall": recall,
            "f1": f1,
            "n": n,
            "interval": wilson(right, n),
        }
        for name, precision, recall, f1, n, right in zip(
            labels, *(column.tolist() for column in columns), strict=True
        )
    ]


def wilson(hits: int, n: int) -> Interval:
    """The 95% score interval of a proportion (Wilson 1927): never outside 0 to 1, and of use for
    a handful of images; everything from 0 to 1 where there are none."""
    if not n:
        return [0.0, 1.0]
    z = NormalDist().inv_cdf(0.975)
    share, scale = hits / n, 1 + z * z / n
    center = (share + z * z / (2 * n)) / scale
    reach = z / scale * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not part the ends from a proportion that lies exactly on one of them.
    low = 0.0 if hits == 0 else float(center - reach)
    high = 1.0 if hits == n else float(center + reach)
    return [low, high]


def _calibration(confidence: Float[np.ndarray, " n"], right: np.ndarray) -> list[dict[str, Any]]:
    """How often the model is right beside how sure it is, in bins (low, high]; an empty bin is
    all zeros."""
    edges = np.arange(BINS + 1) / BINS
    where = (np.searchsorted(edges, confidence.astype(np.float64)) - 1).clip(0, BINS - 1)
    n = np.bincount(where, minlength=BINS)
    sure = _ratio(np.bincount(where, weights=confidence, minlength=BINS), n)
    hits = _ratio(np.bincount(where, weights=right, minlength=BINS), n)
    columns = (edges[:-1], edges[1:], n, sure, hits)
    keys = ("low", "high", "n", "confidence", "accuracy")
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _confusion(
    truth: Int[np.ndarray, " n"], guess: Int[np.ndarray, " n"], classes: int
) -> list[list[int]] | None:
    """How often each class (row) was taken for each class (column); None where the classes are
    too many to look at."""
    if classes > LARGEST_CONFUSION:
        return None
    cells = np.bincount(truth.astype(np.int64) * classes + guess, minlength=classes * classes)
    return cells.reshape(classes, classes).tolist()


def _confused(
    truth: Int[np.ndarray, " n"],
    guess: Int[np.ndarray, " n"],
    labels: Sequence[str],
    most: int = 20,
) -> list[dict[str, Any]]:
    """The pairs of classes that were mistaken most often, in that direction."""
    wrong = truth != guess
    pairs, n = np.unique(np.stack([truth[wrong], guess[wrong]]), axis=1, return_counts=True)
    first = np.argsort(-n, kind="stable")[:most]
    return [
        {"truth": labels[pairs[0, i]], "guess": labels[pairs[1, i]], "n": int(n[i])} for i in first
    ]


def bootstrap(
    truth: Int[np.ndarray, " n"],
    guess: Int[np.ndarray, " n"],
    classes: int,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """95% intervals of the averages over classes, from images drawn with replacement; top-1's
    where all images are right, or all wrong."""
    hits = int((truth == guess).sum())
    if hits in (0, len(truth)):  # all resamples are alike, which would pass for certainty
        return dict.fromkeys(("balanced_accuracy", "macro_f1"), wilson(hits, len(truth)))
    balanced, macro = [], []
    for counts in _resampled(truth, guess, classes, resamples, seed):
        balanced.append(counts.balanced_accuracy())
        macro.append(counts.macro_f1())
    whole = count(truth, guess, classes)
    return {
        "balanced_accuracy": _spread(np.concatenate(balanced), float(whole.balanced_accuracy())),
        "macro_f1": _spread(np.concatenate(macro), float(whole.macro_f1())),
    }


def _spread(values: Float[np.ndarray, " resamples"], estimate: float) -> Interval:
    """The middle 95% of the values, around the estimate.

    A resample holds only two images in three, some of them twice. With a handful of images
    per class that lowers F1 throughout, so plain percentiles would lie below the estimate.
    """
    ends = np.quantile(values, (0.025, 0.975)) - values.mean() + estimate
    low, high = ends.clip(0, 1).tolist()
    return [min(low, estimate), max(high, estimate)]


def _resampled(
    truth: Int[np.ndarray, " n"],
    guess: Int[np.ndarray, " n"],
    classes: int,
    resamples: int,
    seed: int,
) -> Iterator[Counts]:
    """The counts of many resamples, some at a time."""
    random = np.random.default_rng(seed)
    # A image that is not right counts for a class of its own, which is dropped.
    right = np.where(truth == guess, truth, classes)
    columns = [column.astype(np.int32) for column in (right, truth, guess)]
    width, at_once = classes + 1, max(1, CHUNK // max(len(truth), classes))
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        picks = random.integers(0, len(truth), (rows, len(truth)), dtype=np.int32)
        offsets = np.arange(0, rows * width, width, dtype=np.int32)[:, None]
        tallies = (
            np.bincount((column[picks] + offsets).ravel(), minlength=rows * width)
            for column in columns
        )
        yield Counts(*(tally.reshape(rows, width)[:, :classes] for tally in tallies))
