"""What a data set is told to hold."""

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tests.data.gallery import Gallery, gallery, scene
from tests.data.pictures import write_classes
from vitrail.data.check import check, describe, drawn, grid, letters, sheet, shortened, show
from vitrail.data.dataset import Source, Splits
from vitrail.data.folder import open_folder
from vitrail.errors import VitrailError


def part(counts: dict[str, int], *images: Image.Image | None) -> Source:
    """A part with so many images of each class: those given, then scenes."""
    targets = np.repeat(np.arange(len(counts)), list(counts.values()))
    rest = [scene(seed, 40, 36) for seed in range(len(targets) - len(images))]
    names = [f"{label}/{i}" for label, count in counts.items() for i in range(count)]
    return Gallery([*images, *rest], targets, names, tuple(counts))


EVEN = {"cat": 10, "dog": 12}


def test_counts_need_no_decoding():
    data = Splits(name="photos", train=part(EVEN, *[None] * 22), test=part({"cat": 2, "dog": 1}))
    described = describe(data)
    assert [(one.name, one.counts) for one in described.parts] == [
        ("train", {"cat": 10, "dog": 12}),
        ("test", {"cat": 2, "dog": 1}),
    ]
    assert described.imbalance == 1.2
    assert described.parts[0].sizes is None
    assert "broken" not in described.to_dict()["parts"]["train"]


def test_broken_images_are_named_with_the_reason_and_counted():
    checked = check(Splits(name="photos", train=part(EVEN, scene(0), None), test=part(EVEN, None)))
    assert [broken.name for broken in checked.parts[0].broken] == ["cat/1"]
    assert checked.parts[0].counts["cat"] == 10
    lines = checked.lines()
    assert "broken   train: cat/1 cannot be decoded: it is torn" in lines
    assert "broken   test: cat/0 cannot be decoded: it is torn" in lines
    assert "warning  images that cannot be decoded, which training skips: 2" in lines


def test_sizes_are_those_of_the_readable_images():
    images = (None, scene(0, 100, 50), scene(0, 20, 300), scene(0, 60, 40))
    checked = check(Splits(name="photos", val=part({"cat": 2, "dog": 2}, *images)))
    assert checked.parts[0].spread() == {
        "width": {"min": 20, "median": 60.0, "max": 100},
        "height": {"min": 40, "median": 50.0, "max": 300},
    }
    assert "val      width 20 to 100, median 60 · height 40 to 300, median 50" in checked.lines()
    assert checked.parts[0].small == ("dog/0",)


def test_images_of_a_single_color_stand_out():
    checked = check(Splits(name="photos", train=part(EVEN, Image.new("RGB", (64, 64), "red"))))
    assert checked.parts[0].blank == ("cat/0",)
    assert "images of a single color: 1" in checked.warnings()


def test_a_part_without_a_readable_picture_has_no_sizes():
    checked = check(Splits(name="photos", train=part({"cat": 1, "dog": 1}, None, None)))
    assert checked.parts[0].spread() is None
    assert len(checked.parts[0].broken) == 2


@pytest.mark.parametrize(
    ("counts", "warning"),
    [
        ({"cat": 9, "dog": 10}, "train has fewer than 10 images of cat (9)"),
        ({"cat": 10, "dog": 0}, "train has no images of dog; add some"),
        ({"cat": 111, "dog": 10}, "the largest class has 11 times as many"),
    ],
)
def test_uneven_classes_are_warned_of(counts, warning):
    full = part(EVEN)
    found = describe(Splits(name="photos", train=part(counts), val=full, test=full)).warnings()
    assert len(found) == 1
    assert found[0].startswith(warning)


def test_a_good_data_set_gives_no_warning():
    full = part(EVEN)
    assert check(Splits(name="photos", train=full, val=full, test=full)).warnings() == []


def test_a_missing_part_is_warned_of():
    assert describe(Splits(name="photos", train=part(EVEN))).warnings() == [
        "no val split: nothing to choose settings on",
        "no test split: nothing to measure the final model on",
    ]


def test_of_many_classes_the_largest_and_the_smallest_are_shown():
    counts = {f"class {number}": number for number in range(100)}
    columns, rows = describe(Splits(name="photos", train=part(counts, *[None] * 4950))).rows(most=4)
    assert columns == ["class", "train", ""]
    assert [row[0] for row in rows] == ["class 99", "class 98", "…", "class 1", "class 0"]
    assert rows[2] == ["…", "", "96 more"]


def test_everything_fits_into_json():
    checked = check(Splits(name="photos", train=part(EVEN, None), test=part(EVEN)))
    written = json.loads(json.dumps(checked.to_dict()))
    assert written["labels"] == ["cat", "dog"]
    assert written["parts"]["train"]["n"] == 22
    assert written["parts"]["train"]["classes"] == EVEN
    assert written["parts"]["train"]["broken"] == [["cat/0", "cat/0 cannot be decoded: it is torn"]]
    assert written["parts"]["test"]["size"]["width"] == {"min": 40, "median": 40.0, "max": 40}
    assert written["warnings"] == checked.warnings()


def test_the_terminal_shows_counts_as_bars(capsys):
    show(describe(Splits(name="photos", train=part({"cat": 20, "dog": 10}), test=part(EVEN))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "photos  30 train · 22 test · 2 classes"
    assert lines[2].split() == ["class", "train", "test"]
    assert lines[3].split() == ["cat", "20", "10", "█" * 24]
    assert lines[4].split() == ["dog", "10", "12", "█" * 18]
    assert lines[-1] == "warning  no val split: nothing to choose settings on"


def test_files_that_are_no_images_are_found(tmp_path):
    data = open_folder(write_classes(tmp_path, {"a": 40, "b": 3}))
    (tmp_path / "b" / "1.png").write_bytes(b"GIF89a")
    steps: list[int] = []
    checked = check(data, progress=steps.append)
    assert [broken.name for broken in checked.parts[0].broken] == ["b/1.png"]
    assert sum(steps) == 43


def classes(**counts: int) -> Gallery:
    """Pictures of one color for each class."""
    colors = ("red", "green", "blue", "black")
    targets = np.repeat(np.arange(len(counts)), list(counts.values()))
    images = [Image.new("RGB", (30, 20), colors[target]) for target in targets]
    return Gallery(images, targets, [str(i) for i in range(len(images))], tuple(counts))


def how_many(source: Gallery, count: int, seed: int = 0) -> Counter[str]:
    return Counter(source.labels[source.targets[index]] for index in drawn(source, count, seed))


def test_images_are_drawn_evenly_from_the_classes():
    assert how_many(classes(a=1000, b=50, c=7), 12) == {"a": 4, "b": 4, "c": 4}
    assert how_many(classes(a=1000, b=50, c=2), 12) == {"a": 5, "b": 5, "c": 2}
    assert sorted(how_many(classes(a=10, b=10, c=10), 8).values()) == [2, 3, 3]
    assert how_many(classes(a=1, b=2), 64) == {"a": 1, "b": 2}


def test_none_is_drawn_twice_and_classes_stay_together():
    source = classes(a=9, b=3, c=30)
    chosen = drawn(source, 20, 0)
    assert len(set(chosen)) == 20
    assert sorted(source.targets[chosen].tolist()) == source.targets[chosen].tolist()


def test_of_more_classes_than_tiles_each_comes_once():
    source = Gallery([], np.arange(50).repeat(3), [], tuple(map(str, range(50))))
    chosen = source.targets[drawn(source, 8, 0)].tolist()
    assert len(set(chosen)) == 8
    assert chosen != list(range(8))


def test_the_seed_decides():
    source = classes(a=100, b=100)
    assert drawn(source, 16, 1) == drawn(source, 16, 1) != drawn(source, 16, 2)
    scenes = gallery([scene(seed) for seed in range(12)])
    first, again, other = (sheet(scenes, columns=2, rows=2, seed=seed) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_a_sheet_shows_each_picture_where_it_belongs():
    paper = sheet(classes(a=1, b=1, c=1, d=1), columns=2, rows=2, side=64)
    quarter = paper.width // 2, paper.height // 2
    middles = [(36 + x * quarter[0], 36 + y * quarter[1]) for y in (0, 1) for x in (0, 1)]
    colors = [paper.getpixel(middle) for middle in middles]
    assert colors == [(255, 0, 0), (0, 128, 0), (0, 0, 255), (0, 0, 0)]


def test_a_broken_picture_is_a_gray_tile_with_its_name():
    paper = sheet(gallery([None], "torn "), side=128)
    pixels = np.asarray(paper.crop((8, 8, 136, 136)))
    assert (pixels[2, 2] == 200).all()
    written = (pixels < 150).any(-1).any(1)
    assert written[:64].any()
    assert written[64:].any()


def test_a_source_without_images_is_refused():
    with pytest.raises(VitrailError, match="no images"):
        sheet(gallery([]))


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
    font = letters(12)
    short = shortened(name, font, 100)
    assert font.getlength(short) <= 100
    assert "\n" not in short
    assert short == " ".join(name.split()) or short.endswith("…")


def test_letters_outside_english_have_a_shape():
    def drawn_as(letter: str) -> bytes:
        return bytes(letters(20).getmask(letter))

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
