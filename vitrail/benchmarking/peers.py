"""The same model in timm, built fresh and timed by turns with ours."""

import statistics
from importlib.metadata import version
from typing import Any

from torch import nn

from vitrail.benchmarking.measuring import Work, attempted, typical_seconds
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


def build_peer(architecture: Architecture) -> tuple[str, nn.Module] | None:
    """timm's model of the same name, size and number of classes; None where there is none."""
    try:
        import timm
    except ImportError:
        return None
    theirs = peer_name(architecture)
    if not theirs or not timm.is_model(theirs):
        return None
    sized: dict[str, Any] = {"img_size": architecture.size} if theirs.startswith("vit") else {}
    model = timm.create_model(
        theirs, num_classes=architecture.classes, in_chans=architecture.channels, **sized
    )
    return theirs, model


def beside_peer(work: Work, architecture: Architecture, batch: int, seconds: float) -> Any:
    """Images per second of timm's model at our best batch, and how many times as fast ours is."""
    found = build_peer(architecture)
    if found is None:
        return None
    theirs, model = found
    other = Work(model, work.where, work.shape, work.train).prepared()
    rounds = attempted(
        lambda: typical_seconds([work.call(batch), other.call(batch)], work.where, seconds)
    )
    if rounds is None:
        return None
    return {
        "name": theirs,
        "library": f"timm {version('timm')}",
        "images_per_second": round(batch / statistics.median(row[1] for row in rounds), 2),
        "ratio": round(statistics.median(row[1] / row[0] for row in rounds), 4),
    }
