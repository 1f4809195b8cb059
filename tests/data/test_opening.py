"""One way in for folders, shards, stores and names."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import contents, encoded, labeled, write, write_classes, write_tar
from vitrail.config import load_config
from vitrail.data.dataset import Splits
from vitrail.data.opening import open_data, open_run_data
from vitrail.data.store import pack_data
from vitrail.errors import VitrailError


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def counts(data: Splits) -> dict[str, int]:
    return {name: len(part.targets) for name, part in data.parts.items()}


def failure(where, **settings) -> str:
    with pytest.raises(VitrailError) as caught:
        open_data(where, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plain_folder_gets_a_val_and_a_test_part(tmp_path):
    write_classes(tmp_path / "photos", {"a": 40, "b": 60})
    assert counts(open_data("photos", split="stratified")) == {"train": 80, "val": 10, "test": 10}
    assert counts(open_data("photos", val=0.0, test=0.0)) == {"train": 100}
    assert counts(open_data("photos", val=0.0, test=0.25, split="stratified")) == {
        "train": 75,
        "test": 25,
    }


def test_parts_that_the_data_brings_are_kept(tmp_path):
    write_classes(tmp_path / "photos" / "train", {"a": 20, "b": 20})
    write_classes(tmp_path / "photos" / "test", {"a": 5, "b": 5}, start=100)
    data = open_data(tmp_path / "photos", split="stratified")
    assert counts(data) == {"train": 36, "val": 4, "test": 10}
    write_classes(tmp_path / "photos" / "valid", {"a": 1, "b": 1}, start=200)
    assert counts(open_data("photos/")) == {"train": 40, "val": 2, "test": 10}


def test_the_same_pictures_are_held_out_of_a_folder_of_shards_and_of_a_store(tmp_path):
    folder = write_classes(tmp_path / "photos", {"a": 30, "b": 30})
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.png"))}
    write_tar(tmp_path / "photos.tar", files)
    pack_data(open_data(folder, val=0.0, test=0.0), tmp_path / "photos.store")
    first, *others = (
        {name: contents(part) for name, part in open_data(where).parts.items()}
        for where in ("photos", "photos.tar", "photos.store")
    )
    assert [first] * 2 == others


def test_a_list_of_names_says_what_train_keeps(tmp_path):
    write_classes(tmp_path / "photos", {"a": 40, "b": 60})
    whole = open_data("photos")
    names = list(whole.part("train").names)
    (tmp_path / "kept.txt").write_text("".join(f"{name}\n" for name in names[::2]))
    some = open_data("photos", only="kept.txt")
    assert list(some.part("train").names) == names[::2]
    assert list(some.part("test").names) == list(whole.part("test").names)
    assert counts(open_data("photos", only="kept.txt", subset=5))["train"] == 5
    (tmp_path / "strangers.txt").write_text("c/1.png\n")
    assert "lists no training image" in failure("photos", only="strangers.txt")
    assert "cannot read the list nowhere.txt" in failure("photos", only="nowhere.txt")


def test_a_subset_is_drawn_from_what_is_left_to_train_on(tmp_path):
    write_classes(tmp_path / "photos", {"a": 40, "b": 60})
    whole = open_data("photos", split="stratified")
    part = open_data("photos", split="stratified", subset=30, seed=3)
    assert counts(part) == {"train": 30, "val": 10, "test": 10}
    assert contents(part.test) == contents(whole.test)
    assert set(part.train.names) < set(whole.train.names)
    message = failure("photos", split="stratified", subset=81)
    assert message == "data.subset=81: train has 80 images; choose from 1 to 80"


def test_a_folder_of_tars_is_shards(tmp_path):
    write_tar(tmp_path / "shards" / "train-0.tar", labeled(4))
    write_tar(tmp_path / "shards" / "test-0.tar", labeled(2, start=4))
    assert counts(open_data("shards", val=0.0)) == {"train": 4, "test": 2}
    assert counts(open_data("shards/train-{0..0}.tar", val=0.0, test=0.0)) == {"train": 4}


def test_a_tar_left_among_class_folders_is_passed_over(tmp_path):
    write_classes(tmp_path / "photos", {"a": 3, "b": 3})
    write_tar(tmp_path / "photos" / "backup.tar", {"x/1.png": encoded(), "y/1.png": encoded()})
    assert open_data("photos", val=0.0, test=0.0).labels == ("a", "b")


def test_a_folder_here_comes_before_a_name_of_the_catalog(tmp_path, capsys):
    assert len(open_data("digits").labels) == 10
    assert not capsys.readouterr().err
    write_classes(tmp_path / "digits", {"a": 3, "b": 3})
    for where in ("digits", Path("digits"), "./digits"):
        assert open_data(where, val=0.0, test=0.0).labels == ("a", "b")
    line = "data     using ./digits, not the catalog's dataset of that name\n"
    assert capsys.readouterr().err == 2 * line
    assert open_run_data(load_config("digits/vit", ["data.val=0", "data.test=0"])).labels == (
        "a",
        "b",
    )
    assert capsys.readouterr().err == line


def test_a_file_here_comes_before_a_name_of_the_catalog(tmp_path):
    write(tmp_path / "a.png").rename(tmp_path / "digits")
    assert failure("digits").startswith("digits is a file; expected a folder")


def test_in_the_folder_of_all_data_sets_a_name_is_the_catalogs(tmp_path, monkeypatch, capsys):
    write_classes(tmp_path / "data" / "digits" / "train", {f"{i}": 3 for i in range(10)})
    monkeypatch.chdir(tmp_path / "data")
    assert open_data("digits", val=0.0, test=0.0).name == "digits"
    assert not capsys.readouterr().err


def test_what_is_not_there_is_guessed_at(tmp_path):
    (tmp_path / "photos").mkdir()
    assert failure("fotos").endswith("; did you mean 'photos'?")
    assert failure("cifar-10").endswith("; did you mean 'cifar10'?")
    assert failure(tmp_path / "photo").endswith(f"; did you mean '{tmp_path}/photos'?")
    assert failure("q").endswith("; give a folder with one folder per class")
    assert failure("photos/x.tar") == "photos/x.tar does not exist; check the path"
    assert failure("photos/x.tar.gz").startswith("photos/x.tar.gz does not exist")
    write(tmp_path / "a.png")
    assert failure("a.png").startswith("a.png is a file; expected a folder")
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe.png")
        assert failure("pipe.png").startswith("pipe.png is neither a file nor a folder; expected")


def test_too_few_pictures_are_said(tmp_path):
    write_classes(tmp_path / "photos", {"a": 1, "b": 1})
    assert "the test split would be empty; use more images of a class" in failure("photos")


def test_names_of_a_subset_are_made_once(tmp_path):
    write_classes(tmp_path / "photos", {"a": 30, "b": 30})
    train = open_data("photos").train
    assert train.names is train.names
    assert train.targets is train.targets
    assert np.array_equal(train.targets, [("a", "b").index(name[0]) for name in train.names])
