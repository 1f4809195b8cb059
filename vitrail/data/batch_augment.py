"""Augmentation of whole batches on the device, the counterpart of `augment.training_transform`.

What happens to an image is drawn on the CPU, as a function of the seed and the image's position,
and how a batch is mixed, of the seed and the step; pixels stay on the device. Augmented images are
whole numbers that do not depend on the batch an image is in: resizing adds integers, exactly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torchvision.transforms import v2

from vitrail.config import Augment
from vitrail.data.augment import (
    Color,
    crop_source_size,
    mean_color,
    resampling_options,
    to_gray,
    whole_image,
)
from vitrail.data.draws import derive_seed, symmetric_beta, uniform
from vitrail.data.preprocessing import Preprocessing, resampling_kernel, to_tensor
from vitrail.data.store import shrunk

Images = UInt8[Tensor, "b c y x"]
Values = Float[Tensor, "b 3"]
"""The parameters of an operation, up to three for each image."""
Boxes = Int[np.ndarray, "b 4"]
"""Top, left, height and width of the part of each image that is used."""

_MIX, _CROP, _FLIP, _RANDAUGMENT, _AUTOAUGMENT, _THREE_AUGMENT, _JITTER, _ERASE = range(-9, -1)
"""Set the seeds of the draws apart, also from those of masks, which have -1."""
_TRIES = 10
"""torchvision draws up to ten rectangles until one fits."""
_PADDING = 8
"""The largest shift: an eighth of a side, 4 of 32 pixels."""
_SHRINK = 2
"""An image whose short side is more than this many times the model's is resized to that first: a
crop of a quarter of its area still has all the pixels that the model sees."""
_ONE = 1 << 11
"""Resampling weights are multiples of 1/2048: with bytes, all sums are exact in float32, and the
factors in float16."""
_REACH = {"bilinear": 1, "bicubic": 2}
"""The distance from which on `resampling_kernel` is zero."""
_REFERENCE_SIDE = 224


@dataclass(frozen=True)
class BatchAugment:
    """Draws a crop and the other changes of each image, and applies them to batches."""

    preprocessing: Preprocessing
    augment: Augment
    seed: int

    @property
    def channels(self) -> int:
        return len(self.preprocessing.mean)

    @cached_property
    def fill(self) -> Color:
        return mean_color(self.preprocessing)

    @property
    def decoded_size(self) -> tuple[int, int]:
        """Rows and columns of all decoded images; (0, 0) if they keep their own."""
        if self.augment.crop == "inception":
            return 0, 0
        if self.augment.crop == "resize":
            rows, columns = crop_source_size(self.preprocessing)
            return rows, columns
        return self.preprocessing.size

    @property
    def side(self) -> int:
        """The short side that crops need an image to have at most; of larger images, fixed sizes
        are made as well from this one as from the whole."""
        return _SHRINK * max(*self.preprocessing.size, *self.decoded_size)

    def decoded(self, pixels: UInt8[np.ndarray, "_y _x 3"]) -> UInt8[np.ndarray, "y x c"]:
        """The pixels that crops are taken from: they depend on the image and the settings alone."""
        pre = self.preprocessing
        if self.augment.crop == "inception":
            small = shrunk(pixels, self.side)
            return small if self.channels == 3 else to_gray(small)
        image = to_tensor(pixels if self.channels == 3 else to_gray(pixels))
        if self.augment.crop == "resize":
            size, options = crop_source_size(pre), resampling_options(pre)
            resized = v2.functional.resize(image, size, **options)
        else:
            resized = whole_image(image, pre)
        return resized.permute(1, 2, 0).contiguous().numpy()

    def keeps(self, shapes: Int[np.ndarray, "n 2"]) -> bool:
        """Whether `decoded` returns all RGB images of these sizes as they are."""
        if self.augment.crop == "inception":
            same = shapes.min(1) <= self.side
        else:
            size = self.preprocessing.size
            cropped = self.augment.crop != "resize" and self.preprocessing.resized(*size) != size
            same = (shapes == self.decoded_size).all(1) & (not cropped)
        return self.channels == 3 and bool(same.all())

    def boxes(self, positions: Int[np.ndarray, " b"], shapes: Int[np.ndarray, "b 2"]) -> Boxes:
        """The crop of each image; one that reaches beyond the image is padded with black."""
        rows, columns = self.preprocessing.size
        height, width = shapes.T
        if self.augment.crop == "inception":
            draws = self._draws(_CROP, positions, 2 * _TRIES + 2)
            return _inception(draws, shapes, self.augment.area, self.preprocessing.size)
        y, x = self._draws(_CROP, positions, 2).T
        if self.augment.crop == "pad":
            high, wide = rows // _PADDING, columns // _PADDING
            top, left = _below(2 * high + 1, y) - high, _below(2 * wide + 1, x) - wide
        else:  # what is left over where decoded images are larger than the model's
            top, left = _below(height - rows + 1, y), _below(width - columns + 1, x)
        return np.stack([top, left, *np.broadcast_arrays(rows, columns, top)[:2]], 1)

    def flips(self, positions: Int[np.ndarray, " b"]) -> Bool[np.ndarray, " b"]:
        """Which images are mirrored."""
        if not self.augment.flip:
            return np.zeros(len(positions), dtype=bool)
        return self._draws(_FLIP, positions, 1)[:, 0] < 0.5

    def __call__(
        self, cut: Images, boxes: Boxes, positions: Int[np.ndarray, " b"]
    ) -> UInt8[Tensor, "b c rows columns"]:
        """Augmented images of the model's size.

        `cut` has the pixels of the boxes, mirrored where `flips` says so, each at the top left and
        with anything around it.
        """
        pre = self.preprocessing
        if self.augment.crop == "inception":
            cut = resize(cut, boxes[:, 2:], pre.size, pre)
        for codes, values in self._color_layers(positions):
            cut = apply_operations(cut, codes, values, self.fill)
        if self.augment.erasing:
            cut = self._erase(cut, positions)
        return cut

    def mix(
        self,
        images: Float[Tensor, "b c y x"],
        targets: Int[Tensor, " b"],
        *,
        step: int,
        classes: int,
    ) -> tuple[Float[Tensor, "b c y x"], Float[Tensor, "b classes"]]:
        """The counterpart of `augment.mix`, the same for all parts of a step's batch."""
        augment = self.augment
        chance, kind, *beta, y, x = self._draws(_MIX, np.array([step]), 6).T
        truth = F.one_hot(targets, classes).float()
        if chance >= augment.mixed:
            return images, truth
        cuts = bool(augment.cutmix and (kind < 0.5 or not augment.mixup))
        share = float(symmetric_beta(augment.cutmix if cuts else augment.mixup, *beta)[0])
        if not cuts:
            return _blended_with_neighbors(images, share), _blended_with_neighbors(truth, share)
        rows, columns = images.shape[2:]
        top, left, bottom, right = cut_box(share, float(y[0]), float(x[0]), (rows, columns))
        images = images.clone()
        part = images[..., top:bottom, left:right]
        part.copy_(part.roll(1, 0))
        share = 1 - (bottom - top) * (right - left) / (rows * columns)
        return images, _blended_with_neighbors(truth, share)

    def _draws(
        self, purpose: int, positions: Int[np.ndarray, " b"], count: int, layer: int = 0
    ) -> Float[np.ndarray, "b count"]:
        seed = derive_seed(self.seed, purpose, layer)
        return uniform(seed, torch.from_numpy(positions), count).double().numpy()

    def _color_layers(self, positions: Int[np.ndarray, " b"]) -> list["_Layer"]:
        """What changes colors and shapes, in the order of `training_transform`."""
        augment, size = self.augment, self.preprocessing.size
        layers: list[_Layer] = []
        for number in range(augment.randaugment_layers):
            draws = self._draws(_RANDAUGMENT, positions, 4, number)
            layers.append(_randaugment(draws, augment.randaugment_magnitude / 10, size))
        if augment.autoaugment:
            draws = self._draws(_AUTOAUGMENT, positions, 5)
            layers += _autoaugment(draws, v2.AutoAugmentPolicy(augment.autoaugment), size)
        if augment.three_augment:
            draws = self._draws(_THREE_AUGMENT, positions, 2)
            layers.append(_three_augment(draws))
        if augment.color_jitter:
            draws = self._draws(_JITTER, positions, 6)
            layers += _color_jitter(draws, augment.color_jitter)
        return layers

    def _erase(self, images: Images, positions: Int[np.ndarray, " b"]) -> Images:
        """Random erasing (Zhong et al. 2017) of a part of the images."""
        rows, columns = self.preprocessing.size
        draws = self._draws(_ERASE, positions, 2 * _TRIES + 3)
        area = rows * columns * (0.02 + 0.31 * draws[:, :_TRIES])
        aspect = _log_uniform(0.3, 3.3, draws[:, _TRIES : 2 * _TRIES])
        height, width = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (height < rows) & (width < columns)
        height, width = _first(fits, height), _first(fits, width)
        y, x, chance = draws[:, 2 * _TRIES :].T
        boxes = np.stack([_below(rows - height + 1, y), _below(columns - width + 1, x)], 1)
        boxes = np.concatenate([boxes, np.stack([height, width], 1)], 1)
        boxes[~fits.any(1) | (chance >= self.augment.erasing), 2:] = 0
        return fill_boxes(images, _to(boxes.astype(np.int64), images), self.fill)


def cut_box(share: float, y: float, x: float, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Top, left, bottom and right of what CutMix (Yun et al. 2019) replaces, around any pixel, so
    that an image keeps this share, or more where the box reaches beyond it."""
    side = 0.5 * math.sqrt(1 - share)
    centers = [math.floor(length * draw) for length, draw in zip(size, (y, x), strict=True)]
    halves = [int(side * length) for length in size]
    ends = zip(centers, halves, size, strict=True)
    (top, bottom), (left, right) = ((max(0, c - h), min(n, c + h)) for c, h, n in ends)
    return top, left, bottom, right


def _blended_with_neighbors(values: Float[Tensor, "b ..."], share: float) -> Tensor:
    """This share of each row and the rest of the row before it, as in Mixup (Zhang et al. 2017)."""
    return values.roll(1, 0).mul_(1 - share).add_(values.mul(share))


_Layer = tuple[Int[np.ndarray, " b"], Float[np.ndarray, "b 3"]]
"""The number of each image's operation, and its parameters."""


def _below(end: Any, draw: Float[np.ndarray, "*b"]) -> Int[np.ndarray, "*b"]:
    """Whole numbers from zero up to, but not including, `end`."""
    return np.floor(end * draw).astype(np.int64)


def _log_uniform(low: float, high: float, draw: Float[np.ndarray, "..."]) -> np.ndarray:
    return np.exp(np.log(low) + (np.log(high) - np.log(low)) * draw)


def _first(fits: Bool[np.ndarray, "b t"], values: np.ndarray) -> np.ndarray:
    """The value of each row's first try that fits."""
    return np.take_along_axis(values, fits.argmax(1)[:, None], 1)[:, 0]


def _inception(
    draws: Float[np.ndarray, "b n"],
    shapes: Int[np.ndarray, "b 2"],
    area: float,
    size: tuple[int, int],
) -> Boxes:
    """Boxes of random area and aspect ratio (Szegedy et al. 2015), as torchvision draws them."""
    height, width = shapes.T[:, :, None].astype(np.float64)
    low, high = 0.75 * size[1] / size[0], size[1] / (0.75 * size[0])
    areas = height * width * (area + (1 - area) * draws[:, :_TRIES])
    ratios = _log_uniform(low, high, draws[:, _TRIES : 2 * _TRIES])
    h, w = np.rint(np.sqrt(areas / ratios)), np.rint(np.sqrt(areas * ratios))
    fits = (h > 0) & (h <= height) & (w > 0) & (w <= width)
    height, width, none = height[:, 0], width[:, 0], ~fits.any(1)
    # Where none fits, the center, with the aspect ratio as near as possible to the image's.
    h = np.where(none, np.minimum(height, np.rint(width / low)), _first(fits, h))
    w = np.where(none, np.minimum(width, np.rint(height * high)), _first(fits, w))
    y, x = draws[:, -2], draws[:, -1]
    top = np.where(none, (height - h) // 2, _below(height - h + 1, y))
    left = np.where(none, (width - w) // 2, _below(width - w + 1, x))
    return np.stack([top, left, h, w], 1).astype(np.int64)


def _to(array: np.ndarray, like: Tensor) -> Tensor:
    """An array on a tensor's device."""
    return torch.from_numpy(array).to(like.device, non_blocking=True)


# Resizing.


def resize(
    images: Images, sizes: Int[np.ndarray, "b 2"], size: tuple[int, int], pre: Preprocessing
) -> UInt8[Tensor, "b c rows columns"]:
    """The top left part of each image, `sizes` large, resized to `size`.

    As Pillow and torchvision do: columns first, rounded to bytes, then rows, rounded again.
    """
    b, c, height, width = images.shape
    heights, widths = _to(sizes, images).T
    longest = sizes.max(0).tolist()
    across = _resampling(widths, longest[1], width, size[1], pre)
    down = _resampling(heights, longest[0], height, size[0], pre)
    # float16 holds the factors exactly, float32 the sums.
    kind = across.dtype
    lines = _multiply(images.to(kind).reshape(b, c * height, width), across.mT)
    columns = _to_bytes(lines).to(kind).reshape(b, c, height, size[1])
    down = down[:, None].expand(-1, c, -1, -1).reshape(b * c, size[0], height)
    return _to_bytes(_multiply(down, columns.flatten(0, 1))).unflatten(0, (b, c))


def _multiply(left: Float[Tensor, "b i j"], right: Float[Tensor, "b j k"]) -> Tensor:
    if left.dtype == torch.float16:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left @ right


def _to_bytes(values: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    return (values + 0.5).clamp_(0, 255).byte()


def _resampling(
    lengths: Int[Tensor, " b"], longest: int, most: int, size: int, pre: Preprocessing
) -> Float[Tensor, "b size most"]:
    """The weight of each pixel of a line in each pixel of the resized line."""
    scale = (lengths.double() / size)[:, None, None]
    centers = (torch.arange(size, device=lengths.device)[:, None] + 0.5) * scale
    support = scale.clamp(min=1) if pre.antialias else torch.ones_like(scale)
    # Only a few neighboring pixels have a weight.
    reach = _REACH[pre.interpolation]
    count = min(most, math.ceil(2 * reach * max(longest / size, 1)) + 2)
    first = (centers - reach * support - 0.5).floor().long().clamp(0, most - count)
    at = first + torch.arange(count, device=lengths.device)
    # In float64 only up to here: distances are small numbers.
    distance = ((at + 0.5 - centers) / support).float().abs()
    weights = resampling_kernel(distance, pre.interpolation)
    weights = weights * (at < lengths[:, None, None])
    # Sums in float64 are the same for any number of pixels.
    weights = weights / weights.sum(2, keepdim=True, dtype=torch.float64).float()
    levels = (weights * _ONE).round()
    # Rounded weights must still sum to one, or images would darken.
    largest = weights.argmax(2, keepdim=True)
    levels.scatter_add_(2, largest, _ONE - levels.sum(2, keepdim=True))
    kind = torch.float16 if lengths.is_cuda else torch.float32
    found = torch.zeros(len(lengths), size, most, dtype=kind, device=lengths.device)
    return found.scatter_(2, at, (levels / _ONE).to(kind))


# Operations: each takes images, up to three parameters for each of them, and the fill color.

_Operation = Callable[[Images, Values, Color], Images]


def apply_operations(
    images: Images, codes: Int[np.ndarray, " b"], values: Float[np.ndarray, "b 3"], fill: Color
) -> Images:
    """Each image changed by the operation that its code names; a negative code keeps it."""
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], range(len(OPERATIONS) + 1))
    rows, parameters = _to(order, images), _to(values[order], images)
    changed = images.clone()
    for operation, (start, end) in zip(OPERATIONS.values(), pairwise(ends), strict=True):
        if start < end:
            chosen = rows[start:end]
            changed[chosen] = operation(images[chosen], parameters[start:end], fill)
    return changed


def fill_boxes(images: Images, boxes: Int[Tensor, "b 4"], fill: Color) -> Images:
    """The images with a rectangle of each (top, left, height, width) in one color."""
    top, left, height, width = boxes[:, :, None, None].unbind(1)
    y = torch.arange(images.shape[2], device=images.device)[:, None]
    x = torch.arange(images.shape[3], device=images.device)
    inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
    return torch.where(inside[:, None], _color(fill, images.device), images)


@cache
def _color(fill: Color, device: torch.device) -> UInt8[Tensor, "c 1 1"]:
    """Copied to the device only once, or each copy would wait for it."""
    return torch.tensor(fill, dtype=torch.uint8, device=device)[:, None, None]


def _cut_out(images: Images, values: Values, fill: Color) -> Images:
    y, x, half = values.long().unbind(1)
    return fill_boxes(images, torch.stack([y - half, x - half, 2 * half, 2 * half], 1), fill)


def _blend(
    degenerate: Float[Tensor, "..."], pixels: Float[Tensor, "..."], factor: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """From one to the other and beyond, as Pillow: rounded down."""
    return (degenerate + factor.float() * (pixels - degenerate)).clamp_(0, 255).floor_()


def _gray(images: Images) -> Float[Tensor, "b 1 y x"]:
    """Pillow's conversion to gray, in its integers."""
    if images.shape[1] == 1:
        return images.float()
    r, g, b = images.int().split(1, 1)
    return ((19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16).float()


def _saturate(images: Images, values: Values, fill: Color) -> Images:
    return _blend(_gray(images), images.float(), values[:, :1, None, None]).byte()


def _sharpen(images: Images, values: Values, fill: Color) -> Images:
    """Away from the image smoothed by a kernel of nine pixels; Pillow leaves the border alone."""
    pixels = images.float()
    kernel = torch.ones(1, 1, 3, 3, device=images.device)
    kernel[..., 1, 1] = 5
    inner = F.conv2d(pixels.flatten(0, 1)[:, None], kernel).view(*images.shape[:2], -1)
    smooth = pixels.clone()
    smooth[:, :, 1:-1, 1:-1] = (inner / 13 + 0.5).floor().view_as(smooth[:, :, 1:-1, 1:-1])
    return _blend(smooth, pixels, values[:, :1, None, None]).byte()


def _blur(images: Images, values: Values, fill: Color) -> Images:
    """A Gaussian of a radius given in pixels."""

    def matrix(length: int) -> Float[Tensor, "b 1 n n"]:
        at = torch.arange(length, device=images.device).float()
        weights = torch.exp(-0.5 * ((at - at[:, None]) / values[:, :1, None].float()).square())
        return (weights / weights.sum(2, keepdim=True))[:, None]

    down, across = matrix(images.shape[2]), matrix(images.shape[3])
    return _to_bytes(down @ images.float() @ across.mT)


def _by_table(images: Images, table: Tensor) -> Images:
    """Each level replaced by that of a table, one for each image or channel."""
    b, c = images.shape[:2]
    table = table.byte().expand(b, c, 256)
    return table.gather(2, images.flatten(2).long()).view_as(images)


def _levels(images: Images) -> Int[Tensor, " 256"]:
    return torch.arange(256, device=images.device)


def _posterize(images: Images, values: Values, fill: Color) -> Images:
    lost = 8 - values[:, :1, None].long()
    return _by_table(images, _levels(images) >> lost << lost)


def _solarize(images: Images, values: Values, fill: Color) -> Images:
    levels = _levels(images)
    return _by_table(images, torch.where(levels < values[:, :1, None], levels, 255 - levels))


def _solarize_add(images: Images, values: Values, fill: Color) -> Images:
    levels = _levels(images)
    added = (levels + values[:, :1, None].long()).clamp(max=255)
    return _by_table(images, torch.where(levels < 128, added, levels))


def _brighten(images: Images, values: Values, fill: Color) -> Images:
    levels = _levels(images).float()
    return _by_table(images, _blend(torch.zeros_like(levels), levels, values[:, :1, None]))


def _contrast(images: Images, values: Values, fill: Color) -> Images:
    # Sums of bytes are exact in 64 bits only.
    mean = (_gray(images).flatten(1).double().mean(1) + 0.5).floor().float()
    table = _blend(mean[:, None, None], _levels(images).float(), values[:, :1, None])
    return _by_table(images, table)


def _autocontrast(images: Images, values: Values, fill: Color) -> Images:
    low, high = (edge.double()[:, :, None] for edge in images.flatten(2).aminmax(dim=2))
    levels = _levels(images).double()
    scale = 255 / (high - low).clamp(min=1)
    stretched = (levels * scale - low * scale).clamp(0, 255).floor()
    return _by_table(images, torch.where(high > low, stretched, levels))


def _equalize(images: Images, values: Values, fill: Color) -> Images:
    b, c = images.shape[:2]
    pixels = images.flatten(2).long()
    counts = torch.zeros(b, c, 256, dtype=torch.long, device=images.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    last = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - last) // 255
    before = counts.cumsum(2) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    return _by_table(images, torch.where(step > 0, table, _levels(images)))


def _affine(images: Images, matrix: Sequence[Tensor | int], fill: Color) -> Images:
    """Nearest pixels; the matrix maps output to input, in Pillow's 16-bit fixed point."""
    device = images.device
    parts = (x if isinstance(x, Tensor) else torch.full((), x, device=device) for x in matrix)
    a, b, c, d, e, f = (x.double().expand(len(images)) for x in parts)
    height, width = images.shape[2:]
    y = torch.arange(height, device=device)[:, None]
    x = torch.arange(width, device=device)

    def source(
        per_x: Float[Tensor, " b"], per_y: Float[Tensor, " b"], offset: Float[Tensor, " b"]
    ) -> Int[Tensor, "b y x"]:
        first = _fixed(offset + 0.5 * per_x + 0.5 * per_y)
        dx, dy, first = (step[:, None, None] for step in (_fixed(per_x), _fixed(per_y), first))
        return (first + dx * x + dy * y) >> 16

    xs, ys = source(a, b, c), source(d, e, f)
    inside = (xs >= 0) & (xs < width) & (ys >= 0) & (ys < height)
    at = (ys * width + xs).where(inside, 0).flatten(1)[:, None].expand(-1, images.shape[1], -1)
    moved = images.flatten(2).gather(2, at).view_as(images)
    return torch.where(inside[:, None], moved, _color(fill, device))


def _fixed(x: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    return (x * 65536 + 0.5).floor().long()


def _rotate(images: Images, values: Values, fill: Color) -> Images:
    """Counterclockwise around the center, by degrees."""
    angle = -torch.deg2rad(values[:, 0].double())
    cos, sin = angle.cos(), angle.sin()
    y, x = images.shape[2] / 2, images.shape[3] / 2
    matrix = (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)
    return _affine(images, matrix, fill)


OPERATIONS: dict[str, _Operation] = {
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
    "Invert": lambda images, values, fill: 255 - images,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _saturate,
    "Contrast": _contrast,
    "Brightness": _brighten,
    "Sharpness": _sharpen,
    "ShearX": lambda images, v, fill: _affine(images, (1, v[:, 0], 0, 0, 1, 0), fill),
    "ShearY": lambda images, v, fill: _affine(images, (1, 0, 0, v[:, 0], 1, 0), fill),
    "TranslateX": lambda images, v, fill: _affine(images, (1, 0, v[:, 0], 0, 1, 0), fill),
    "TranslateY": lambda images, v, fill: _affine(images, (1, 0, 0, 0, 1, v[:, 0]), fill),
    "CutOut": _cut_out,
    "SolarizeAdd": _solarize_add,
    "Blur": _blur,
}
"""The first sixteen are RandAugment's, in the order of `augment.OPERATIONS`."""
_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
_SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")


# What is drawn for each image.


def _randaugment(draws: Float[np.ndarray, "b 4"], share: float, size: tuple[int, int]) -> _Layer:
    """One operation of `augment.RandAugment`; `share` is the magnitude as a part of the scale."""
    rows, columns = size
    blended, distance = 0.1 + 1.8 * share, 100 / _REFERENCE_SIDE * share
    strengths = {
        "Rotate": 30 * share,
        "Posterize": min(int(4 * share), 8),
        "Solarize": int(256 * share),
        **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), blended),
        **dict.fromkeys(("ShearX", "ShearY"), 0.3 * share),
        "TranslateX": distance * columns,
        "TranslateY": distance * rows,
        "SolarizeAdd": int(110 * share),
    }
    names = list(OPERATIONS)[:16]
    table = np.array([strengths.get(name, 0.0) for name in names])
    codes = _below(len(names), draws[:, 0])
    signed = np.isin(codes, [_NUMBERS[name] for name in _SIGNED])
    values = np.zeros((len(draws), 3))
    values[:, 0] = table[codes] * np.where(signed & (draws[:, 1] >= 0.5), -1, 1)
    half = int(40 / _REFERENCE_SIDE * share * min(rows, columns))
    out = codes == _NUMBERS["CutOut"]
    y, x = _below(rows, draws[:, 2]), _below(columns, draws[:, 3])
    values[out] = np.stack([y, x, np.full_like(y, half)], 1)[out]
    return codes, values


def _autoaugment(
    draws: Float[np.ndarray, "b 5"], policy: v2.AutoAugmentPolicy, size: tuple[int, int]
) -> list[_Layer]:
    """AutoAugment (Cubuk et al. 2018) with the policies and magnitudes of torchvision."""
    table = _policies(policy, size)
    chosen = table[_below(len(table), draws[:, 0])]
    layers: list[_Layer] = []
    for part in (0, 1):
        code, probability, strength, base, signed = chosen[:, part].T
        skip, sign = draws[:, 1 + part], draws[:, 3 + part]
        codes = np.where(skip < probability, code, -1).astype(np.int64)
        values = np.zeros((len(draws), 3))
        values[:, 0] = base + strength * np.where((signed > 0) & (sign < 0.5), -1, 1)
        layers.append((codes, values))
    return layers


@cache
def _policies(
    policy: v2.AutoAugmentPolicy, size: tuple[int, int]
) -> Float[np.ndarray, "policies 2 5"]:
    reference: Any = v2.AutoAugment(policy)
    return np.array([
        [_policy_entry(reference, entry, size) for entry in pair]
        for pair in reference._policies
    ])  # fmt: skip


def _policy_entry(
    reference: Any, entry: tuple[str, float, int | None], size: tuple[int, int]
) -> tuple[float, ...]:
    """Number of the operation, its probability, strength, what that is added to, and whether it has
    a random sign."""
    name, probability, magnitude = entry
    magnitudes, signed = reference._AUGMENTATION_SPACE[name]
    found = magnitudes(10, *size)
    strength = 0.0 if found is None else float(found[magnitude])
    base = 1.0 if name in ("Brightness", "Color", "Contrast", "Sharpness") else 0.0
    if name == "Solarize":
        strength *= 255
    if name.startswith("Translate"):
        strength = float(int(strength))
    return float(_NUMBERS[name]), probability, strength, base, float(signed)


def _three_augment(draws: Float[np.ndarray, "b 2"]) -> _Layer:
    """3-Augment (Touvron et al. 2022): grayscale, solarization or blur, equally likely."""
    choice = _below(3, draws[:, 0])
    codes = np.array([_NUMBERS[name] for name in ("Color", "Solarize", "Blur")])[choice]
    values = np.zeros((len(draws), 3))
    values[:, 0] = np.where(choice == 2, 0.1 + 1.9 * draws[:, 1], 128.0 * choice)
    return codes, values


def _color_jitter(draws: Float[np.ndarray, "b 6"], strength: float) -> list[_Layer]:
    """Brightness, contrast and saturation in random order."""
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = low + (high - low) * draws[:, :3]
    numbers = np.array([_NUMBERS[name] for name in ("Brightness", "Contrast", "Color")])
    order = draws[:, 3:].argsort(1)
    layers: list[_Layer] = []
    for part in range(3):
        values = np.zeros((len(draws), 3))
        values[:, 0] = np.take_along_axis(factors, order[:, part : part + 1], 1)[:, 0]
        layers.append((numbers[order[:, part]], values))
    return layers
