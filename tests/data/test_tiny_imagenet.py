"""Tiny-ImageNet, as class folders and in the folders of its archive."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data.pictures import encoded, same, write, write_classes
from vitrail.data import tiny_imagenet
from vitrail.data.catalog import open_named, unpack
from vitrail.data.tiny_imagenet import extract_images
from vitrail.errors import FailureError


def write_tiny_imagenet(path: Path, more: Sequence[str] = ()) -> Path:
    """The archive with two training images and one val image of each class, and `more` images."""
    wnids = [f"n{i:08d}" for i in range(200)]
    image = encoded(suffix="jpeg")
    # Not in the order of the classes, as in the archive.
    files: dict[str, bytes | str] = {}
    files |= {f"val/images/val_{i}.JPEG": encoded(i, "jpeg") for i in range(200)}
    rows = [f"val_{i}.JPEG\t{wnids[i * 7 % 200]}\t0\t32\t44\t62\n" for i in range(200)]
    files["val/val_annotations.txt"] = "".join(rows)
    files |= dict.fromkeys(("test/images/test_0.JPEG", *more), image)
    for wnid in wnids:
        files |= {f"train/{wnid}/images/{wnid}_{n}.JPEG": image for n in range(2)}
        files[f"train/{wnid}/{wnid}_boxes.txt"] = f"{wnid}_0.JPEG\t0\t0\t63\t63\n"
    words = ["goldfish, Carassius auratus", "bow", "bow, bow window", "sports car, sport car"]
    rows = [f"{wnid}\t{name}\n" for wnid, name in zip(wnids, words, strict=False)]
    files["words.txt"] = "".join(["n00999999\tgoldfish\n", *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    return path


def test_classes_of_tiny_imagenet_have_the_first_word_that_no_other_has(place, tmp_path):
    unpack(write_tiny_imagenet(tmp_path / "tiny.zip"), place / "tiny_imagenet", extract_images)
    data = open_named("tiny_imagenet")
    assert data.train.labels == data.test.labels
    assert data.labels[:5] == ("goldfish", "n00000001", "n00000002", "sports car", "n00000004")
    (place / "tiny_imagenet" / "words.txt").unlink()
    assert open_named("tiny_imagenet").labels[:2] == ("n00000000", "n00000001")


def test_tiny_imagenet_as_published_is_the_same_data(place, tmp_path):
    archive = write_tiny_imagenet(tmp_path / "tiny.zip")
    unpack(archive, place / "tiny_imagenet", extract_images)
    data = open_named("tiny_imagenet")
    image = data.test.image(7)
    (place / "tiny_imagenet").rename(tmp_path / "unpacked")
    with zipfile.ZipFile(archive) as file:
        file.extractall(place)
    (place / "tiny-imagenet-200").rename(place / "tiny_imagenet")
    published = open_named("tiny_imagenet")
    assert list(published.parts) == ["train", "test"]
    for part, source in data.parts.items():
        assert published.part(part).labels == source.labels
        assert published.part(part).names == source.names
        assert published.part(part).targets.tolist() == source.targets.tolist()
    assert same(published.test.image(7), image)
    assert not same(published.test.image(8), image)
    write(place / "tiny_imagenet" / "val" / "images" / "val_200.png")
    with pytest.raises(FailureError, match=r"val_annotations\.txt or .* lacks 'val_200\.png'"):
        open_named("tiny_imagenet")


def test_tiny_imagenet_of_your_own_is_tested_on_its_val_folder(place):
    for part, count in (("train", 2), ("val", 1)):
        write_classes(place / "tiny_imagenet" / part, {f"c{i}": count for i in range(200)})
    data = open_named("tiny_imagenet")
    assert list(data.parts) == ["train", "test"]
    assert len(data.test.targets) == 200


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("damaged", "Bad CRC-32"),
        ("large", "its images take more than"),
        ("unlabeled", "'val_200.JPEG'"),
        ("no zip", "File is not a zip file"),
    ],
)
def test_an_archive_of_tiny_imagenet_is_unpacked_whole_or_not_at_all(
    place, tmp_path, monkeypatch, kind, reason
):
    more = ["val/images/val_200.JPEG"] if kind == "unlabeled" else []
    archive = write_tiny_imagenet(tmp_path / "tiny.zip", more)
    if kind == "damaged":  # the last file, words.txt
        archive.write_bytes(archive.read_bytes().replace(b"\tsports car", b"\tsports bar"))
    elif kind == "large":
        monkeypatch.setattr(tiny_imagenet, "UNPACKED_LIMIT", 1000)
    elif kind == "no zip":
        archive.write_text("moved")
    place.mkdir()
    with pytest.raises(FailureError, match=rf"^cannot unpack .*tiny\.zip to .* \({reason}"):
        unpack(archive, place / "tiny_imagenet", extract_images)
    assert not list(place.iterdir())


def test_an_archive_of_tiny_imagenet_writes_nothing_beside_its_folder(place, tmp_path):
    climbing = ["../../evil.JPEG", "train/../images/evil.JPEG", "val/images/../../evil.JPEG"]
    archive = write_tiny_imagenet(tmp_path / "tiny.zip", climbing)
    unpack(archive, place / "tiny_imagenet", extract_images)
    assert not list(tmp_path.rglob("evil*"))
