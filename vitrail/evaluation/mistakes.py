"""The most confident mistakes with thumbnails: many of them are often labeling errors."""

import base64
import io
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from vitrail.data.dataset import Source
from vitrail.errors import VitrailError
from vitrail.evaluation.metrics import Predictions

_SIDE = 160
"""Pixels of a thumbnail's longer side at most."""


def mistakes(predictions: Predictions, source: Source, most: int = 24) -> list[dict[str, Any]]:
    """The most confident mistakes, surest first; the images are read again."""
    wrong = np.flatnonzero(predictions.guesses[:, 0] != predictions.targets)
    sure = predictions.probabilities[wrong, 0]
    return _described(predictions, source, wrong[np.argsort(-sure, kind="stable")[:most]])


def with_examples(
    confused: list[dict[str, Any]],
    predictions: Predictions,
    source: Source,
    pairs: int = 10,
    each: int = 2,
) -> list[dict[str, Any]]:
    """The most frequent confusions, the first `pairs` of them with their surest `examples`."""
    surest = np.argsort(-predictions.probabilities[:, 0], kind="stable")
    labels = np.array(predictions.labels)
    truth = labels[predictions.targets[surest]]
    guess = labels[predictions.guesses[surest, 0]]
    chosen = [
        surest[(truth == pair["truth"]) & (guess == pair["guess"])][:each]
        for pair in confused[:pairs]
    ]
    rows = _described(predictions, source, np.concatenate([surest[:0], *chosen]))
    examples = {(pair["truth"], pair["guess"]): [] for pair in confused[:pairs]}
    for row in rows:
        examples[row["truth"], row["guess"]].append(row)
    return [
        pair | {"examples": examples.get((pair["truth"], pair["guess"]), [])} for pair in confused
    ]


def _described(
    predictions: Predictions, source: Source, indices: Int[np.ndarray, " k"]
) -> list[dict[str, Any]]:
    """Name, label, prediction and thumbnail of some images."""
    chosen = indices.tolist()
    chosen_names = {predictions.names[i] for i in chosen}
    places = {name: place for place, name in enumerate(source.names) if name in chosen_names}
    rows = []
    for i in chosen:
        name = predictions.names[i]
        try:
            image = source.image(places[name])
        except VitrailError:  # gone since; the numbers matter more than a thumbnail
            continue
        rows.append(
            {
                "name": name,
                "truth": predictions.labels[predictions.targets[i]],
                "guess": predictions.labels[predictions.guesses[i, 0]],
                "probability": float(predictions.probabilities[i, 0]),
                "thumbnail": thumbnail(image),
            }
        )
    return rows


def thumbnail(image: Image.Image) -> str:
    """A small JPEG as a data URI."""
    small = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")
