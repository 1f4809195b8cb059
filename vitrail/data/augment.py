"""Augmentation of single images by the processor; `batch_augment` is the device's.

Images are uint8 tensors, a quarter of the data of floats; `normalize` converts them, and `mix`
mixes them, on the device. All random numbers come from torch's global generator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from vitrail.config import Augment
from vitrail.data.preprocessing import Preprocessing, to_tensor

Color = tuple[int, ...]
_Step = Callable[[Any], Any]
_PADDING = 8
"""The largest shift: an eighth of a side, 4 of 32 pixels."""


def training_transform(
    preprocessing: Preprocessing, augment: Augment
) -> Callable[[Image.Image | UInt8[np.ndarray, "y x 3"]], UInt8[Tensor, "c y x"]]:
    """From an image or its pixels to an augmented uint8 tensor of `preprocessing.size`.

    Mixup and CutMix are for batches: see `mix`. The result can be pickled for worker processes.
    """
    fill = mean_color(preprocessing)
    # Pillow's own operations come first; everything else starts from pixels.
    gray: list[_Step] = [] if len(fill) == 3 else [_as_image, v2.Grayscale()]
    colors = _color_steps(augment, fill)
    if augment.crop == "pad":
        flip: list[_Step] = [_mirrored] if augment.flip else []
        steps = [_as_image, _Whole(preprocessing), _shifted, *flip, *colors, to_tensor]
    else:
        flip = [_flipped] if augment.flip else []
        if colors:
            # Pillow recolors several times faster than torch, and torch crops twice as fast.
            colors = [_to_pil, *colors, to_tensor]
        steps = [*_crop_steps(augment, preprocessing), *flip, *colors]
    erase: list[_Step] = [_Erase(augment.erasing, fill)] if augment.erasing else []
    return v2.Compose([*gray, *steps, *erase])


def _crop_steps(augment: Augment, preprocessing: Preprocessing) -> list[_Step]:
    rows, columns = size = preprocessing.size
    resampling = resampling_options(preprocessing)
    if augment.crop == "inception":
        # Aspect ratios from 3/4 to 4/3 of the model's.
        ratio = (0.75 * columns / rows, columns / (0.75 * rows))
        area = (augment.area, 1.0)
        crop = v2.RandomResizedCrop(size, scale=area, ratio=ratio, **resampling)
        return [to_tensor, partial(_inception_crop, crop=crop)]
    if augment.crop == "resize":
        resize = v2.Resize(crop_source_size(preprocessing), **resampling)
        return [to_tensor, resize, v2.RandomCrop(size)]
    return [to_tensor, partial(whole_image, preprocessing=preprocessing)]


def _color_steps(augment: Augment, fill: Color) -> list[_Step]:
    """What changes colors and shapes of PIL images."""
    steps: list[_Step] = []
    if augment.randaugment_layers:
        steps.append(RandAugment(augment.randaugment_layers, augment.randaugment_magnitude, fill))
    if augment.autoaugment:
        policy = v2.AutoAugmentPolicy(augment.autoaugment)
        steps.append(v2.AutoAugment(policy, fill=list(fill)))
    if augment.three_augment:
        steps.append(_three_augment)
    if augment.color_jitter:
        steps.append(v2.ColorJitter(*[augment.color_jitter] * 3))
    return steps


def mean_color(preprocessing: Preprocessing) -> Color:
    """The color that normalization maps to zero."""
    return tuple(round(255 * share) for share in preprocessing.mean)


def whole_image(
    image: UInt8[Tensor, "c _y _x"], preprocessing: Preprocessing
) -> UInt8[Tensor, "c y x"]:
    """The evaluation's resize and crop, in bytes."""
    sides = list(preprocessing.resized(image.shape[1], image.shape[2]))
    resized = v2.functional.resize(image, sides, **resampling_options(preprocessing))
    if not preprocessing.short_side:
        return resized
    return v2.functional.center_crop(resized, list(preprocessing.size))


def resampling_options(preprocessing: Preprocessing) -> dict[str, Any]:
    """For torchvision's functions that resize."""
    mode = InterpolationMode(preprocessing.interpolation)
    return {"interpolation": mode, "antialias": preprocessing.antialias}


# For small images, the overhead of torchvision's classes would dominate; for photographs, it would
# be a twentieth of the time.


def _inception_crop(
    image: UInt8[Tensor, "c _y _x"], crop: v2.RandomResizedCrop
) -> UInt8[Tensor, "c y x"]:
    """What the crop draws, with its pixels."""
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        return crop(image)  # torchvision may resize floats there
    box = crop.make_params([image])
    bottom, right = box["top"] + box["height"], box["left"] + box["width"]
    part = image[None, :, box["top"] : bottom, box["left"] : right]
    mode = InterpolationMode(crop.interpolation).value
    return F.interpolate(part, crop.size, mode=mode, antialias=bool(crop.antialias))[0]


def _flipped(image: UInt8[Tensor, "c y x"]) -> UInt8[Tensor, "c y x"]:
    return image.flip(-1) if torch.rand(()) < 0.5 else image


def to_gray(pixels: UInt8[np.ndarray, "y x 3"]) -> UInt8[np.ndarray, "y x 1"]:
    return np.asarray(Image.fromarray(pixels).convert("L"))[..., None]


def _as_image(image: Image.Image | UInt8[np.ndarray, "y x 3"]) -> Image.Image:
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


def _to_pil(image: UInt8[Tensor, "c y x"]) -> Image.Image:
    if len(image) == 1:
        return Image.fromarray(image[0].numpy())
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


@dataclass(frozen=True)
class _Whole:
    """The evaluation's resize and crop, skipped if the image has the right size."""

    preprocessing: Preprocessing

    def __call__(self, image: Image.Image) -> Image.Image:
        rows, columns = self.preprocessing.size
        if image.size == (columns, rows) and self.preprocessing.short_side in (
            0,
            min(rows, columns),
        ):
            return image
        return _to_pil(whole_image(to_tensor(image), self.preprocessing))


def _shifted(image: Image.Image) -> Image.Image:
    """Shifted by up to an eighth of each side, padded with black."""
    columns, rows = image.size
    x, y = columns // _PADDING, rows // _PADDING
    left, top = int(torch.randint(-x, x + 1, ())), int(torch.randint(-y, y + 1, ()))
    return image.crop((left, top, left + columns, top + rows))


def _mirrored(image: Image.Image) -> Image.Image:
    flip = Image.Transpose.FLIP_LEFT_RIGHT
    return image.transpose(flip) if torch.rand(()) < 0.5 else image


@dataclass(frozen=True)
class _Erase:
    """Random erasing (Zhong et al. 2017) in this share of the images."""

    share: float
    fill: Color

    def __call__(self, image: UInt8[Tensor, "c y x"]) -> UInt8[Tensor, "c y x"]:
        return _eraser(self.fill)(image) if torch.rand(()) < self.share else image


@cache
def _eraser(fill: Any) -> v2.RandomErasing:
    """torchvision's RandomErasing that always erases: it is slow even if it does nothing."""
    return v2.RandomErasing(1.0, value=fill)


def crop_source_size(preprocessing: Preprocessing) -> list[int]:
    """Rows and columns that BiT crops from, ignoring the image's aspect ratio: those that
    evaluation crops from, or BiT's own, 160 for 128 and 448 for 384, if it does not crop."""
    short = min(preprocessing.size)
    scale = 5 / 4 if short <= 128 else 7 / 6
    if preprocessing.short_side:
        scale = preprocessing.short_side / short
    return [round(side * scale) for side in preprocessing.size]


def _three_augment(image: Image.Image) -> Image.Image:
    """3-Augment (Touvron et al. 2022): grayscale, solarization or blur, equally likely."""
    choice = int(torch.randint(3, ()))
    if choice == 0:
        return image.convert("L").convert(image.mode)
    if choice == 1:
        return ImageOps.solarize(image)
    radius = float(torch.empty(()).uniform_(0.1, 2.0))
    return image.filter(ImageFilter.GaussianBlur(radius))


def normalize(
    images: UInt8[Tensor, "b c y x"], preprocessing: Preprocessing
) -> Float[Tensor, "b c y x"]:
    """From uint8 to the model's input, on the images' device."""
    mean, std = _colors(preprocessing, images.device)
    return (images.float() / 255 - mean) / std


@cache
def _colors(
    preprocessing: Preprocessing, device: torch.device
) -> tuple[Float[Tensor, "c 1 1"], Float[Tensor, "c 1 1"]]:
    """Mean and deviation, copied to the device only once."""
    values = torch.tensor([preprocessing.mean, preprocessing.std], device=device)
    mean, std = values[:, :, None, None]
    return mean, std


def mix(
    images: Float[Tensor, "b c y x"],
    targets: Int[Tensor, " b"] | Float[Tensor, "b classes"],
    *,
    mixup: float,
    cutmix: float,
    classes: int,
    share: float = 1.0,
) -> tuple[Float[Tensor, "b c y x"], Float[Tensor, "b classes"]]:
    """Each image mixed with its neighbor in the batch, and the targets in the same proportion.

    With both Mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019), a batch gets one of the two;
    with a `share` below one, some batches get neither.
    """
    if (mixup or cutmix) and (share == 1 or torch.rand(()) < share):
        return _mixer(mixup, cutmix, classes)(images, targets)
    if targets.ndim == 1:
        targets = F.one_hot(targets.long(), classes)
    return images, targets.float()


@cache
def _mixer(mixup: float, cutmix: float, classes: int) -> Callable[..., Any]:
    kinds = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]
    chosen = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds if alpha]
    return chosen[0] if len(chosen) == 1 else v2.RandomChoice(chosen)


_Operation = Callable[[Image.Image, float, Color], Image.Image]
"""Takes an image, the magnitude as a fraction of the original scale, and the fill color."""

_REFERENCE_SIDE = 224


@dataclass(frozen=True)
class RandAugment:
    """RandAugment (Cubuk et al. 2019) as the ViT papers used it: the operations and the scale of
    big_vision, which differ from torchvision's.

    Operations are drawn at random, all of the same magnitude. A magnitude of 10 is the top of the
    original scale; AugReg goes up to 20. Magnitude 0 is not the identity: brightness, contrast,
    color and sharpness are blended by 0.1 + 0.18 m, posterizing keeps 0.4 m bits and solarizing
    starts at 25.6 m, so that 0 darkens, blackens and inverts. Two details differ: contrast is
    blended with the image's mean gray, where the reference takes a constant by mistake, and
    distances are shares of the side, where it counts pixels of 224.
    """

    layers: int
    magnitude: float
    fill: Color

    def __call__(self, image: Image.Image) -> Image.Image:
        for _ in range(self.layers):
            operation = OPERATIONS[int(torch.randint(len(OPERATIONS), ()))]
            image = operation(image, self.magnitude / 10, self.fill)
        return image


def _random_sign(value: float) -> float:
    return value if torch.rand(()) < 0.5 else -value


def _by_table(image: Image.Image, value_of: Callable[[int], int]) -> Image.Image:
    return image.point([value_of(value) for value in range(256)] * len(image.getbands()))


def _posterize(image: Image.Image, share: float, fill: Color) -> Image.Image:
    lost = 8 - min(int(4 * share), 8)
    return _by_table(image, lambda value: value >> lost << lost)


def _solarize(image: Image.Image, share: float, fill: Color) -> Image.Image:
    threshold = int(256 * share)
    return _by_table(image, lambda value: value if value < threshold else 255 - value)


def _solarize_add(image: Image.Image, share: float, fill: Color) -> Image.Image:
    added = int(110 * share)
    return _by_table(image, lambda value: min(value + added, 255) if value < 128 else value)


def _blended(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> _Operation:
    """Blends the image with a degenerate version of it."""
    return lambda image, share, fill: enhancer(image).enhance(0.1 + 1.8 * share)


def _moved(matrix: Callable[[float, tuple[int, int]], tuple[float, ...]]) -> _Operation:
    """An affine transform; the matrix maps output to input pixels."""

    def operation(image: Image.Image, share: float, fill: Color) -> Image.Image:
        data = matrix(_random_sign(share), image.size)
        return image.transform(image.size, Image.Transform.AFFINE, data, fillcolor=fill)

    return operation


def _cut_out(image: Image.Image, share: float, fill: Color) -> Image.Image:
    columns, rows = image.size
    half = int(40 / _REFERENCE_SIDE * share * min(rows, columns))
    x, y = int(torch.randint(columns, ())), int(torch.randint(rows, ()))
    image = image.copy()
    image.paste(fill if len(fill) > 1 else fill[0], (x - half, y - half, x + half, y + half))
    return image


OPERATIONS: tuple[_Operation, ...] = (
    lambda image, share, fill: ImageOps.autocontrast(image),
    lambda image, share, fill: ImageOps.equalize(image),
    lambda image, share, fill: ImageOps.invert(image),
    lambda image, share, fill: image.rotate(_random_sign(30 * share), fillcolor=fill),
    _posterize,
    _solarize,
    _blended(ImageEnhance.Color),
    _blended(ImageEnhance.Contrast),
    _blended(ImageEnhance.Brightness),
    _blended(ImageEnhance.Sharpness),
    _moved(lambda share, size: (1, 0.3 * share, 0, 0, 1, 0)),
    _moved(lambda share, size: (1, 0, 0, 0.3 * share, 1, 0)),
    _moved(lambda share, size: (1, 0, 100 / _REFERENCE_SIDE * share * size[0], 0, 1, 0)),
    _moved(lambda share, size: (1, 0, 0, 0, 1, 100 / _REFERENCE_SIDE * share * size[1])),
    _cut_out,
    _solarize_add,
)
