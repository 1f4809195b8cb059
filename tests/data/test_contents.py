"""Images are known by their content, whatever they are called and wherever they lie."""

import os
import shutil
import tarfile

import numpy as np
import pytest

from tests.data.pictures import write
from vitrail.data import contents
from vitrail.data.contents import content_hashes
from vitrail.data.dataset import ArraySource, Joined, Renamed, Subset
from vitrail.data.folder import open_folder
from vitrail.data.shards import open_shards
from vitrail.data.store import open_store, pack_data


@pytest.fixture
def folder(tmp_path):
    for label in ("cat", "dog"):
        for i in range(3):
            write(tmp_path / "photos" / label / f"{i}.png", seed=10 * (label == "dog") + i)
    return tmp_path / "photos"


def hashes(data) -> list[int]:
    return content_hashes(data.part("train")).tolist()


def test_a_copy_has_the_same_hash_in_a_folder_a_tar_file_and_a_store(folder, tmp_path):
    known = hashes(open_folder(folder))
    assert len(set(known)) == 6
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "cat" / "0.png").rename(tmp_path / "copy" / "cat" / "z.png")
    assert sorted(hashes(open_folder(tmp_path / "copy"))) == sorted(known)
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(folder, "photos")
    assert hashes(open_shards(str(tmp_path / "photos.tar"))) == known
    pack_data(open_folder(folder), tmp_path / "store", side=4)
    assert hashes(open_store(tmp_path / "store")) == known


def test_parts_have_the_hashes_of_their_images(folder):
    train = open_folder(folder).part("train")
    known = content_hashes(train)
    some = Subset(train, np.array([4, 1]))
    assert content_hashes(some).tolist() == known[[4, 1]].tolist()
    assert content_hashes(Renamed(some, ("a", "b"))).tolist() == known[[4, 1]].tolist()
    assert content_hashes(Joined(some, train)).tolist() == [*known[[4, 1]], *known]


def test_images_in_memory_are_known_by_their_pixels():
    pixels = np.random.default_rng(0).integers(0, 255, (3, 4, 4), dtype=np.uint8)
    pixels[2] = pixels[0]
    found = content_hashes(ArraySource(("a", "b"), np.array([0, 1, 1]), ["x", "y", "z"], pixels))
    assert found[0] == found[2] != found[1]
    (wide,) = content_hashes(ArraySource(("a",), np.array([0]), ["x"], pixels[:1].reshape(1, 2, 8)))
    assert wide != found[0]


def test_what_did_not_change_is_not_read_again(folder, monkeypatch):
    known = hashes(open_folder(folder))
    monkeypatch.setattr(contents, "hash_each", None)
    assert hashes(open_folder(folder)) == known
    monkeypatch.undo()
    # Two files of one size and time that trade places.
    one, two = folder / "cat" / "0.png", folder / "dog" / "0.png"
    os.utime(one, (1, 1))
    os.utime(two, (1, 1))
    before = hashes(open_folder(folder))
    for old, new in ((one, folder / "x"), (two, one), (folder / "x", two)):
        old.rename(new)
    assert hashes(open_folder(folder)) == [before[i] for i in (3, 1, 2, 0, 4, 5)]


def test_a_tar_file_that_did_not_change_is_not_read_again(folder, tmp_path, monkeypatch):
    path = tmp_path / "photos.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(folder, "photos")
    train = open_shards(str(path)).part("train")
    known, some = content_hashes(train), Subset(train, np.array([4, 1]))
    assert content_hashes(some).tolist() == known[[4, 1]].tolist()
    monkeypatch.setattr(contents, "hash_each", None)
    assert content_hashes(train).tolist() == known.tolist()
    assert content_hashes(some).tolist() == known[[4, 1]].tolist()
    os.utime(path, (1, 1))
    with pytest.raises(TypeError):
        hashes(open_shards(str(path)))


def test_what_cannot_be_read_is_unknown(folder):
    (folder / "cat" / "lost.png").symlink_to(folder / "nowhere.png")
    os.mkfifo(folder / "cat" / "pipe")
    (folder / "cat" / "pipe.png").symlink_to(folder / "cat" / "pipe")
    with (folder / "cat" / "sparse.png").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte that takes no place on the disk
    found = dict(
        zip(open_folder(folder).part("train").names, hashes(open_folder(folder)), strict=True)
    )
    assert found["cat/lost.png"] == found["cat/pipe.png"] == 0
    assert sum(value != 0 for value in found.values()) == 6


def test_a_store_of_an_earlier_version_opens_without_hashes(folder, tmp_path):
    pack_data(open_folder(folder), tmp_path / "store")
    index = tmp_path / "store" / "train.npz"
    kept = dict(np.load(index))
    del kept["hashes"]
    np.savez(index, **kept)
    assert hashes(open_store(tmp_path / "store")) == [0] * 6
    assert open_store(tmp_path / "store").part("train").image(0).mode == "RGB"
