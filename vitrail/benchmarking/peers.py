"""The same model in timm, built fresh and timed by turns with ours."""

import statistics
from importlib.metadata import version
from typing import Any

from torch import nn

from vitrail.benchmarking.measuring import SAID, Work, attempted, typical_seconds
from vitrail.errors import one_line
from vitrail.model import Architecture
from vitrail.model.variants import name

SIZES = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge"}
HYBRIDS = {
    "R26+S/32": "vit_small_r26_s32_224",
    "R50+B/16": "vit_base_r50_s16_224",
    "R50+L/32": "vit_large_r50_s32_224",
}


def peer_name(architecture: Architecture) -> str:
    """What timm calls a model, if it has it at all; options beyond the variant are passed over."""
    ours = name(architecture)
    if ours in HYBRIDS:
        return HYBRIDS[ours]
    if ours.startswith("ResNet"):
        return ours.lower()
    if "/" in ours:
        size, _, patch = ours.partition("/")
        return f"vit_{SIZES[size]}_patch{patch}_224" if size in SIZES else ""
    return f"resnetv2_{ours[1:]}_bit" if "x" in ours else ""


def build_peer(architecture: Architecture) -> tuple[str, nn.Module] | str:
    """timm's model of the same name, size and number of classes, or why there is none."""
    try:
        import timm
    except ImportError:
        return "timm is not installed"
    theirs = peer_name(architecture)
    if not theirs or not timm.is_model(theirs):
        return "timm has no such model"
    sized: dict[str, Any] = {"img_size": architecture.size} if theirs.startswith("vit") else {}
    model = timm.create_model(
        theirs, num_classes=architecture.classes, in_chans=architecture.channels, **sized
    )
    return theirs, model


def beside_peer(
    work: Work, architecture: Architecture, batch: int, seconds: float
) -> dict[str, Any]:
    """Images per second of both models at our best batch, by turns, and how many times as fast ours
    is; or why there is nothing beside it."""
    found = build_peer(architecture)
    if isinstance(found, str):
        return {"missing": found}
    theirs, model = found
    try:
        rounds, lacks = attempted(lambda: by_turns(work, model, batch, seconds))
    except RuntimeError as error:  # theirs: ours went through before
        return {"missing": f"{theirs} failed ({one_line(error)})"}
    if rounds is None:
        return {"missing": f"{SAID[lacks]} {batch} images beside ours"}
    ours, other = (batch / statistics.median(row[i] for row in rounds) for i in (0, 1))
    return {
        "name": theirs,
        "library": f"timm {version('timm')}",
        "images_per_second": round(other, 2),
        "ours_images_per_second": round(ours, 2),
        "ratio": round(statistics.median(row[1] / row[0] for row in rounds), 4),
    }


def by_turns(work: Work, model: nn.Module, batch: int, seconds: float) -> list[list[float]]:
    """Seconds of ours and theirs in every round."""
    other = Work(model, work.where, work.shape, work.train).prepared()
    return typical_seconds([work.call(batch), other.call(batch)], work.where, seconds)
