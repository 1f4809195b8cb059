"""BiT's HyperRule (Kolesnikov et al. 2019): transfer settings that follow from the data alone.

What is the same for all data stands in the recipe finetune/bit_hyperrule. Sizes are the paper's,
384 out of 448 pixels, where the released code takes 480 out of 512. The warm-up, which the paper
leaves out, is the code's.
"""

from typing import Any


def hyperrule(images: int, median_side: float) -> dict[str, Any]:
    """The settings for so many training images, half of them smaller than that many pixels."""
    steps, warmup = (500, 100) if images < 20_000 else (10_000, 500)
    if images >= 500_000:
        steps = 20_000
    return {
        "train.steps": steps,
        "optim.warmup": warmup,
        "data.size": 128 if median_side < 96 else 384,
        "augment.mixup": 0.0 if images < 20_000 else 0.1,
    }
