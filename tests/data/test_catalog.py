"""Names that stand for data, with what is in a folder, or with nothing and no network."""

import hashlib
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision import datasets
from torchvision.models import ResNet50_Weights

from tests.data.pictures import (
    contents,
    encoded,
    labeled,
    photo,
    same,
    write,
    write_classes,
    write_tar,
)
from tests.data.test_tiny_imagenet import write_tiny_imagenet
from vitrail.config import load_config
from vitrail.data.catalog import (
    FLOWER_PHOTOS,
    from_archive,
    known_datasets,
    open_named,
    source_of,
    unpack,
)
from vitrail.data.folder import open_folder
from vitrail.data.opening import open_data, open_run_data
from vitrail.data.store import pack_data
from vitrail.data.tiny_imagenet import extract_images
from vitrail.errors import FailureError, VitrailError

pytestmark = pytest.mark.usefixtures("place")


def counts(data) -> dict[str, int]:
    return {name: len(part.targets) for name, part in data.parts.items()}


def test_digits_come_with_a_test_part_and_a_val_part_is_taken_from_train():
    data = open_named("digits")
    assert counts(data) == {"train": 1438, "test": 359}
    share = np.bincount(data.test.targets) / np.bincount(
        np.r_[data.train.targets, data.test.targets]
    )
    assert (abs(share - 0.2) < 0.003).all()
    assert data.labels == tuple("0123456789")
    assert data.train.names[0].startswith(f"{data.train.targets[0]}/")
    pictures = np.stack([np.asarray(data.train.image(i)) for i in range(50)])
    assert pictures.shape == (50, 8, 8, 3)
    assert (pictures.min(), pictures.max()) == (0, 255)
    split = open_data("digits")
    assert contents(split.test) == contents(data.test)
    assert 100 < len(split.val.targets) < 190


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(VitrailError) as caught:
        open_named("digits")
    assert str(caught.value) == "digits needs the demo extra: pip install 'vitrail[demo]'"


def test_every_class_of_torchvision_exists():
    digits = known_datasets()["digits"]
    assert (digits.what, digits.classes, digits.images) == ("handwritten digits, 8 px", 10, 1797)
    entries = known_datasets().values()
    kinds = [entry.fetch.args[0] for entry in entries if entry.origin == "torchvision"]
    assert len(kinds) > 15
    assert all(hasattr(datasets, kind) for kind in kinds)


@pytest.mark.parametrize("packed", [False, True])
def test_every_fifth_flower_photo_of_a_class_is_test(place, tmp_path, packed):
    written = place if not packed else tmp_path
    write_classes(written / "flower_photos", {"e": 11, "d": 10, "c": 5, "b": 4, "a": 1})
    if packed:  # in two archives, as the file is
        files = sorted((tmp_path / "flower_photos").rglob("*.png"))
        for number, part in enumerate((files[:20], files[20:]), 1):
            packing = {str(file.relative_to(tmp_path)): file.read_bytes() for file in part}
            write_tar(place / "flower_photos" / f"flower_photos-{number}of2.tar", packing)
    data = open_named("flower_photos")
    assert counts(data) == {"train": 23, "test": 8}
    assert [name for name in data.test.names if name.startswith("e/")] == [
        "e/0.png",
        "e/4.png",
        "e/9.png",
    ]
    assert data.name == "flower_photos"


@pytest.mark.parametrize("where", ["folders", "parts", "shards", "store"])
def test_a_folder_of_the_name_comes_first(place, tmp_path, where):
    many = {f"c{i}": 1 for i in range(37)}
    if where == "folders":
        write_classes(place / "pets", many)
    elif where == "parts":
        for part in ("train", "test"):
            write_classes(place / "pets" / part, many)
    elif where == "shards":
        write_tar(place / "pets" / "x.tar", {f"{c}/1.png": encoded() for c in many})
    else:
        pack_data(open_folder(write_classes(tmp_path / "x", many)), place / "pets")
    data = open_named("pets")
    assert len(data.labels) == 37
    assert list(data.parts) == (["train", "test"] if where == "parts" else ["train"])


def test_flowers102_is_trained_on_as_in_the_paper(place):
    for part, count in (("train", 10), ("val", 10), ("test", 2)):
        write_classes(place / "flowers102" / part, {f"c{i}": count for i in range(102)})
    assert counts(open_named("flowers102")) == {"train": 1020, "test": 204}
    trial = counts(open_run_data(load_config("finetune/flowers102")))
    assert trial["train"] + trial["val"] == 1020
    retrained = open_run_data(load_config("finetune/flowers102", ["data.train_on=train+val"]))
    assert counts(retrained) == {"train": 1020, "test": 204}


@pytest.mark.parametrize(
    "name", [name for name, entry in known_datasets().items() if entry.origin == "torchvision"]
)
def test_what_is_neither_here_nor_to_be_had_is_one_line(place, name):
    write_classes(place / name, {"cars_train": 1, "cars_test": 1})  # torchvision's, not classes
    with pytest.raises(FailureError) as caught:
        open_named(name)
    message = str(caught.value)
    assert message.startswith(f"{name} is not in {place} and cannot be downloaded (")
    assert f"as {name}/train/<class>/…" in message
    classes = known_datasets()[name].classes
    assert f"{place / name} has 2 folders, expected {classes} classes" in message
    assert "\n" not in message


def test_flower_photos_without_a_network_say_where_to_put_them(place):
    with pytest.raises(FailureError) as caught:
        open_named("flower_photos")
    assert str(caught.value).startswith("cannot reach storage.googleapis.com (")
    assert str(caught.value).endswith(
        f"; go online, or put its class folders in {place}/flower_photos"
    )


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[str]:
    """The address of a server of the files in `tmp_path / "site"`."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "site"))

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_an_archive_is_fetched_unpacked_and_not_fetched_again(place, tmp_path, site):
    write_classes(tmp_path / "site" / "flower_photos", dict.fromkeys("abcde", 5))
    with tarfile.open(tmp_path / "site" / "flowers.tgz", "w:gz") as tar:
        tar.add(tmp_path / "site" / "flower_photos", "flower_photos")
    data = from_archive(f"{site}/flowers.tgz", "flower_photos", place)
    assert counts(data) == {"train": 25}
    assert not list((tmp_path / "cache").rglob("*.tgz"))
    assert {p.name for p in place.iterdir()} == {"flower_photos", ".flower_photos.lock"}
    assert counts(open_named("flower_photos")) == {"train": 20, "test": 5}
    assert FLOWER_PHOTOS.args[0].endswith("/flower_photos.tgz")


def test_tiny_imagenet_is_fetched_and_its_val_images_are_what_is_tested_on(place, tmp_path, site):
    archive = write_tiny_imagenet(tmp_path / "site" / "tiny.zip")
    digest = hashlib.md5(archive.read_bytes()).hexdigest()
    fetch = partial(
        from_archive, f"{site}/tiny.zip", "tiny_imagenet", place, extract=extract_images
    )
    with pytest.raises(FailureError, match=r"was damaged .* and has been deleted"):
        fetch(md5="0" * 32)
    assert not list((tmp_path / "cache").rglob("*.zip"))
    assert not (place / "tiny_imagenet").exists()
    assert counts(fetch(md5=digest)) == {"train": 400, "test": 200}
    assert not list((tmp_path / "cache").rglob("*.zip"))
    assert {p.name for p in place.iterdir()} == {"tiny_imagenet", ".tiny_imagenet.lock"}
    assert {p.name for p in (place / "tiny_imagenet").iterdir()} == {"train", "test", "words.txt"}
    data = open_named("tiny_imagenet")
    assert counts(data) == {"train": 400, "test": 200}
    assert data.train.names[1] == "n00000000/n00000000_1.JPEG"
    assert data.test.names[7] == "n00000007/val_1.JPEG"
    assert data.test.targets.tolist() == list(range(200))
    assert data.test.image(7).size == (16, 12)


def test_an_archive_that_climbs_out_of_its_folder_is_refused(place, tmp_path):
    archive = tmp_path / "bad.tgz"
    write_tar(archive, {"../../evil.png": encoded()})
    place.mkdir()
    with pytest.raises(FailureError, match="cannot unpack"):
        unpack(archive, place / "flower_photos")
    assert not list(place.iterdir())
    assert not (tmp_path / "evil.png").exists()


# ImageNet


def test_imagenets_validation_set_is_what_is_tested_on(place):
    wnids = [f"n{i:08d}" for i in range(1000)]
    write(place / "one.png")
    for part in ("train", "val"):
        for wnid in wnids:
            folder = place / "imagenet" / part / wnid
            folder.mkdir(parents=True)
            (folder / "1.png").symlink_to(place / "one.png")
    data = open_named("imagenet")
    assert counts(data) == {"train": 1000, "test": 1000}
    assert data.labels == tuple(ResNet50_Weights.DEFAULT.meta["categories"])
    assert data.test.names[0] == "n00000000/1.png"


def test_imagenet_in_shards_gets_its_names_too(place):
    write_tar(
        place / "imagenet" / "imagenet-train-0.tar",
        labeled(4) | {"9.png": encoded(), "9.cls": "999"},
    )
    write_tar(place / "imagenet" / "imagenet-validation-0.tar", labeled(2))
    data = open_named("imagenet")
    assert counts(data) == {"train": 5, "test": 2}
    assert data.labels[0] == "tench"


def test_a_part_of_imagenet_keeps_the_names_of_its_folders(place):
    write_classes(place / "imagenet" / "train", {"n01": 1, "n02": 1})
    assert open_named("imagenet").labels == ("n01", "n02")


def test_imagenet_that_is_not_there_says_where_it_is_looked_for():
    for name in ("imagenet", "imagenet21k"):
        with pytest.raises(FailureError, match=f"{name} cannot be downloaded; set VITRAIL_DATA"):
            open_named(name)


# torchvision's objects


def test_color_arrays_become_pictures():
    pixels = np.stack([np.asarray(photo(i)) for i in range(3)])
    like_cifar = SimpleNamespace(data=pixels, targets=[1, 0, 1], classes=["cat", "dog"])
    like_svhn = SimpleNamespace(data=pixels.transpose(0, 3, 1, 2), labels=np.array([1, 0, 1]))
    for dataset in (like_cifar, like_svhn):
        source = source_of(dataset)
        assert source.targets.tolist() == [1, 0, 1]
        assert all(same(source.image(i), photo(i)) for i in range(3))
    assert source_of(like_cifar).names == ["dog/0", "cat/1", "dog/2"]
    assert source_of(like_svhn).labels == ("0", "1")


def test_gray_tensors_become_pictures():
    like_mnist = SimpleNamespace(
        data=torch.arange(2 * 9, dtype=torch.uint8).view(2, 3, 3),
        targets=torch.tensor([0, 1]),
        classes=["0 - zero", "1 - one"],
    )
    picture = source_of(like_mnist).image(1)
    assert picture.getpixel((2, 0)) == (11, 11, 11)


@pytest.mark.parametrize("kind", ["pets", "flowers", "cars", "folder", "caltech"])
def test_lists_of_files_are_read_without_opening_them(tmp_path, kind):
    for number, label in enumerate(("b", "a")):
        for count in (2, 1):
            write(tmp_path / "101_ObjectCategories" / label / f"image_{count:04d}.jpg", number)
    folder = tmp_path / "101_ObjectCategories"
    files = [folder / label / f"image_{n:04d}.jpg" for label in ("b", "a") for n in (2, 1)]
    targets = [1, 1, 0, 0]
    pairs = [(str(path), target) for path, target in zip(files, targets, strict=True)]
    dataset = {
        "pets": SimpleNamespace(_images=files, _labels=targets, classes=["a", "b"]),
        "flowers": SimpleNamespace(_image_files=files, _labels=targets, classes=["a", "b"]),
        "cars": SimpleNamespace(_samples=pairs, classes=["a", "b"]),
        "folder": SimpleNamespace(samples=pairs, targets=targets, classes=["a", "b"]),
        "caltech": SimpleNamespace(
            root=str(tmp_path), categories=["a", "b"], index=[2, 1, 2, 1], y=targets
        ),
    }[kind]
    source = source_of(dataset)
    assert contents(source) == {
        f"{label}/image_{n:04d}.jpg": label for label in ("a", "b") for n in (1, 2)
    }
    assert source.names == sorted(source.names)
    assert same(source.image(0), source.image(1))
    assert not same(source.image(0), source.image(2))


def test_torchvisions_own_folder_is_read_through_torchvision(place):
    # EuroSAT as torchvision unpacks it: the name of the catalog, but no classes in it.
    write_classes(place / "eurosat" / "2750", {f"c{i}": 2 for i in range(10)})
    data = open_named("eurosat")
    assert counts(data) == {"train": 20}
    assert data.train.names[:2] == ["c0/0.png", "c0/1.png"]


def test_without_the_package_of_vtab_its_names_are_one_line_and_all_others_work(monkeypatch):
    for module in ("vitrail.vtab", "vitrail.vtab.tasks"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    known_datasets.cache_clear()
    try:
        assert "cifar10" in known_datasets()
        assert "vtab/dtd" not in known_datasets()
        with pytest.raises(VitrailError, match=r"^vtab/dtd needs the package vitrail\.vtab"):
            open_data("vtab/dtd")
    finally:
        known_datasets.cache_clear()
