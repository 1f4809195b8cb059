"""VTAB's derived labels: pure functions from a data set's own annotations to the class.

The rules are those of google-research/task_adaptation, which made the benchmark.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from vitrail.errors import VitrailError

_CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
_KITTI_METERS = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE = 1000.0
_VEHICLES = ("Car", "Van", "Truck")


def _above(thresholds: Sequence[float], value: float) -> int:
    """The number of the last threshold that lies strictly below the value."""
    below = [number for number, threshold in enumerate(thresholds) if threshold < value]
    if not below:
        raise VitrailError(f"a distance of {value:g} is below {thresholds[0]:g}; check the labels")
    return below[-1]


def clevr_count(objects: Sequence[Mapping[str, Any]]) -> int:
    """Three to ten objects."""
    if not 3 <= len(objects) <= 10:
        raise VitrailError(f"a CLEVR scene has {len(objects)} objects; expected 3 to 10")
    return len(objects) - 3


def clevr_distance(objects: Sequence[Mapping[str, Any]]) -> int:
    """How far the nearest object is from the camera."""
    return _above(_CLEVR_DEPTHS, min(float(one["pixel_coords"][2]) for one in objects))


def kitti_distance(lines: Iterable[str]) -> int:
    """How far ahead the nearest car, van or truck is, from the lines of a label file."""
    found = [line.split() for line in lines]
    ahead = [float(words[13]) for words in found if words and words[0] in _VEHICLES]
    return _above(_KITTI_METERS, min(ahead, default=_NO_VEHICLE))


def dsprites_location(classes: Int[np.ndarray, "n 6"]) -> Int[np.ndarray, " n"]:
    """Sixteen columns out of 32; the latent factors are color, shape, scale, orientation, x, y."""
    return classes[:, 4] // 2


def dsprites_orientation(classes: Int[np.ndarray, "n 6"]) -> Int[np.ndarray, " n"]:
    """Sixteen ranges of the 40 orientations."""
    return np.floor_divide(classes[:, 3], 2.5).astype(np.int64)


def smallnorb_azimuth(info: Int[np.ndarray, "n 4"]) -> Int[np.ndarray, " n"]:
    """Eighteen directions, which the file numbers 0, 2, … 34."""
    return info[:, 2].astype(np.int64) // 2


def smallnorb_elevation(info: Int[np.ndarray, "n 4"]) -> Int[np.ndarray, " n"]:
    """Nine heights of the camera."""
    return info[:, 1].astype(np.int64)
