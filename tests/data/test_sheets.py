"""Contact sheets."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tests.data.gallery import Gallery, gallery, scene
from vitrail.data.sheets import contact_sheet, grid, load_font, sample_evenly, shorten
from vitrail.errors import VitrailError


def classes(**counts: int) -> Gallery:
    """Pictures of one color for each class."""
    colors = ("red", "green", "blue", "black")
    targets = np.repeat(np.arange(len(counts)), list(counts.values()))
    images = [Image.new("RGB", (30, 20), colors[target]) for target in targets]
    return Gallery(images, targets, [str(i) for i in range(len(images))], tuple(counts))


def how_many(source: Gallery, count: int, seed: int = 0) -> Counter[str]:
    return Counter(
        source.labels[source.targets[index]] for index in sample_evenly(source, count, seed)
    )


def test_images_are_drawn_evenly_from_the_classes():
    assert how_many(classes(a=1000, b=50, c=7), 12) == {"a": 4, "b": 4, "c": 4}
    assert how_many(classes(a=1000, b=50, c=2), 12) == {"a": 5, "b": 5, "c": 2}
    assert sorted(how_many(classes(a=10, b=10, c=10), 8).values()) == [2, 3, 3]
    assert how_many(classes(a=1, b=2), 64) == {"a": 1, "b": 2}


def test_none_is_drawn_twice_and_classes_stay_together():
    source = classes(a=9, b=3, c=30)
    chosen = sample_evenly(source, 20, 0)
    assert len(set(chosen)) == 20
    assert sorted(source.targets[chosen].tolist()) == source.targets[chosen].tolist()


def test_of_more_classes_than_tiles_each_comes_once():
    source = Gallery([], np.arange(50).repeat(3), [], tuple(map(str, range(50))))
    chosen = source.targets[sample_evenly(source, 8, 0)].tolist()
    assert len(set(chosen)) == 8
    assert chosen != list(range(8))


def test_the_seed_decides():
    source = classes(a=100, b=100)
    assert (
        sample_evenly(source, 16, 1) == sample_evenly(source, 16, 1) != sample_evenly(source, 16, 2)
    )
    scenes = gallery([scene(seed) for seed in range(12)])
    first, again, other = (
        contact_sheet(scenes, columns=2, rows=2, seed=seed) for seed in (1, 1, 2)
    )
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_a_sheet_shows_each_picture_where_it_belongs():
    paper = contact_sheet(classes(a=1, b=1, c=1, d=1), columns=2, rows=2, side=64)
    quarter = paper.width // 2, paper.height // 2
    middles = [(36 + x * quarter[0], 36 + y * quarter[1]) for y in (0, 1) for x in (0, 1)]
    colors = [paper.getpixel(middle) for middle in middles]
    assert colors == [(255, 0, 0), (0, 128, 0), (0, 0, 255), (0, 0, 0)]


def test_a_broken_picture_is_a_gray_tile_with_its_name():
    paper = contact_sheet(gallery([None], "torn "), side=128)
    pixels = np.asarray(paper.crop((8, 8, 136, 136)))
    assert (pixels[2, 2] == 200).all()
    written = (pixels < 150).any(-1).any(1)
    assert written[:64].any()
    assert written[64:].any()


def test_a_source_without_images_is_refused():
    with pytest.raises(VitrailError, match="no images"):
        contact_sheet(gallery([]))


def test_captions_are_written_below():
    images = [Image.new("RGB", (64, 64), "white")] * 3
    bare, told = (grid(images, columns=2, side=64, captions=text) for text in (None, ["ö"] * 3))
    assert bare.width == told.width
    assert bare.height < told.height
    assert np.asarray(bare).min() == 255
    assert np.asarray(told).min() < 100


def test_captions_are_as_many_as_images():
    with pytest.raises(VitrailError, match="2 images, but 1 captions"):
        grid([scene(0), scene(1)], columns=2, side=32, captions=["a"])


@pytest.mark.parametrize("name", ["daisy", "Gänseblümchen " * 9, "ромашка" * 9, "two\nlines", ""])
def test_any_name_fits_below_its_picture(name):
    font = load_font(12)
    short = shorten(name, font, 100)
    assert font.getlength(short) <= 100
    assert "\n" not in short
    assert short == " ".join(name.split()) or short.endswith("…")


def test_letters_outside_english_have_a_shape():
    def drawn_as(letter: str) -> bytes:
        return bytes(load_font(20).getmask(letter))

    unknown = drawn_as("\U000f0000")
    assert all(drawn_as(letter) != unknown for letter in "öéñжδ")


def test_tall_and_wide_images_stay_whole():
    for size in ((200, 50), (50, 200)):
        tile = grid([Image.new("RGB", size, "red")], columns=1, side=64).crop((4, 4, 68, 68))
        red = (np.asarray(tile) == (255, 0, 0)).all(-1)
        assert sorted([red.any(0).sum(), red.any(1).sum()]) == [16, 64]


def test_tiny_images_keep_their_pixels_sharp():
    chess = Image.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8))
    tile = grid([chess], columns=1, side=64).crop((4, 4, 68, 68))
    assert set(np.unique(np.asarray(tile)).tolist()) == {0, 255}
