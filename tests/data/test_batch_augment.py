"""Augmentation on the device beside Pillow's and torchvision's, with the same parameters."""

import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from vitrail.config import Augment
from vitrail.data import batch_augment
from vitrail.data.augment import OPERATIONS as PILLOW
from vitrail.data.augment import training_transform
from vitrail.data.batch_augment import (
    OPERATIONS,
    BatchAugment,
    apply_operations,
    cut_box,
    fill_boxes,
    resize,
)
from vitrail.data.preprocessing import Preprocessing, to_tensor

FILL = (124, 116, 104)
POSITIONS = np.arange(400)


def batch(scenes: list[Image.Image], size: int = 96) -> list[Image.Image]:
    return [scene.resize((size, size - 16)) for scene in scenes]


def changed(name: str, pictures: list[Image.Image], values: list[float]) -> torch.Tensor:
    images = torch.stack([to_tensor(picture) for picture in pictures])
    parameters = np.zeros((len(pictures), 3))
    parameters[:, : len(values)] = values
    codes = np.full(len(pictures), list(OPERATIONS).index(name))
    return apply_operations(images, codes, parameters, FILL)


def share_within(found: torch.Tensor, expected: list[Image.Image], levels: int) -> float:
    truth = torch.stack([to_tensor(picture) for picture in expected])
    return ((found.int() - truth.int()).abs() <= levels).float().mean().item()


COLORS = {
    "AutoContrast": (lambda p, v: ImageOps.autocontrast(p), [0]),
    "Equalize": (lambda p, v: ImageOps.equalize(p), [0]),
    "Invert": (lambda p, v: ImageOps.invert(p), [0]),
    "Posterize": (lambda p, v: ImageOps.posterize(p, v), [1, 4, 7]),
    "Solarize": (lambda p, v: ImageOps.solarize(p, v), [0, 85.0, 256]),
    "Color": (lambda p, v: ImageEnhance.Color(p).enhance(v), [0.1, 0.55, 1.9]),
    "Contrast": (lambda p, v: ImageEnhance.Contrast(p).enhance(v), [0.1, 0.55, 1.9]),
    "Brightness": (lambda p, v: ImageEnhance.Brightness(p).enhance(v), [0.1, 0.55, 1.9]),
    "Sharpness": (lambda p, v: ImageEnhance.Sharpness(p).enhance(v), [0.1, 0.55, 1.9]),
}


@pytest.mark.parametrize("name", COLORS)
def test_colors_are_pillows(scenes, name):
    operation, values = COLORS[name]
    pictures = batch(scenes)
    for value in values:
        expected = [operation(picture, value) for picture in pictures]
        found = changed(name, pictures, [value])
        assert share_within(found, expected, 1) > 0.999
        assert share_within(found, expected, 0) > 0.99


@pytest.mark.parametrize("name", ["AutoContrast", "Equalize", "Contrast", "Color", "Sharpness"])
def test_colors_of_flat_and_gray_images_are_pillows(name):
    operation, values = COLORS[name]
    flat = Image.new("L", (20, 20), 77)
    ramp = Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20).astype(np.uint8))
    found = changed(name, [flat, ramp], [values[-1]])
    assert share_within(found, [operation(p, values[-1]) for p in (flat, ramp)], 0) > 0.99


def affine(data: tuple[float, ...]):
    return lambda p: p.transform(p.size, Image.Transform.AFFINE, data, fillcolor=FILL)


@pytest.mark.parametrize(
    ("name", "value", "operation"),
    [
        ("Rotate", 30.0, lambda p: p.rotate(30.0, fillcolor=FILL)),
        ("Rotate", -17.3, lambda p: p.rotate(-17.3, fillcolor=FILL)),
        ("ShearX", 0.3, affine((1, 0.3, 0, 0, 1, 0))),
        ("ShearX", -0.21, affine((1, -0.21, 0, 0, 1, 0))),
        ("ShearY", 0.17, affine((1, 0, 0, 0.17, 1, 0))),
        ("TranslateX", 10.7, affine((1, 0, 10.7, 0, 1, 0))),
        ("TranslateY", -31.0, affine((1, 0, 0, 0, 1, -31.0))),
    ],
)
def test_affine_operations_are_pillows(scenes, name, value, operation):
    pictures = batch(scenes)
    expected = [operation(picture) for picture in pictures]
    assert share_within(changed(name, pictures, [value]), expected, 0) > 0.995


def test_other_operations_of_randaugment_and_3_augment_are_pillows(scenes):
    pictures = batch(scenes)
    added = [PILLOW[15](picture, 0.7, FILL) for picture in pictures]
    assert share_within(changed("SolarizeAdd", pictures, [int(110 * 0.7)]), added, 0) == 1
    black = torch.zeros(1, 3, 30, 40, dtype=torch.uint8)
    cut = apply_operations(black, np.array([14]), np.array([[3.0, 20.0, 8.0]]), (9, 9, 9))
    assert cut[0, 0, :11, 12:28].eq(9).all()
    assert cut.bool().sum() == 3 * 11 * 16
    for radius in (0.4, 1.0, 2.0):  # Pillow approximates a Gaussian by three boxes
        expected = [picture.filter(ImageFilter.GaussianBlur(radius)) for picture in pictures]
        found = changed("Blur", pictures, [radius])[:, :, 4:-4, 4:-4]
        truth = torch.stack([to_tensor(picture) for picture in expected])[:, :, 4:-4, 4:-4]
        assert (found.float() - truth.float()).abs().mean() < 1.5


def test_each_image_gets_its_own_operation(scenes):
    pictures = batch(scenes)[:3]
    images = torch.stack([to_tensor(picture) for picture in pictures])
    codes = np.array([list(OPERATIONS).index("Invert"), -1, list(OPERATIONS).index("Invert")])
    found = apply_operations(images, codes, np.zeros((3, 3)), FILL)
    assert torch.equal(found[1], images[1])
    assert torch.equal(found[[0, 2]], 255 - images[[0, 2]])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_resizing_is_torchvisions(scenes, interpolation, antialias):
    if interpolation == "bicubic" and not antialias:
        pytest.skip("on the CPU only: see ImageInputs")
    pre = Preprocessing(size=(64, 48), interpolation=interpolation, antialias=antialias)
    sizes = np.array([[90, 140], [64, 48], [31, 20], [150, 33]])
    padded = torch.randint(
        0, 256, (4, 3, 160, 150), dtype=torch.uint8
    )  # what lies around is unused
    expected = []
    for row, (size, scene) in enumerate(zip(sizes.tolist(), scenes, strict=False)):
        image = to_tensor(scene.resize(size[::-1]))
        padded[row, :, : size[0], : size[1]] = image
        mode = InterpolationMode(interpolation)
        expected.append(F.resize(image, [64, 48], mode, antialias=antialias))
    found = resize(padded, sizes, pre.size, pre)
    difference = (found.int() - torch.stack(expected).int()).abs()
    assert (difference <= 1).float().mean() > 0.999
    assert (difference == 0).float().mean() > 0.9
    assert torch.equal(found[1], padded[1, :, :64, :48])  # the same size


def test_resizing_does_not_depend_on_what_is_beside_an_image():
    """Sums are of integers, so that no order of adding them changes a bit."""
    pre = Preprocessing(size=(32, 32), interpolation="bicubic")
    images = torch.randint(0, 256, (5, 3, 60, 70), dtype=torch.uint8)
    sizes = np.array([[60, 70], [33, 41], [50, 20], [8, 9], [47, 64]])
    together = resize(images, sizes, pre.size, pre)
    for row, (height, width) in enumerate(sizes.tolist()):
        alone = resize(
            images[row : row + 1, :, :height, :width], sizes[row : row + 1], (32, 32), pre
        )
        assert torch.equal(together[row], alone[0])


def test_erased_rectangles_are_torchvisions():
    images = torch.randint(0, 256, (2, 3, 20, 30), dtype=torch.uint8)
    found = fill_boxes(images, torch.tensor([[3, 4, 5, 6], [0, 0, 0, 0]]), FILL)
    value = torch.tensor(FILL, dtype=torch.uint8)[:, None, None]
    assert torch.equal(found[0], F.erase(images[0], 3, 4, 5, 6, value))
    assert torch.equal(found[1], images[1])


# What is drawn.


def drawn(crop: str, shape: tuple[int, int], size=(32, 32), **options) -> np.ndarray:
    augment = BatchAugment(Preprocessing(size=size), Augment(crop=crop, **options), seed=0)
    return augment.boxes(POSITIONS, np.tile(shape, (len(POSITIONS), 1)))


def test_inception_crops_have_the_area_and_shape_of_torchvisions():
    boxes = drawn("inception", (200, 300), area=0.2)
    draw = v2.RandomResizedCrop((32, 32), scale=(0.2, 1.0))
    image = torch.zeros(3, 200, 300)
    torch.manual_seed(0)
    peers = [draw.make_params([image]) for _ in range(len(POSITIONS))]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in peers])
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 0] + boxes[:, 2] <= 200).all()
    assert (boxes[:, 1] + boxes[:, 3] <= 300).all()
    area = boxes[:, 2] * boxes[:, 3] / 60_000
    assert area.min() > 0.19
    for ours, peer in zip(boxes.T, theirs.T, strict=True):
        assert abs(ours.mean() - peer.mean()) < 4 * peer.std() * math.sqrt(2 / len(POSITIONS))
        assert 0.85 < ours.std() / peer.std() < 1.15


@pytest.mark.parametrize("shape", [(10, 400), (400, 10), (7, 7), (1, 1)])
def test_crops_of_extreme_images_are_the_center(shape):
    boxes = drawn("inception", shape, area=1.0)
    height, width = boxes[:, 2], boxes[:, 3]
    assert (height >= 1).all()
    assert (width >= 1).all()
    if max(shape) == 400:
        assert set(height / width) <= {0.75, 10 / 13, 4 / 3, 13 / 10}
        assert (np.abs(2 * boxes[:, :2] + boxes[:, 2:] - shape) <= 1).all()


def test_padding_shifts_by_up_to_an_eighth():
    boxes = drawn("pad", (32, 32))
    assert set(boxes[:, 0]) == set(boxes[:, 1]) == set(range(-4, 5))
    assert (boxes[:, 2:] == 32).all()


def test_bits_crop_and_none_stay_inside():
    boxes = drawn("resize", (40, 48))
    assert set(boxes[:, 0]) == set(range(9))
    assert set(boxes[:, 1]) == set(range(17))
    assert (drawn("none", (32, 32)) == [0, 0, 32, 32]).all()


@pytest.mark.parametrize("crop", ["inception", "resize", "pad", "none"])
@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), (0.5,)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"randaugment_layers": 2, "randaugment_magnitude": 15.0},
        {"autoaugment": "cifar10", "erasing": 0.5},
        {"autoaugment": "imagenet", "three_augment": True, "color_jitter": 0.4},
    ],
    ids=["plain", "randaugment", "cifar10", "everything"],
)
def test_an_image_depends_on_its_position_alone(scenes, crop, mean, options):
    pre = Preprocessing(size=(32, 48), short_side=40, mean=mean, std=mean)
    augment = BatchAugment(pre, Augment(crop=crop, **options), seed=3)

    def augmented(positions: list[int]) -> torch.Tensor:
        chosen = [augment.decoded(np.asarray(scenes[p % len(scenes)])) for p in positions]
        at = np.array(positions)
        shapes = np.array([pixels.shape[:2] for pixels in chosen])
        boxes = augment.boxes(at, shapes)
        cut = torch.zeros(len(at), len(mean), *boxes[:, 2:].max(0).tolist(), dtype=torch.uint8)
        for row, (pixels, (top, left, height, width)) in enumerate(zip(chosen, boxes, strict=True)):
            inner = to_tensor(pixels)
            padded = torch.nn.functional.pad(inner, (8, 8, 8, 8))
            part = padded[:, top + 8 : top + 8 + height, left + 8 : left + 8 + width]
            cut[row, :, :height, :width] = part
        return augment(cut, boxes, at)

    positions = [5, 6, 7, 1000, 1001, 40]
    together = augmented(positions)
    assert together.shape == (6, len(mean), 32, 48)
    assert together.dtype == torch.uint8
    for row, position in enumerate(positions):
        assert torch.equal(augmented([position])[0], together[row])
    if crop == "none" and not options:
        transform = training_transform(pre, Augment(crop="none", flip=False))
        expected = torch.stack([transform(scenes[p % len(scenes)]) for p in positions])
        assert torch.equal(together, expected)


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_autoaugment_draws_torchvisions_policies(policy, monkeypatch):
    """How often each operation comes, and with which strength, over many images."""
    applied: dict[str, list[float]] = {}
    reference = v2.AutoAugment(v2.AutoAugmentPolicy(policy))

    def record(image, name, magnitude, **_):
        applied.setdefault(name, []).append(magnitude)
        return image

    monkeypatch.setattr(reference, "_apply_image_or_video_transform", record)
    torch.manual_seed(0)
    n, image = 3000, Image.new("RGB", (32, 32))
    for _ in range(n):
        reference(image)
    augment = BatchAugment(Preprocessing(size=(32, 32)), Augment(autoaugment=policy), seed=1)
    layers = augment._color_layers(np.arange(n))
    codes = np.concatenate([codes for codes, _ in layers])
    values = np.concatenate([values[:, 0] for _, values in layers])
    names = list(OPERATIONS)
    assert {names[code] for code in set(codes.tolist()) - {-1}} == set(applied)
    for name, theirs in applied.items():
        ours = values[codes == names.index(name)]
        assert abs(len(ours) - len(theirs)) < 5 * math.sqrt(2 * len(theirs))
        scale = 255 if name == "Solarize" else 1
        base = 1 if name in ("Brightness", "Color", "Contrast", "Sharpness") else 0
        expected = {round(scale * value + base, 4) for value in theirs}
        if name.startswith("Translate"):
            expected = {int(value) for value in theirs}
        assert {round(value, 4) for value in ours.tolist()} <= {*expected, *(-e for e in expected)}
        assert {abs(round(value, 4)) for value in ours.tolist()} == {abs(e) for e in expected}


def test_randaugment_draws_every_operation_with_the_strength_of_the_other():
    augment = BatchAugment(Preprocessing(size=(64, 64)), Augment(randaugment_layers=2), seed=0)
    (codes, values), (others, _) = augment._color_layers(np.arange(4000))
    assert set(codes) == set(others) == set(range(16))
    assert not (codes == others).all()
    rotated = values[codes == 3, 0]
    assert set(rotated) == {-30.0, 30.0}
    assert 0.4 < (rotated > 0).mean() < 0.6
    assert set(values[codes == 7, 0]) == {0.1 + 1.8}


def test_erasing_takes_the_share_it_is_given():
    augment = BatchAugment(Preprocessing(size=(32, 32)), Augment(erasing=0.25), seed=0)
    images = torch.zeros(2000, 3, 32, 32, dtype=torch.uint8)
    found = augment._erase(images, np.arange(2000)).bool().float().mean((1, 2, 3))
    assert 0.22 < (found > 0).float().mean() < 0.28
    assert found[found > 0].min() > 0.015
    assert found.max() < 0.36


def test_the_order_of_randaugments_operations_is_the_same_on_both_devices(scenes):
    """By their effect: operation i of one list is operation i of the other."""
    pictures = batch(scenes)[:4]
    share, size = 1.0, (80, 96)
    names = list(OPERATIONS)
    for code in (0, 1, 2, 4, 5, 6, 7, 8, 9, 15):
        expected = [PILLOW[code](picture, share, FILL) for picture in pictures]
        found_code, values = -1, np.zeros((1, 3))
        for draw in np.linspace(0, 0.999, 64):
            codes, values = batch_augment._randaugment(np.array([[draw, 0, 0, 0]]), share, size)
            found_code = int(codes[0])
            if found_code == code:
                break
        assert found_code == code
        found = changed(names[code], pictures, values[0].tolist())
        assert share_within(found, expected, 1) > 0.999, names[code]


# Mixing.


def neighbors(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(count, 3, 20, 36), torch.arange(count) % 4


def mixed(step: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    augment = BatchAugment(Preprocessing(), Augment(**options), seed=2)
    torch.manual_seed(0)
    return augment.mix(*neighbors(), step=step, classes=4)


def draw(monkeypatch, share: float, y: float = 0.0, x: float = 0.0) -> None:
    """What is drawn from here on, for torchvision as well; 20 × 36 pixels."""
    numbers = iter([int(36 * x), int(20 * y)] * 2)
    monkeypatch.setattr(torch, "randint", lambda *_, size: torch.tensor([next(numbers)]))
    monkeypatch.setattr(torch.distributions.Beta, "sample", lambda *_: torch.tensor(share))
    monkeypatch.setattr(batch_augment, "symmetric_beta", lambda *_: np.array([share]))
    drawn = np.array([[0.0, 0.0, 0.5, 0.5, y, x]])
    monkeypatch.setattr(BatchAugment, "_draws", lambda *_: drawn)


def test_mixup_is_torchvisions(monkeypatch):
    for share in (0.0, 0.1, 0.75, 1.0):
        draw(monkeypatch, share)
        found = mixed(0, mixup=0.2)
        torch.manual_seed(0)
        expected = v2.MixUp(alpha=0.2, num_classes=4)(*neighbors())
        assert all(map(torch.equal, found, expected))


def test_boxes_of_cutmix_are_torchvisions(monkeypatch):
    sizes = set()
    for share in (0.0, 0.25, 0.5, 0.9375, 1.0):
        for y, x in itertools.product((0.0, 0.3, 0.75, 0.999), repeat=2):
            draw(monkeypatch, share, y, x)
            reference = v2.CutMix(alpha=1.0, num_classes=4)
            left, top, right, bottom = reference.make_params([neighbors()[0]])["box"]
            assert cut_box(share, y, x, (20, 36)) == (top, left, bottom, right)
            sizes.add((bottom - top, right - left))
            found = mixed(0, cutmix=1.0)
            torch.manual_seed(0)
            expected = reference(*neighbors())
            assert torch.equal(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1])
    assert len(sizes) > 20


def test_batches_get_mixup_or_cutmix_equally_often_and_some_neither():
    torch.manual_seed(0)
    images, _ = neighbors()
    kinds, shares = [], set()
    for step in range(400):
        found, truth = mixed(step, mixup=1.0, cutmix=1.0, mixed=0.75)
        torch.testing.assert_close(truth.sum(1), torch.ones(6))
        same = float((found == images).float().mean())
        kinds.append("neither" if same == 1 else "cutmix" if same > 0 else "mixup")
        shares.add(float(truth[0, 0]))
    assert 70 < kinds.count("neither") < 140  # some boxes have no pixels
    assert 110 < kinds.count("mixup") < 190
    assert len(shares) > 200


def test_one_kind_alone_is_always_drawn():
    for step in range(50):
        blended, truth = mixed(step, mixup=1.0)
        assert 0 < truth[0, 0] < 1
        pasted, _ = mixed(step, cutmix=1.0)
        torch.manual_seed(0)
        images, _ = neighbors()
        assert ((pasted == images) | (pasted == images.roll(1, 0))).all()
        assert not (blended == images).any()
