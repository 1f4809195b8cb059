"""Preprocessing as part of the model: bytes of a picture of any size in, logits out.

Resizing is two products with matrices that are computed from the picture's size, in Pillow's way:
columns first, rounded to whole numbers, then rows, rounded again. What is cropped away is never
computed. Pillow computes with whole numbers, and sums of those are exact in 64-bit floats.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError

ONE = float(1 << 22)
"""Pillow's weights are multiples of this part of one."""


class Pipeline(nn.Module):
    """A model that takes pictures as they come out of a decoder."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        if preprocessing.interpolation == "bicubic" and not preprocessing.antialias:
            raise VitrailError(
                "bicubic without smoothing cannot be put into the graph; use --preprocessing beside"
            )
        self.model, self.preprocessing = model, preprocessing
        for name in ("mean", "std"):
            values = torch.tensor(getattr(preprocessing, name)).reshape(-1, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, images: UInt8[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        pixels = self.resized(images.double()).float() / 255
        return self.model((pixels - self.mean) / self.std)

    def resized(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c rows columns"]:
        """What `Preprocessing` cuts out of the resized picture."""
        p = self.preprocessing
        height, width = places(images, 2), places(images, 3)
        long = (height[-1] + 1, width[-1] + 1)
        rows, columns = p.size
        if p.short_side:
            scale = p.short_side / min(p.size)
            box = round(rows * scale), round(columns * scale)
        else:
            box = p.size
        # One of the two is the box's own side: the picture just covers it.
        covering = p.short_side > 0
        tall = covered(box[0], box[1] * long[0] / long[1], covering)
        wide = covered(box[1], box[0] * long[1] / long[0], covering)
        images = images @ self.weights(width, wide, columns).T
        images = self.weights(height, tall, rows) @ self.rounded(images)
        return self.rounded(images)

    def rounded(self, values: Tensor) -> Tensor:
        """Pillow keeps bytes between its two passes; without smoothing, torch resizes floats."""
        if not self.preprocessing.antialias:
            return values
        return ((values + ONE / 2) / ONE).floor().clamp(0, 255)

    def weights(
        self, places: Float[Tensor, " n"], length: Float[Tensor, ""], kept: int
    ) -> Float[Tensor, "kept n"]:
        """How much each pixel of a line counts in each of those kept of the resized line."""
        scale = (places[-1] + 1) / length
        first = ((length - kept) / 2).round()
        centers = (first + torch.arange(kept, dtype=places.dtype) + 0.5) * scale
        reach = scale.clamp(min=1) if self.preprocessing.antialias else torch.ones_like(scale)
        distance = ((places + 0.5 - centers[:, None]) / reach).abs()
        is_cubic = self.preprocessing.interpolation == "bicubic"
        found = bicubic(distance) if is_cubic else (1 - distance).clamp(min=0)
        found = found / found.sum(1, keepdim=True)
        if not self.preprocessing.antialias:
            return found
        return found.sign() * (found.abs() * ONE + 0.5).floor()


def places(images: Float[Tensor, "b c y x"], axis: int) -> Float[Tensor, " n"]:
    """The numbers of the pixels along an axis, precise enough for very long ones."""
    return torch.arange(images.shape[axis], dtype=torch.float64)


def covered(box: int, other: Float[Tensor, ""], covering: bool) -> Float[Tensor, ""]:
    """The side that a resized picture has: the box's, or more where the other side decides."""
    return other.floor().clamp(min=box) if covering else torch.full_like(other, box)


def bicubic(x: Float[Tensor, "kept n"]) -> Float[Tensor, "kept n"]:
    """Pillow's kernel, of the distance in pixels."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
