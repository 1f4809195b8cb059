"""BiT's HyperRule (Kolesnikov et al. 2019): transfer settings that follow from the data alone.

Numbers are the paper's: crops of 384 out of 448 pixels, decays at 30, 60 and 90 % of the run. The
released code takes 480 out of 512 pixels, and for small data 40, 60 and 80 %. The warm-up, which
the paper leaves out, is the code's.
"""

from typing import Any

FIXED: dict[str, Any] = {
    "train.batch": 512,
    "data.crop": 0.0,  # for testing, pictures are resized only
    "augment.crop": "resize",
    "optim.name": "sgd",
    "optim.lr": 0.003,
    "optim.momentum": 0.9,
    "optim.weight_decay": 0.0,
    "optim.clip": 0.0,
    "optim.decay": "staircase",
    "optim.milestones": (0.3, 0.6, 0.9),
}


def hyperrule(images: int, median_side: float) -> dict[str, Any]:
    """The settings for so many training images, half of them smaller than that many pixels."""
    steps, warmup = (500, 100) if images < 20_000 else (10_000, 500)
    if images >= 500_000:
        steps = 20_000
    return FIXED | {
        "train.steps": steps,
        "optim.warmup": warmup,
        "data.size": 128 if median_side < 96 else 384,
        "augment.mixup": 0.0 if images < 20_000 else 0.1,
    }
