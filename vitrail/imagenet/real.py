"""ImageNet-ReaL (Beyer et al. 2020, arXiv 2006.07159): the validation images with better labels.

An image may have several labels, and a guess is right if it is one of them; an image whose
labelers found none of the classes is left out.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.data.dataset import Source
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import fetch_file
from vitrail.imagenet.classes import CLASSES, ImageNetSubset

_FILE = "real.json"
_URL = "https://raw.githubusercontent.com/google-research/reassessed-imagenet/master/real.json"
_IMAGES = 50_000


def real(source: Source, folders: Sequence[Path]) -> ImageNetSubset:
    """The validation images that have labels; real.json lies in one of the folders or is
    downloaded."""
    numbers = [_image_number(name) for name in source.names]
    path = next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)
    labels = _read_labels(path or _fetch())
    found = [labels[number - 1] for number in numbers]
    kept = [index for index, right in enumerate(found) if right]
    if not kept:
        raise VitrailError(f"none of {len(found):,} images has a label in {path or _URL}")
    return ImageNetSubset(source, np.array(kept), [found[index] for index in kept])


def _fetch() -> Path:
    try:
        return fetch_file(_URL)
    except FailureError as error:
        raise FailureError(f"no {_FILE} in DATA, beside it or in $VITRAIL_DATA; {error}") from None


def _read_labels(path: Path) -> list[tuple[int, ...]]:
    """The labels of each validation image, in the order of their numbers."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FailureError(f"cannot read {path} ({one_line(error)})") from None
    lists = isinstance(values, list) and all(isinstance(labels, list) for labels in values)
    if not lists or len(values) != _IMAGES:
        many = f"{len(values):,} entries" if isinstance(values, (list, dict)) else "no list"
        raise VitrailError(f"{path} has {many}; expected 50,000 lists of class numbers")
    if not all(type(x) is int and 0 <= x < CLASSES for labels in values for x in labels):
        raise VitrailError(f"{path} has labels that are not class numbers from 0 to 999")
    return [tuple(labels) for labels in values]


def _image_number(name: str) -> int:
    """Counted from 1; real.json identifies images by number alone."""
    match = re.search(r"ILSVRC2012_val_(\d{8})", name)
    if match is None or not 1 <= int(match[1]) <= _IMAGES:
        raise VitrailError(
            f"'{name}' is not the name of a validation image; --labels real needs the names "
            "ILSVRC2012_val_00000001.JPEG to …50000.JPEG"
        )
    return int(match[1])
