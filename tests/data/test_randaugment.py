"""RandAugment's operations against the formulas of the reference."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from vitrail.data.randaugment import OPERATIONS, RandAugment

FILL = (1, 2, 3)
NAMES = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize"),
    *("colour", "contrast", "brightness", "sharpness"),
    *("shear_x", "shear_y", "translate_x", "translate_y", "cut_out", "solarize_add"),
)


@pytest.fixture
def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(9, 256, (56, 112, 3), np.uint8))


def apply(name: str, picture: Image.Image, magnitude: float, seed: int = 0) -> np.ndarray:
    torch.manual_seed(seed)
    result = OPERATIONS[NAMES.index(name)](picture, magnitude / 10, FILL)
    assert result.size == picture.size
    return np.asarray(result)


def test_there_are_the_sixteen_operations_of_the_reference():
    assert len(OPERATIONS) == len(NAMES) == 16


@pytest.mark.parametrize(
    ("magnitude", "bits"), [(0, 0), (5, 2), (10, 4), (15, 6), (20, 8), (30, 8)]
)
def test_posterising_keeps_more_bits_the_stronger_it_is(picture, magnitude, bits):
    expected = np.asarray(picture) >> (8 - bits) << (8 - bits)
    assert (apply("posterize", picture, magnitude) == expected).all()


@pytest.mark.parametrize("magnitude", [0, 3, 10, 20])
def test_solarising_inverts_what_is_bright(picture, magnitude):
    pixels = np.asarray(picture)
    expected = np.where(pixels < int(25.6 * magnitude), pixels, 255 - pixels)
    assert (apply("solarize", picture, magnitude) == expected).all()


@pytest.mark.parametrize("magnitude", [0, 5, 10, 20])
def test_solarize_add_brightens_what_is_dark(picture, magnitude):
    pixels = np.asarray(picture).astype(int)
    expected = np.where(pixels < 128, np.minimum(pixels + 11 * magnitude, 255), pixels)
    assert (apply("solarize_add", picture, magnitude) == expected).all()


@pytest.mark.parametrize("magnitude", [0, 5, 10, 15, 20])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("colour", ImageEnhance.Color),
        ("contrast", ImageEnhance.Contrast),
        ("brightness", ImageEnhance.Brightness),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
def test_blending_goes_from_a_tenth_to_nearly_twice_and_beyond(picture, magnitude, name, enhance):
    expected = np.asarray(enhance(picture).enhance(0.1 + 0.18 * magnitude))
    assert (apply(name, picture, magnitude) == expected).all()


def moves(name: str, picture: Image.Image, magnitude: float) -> list[np.ndarray]:
    return [apply(name, picture, magnitude, seed) for seed in range(8)]


@pytest.mark.parametrize(
    ("name", "axis", "pixels"), [("translate_x", 1, 50), ("translate_y", 0, 25)]
)
def test_translations_go_both_ways_by_a_share_of_the_side(picture, name, axis, pixels):
    whole = np.asarray(picture)
    forward, backward = whole.copy(), whole.copy()
    forward[:], backward[:] = FILL, FILL
    size = whole.shape[axis]
    keep, lose = np.arange(size - pixels), np.arange(pixels, size)
    if axis:
        forward[:, lose], backward[:, keep] = whole[:, keep], whole[:, lose]
    else:
        forward[lose], backward[keep] = whole[keep], whole[lose]
    seen = moves(name, picture, 10)  # 100 of 224 pixels
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


def test_rotations_go_both_ways_by_thirty_degrees(picture):
    expected = {np.asarray(picture.rotate(angle, fillcolor=FILL)).tobytes() for angle in (30, -30)}
    assert {image.tobytes() for image in moves("rotate", picture, 10)} == expected


def test_a_cut_out_is_a_square_of_the_fill(picture):
    counts = []
    for image in moves("cut_out", picture, 10):
        rows, columns = np.nonzero((image == FILL).all(2))
        counts.append(len(rows))
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    assert max(counts) == 20 * 20  # 80 of 224 pixels, of the short side


def test_magnitude_zero_moves_nothing_but_changes_looks(picture):
    whole = np.asarray(picture)
    for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", "solarize_add"):
        assert (apply(name, picture, 0) == whole).all()
    assert not apply("posterize", picture, 0).any()
    assert apply("brightness", picture, 0).mean() < 0.11 * whole.mean()


def test_operations_are_drawn_evenly_and_one_after_the_other(picture):
    torch.manual_seed(0)
    once = {RandAugment(1, 10.0, FILL)(picture).tobytes() for _ in range(300)}
    twice = {RandAugment(2, 10.0, FILL)(picture).tobytes() for _ in range(300)}
    assert len(once) > 14  # sixteen, some both ways, and one in many places
    assert len(twice) > 2 * len(once)
    assert RandAugment(0, 10.0, FILL)(picture) is picture
