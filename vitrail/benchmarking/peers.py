"""timm's model of the same name, timed alternately with ours."""

import statistics
from importlib.metadata import version
from typing import Any

from torch import nn

from vitrail.benchmarking.measure import FAILURES, Workload, attempt, interleaved_seconds
from vitrail.errors import one_line
from vitrail.model import Architecture
from vitrail.model.variants import variant_name

_SIZES = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge"}
_HYBRIDS = {
    "R26+S/32": "vit_small_r26_s32_224",
    "R50+B/16": "vit_base_r50_s16_224",
    "R50+L/32": "vit_large_r50_s32_224",
}


def timm_name(architecture: Architecture) -> str:
    """timm's name of a variant, empty if it has none; other options of the model are ignored."""
    ours = variant_name(architecture)
    if ours in _HYBRIDS:
        return _HYBRIDS[ours]
    if ours.startswith("ResNet"):
        return ours.lower()
    if "/" in ours:
        size, _, patch = ours.partition("/")
        return f"vit_{_SIZES[size]}_patch{patch}_224" if size in _SIZES else ""
    return f"resnetv2_{ours[1:]}_bit" if "x" in ours else ""


def compare_with_timm(
    work: Workload, architecture: Architecture, batch: int, seconds: float
) -> dict[str, Any]:
    """Images per second of both models and the ratio, or why the comparison is missing."""
    try:
        import timm
    except ImportError:
        return {"missing": "timm is not installed"}
    theirs = timm_name(architecture)
    if not theirs or not timm.is_model(theirs):
        return {"missing": "timm has no such model"}
    options: dict[str, Any] = {"img_size": architecture.size} if theirs.startswith("vit") else {}
    model = timm.create_model(
        theirs, num_classes=architecture.classes, in_chans=architecture.channels, **options
    )
    try:
        rounds, failure = attempt(lambda: _time_both(work, model, batch, seconds))
    except RuntimeError as error:  # of timm's model: ours ran before
        return {"missing": f"{theirs} failed ({one_line(error)})"}
    if rounds is None:
        return {"missing": f"{FAILURES[failure]} batch size {batch} with both models"}
    ours, other = (batch / statistics.median(row[i] for row in rounds) for i in (0, 1))
    return {
        "name": theirs,
        "library": f"timm {version('timm')}",
        "images_per_second": round(other, 2),
        "ours_images_per_second": round(ours, 2),
        "ratio": round(statistics.median(row[1] / row[0] for row in rounds), 4),
    }


def _time_both(work: Workload, model: nn.Module, batch: int, seconds: float) -> list[list[float]]:
    other = Workload(model, work.where, work.shape, work.train).prepared()
    return interleaved_seconds([work.call(batch), other.call(batch)], work.where, seconds)
