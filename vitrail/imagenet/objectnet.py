"""ObjectNet (Barbu et al. 2019): its images of the 113 classes that it shares with ImageNet.

The red border of the images is cut off. A class of ObjectNet can map to several ImageNet classes; a
prediction is correct if it is one of them. Only classes that map to one of the 113 may be
predicted; unmasked, all 1,000.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.dataset import Source
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.imagenet.classes import ImageNetSubset

FOLDERS = "folder_to_objectnet_label.json"
TO_IMAGENET = "objectnet_to_imagenet_1k.json"
NAMES = "imagenet_to_label_2012_v2"
ORDER = "pytorch_to_imagenet_2012_id.json"
_BORDER = 2
"""Pixels that ObjectNet's own code cuts off on each side."""
_CROP = 480 / 512
"""BiT (arXiv 1912.11370, appendix B) resizes the short side to 512 pixels and crops 480."""


def objectnet(source: Source, folders: Sequence[Path]) -> ImageNetSubset:
    """The images of the shared classes; the mappings are in one of the folders."""
    shared = _shared_classes(_mappings_in(folders))
    known = [shared.get(label, ()) for label in source.labels]
    kept = np.flatnonzero(np.array([bool(known[target]) for target in source.targets.tolist()]))
    if not len(kept):
        raise VitrailError(
            f"none of the {len(source.labels)} classes is one of ObjectNet's {len(shared)} that "
            f"ImageNet has; expected folders such as {next(iter(shared))}/"
        )
    right = [known[target] for target in source.targets[kept].tolist()]
    competing = {number for classes in shared.values() for number in classes}
    return ImageNetSubset(source, kept, right, border=_BORDER, allowed=tuple(sorted(competing)))


def bit_crop(preprocessing: Preprocessing) -> Preprocessing:
    """BiT's resize and center crop for ObjectNet, at the model's own size."""
    return replace(preprocessing, short_side=round(min(preprocessing.size) / _CROP))


def _mappings_in(folders: Sequence[Path]) -> Path:
    places = [place for folder in folders for place in (folder, folder / "mappings")]
    found = next((place for place in places if (place / TO_IMAGENET).is_file()), None)
    if found is None:
        raise VitrailError(
            f"no {TO_IMAGENET} in {folders[0]} or its mappings/; it comes with ObjectNet, from "
            "objectnet.dev"
        )
    return found


def _shared_classes(mappings: Path) -> dict[str, tuple[int, ...]]:
    """ObjectNet folder → ImageNet class numbers."""
    folders, to_imagenet, order = (
        _read_object(mappings / name) for name in (FOLDERS, TO_IMAGENET, ORDER)
    )
    names = _read_text(mappings / NAMES).splitlines()
    try:
        number = {names[line].strip(): int(place) for place, line in order.items()}
        found = {
            folder: tuple(number[name.strip()] for name in to_imagenet[label].split(";"))
            for folder, label in folders.items()
            if label in to_imagenet
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise VitrailError(
            f"the mappings in {mappings} do not belong together ({one_line(error)})"
        ) from None
    if not found:
        raise VitrailError(f"the mappings in {mappings} are empty; unpack ObjectNet again")
    return found


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise VitrailError(f"cannot read {path} ({one_line(error)})") from None
    if not isinstance(value, dict) or not value:
        raise VitrailError(f"{path} is empty or not a JSON object; unpack ObjectNet again")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FailureError(f"cannot read {path} ({one_line(error)})") from None
