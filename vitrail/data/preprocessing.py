"""Preprocessing: from an image to the model's input; saved with the weights."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitrail.data.decode import open_image, readable, upright
from vitrail.errors import VitrailError

Color = tuple[float, ...]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image is resized, cropped and scaled before the model sees it."""

    size: tuple[int, int] = (224, 224)
    """Rows and columns of the model's input."""
    short_side: int = 0
    """Resize, keeping the aspect ratio, as if the short side of `size` were this long, and crop the
    center; zero resizes to `size`, ignoring the aspect ratio."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    antialias: bool = True
    mean: Color = (0.5, 0.5, 0.5)
    std: Color = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        sides = isinstance(self.size, tuple) and len(self.size) == 2 and min(self.size) > 0
        colors = isinstance(self.mean, tuple) and isinstance(self.std, tuple)
        if not sides or not colors or len(self.mean) != len(self.std):
            raise VitrailError(f"cannot preprocess to {self.size}, {self.mean}, {self.std}")

    def __call__(self, image: Image.Image | np.ndarray | Path | str) -> Float[Tensor, "c y x"]:
        if isinstance(image, (Path, str)):
            image = open_image(Path(image))
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise VitrailError(f"expected an image, array or path, not {type(image).__name__}")
        if len(self.mean) not in (1, 3):
            raise VitrailError(f"images have 1 or 3 channels, this model takes {len(self.mean)}")
        with readable("the image"):
            rgb = upright(image)
        pixels = self._resize(rgb if len(self.mean) == 3 else rgb.convert("L"))
        if self.short_side:
            pixels = _center_crop(pixels, self.size)
        return self._normalized(pixels)

    def only_normalizes(self, size: tuple[int, int]) -> bool:
        """Whether RGB images of that size are neither resized nor cropped."""
        return len(self.mean) == 3 and size == self.size == self.resized(*size)

    def normalized(self, images: UInt8[np.ndarray, "b y x 3"]) -> Float[Tensor, "b c y x"]:
        """What `__call__` returns for each of them if it only normalizes."""
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        return self._normalized(pixels.float().mul_(1 / 255))

    def _normalized(self, pixels: Float[Tensor, "*b c y x"]) -> Float[Tensor, "*b c y x"]:
        mean, std = (torch.tensor(color)[:, None, None] for color in (self.mean, self.std))
        return (pixels - mean).div_(std)

    def _resize(self, image: Image.Image) -> Float[Tensor, "c y x"]:
        """To the size itself, or to the one that the center is cropped from.

        Pillow always antialiases; without it, the tensor is resized instead. torchvision gives the
        same numbers, but importing it takes longer than a prediction.
        """
        rows, columns = self.resized(image.height, image.width)
        if self.antialias and image.size != (columns, rows):
            image = image.resize((columns, rows), Image.Resampling[self.interpolation.upper()])
        pixels = to_tensor(image).float().mul_(1 / 255)
        if pixels.shape[1:] == (rows, columns):
            return pixels
        return F.interpolate(pixels[None], (rows, columns), mode=self.interpolation)[0]

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns before the center crop."""
        rows, columns = self.size
        if self.short_side:
            scale = self.short_side / min(self.size)
            rows, columns = round(rows * scale), round(columns * scale)
            if rows * width >= columns * height:
                columns = max(columns, int(rows * width / height))
            else:
                rows = max(rows, int(columns * height / width))
        return rows, columns

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for a file's metadata."""
        return asdict(self)


def to_tensor(image: Image.Image | UInt8[np.ndarray, "y x _c"]) -> UInt8[Tensor, "c y x"]:
    """A view where possible: torch resizes images fastest whose channels come last."""
    pixels = np.asarray(image)
    pixels = pixels if pixels.flags.writeable else pixels.copy()  # torch has no read-only tensors
    return torch.from_numpy(pixels[..., None] if pixels.ndim == 2 else pixels).permute(2, 0, 1)


def _center_crop(pixels: Float[Tensor, "c y x"], size: tuple[int, int]) -> Float[Tensor, "c r s"]:
    """The middle; what is smaller gets a black border."""
    (height, width), (rows, columns) = pixels.shape[1:], size
    top, left = round((height - rows) / 2), round((width - columns) / 2)
    return F.pad(pixels, [-left, columns + left - width, -top, rows + top - height])


def resampling_kernel(
    distance: Float[Tensor, "..."], interpolation: Literal["bilinear", "bicubic"]
) -> Float[Tensor, "..."]:
    """Pillow's weight of a pixel by its distance from 0 up, in pixels of the result or the source,
    whichever are larger."""
    if interpolation == "bilinear":
        return (1 - distance).clamp(min=0)
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    beyond = torch.zeros_like(distance)
    return torch.where(distance < 1, near, torch.where(distance < 2, far, beyond))


def from_dict(values: dict[str, Any]) -> Preprocessing:
    """The inverse of `Preprocessing.to_dict`."""
    if not set(values) <= {field.name for field in fields(Preprocessing)}:
        raise VitrailError("the file describes a preprocessing that this version does not know")
    tuples: dict[str, Any] = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    return Preprocessing(**values | tuples)
