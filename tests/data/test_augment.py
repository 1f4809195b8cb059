"""What chance does to training images, and what it must leave alone."""

import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torchvision.transforms import InterpolationMode, v2

from tests.data.pictures import bit_resized, window
from vitrail.config import Augment
from vitrail.data.augment import (
    OPERATIONS,
    RandAugment,
    _color_steps,
    mix,
    normalize,
    training_transform,
)
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, to_tensor

EVERYTHING = {
    "randaugment_layers": 2,
    "autoaugment": "imagenet",
    "three_augment": True,
    "color_jitter": 0.3,
    "erasing": 0.5,
}
CROPS = ("inception", "resize", "pad", "none")


def ramps(rows: int, columns: int) -> Image.Image:
    """Red tells the column and green the row, as shares of 250; blue is constant."""
    pixels = np.full((rows, columns, 3), 90, dtype=np.uint8)
    pixels[:, :, 0] = (np.arange(columns) + 0.5) / columns * 250
    pixels[:, :, 1] = ((np.arange(rows) + 0.5) / rows * 250)[:, None]
    return Image.fromarray(pixels)


def shown(image: torch.Tensor) -> tuple[float, float]:
    """The share of the rows and of the columns of `ramps` that an image shows."""
    red, green = image[0].float(), image[1].float()
    columns = (red[:, -1] - red[:, 0]).abs().mean() / 250 * image.shape[2] / (image.shape[2] - 1)
    rows = (green[-1] - green[0]).abs().mean() / 250 * image.shape[1] / (image.shape[1] - 1)
    return float(rows), float(columns)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("size", [(32, 32), (32, 48), (200, 64)])
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("antialias", [True, False])
def test_images_are_bytes_of_the_models_size(options, size, crop, antialias):
    preprocessing = Preprocessing(size=size, short_side=min(size) * 9 // 8, antialias=antialias)
    transform = training_transform(preprocessing, Augment(crop=crop, **options))
    for picture in (ramps(60, 90), ramps(90, 60), ramps(20, 300)):
        image = transform(picture)
        assert image.dtype == torch.uint8
        assert tuple(image.shape) == (3, *size)
        assert type(image) is torch.Tensor


@pytest.mark.parametrize("crop", CROPS)
def test_all_chance_comes_from_torchs_generator(crop):
    transform = training_transform(Preprocessing(size=(32, 48)), Augment(crop=crop, **EVERYTHING))
    copied = pickle.loads(pickle.dumps(transform))
    picture = ramps(60, 90)

    def draws(transform, seed: int) -> list[torch.Tensor]:
        random.seed()
        np.random.seed(None)
        torch.manual_seed(seed)
        return [transform(picture) for _ in range(8)]

    first = draws(transform, 1)
    for one, other in zip(first, draws(copied, 1), strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(a, b) for a, b in zip(first, draws(transform, 2), strict=True))


@pytest.mark.parametrize("short_side", [0, 40])
@pytest.mark.parametrize(
    ("interpolation", "antialias"), [("bilinear", True), ("bilinear", False), ("bicubic", True)]
)
def test_without_augmentation_images_are_the_evaluations(
    scenes, short_side, interpolation, antialias
):
    preprocessing = Preprocessing(
        size=(32, 48),
        short_side=short_side,
        antialias=antialias,
        interpolation=interpolation,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
    transform = training_transform(preprocessing, Augment(crop="none", flip=False))
    for picture in scenes[:4]:
        image = normalize(transform(picture)[None], preprocessing)[0]
        mean, std = (torch.tensor(c)[:, None, None] for c in (IMAGENET_MEAN, IMAGENET_STD))
        difference = image * std + mean - (preprocessing(picture) * std + mean).clamp(0, 1)
        assert difference.abs().max() <= 1.01 / 255  # one level, for the rounding to bytes


@pytest.mark.parametrize("mean", [(0.5,), (0.5, 0.5, 0.5)], ids=["gray", "color"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_inception_crops_are_torchvisions_to_the_bit(interpolation, antialias, mean, scenes):
    options = {"interpolation": interpolation, "antialias": antialias, "mean": mean, "std": mean}
    transform = training_transform(Preprocessing(size=(40, 48), **options), Augment(area=0.08))
    mode = InterpolationMode(interpolation)
    reference = v2.Compose(
        [
            v2.RandomResizedCrop(
                (40, 48), (0.08, 1.0), (0.9, 1.6), interpolation=mode, antialias=antialias
            ),
            v2.RandomHorizontalFlip(),
        ]
    )
    for seed, scene in enumerate(scenes[:12]):
        image = scene.resize((60 + 17 * seed, 170 - 9 * seed))
        torch.manual_seed(seed)
        found = transform(np.asarray(image))
        torch.manual_seed(seed)
        assert torch.equal(
            found, reference(to_tensor(image.convert("L") if len(mean) == 1 else image))
        )


def test_an_inception_crop_keeps_the_area_and_the_shape_it_promises():
    transform = training_transform(Preprocessing(size=(64, 64)), Augment(area=0.3))
    shares = torch.tensor([shown(transform(ramps(400, 400))) for _ in range(200)])
    area = shares.prod(1)
    ratio = shares[:, 1] / shares[:, 0]
    assert area.min() > 0.27
    assert area.max() > 0.9
    assert 0.5 < area.mean() < 0.65  # large areas fit less often
    assert ratio.min() > 0.7
    assert ratio.max() < 1.43


def test_an_inception_crop_to_a_rectangle_is_no_more_distorted():
    transform = training_transform(Preprocessing(size=(32, 96)), Augment())
    shares = torch.tensor([shown(transform(ramps(400, 400))) for _ in range(100)])
    distortion = shares[:, 1] / shares[:, 0] / 3
    assert distortion.min() > 0.65
    assert distortion.max() < 1.5


@pytest.mark.parametrize(
    ("size", "short_side", "share"), [(384, 0, 6 / 7), (128, 0, 4 / 5), (64, 96, 2 / 3)]
)
def test_bits_crop_is_cut_from_the_resized_picture(size, short_side, share):
    preprocessing = Preprocessing(size=(size, size), short_side=short_side)
    transform = training_transform(preprocessing, Augment(crop="resize"))
    for _ in range(5):
        rows, columns = shown(transform(ramps(100, 300)))
        assert abs(rows - share) < 0.03
        assert abs(columns - share) < 0.03


@pytest.mark.parametrize(("size", "side"), [(384, 448), (128, 160)])
def test_training_images_are_those_of_bits_released_code(size, side, scenes):
    """Resized to a square, a random crop of that, mirrored or not, from -1 to 1."""
    preprocessing = Preprocessing(size=(size, size))
    transform = training_transform(preprocessing, Augment(crop="resize"))
    for scene in scenes[:3]:
        resized = bit_resized(scene, side)
        found = {window(transform(scene), resized) for _ in range(8)}
        assert None not in found
        assert len(found) > 6
        assert {mirrored for _, _, mirrored in found} == {False, True}
        test = normalize(bit_resized(scene, size)[None], preprocessing)[0]
        torch.testing.assert_close(preprocessing(scene), test)


def test_padding_shifts_by_at_most_an_eighth_and_shows_black():
    picture = Image.fromarray(np.random.default_rng(0).integers(1, 256, (32, 32, 3), np.uint8))
    whole = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    padded = torch.nn.functional.pad(whole, (4, 4, 4, 4))
    preprocessing = Preprocessing(size=(32, 32), short_side=32)
    transform = training_transform(preprocessing, Augment(crop="pad", flip=False))
    windows = {(y, x): padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)}
    found = set()
    for _ in range(400):
        image = transform(picture)
        found |= {at for at, window in windows.items() if torch.equal(window, image)}
    assert len(found) > 70  # of 81 places


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize(("flip", "low", "high"), [(False, 0, 0), (True, 30, 70)])
def test_half_of_the_images_are_mirrored(flip, low, high, crop):
    transform = training_transform(Preprocessing(size=(16, 16)), Augment(crop=crop, flip=flip))
    images = [transform(ramps(64, 64)) for _ in range(100)]
    mirrored = sum(bool(image[0, 8, 4] > image[0, 8, 11]) for image in images)
    assert low <= mirrored <= high


def test_erased_places_have_the_mean_color():
    preprocessing = Preprocessing(size=(64, 64), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    transform = training_transform(preprocessing, Augment(crop="none", erasing=1.0))
    black = Image.new("RGB", (64, 64))
    shares = []
    for _ in range(50):
        image = normalize(transform(black)[None], preprocessing)[0]
        erased = (image.abs() < 0.02).all(0)
        shares.append(float(erased.float().mean()))
    assert 0.01 < min(shares) < max(shares) < 0.35
    never = training_transform(preprocessing, Augment(crop="none"))
    assert not never(black).any()
    often = training_transform(preprocessing, Augment(crop="none", erasing=0.25))
    assert 25 < sum(bool(often(black).any()) for _ in range(200)) < 75


def test_a_model_of_gray_images_gets_gray_images():
    preprocessing = Preprocessing(size=(32, 32), mean=(0.2,), std=(0.3,))
    image = training_transform(preprocessing, Augment(**EVERYTHING))(ramps(60, 90))
    assert image.shape == (1, 32, 32)


def test_three_augment_does_one_of_three_things():
    transform = training_transform(
        Preprocessing(size=(64, 64)), Augment(crop="none", flip=False, three_augment=True)
    )
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    whole = torch.from_numpy(pixels).permute(2, 0, 1)
    seen = {"gray": 0, "solarized": 0, "blurred": 0}
    for _ in range(90):
        image = transform(Image.fromarray(pixels))
        if torch.equal(image[0], image[1]):
            seen["gray"] += 1
        elif torch.equal(image, torch.where(whole < 128, whole, 255 - whole)):
            seen["solarized"] += 1
        else:
            assert image.float().std() <= whole.float().std()
            seen["blurred"] += 1
    assert min(seen.values()) > 15


def test_color_jitter_moves_colors_about_where_they_are():
    transform = training_transform(
        Preprocessing(size=(16, 16)), Augment(crop="none", flip=False, color_jitter=0.4)
    )
    picture = Image.new("RGB", (16, 16), (128, 64, 32))
    red = torch.stack([transform(picture)[0].float().mean() for _ in range(100)])
    assert red.std() > 5
    assert abs(red.mean() - 128) < 10


def test_every_policy_of_autoaugment_is_offered():
    for policy in ("imagenet", "cifar10", "svhn"):
        transform = training_transform(Preprocessing(size=(32, 32)), Augment(autoaugment=policy))
        assert transform(ramps(40, 40)).shape == (3, 32, 32)


def test_nothing_is_on_that_is_not_asked_for():
    assert _color_steps(Augment(), (128, 128, 128)) == []


@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), IMAGENET_MEAN])
def test_bytes_become_the_numbers_of_the_evaluation(mean):
    preprocessing = Preprocessing(size=(16, 16), mean=mean, std=IMAGENET_STD)
    picture = ramps(16, 16)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    image = normalize(pixels[None], preprocessing)[0]
    torch.testing.assert_close(image, preprocessing(picture))


def batch(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Constant images whose value is their number, and their number as the class."""
    targets = torch.arange(count)
    return targets.float()[:, None, None, None].expand(count, 3, 16, 24).clone(), targets


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.2, 1.0), (0.0, 0.0)])
def test_mixing_conserves_the_mass_of_labels(mixup, cutmix):
    images, targets = batch()
    for labels in (targets, torch.eye(8)):
        for _ in range(20):
            mixed, soft = mix(images, labels, mixup=mixup, cutmix=cutmix, classes=8)
            torch.testing.assert_close(soft.sum(1), torch.ones(8))
            torch.testing.assert_close(soft.sum(0), torch.ones(8))
            assert (soft >= 0).all()
            # The mean pixel of an image is the mean of its classes' numbers, in that proportion.
            expected = (soft * torch.arange(8)).sum(1)
            torch.testing.assert_close(mixed.mean((1, 2, 3)), expected, atol=1e-4, rtol=1e-4)


def shares(mixup: float, cutmix: float, draws: int = 300) -> torch.Tensor:
    """The share of its own class that the first image keeps."""
    images, targets = batch(2)
    return torch.stack(
        [mix(images, targets, mixup=mixup, cutmix=cutmix, classes=2)[1][0, 0] for _ in range(draws)]
    )


def test_mixups_proportion_follows_a_beta_distribution():
    flat, pointed = shares(1.0, 0.0), shares(0.1, 0.0)
    assert abs(flat.mean() - 0.5) < 0.07
    assert abs(flat.std() - 12**-0.5) < 0.04
    # Beta(α, α) has the variance 1 / (4 (2 α + 1)).
    assert abs(pointed.std() - (4 * 1.2) ** -0.5) < 0.04


def test_cutmix_pastes_a_rectangle_of_the_neighbour():
    images, targets = batch(3)
    mixed, soft = mix(images, targets, mixup=0.0, cutmix=1.0, classes=3)
    assert set(mixed[1].unique().tolist()) <= {0.0, 1.0}
    assert abs(float((mixed[1] == 1).float().mean()) - float(soft[1, 1])) < 1e-6


def test_a_batch_gets_mixup_or_cutmix_equally_often():
    images, targets = batch(2)
    kinds = []
    for _ in range(200):
        mixed, _ = mix(images, targets, mixup=1.0, cutmix=1.0, classes=2)
        kinds.append(bool(((mixed == 0) | (mixed == 1)).all()))
    assert 70 < sum(kinds) < 130


def test_some_batches_stay_unmixed_where_that_is_asked_for():
    images, targets = batch(2)
    whole = 0
    for _ in range(200):
        mixed, soft = mix(images, targets, mixup=1.0, cutmix=1.0, classes=2, share=0.25)
        same = torch.equal(mixed, images)
        assert not same or torch.equal(soft, torch.eye(2))
        whole += same
    assert 125 < whole < 175


def test_mixing_repeats_with_the_seed():
    images, targets = batch()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(mix(images, targets, mixup=0.5, cutmix=0.5, classes=8))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


FILL = (1, 2, 3)
NAMES = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize"),
    *("color", "contrast", "brightness", "sharpness"),
    *("shear_x", "shear_y", "translate_x", "translate_y", "cut_out", "solarize_add"),
)


@pytest.fixture
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(9, 256, (56, 112, 3), np.uint8))


def apply(name: str, image: Image.Image, magnitude: float, seed: int = 0) -> np.ndarray:
    torch.manual_seed(seed)
    result = OPERATIONS[NAMES.index(name)](image, magnitude / 10, FILL)
    assert result.size == image.size
    return np.asarray(result)


def test_there_are_the_sixteen_operations_of_the_reference():
    assert len(OPERATIONS) == len(NAMES) == 16


@pytest.mark.parametrize(
    ("magnitude", "bits"), [(0, 0), (5, 2), (10, 4), (15, 6), (20, 8), (30, 8)]
)
def test_posterizing_keeps_more_bits_the_stronger_it_is(image, magnitude, bits):
    expected = np.asarray(image) >> (8 - bits) << (8 - bits)
    assert (apply("posterize", image, magnitude) == expected).all()


@pytest.mark.parametrize("magnitude", [0, 3, 10, 20])
def test_solarizing_inverts_what_is_bright(image, magnitude):
    pixels = np.asarray(image)
    expected = np.where(pixels < int(25.6 * magnitude), pixels, 255 - pixels)
    assert (apply("solarize", image, magnitude) == expected).all()


@pytest.mark.parametrize("magnitude", [0, 5, 10, 20])
def test_solarize_add_brightens_what_is_dark(image, magnitude):
    pixels = np.asarray(image).astype(int)
    expected = np.where(pixels < 128, np.minimum(pixels + 11 * magnitude, 255), pixels)
    assert (apply("solarize_add", image, magnitude) == expected).all()


@pytest.mark.parametrize("magnitude", [0, 5, 10, 15, 20])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("color", ImageEnhance.Color),
        ("contrast", ImageEnhance.Contrast),
        ("brightness", ImageEnhance.Brightness),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
def test_blending_goes_from_a_tenth_to_nearly_twice_and_beyond(image, magnitude, name, enhance):
    expected = np.asarray(enhance(image).enhance(0.1 + 0.18 * magnitude))
    assert (apply(name, image, magnitude) == expected).all()


def moves(name: str, image: Image.Image, magnitude: float) -> list[np.ndarray]:
    return [apply(name, image, magnitude, seed) for seed in range(8)]


@pytest.mark.parametrize(
    ("name", "axis", "pixels"), [("translate_x", 1, 50), ("translate_y", 0, 25)]
)
def test_translations_go_both_ways_by_a_share_of_the_side(image, name, axis, pixels):
    whole = np.asarray(image)
    forward, backward = whole.copy(), whole.copy()
    forward[:], backward[:] = FILL, FILL
    size = whole.shape[axis]
    keep, lose = np.arange(size - pixels), np.arange(pixels, size)
    if axis:
        forward[:, lose], backward[:, keep] = whole[:, keep], whole[:, lose]
    else:
        forward[lose], backward[keep] = whole[keep], whole[lose]
    seen = moves(name, image, 10)  # 100 of 224 pixels
    assert any((image == forward).all() for image in seen)
    assert any((image == backward).all() for image in seen)
    assert all((image == forward).all() or (image == backward).all() for image in seen)


@pytest.mark.parametrize(("name", "axis"), [("shear_x", 0), ("shear_y", 1)])
def test_shears_shift_each_line_by_a_share_of_its_number(name, axis):
    lines = np.zeros((60, 60, 3), np.uint8)
    lines[(slice(None), 30) if axis == 0 else (30, slice(None))] = 255
    seen = moves(name, Image.fromarray(lines), 10)
    for image in seen:
        bright = np.argwhere(image[:, :, 0] == 255)
        steps = np.polyfit(bright[:, axis], bright[:, 1 - axis], 1)[0]
        assert abs(abs(steps) - 0.3) < 0.03
    assert len({image.tobytes() for image in seen}) == 2


def test_rotations_go_both_ways_by_thirty_degrees(image):
    expected = {np.asarray(image.rotate(angle, fillcolor=FILL)).tobytes() for angle in (30, -30)}
    assert {image.tobytes() for image in moves("rotate", image, 10)} == expected


def test_a_cut_out_is_a_square_of_the_fill(image):
    counts = []
    for moved in moves("cut_out", image, 10):
        rows, columns = np.nonzero((moved == FILL).all(2))
        counts.append(len(rows))
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    assert max(counts) == 20 * 20  # 80 of 224 pixels, of the short side


def test_magnitude_zero_moves_nothing_but_changes_looks(image):
    whole = np.asarray(image)
    for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", "solarize_add"):
        assert (apply(name, image, 0) == whole).all()
    assert not apply("posterize", image, 0).any()
    assert apply("brightness", image, 0).mean() < 0.11 * whole.mean()


def test_operations_are_drawn_evenly_and_one_after_the_other(image):
    torch.manual_seed(0)
    once = {RandAugment(1, 10.0, FILL)(image).tobytes() for _ in range(300)}
    twice = {RandAugment(2, 10.0, FILL)(image).tobytes() for _ in range(300)}
    assert len(once) > 14  # sixteen, some both ways, and one in many places
    assert len(twice) > 2 * len(once)
    assert RandAugment(0, 10.0, FILL)(image) is image
