"""The 19 tasks: their parts, whatever their data bring, and what becomes of missing data."""

import re

import numpy as np
import pytest

from tests.data.lists import write_lists
from tests.data.pictures import contents, write
from vitrail.config import DATASET_SETTINGS, load_config
from vitrail.data.catalog import known_datasets, open_named
from vitrail.data.dataset import ArraySource, Splits
from vitrail.data.opening import open_data, open_run_data
from vitrail.errors import FailureError, VitrailError
from vitrail.vtab import tasks as vtab

# Images of train, val and test that the public files of each dataset have.
BROUGHT = {
    "caltech101": (9_144, 0, 0),
    "cifar100": (50_000, 0, 10_000),
    "dtd": (1_880, 1_880, 1_880),
    "flowers102": (1_020, 1_020, 6_149),
    "pets": (3_680, 0, 3_669),
    "sun397": (108_753, 0, 0),
    "svhn": (73_257, 0, 26_032),
    "camelyon": (262_144, 32_768, 32_768),
    "eurosat": (27_000, 0, 0),
    "resisc45": (31_500, 0, 0),
    "retinopathy": (35_126, 10_906, 42_670),
    "clevr_count": (70_000, 0, 15_000),
    "clevr_dist": (70_000, 0, 15_000),
    "dmlab": (65_550, 22_628, 22_735),
    "dsprites_loc": (737_280, 0, 0),
    "dsprites_ori": (737_280, 0, 0),
    "kitti_dist": (6_347, 423, 711),
    "smallnorb_azim": (24_300, 0, 24_300),
    "smallnorb_elev": (24_300, 0, 24_300),
}


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Where datasets lie; nothing can be fetched."""
    vtab.say_once.cache_clear()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return tmp_path / "data"


def source(part: str, n: int, classes: int) -> ArraySource:
    """As many pictures as a dataset has, all of them one pixel."""
    pixels = np.broadcast_to(np.zeros((1, 1, 1), np.uint8), (n, 1, 1))
    labels = tuple(map(str, range(classes)))
    return ArraySource(labels, np.arange(n) % classes, [f"{part}{i}" for i in range(n)], pixels)


def brought(short: str) -> Splits:
    parts = zip(("train", "val", "test"), BROUGHT[short], strict=True)
    classes = vtab.TASKS[short].classes
    return Splits(name=short, **{part: source(part, n, classes) for part, n in parts if n})


def test_there_are_seven_natural_four_specialized_and_eight_structured_tasks():
    groups = [task.group for task in vtab.TASKS.values()]
    assert [groups.count(group) for group in vtab.GROUPS] == [7, 4, 8]
    assert list(vtab.TASKS) == list(BROUGHT)
    titles = [task.title for task in vtab.TASKS.values()]
    assert titles[:7] == [
        *("Caltech101", "CIFAR-100", "DTD", "Flowers102", "Pets", "Sun397", "SVHN"),
    ]
    classes = [task.classes for task in vtab.TASKS.values()]
    assert classes == [102, 100, 47, 102, 37, 397, 10, 2, 10, 45, 5, 8, 6, 6, 16, 16, 4, 18, 9]
    assert len({task.lists for task in vtab.TASKS.values()}) == 19


@pytest.mark.parametrize("short", vtab.TASKS)
def test_its_parts_are_as_large_as_the_benchmarks(short, capsys):
    task, data = vtab.TASKS[short], brought(short)
    assert vtab.sizes(vtab.resplit(task, data)) == task.whole
    found = vtab.as_vtab(short, data)
    assert vtab.sizes(found) == (800, 200, task.whole[2])
    assert len(found.labels) == task.classes
    names = [set(part.names) for part in found.parts.values()]
    assert not names[0] & names[1]
    assert not (names[0] | names[1]) & names[2]
    assert "drawn by this project's own seed, not TFDS's" in capsys.readouterr().err
    # Of the thousand, none comes from where the benchmark tests, and val from where it should.
    assert {name.rstrip("0123456789") for name in names[0]} == {"train"}
    expected = "val" if BROUGHT[short][1] else "test" if task.halved else "train"
    assert {name.rstrip("0123456789") for name in names[1]} == {expected}


def test_the_draw_depends_on_names_alone_and_is_told_once(capsys):
    data = brought("pets")
    one = vtab.as_vtab("pets", data)
    order = np.random.default_rng(0).permutation(len(data.train.targets))
    shuffled = ArraySource(
        data.train.labels,
        data.train.targets[order],
        [data.train.names[i] for i in order],
        data.train.pixels,
    )
    other = vtab.as_vtab("pets", Splits(name="pets", train=shuffled, test=data.test))
    assert contents(one.train) == contents(other.train)
    assert contents(one.val) == contents(other.val)
    assert capsys.readouterr().err.count("own seed") == 1


def test_caltech_learns_from_thirty_of_each_class():
    task = vtab.TASKS["caltech101"]
    found = vtab.resplit(task, brought("caltech101"))
    learned = np.bincount(np.r_[found.train.targets, found.val.targets])
    assert learned.tolist() == [30] * 102


def test_a_large_class_of_caltech_does_not_crowd_the_others_out():
    targets = np.r_[np.repeat(0, 5000), np.repeat(np.arange(1, 102), 40)]
    names = [f"p{i}" for i in range(len(targets))]
    pixels = np.broadcast_to(np.zeros((1, 1, 1), np.uint8), (len(names), 1, 1))
    many = ArraySource(tuple(map(str, range(102))), targets, names, pixels)
    found = vtab.as_vtab("caltech101", Splits(name="x", train=many))
    assert np.bincount(found.train.targets)[0] < 16  # 7.8 of 800 are expected


def test_bit_leaves_flips_and_crops_out_where_they_change_the_label():
    settings = {name.removeprefix("vtab/"): own for name, own in DATASET_SETTINGS.items()}
    assert settings.keys() <= vtab.TASKS.keys()
    no_flip, no_crop = {"augment.flip": False}, {"augment.crop": "none"}
    assert settings == {
        "clevr_count": no_crop,
        "clevr_dist": no_crop,
        "dmlab": no_crop,
        "kitti_dist": no_crop,
        "dsprites_loc": no_flip | no_crop,
        "dsprites_ori": no_flip,
        "smallnorb_azim": no_flip,
    }


@pytest.mark.parametrize("short", vtab.TASKS)
@pytest.mark.parametrize("root", ["vtab", "vtab-1k"])
def test_file_lists_are_found_under_either_name_and_taken_as_they_are(place, short, root, capsys):
    task = vtab.TASKS[short]
    folder = place / root / (task.lists if root == "vtab-1k" else short)
    write_lists(folder, classes=min(task.classes, 200))
    data = open_named(f"vtab/{short}")
    assert vtab.sizes(data) == (800, 200, 30)
    assert list(data.train.names) == [f"images/train800/{i:04d}.png" for i in range(800)]
    assert len(data.labels) == task.classes
    assert data.name == f"vtab/{short}"
    assert capsys.readouterr().err == ""
    assert vtab.lists_of(f"vtab/{short}", place) == folder


def test_lists_come_before_folders_of_classes(place):
    one = write(place / "one.png")
    for label in range(47):
        folder = place / "vtab" / "dtd" / f"c{label:02d}"
        folder.mkdir(parents=True)
        for i in range(70):
            (folder / f"{i}.png").symlink_to(one)
    assert len(open_named("vtab/dtd").test.targets) == 1097
    write_lists(place / "vtab-1k" / "dtd", classes=47)
    assert len(open_named("vtab/dtd").test.targets) == 30


def test_derived_classes_say_what_they_mean(place):
    write_lists(place / "vtab" / "kitti", classes=4)
    assert open_data("vtab/kitti_dist").labels == vtab.METERS
    write_lists(place / "vtab" / "clevr_count", classes=8)
    assert open_data("vtab/clevr_count").labels == (*"3456789", "10")


def test_of_one_list_of_a_thousand_two_hundred_are_val(place, capsys):
    folder = write_lists(place / "vtab" / "dtd", classes=47)
    (folder / "train800.txt").unlink()
    data = open_named("vtab/dtd")
    assert vtab.sizes(data) == (800, 200, 30)
    assert "the 200 val images are drawn from the 1,000" in capsys.readouterr().err


def test_retraining_takes_the_800_and_the_200(place):
    write_lists(place / "vtab" / "dtd", classes=47)
    config = load_config(None, ["data.source=vtab/dtd", "data.train_on=train+val"])
    assert len(open_run_data(config).train.targets) == 1000


def test_lists_of_another_task_are_told_apart(place):
    write_lists(place / "vtab" / "dtd", classes=48)
    with pytest.raises(VitrailError, match="vtab/dtd has 47 classes, but this dataset has 48"):
        open_named("vtab/dtd")


def test_data_that_is_not_whole_is_one_line():
    few = Splits(name="x", train=source("train", 500, 37), test=source("test", 9, 37))
    with pytest.raises(
        VitrailError, match="vtab/pets: only 400 images available for train, but VTAB-1k needs 800"
    ):
        vtab.as_vtab("pets", few)


@pytest.mark.parametrize("brought", [(800, 200), (1000, 0)])
def test_a_thousand_images_without_a_test_part_are_not_tested_on_themselves(brought):
    parts = zip(("train", "val"), brought, strict=True)
    data = Splits(name="x", **{part: source(part, n, 37) for part, n in parts if n})
    with pytest.raises(
        VitrailError, match="vtab/pets: the data has the 1,000 training images but no test"
    ):
        vtab.as_vtab("pets", data)


def test_class_folders_of_ones_own_are_parted_as_the_benchmark_parts_them(place):
    one = write(place / "one.png")
    for label in range(45):
        folder = place / "vtab" / "resisc45" / f"c{label:02d}"
        folder.mkdir(parents=True)
        for i in range(40):
            (folder / f"{i}.png").symlink_to(one)
    data = open_named("vtab/resisc45")
    assert vtab.sizes(data) == (800, 200, 360)
    assert data.labels[1] == "c01"


@pytest.mark.parametrize("short", vtab.TASKS)
def test_a_task_without_data_is_one_line_that_says_so(place, short):
    with pytest.raises(FailureError) as caught:
        open_named(f"vtab/{short}")
    assert "\n" not in str(caught.value)
    assert re.search("fetch|reach|download", str(caught.value))


def test_an_unknown_task_suggests_one():
    with pytest.raises(VitrailError, match="did you mean 'vtab/cifar100'"):
        open_data("vtab/cifar10O")


def test_the_catalog_has_all_tasks():
    assert [name for name in known_datasets() if name.startswith("vtab/")] == [
        f"vtab/{short}" for short in vtab.TASKS
    ]
    assert known_datasets()["vtab/dtd"].images == 2880
    assert known_datasets()["vtab/dtd"].task is vtab.TASKS["dtd"]
    assert known_datasets()["dtd"].task is None
    assert "vtab/no" not in known_datasets()
