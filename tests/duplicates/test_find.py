"""Duplicates inside and across the parts of a dataset."""

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from tests.data.gallery import Gallery, gallery, scene
from vitrail.data.dataset import Source, Splits
from vitrail.duplicates.find import Pair, find, groups, pairs
from vitrail.duplicates.fingerprints import fingerprints


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def crop(image: Image.Image, part: float, x: float, y: float) -> Image.Image:
    width, height = round(part * image.width), round(part * image.height)
    left, top = round(x * (image.width - width)), round(y * (image.height - height))
    return image.crop((left, top, left + width, top + height))


CHANGES = {
    "as a poor JPEG": lambda image: jpeg(image, 20),
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "squeezed to a square": lambda image: image.resize((224, 224)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.6),
    "with more contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.3),
    "gray": lambda image: image.convert("L").convert("RGB"),
    "cropped by 3%": lambda image: crop(image, 0.97, 0.3, 0.7),
    "cropped by 5% to a corner": lambda image: crop(image, 0.95, 0, 1),
    "cropped by 10%": lambda image: crop(image, 0.9, 0.5, 0.5),
    "cropped by 10% to a corner": lambda image: crop(image, 0.9, 1, 0),
    "cropped, shrunk and compressed": lambda image: jpeg(
        crop(image, 0.95, 0.5, 0.5).resize((120, 120)), 40
    ),
}
"""What the same picture looks like elsewhere on the web."""


def part(*images: Image.Image | None, target: int = 0) -> Source:
    return gallery(images, "picture ", target)


def named(found: list[Pair]) -> list[tuple[str, str, str]]:
    return [(pair.first, pair.second, pair.kind) for pair in found]


def copies_found(images: list[Image.Image], change: str) -> int:
    """How many of 32 changed copies are found among 64 pictures; none is taken for another."""
    copies = [CHANGES[change](image) for image in images[::2]]
    originals = fingerprints(gallery(images, ""))
    changed = fingerprints(Gallery(copies, np.zeros(32, int), [str(2 * i) for i in range(32)]))
    found = pairs(originals, changed)
    assert all(pair.first == pair.second for pair in found)
    return len(found)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_found(scenes, change):
    assert copies_found(scenes, change) >= 31


def test_unrelated_pictures_are_not_alike(scenes):
    assert pairs(fingerprints(gallery(scenes)), mirrored=True) == []


def test_mirror_images_count_only_when_asked(scenes):
    a = fingerprints(gallery(scenes[:8]))
    b = fingerprints(gallery([ImageOps.mirror(image) for image in scenes[:8]]))
    assert pairs(a, b) == []
    assert [pair.first for pair in pairs(a, b, mirrored=True)] == [str(i) for i in range(8)]


def test_a_crop_is_a_duplicate_whichever_set_it_is_in():
    a = fingerprints(part(scene(0)))
    b = fingerprints(part(crop(scene(0), 0.9, 0, 1)))
    assert len(pairs(a, b)) == len(pairs(b, a)) == 1


def test_leaks_come_first_and_name_both_pictures():
    data = Splits(
        name="photos",
        train=part(scene(0), scene(1), scene(2), jpeg(scene(2), 60)),
        test=part(scene(5), scene(1)),
    )
    found = find(data)
    assert [(section.first, section.second, section.leak) for section in found.sections] == [
        ("train", "test", True),
        ("train", "train", False),
        ("test", "test", False),
    ]
    assert named(found.sections[0].pairs) == [("picture 1", "picture 1", "exact")]
    assert named(found.sections[1].pairs) == [("picture 2", "picture 3", "near")]
    assert found.leaks == found.sections[:1]
    assert found.lines()[:2] == [
        "leak        train and test: 1 pair, 1 identical; 1 image of test",
        "  identical picture 1 · picture 1",
    ]
    assert found.lines()[2] == "duplicates  within train: 1 pair, 0 identical; 1 group"


def test_train_is_freed_of_what_comes_back_in_val_and_test():
    data = Splits(
        name="photos",
        train=part(scene(0), scene(1), scene(0), scene(2), scene(3), scene(3)),
        val=part(jpeg(scene(2), 50), scene(8)),
        test=part(scene(0), scene(9)),
    )
    clean, removed = find(data).without_leaks(data)
    assert sorted(removed) == ["picture 0", "picture 2", "picture 3"]
    assert clean.names == ["picture 1", "picture 4", "picture 5"]
    assert find(Splits(name="clean", train=clean, val=data.val, test=data.test)).leaks == ()


def test_nothing_is_removed_where_nothing_leaks():
    data = Splits(name="photos", train=part(scene(0), scene(0)), test=part(scene(1)))
    clean, removed = find(data).without_leaks(data)
    assert removed == {}
    assert clean.names == data.part("train").names


def test_other_data_sets_are_compared_by_what_they_hold_out():
    data = Splits(name="large", train=part(scene(0), scene(1), scene(2), scene(3)))
    small = Splits(name="small", train=part(scene(2)), test=part(scene(7), scene(1), target=1))
    plain = Splits(name="plain", train=part(jpeg(scene(3), 60)))
    found = find(data, against=[small, plain], inside=False)
    told = {(one.first, one.second): (one.leak, named(one.pairs)) for one in found.sections}
    assert told == {
        ("train", "test of small"): (True, [("picture 1", "picture 1", "exact")]),
        ("train", "train of plain"): (True, [("picture 3", "picture 0", "near")]),
    }
    # Classes of another dataset are others, even by the same number.
    assert found.sections[0].conflicts == ()
    assert found.without_leaks(data)[1] == {
        "picture 1": "duplicate of picture 1 in test of small",
        "picture 3": "duplicate of picture 0 in train of plain",
    }


def test_inside_and_against_are_asked_for_apart():
    data = Splits(name="large", train=part(scene(0), scene(0)), test=part(scene(1)))
    other = Splits(name="small", test=part(scene(2)))
    assert find(data, against=[other], inside=False).lines() == [
        "no image of large has a duplicate in test of small"
    ]
    both = find(data, against=[other])
    assert [(one.first, one.second) for one in both.sections] == [
        *(("train", "test of small"), ("train", "test")),
        *(("test", "test of small"), ("train", "train"), ("test", "test")),
    ]


def test_one_picture_in_two_classes_is_pointed_out():
    images = [scene(0), scene(1), scene(1), scene(0)]
    train = Gallery(images, np.array([0, 1, 1, 1]), ["cat/0", "dog/0", "dog/1", "dog/2"])
    found = find(Splits(name="photos", train=train)).sections[0]
    assert [(pair.first, pair.labels) for pair in found.conflicts] == [("cat/0", ("cat", "dog"))]
    assert found.lines(1) == [
        "duplicates  within train: 2 pairs, 2 identical, 1 in two classes; 2 groups",
        "  identical cat/0 · dog/2  (two classes)",
        "  … and 1 more",
    ]


def test_broken_pictures_are_left_out_and_named():
    found = find(Splits(name="photos", train=part(scene(0), None), test=part(None, scene(0))))
    assert named(found.sections[0].pairs) == [("picture 0", "picture 1", "exact")]
    assert [broken.name for broken in found.broken] == ["picture 1", "picture 0"]
    assert found.lines()[-1] == "2 broken images left out"


def test_a_clean_data_set_is_told_so():
    assert find(Splits(name="photos", train=part(scene(0)), test=part(scene(1)))).lines() == [
        "no image of photos has a duplicate"
    ]


def test_all_of_it_can_be_written_as_json():
    found = find(Splits(name="photos", train=part(scene(0)), test=part(scene(0))))
    written = json.loads(json.dumps(found.to_dict()))
    assert written["sections"][0] == {
        "first": "train",
        "second": "test",
        "leak": True,
        "pairs": [
            {
                "first": "picture 0",
                "second": "picture 0",
                "kind": "exact",
                "distance": 0,
                "labels": ["cat", "cat"],
            }
        ],
    }


def test_progress_counts_every_picture_once():
    steps: list[int] = []
    data = Splits(name="photos", train=part(scene(0), scene(1)), test=part(scene(2)))
    find(data, against=[data], progress=steps.append)
    assert sum(steps) == 4  # of the other, its test part alone


def test_groups_join_what_is_alike_through_others():
    chain = [
        Pair(*names, "near", 1, ("cat", "cat"))
        for names in (("a", "b"), ("c", "d"), ("b", "c"), ("x", "y"))
    ]
    assert groups(chain) == [["a", "b", "c", "d"], ["x", "y"]]
