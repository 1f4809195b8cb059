"""What a dataset is told to hold."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.data.gallery import Gallery, scene
from tests.data.pictures import write_classes
from vitrail.data.check import check_images, describe_dataset, show_report
from vitrail.data.dataset import Source, Splits
from vitrail.data.folder import open_folder


def part(counts: dict[str, int], *images: Image.Image | None) -> Source:
    """A part with so many images of each class: those given, then scenes."""
    targets = np.repeat(np.arange(len(counts)), list(counts.values()))
    rest = [scene(seed, 40, 36) for seed in range(len(targets) - len(images))]
    names = [f"{label}/{i}" for label, count in counts.items() for i in range(count)]
    return Gallery([*images, *rest], targets, names, tuple(counts))


EVEN = {"cat": 10, "dog": 12}


def test_counts_need_no_decoding():
    data = Splits(name="photos", train=part(EVEN, *[None] * 22), test=part({"cat": 2, "dog": 1}))
    described = describe_dataset(data)
    assert [(one.name, one.counts) for one in described.parts] == [
        ("train", {"cat": 10, "dog": 12}),
        ("test", {"cat": 2, "dog": 1}),
    ]
    assert described.imbalance == 1.2
    assert described.parts[0].sizes is None
    assert "broken" not in described.to_dict()["parts"]["train"]


def test_broken_images_are_named_with_the_reason_and_counted():
    checked = check_images(
        Splits(name="photos", train=part(EVEN, scene(0), None), test=part(EVEN, None))
    )
    assert [broken.name for broken in checked.parts[0].broken] == ["cat/1"]
    assert checked.parts[0].counts["cat"] == 10
    lines = checked.lines()
    assert "broken   train: cat/1 cannot be decoded: it is torn" in lines
    assert "broken   test: cat/0 cannot be decoded: it is torn" in lines
    assert "warning  images that cannot be decoded, which training skips: 2" in lines


def test_sizes_are_those_of_the_readable_images():
    images = (None, scene(0, 100, 50), scene(0, 20, 300), scene(0, 60, 40))
    checked = check_images(Splits(name="photos", val=part({"cat": 2, "dog": 2}, *images)))
    assert checked.parts[0].spread() == {
        "width": {"min": 20, "median": 60.0, "max": 100},
        "height": {"min": 40, "median": 50.0, "max": 300},
    }
    assert "val      width 20 to 100, median 60 · height 40 to 300, median 50" in checked.lines()
    assert checked.parts[0].small == ("dog/0",)


def test_images_of_a_single_color_stand_out():
    checked = check_images(
        Splits(name="photos", train=part(EVEN, Image.new("RGB", (64, 64), "red")))
    )
    assert checked.parts[0].blank == ("cat/0",)
    assert "images of a single color: 1" in checked.warnings()


def test_a_part_without_a_readable_picture_has_no_sizes():
    checked = check_images(Splits(name="photos", train=part({"cat": 1, "dog": 1}, None, None)))
    assert checked.parts[0].spread() is None
    assert "decoded  0 of 2 images" in checked.lines()
    assert len(checked.parts[0].broken) == 2


@pytest.mark.parametrize(
    ("counts", "warning"),
    [
        ({"cat": 9, "dog": 10}, "train has fewer than 10 images of cat (9)"),
        ({"cat": 10, "dog": 0}, "train has no images of 'dog'; add some"),
        ({"cat": 111, "dog": 10}, "the largest class has 11 times as many"),
    ],
)
def test_uneven_classes_are_warned_of(counts, warning):
    full = part(EVEN)
    found = describe_dataset(
        Splits(name="photos", train=part(counts), val=full, test=full)
    ).warnings()
    assert len(found) == 1
    assert found[0].startswith(warning)


def test_a_good_data_set_gives_no_warning():
    full = part(EVEN)
    checked = check_images(Splits(name="photos", train=full, val=full, test=full))
    assert checked.warnings() == []
    total = 3 * checked.parts[0].total
    assert checked.lines()[-1] == f"decoded  {total} of {total} images"


def test_a_missing_part_is_warned_of():
    assert describe_dataset(Splits(name="photos", train=part(EVEN))).warnings() == [
        "no val split: nothing to choose settings on",
        "no test split: nothing to measure the final model on",
    ]


def test_of_many_classes_the_largest_and_the_smallest_are_shown():
    counts = {f"class {number}": number for number in range(100)}
    columns, rows = describe_dataset(
        Splits(name="photos", train=part(counts, *[None] * 4950))
    ).rows(most=4)
    assert columns == ["class", "train", ""]
    assert [row[0] for row in rows] == ["class 99", "class 98", "…", "class 1", "class 0"]
    assert rows[2] == ["…", "", "96 more"]


def test_everything_fits_into_json():
    checked = check_images(Splits(name="photos", train=part(EVEN, None), test=part(EVEN)))
    written = json.loads(json.dumps(checked.to_dict()))
    assert written["labels"] == ["cat", "dog"]
    assert written["parts"]["train"]["n"] == 22
    assert written["parts"]["train"]["classes"] == EVEN
    assert written["parts"]["train"]["broken"] == [["cat/0", "cat/0 cannot be decoded: it is torn"]]
    assert written["parts"]["test"]["size"]["width"] == {"min": 40, "median": 40.0, "max": 40}
    assert written["warnings"] == checked.warnings()


def test_the_terminal_shows_counts_as_bars(capsys):
    show_report(
        describe_dataset(Splits(name="photos", train=part({"cat": 20, "dog": 10}), test=part(EVEN)))
    )
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
    checked = check_images(data, progress=steps.append)
    assert [broken.name for broken in checked.parts[0].broken] == ["b/1.png"]
    assert sum(steps) == 43
