"""Preprocessing as part of the graph: bytes of images of any size in, logits out.

Resizing is two products with matrices that are computed from the image's size. Like Pillow, it
resizes columns first, rounds to whole numbers, then resizes rows and rounds again. What would be
cropped away is never computed. Pillow uses integers, whose sums are exact in 64-bit floats.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.data.preprocessing import Preprocessing, resampling_kernel
from vitrail.errors import VitrailError

_ONE = float(1 << 22)
"""The fixed-point one of Pillow's resampling weights."""


class Pipeline(nn.Module):
    """A model that takes decoded images as bytes."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        if preprocessing.interpolation == "bicubic" and not preprocessing.antialias:
            raise VitrailError(
                "bicubic resizing without antialiasing cannot be part of the graph; use "
                "--preprocessing beside"
            )
        self.model, self.preprocessing = model, preprocessing
        for name in ("mean", "std"):
            values = torch.tensor(getattr(preprocessing, name)).reshape(-1, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, images: UInt8[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        pixels = self._resize(images.double()).float() / 255
        return self.model((pixels - self.mean) / self.std)

    def _resize(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c rows columns"]:
        """The resized images, cropped as `Preprocessing` does."""
        p = self.preprocessing
        y, x = (torch.arange(images.shape[axis], dtype=torch.float64) for axis in (2, 3))
        height, width = y[-1] + 1, x[-1] + 1
        rows, columns = p.size
        tall, wide = torch.full_like(height, rows), torch.full_like(width, columns)
        if p.short_side:
            scale = p.short_side / min(p.size)
            box = round(rows * scale), round(columns * scale)
            # The resized image just covers the box: one of its sides is the box's own.
            tall = (box[1] * height / width).floor().clamp(min=box[0])
            wide = (box[0] * width / height).floor().clamp(min=box[1])
        images = self._round(images @ self._weights(x, wide, columns).T)
        return self._round(self._weights(y, tall, rows) @ images)

    def _round(self, values: Tensor) -> Tensor:
        """Pillow stores bytes between its two passes; without antialiasing, torch stores floats."""
        if not self.preprocessing.antialias:
            return values
        return ((values + _ONE / 2) / _ONE).floor().clamp(0, 255)

    def _weights(
        self, indices: Float[Tensor, " n"], length: Float[Tensor, ""], cropped: int
    ) -> Float[Tensor, "cropped n"]:
        """The weight of each pixel of a line in each pixel of the resized and cropped line."""
        scale = (indices[-1] + 1) / length
        first = ((length - cropped) / 2).round()
        centers = (first + torch.arange(cropped, dtype=indices.dtype) + 0.5) * scale
        support = scale.clamp(min=1) if self.preprocessing.antialias else torch.ones_like(scale)
        distance = ((indices + 0.5 - centers[:, None]) / support).abs()
        weights = resampling_kernel(distance, self.preprocessing.interpolation)
        weights = weights / weights.sum(1, keepdim=True)
        if not self.preprocessing.antialias:
            return weights
        return weights.sign() * (weights.abs() * _ONE + 0.5).floor()
