"""The mistakes a model was surest of, with their pictures: half of them are often wrong labels."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.source import Source
from vitrail.errors import VitrailError
from vitrail.evaluation.metrics import Predictions

SIDE = 160
"""Pixels of a thumbnail's longer side at most."""


def mistakes(predictions: Predictions, source: Source, most: int = 24) -> list[dict[str, Any]]:
    """The most confident mistakes, surest first; the pictures are read again."""
    wrong = np.flatnonzero(predictions.guesses[:, 0] != predictions.targets)
    sure = predictions.probabilities[wrong, 0]
    chosen = wrong[np.argsort(-sure, kind="stable")[:most]].tolist()
    wanted = {predictions.names[i] for i in chosen}
    places = {name: place for place, name in enumerate(source.names) if name in wanted}
    found = []
    for i in chosen:
        name = predictions.names[i]
        try:
            picture = source.picture(places[name])
        except VitrailError:  # gone since it was judged; the numbers are worth more than a picture
            continue
        found.append(
            {
                "name": name,
                "truth": predictions.labels[predictions.targets[i]],
                "guess": predictions.labels[predictions.guesses[i, 0]],
                "probability": float(predictions.probabilities[i, 0]),
                "thumbnail": thumbnail(picture),
            }
        )
    return found


def thumbnail(picture: Image.Image) -> str:
    """A small JPEG as a data URI, which a page can hold."""
    small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")
