"""Decoded images are the same wherever they are kept, and a cache is whole or not there."""

import errno
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.gallery import Gallery
from tests.data.pictures import bit_resized, labeled, window, write_tar
from vitrail.config import Augment
from vitrail.data import decoded, store
from vitrail.data.batch_augment import BatchAugment
from vitrail.data.contents import source_digest
from vitrail.data.dataset import Joined, Source, Splits, random_subset
from vitrail.data.decoded import CutImages, cut_parts, decode_images, decoded_batches
from vitrail.data.folder import open_folder
from vitrail.data.loader import RankBatchSampler, ShuffledOrder, TrainingBatch, training_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.shards import open_shards
from vitrail.data.store import open_store, pack_data
from vitrail.devices import Devices
from vitrail.errors import FailureError, VitrailError
from vitrail.files import cache_folder

CPU = Devices(torch.device("cpu"), torch.float32)
RGB, GRAY = (0.5, 0.5, 0.5), (0.4,)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path, scenes) -> Path:
    """Photographs of several sizes, as PNG, JPEG and gray files."""
    for number, scene in enumerate(scenes[:9]):
        image = scene.resize((60 + 9 * number, 90 - 5 * number))
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = ("png", "jpg")[number % 3 > 0]
        (image.convert("L") if number == 4 else image).save(f"{path}.{kind}")
    return tmp_path / "photos"


def train(folder: Path) -> Source:
    return open_folder(folder).part("train")


def augmenting(crop: str = "inception", mean: tuple[float, ...] = RGB, side: int = 24):
    pre = Preprocessing(size=(side, side + 8), short_side=side + 6, mean=mean, std=mean)
    options = {"randaugment_layers": 1, "randaugment_magnitude": 9.0}
    return BatchAugment(pre, Augment(crop=crop, area=0.1, **options), seed=5)


def batches(source: Source, place: str, augment: BatchAugment, start: int = 0, **share):
    """Four batches of four."""
    order = ShuffledOrder(source.targets, source.blocks, seed=3)
    sampler = RankBatchSampler(order, batch=4, start=start, **{"rank": 0, "world": 1} | share)
    found = decode_images(source, augment, CPU, place=place, workers=0)
    if found is None:
        cut = CutImages(source, augment)
        parts = training_batches(
            cut,
            sampler,
            workers=0,
            device=CPU.device,
            finish=lambda chunk: cut.finish(chunk, CPU.device),
        )
    else:
        parts = decoded_batches(found[0], augment, source.targets, sampler, CPU.device)
    return list(islice(parts, 4))


def assert_equal(one: list[TrainingBatch], other: list[TrainingBatch]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)
        assert (a.first, a.overlap) == (b.first, b.overlap)


@pytest.mark.parametrize("mean", [RGB, GRAY], ids=["color", "gray"])
@pytest.mark.parametrize("crop", ["inception", "pad", "resize", "none"])
def test_images_are_the_same_wherever_they_are_kept(folder, crop, mean):
    source, augment = train(folder), augmenting(crop, mean)
    every_time = batches(source, "none", augment)
    assert every_time[0].images.shape == (4, len(mean), 24, 32)
    assert len({image.sum().item() for batch in every_time for image in batch.images}) > 12
    assert not (cache_folder() / "decoded").exists()
    for place in ("memory", "device", "disk", "disk", "auto"):  # the second time from the file
        assert_equal(every_time, batches(source, place, augment))
    assert len(list((cache_folder() / "decoded").iterdir())) == 2


@pytest.mark.parametrize("place", ["memory", "none"])
@pytest.mark.parametrize(("size", "side"), [(384, 448), (128, 160)])
def test_images_are_those_of_bits_released_code(folder, size, side, place):
    source = train(folder)
    augment = BatchAugment(Preprocessing(size=(size, size)), Augment(crop="resize"), seed=0)
    resized = [bit_resized(source.image(number), side) for number in range(len(source.targets))]
    found = [
        [where for one in resized if (where := window(image, one))]
        for batch in batches(source, place, augment)
        for image in batch.images
    ]
    assert [len(places) for places in found] == [1] * 16  # each is a crop of one of the images
    assert len({places[0][:2] for places in found}) > 12
    assert {places[0][2] for places in found} == {False, True}


def test_later_steps_and_the_parts_of_several_processes_are_those_of_one(folder):
    source, augment = train(folder), augmenting()
    for place in ("memory", "none"):
        whole = batches(source, place, augment)
        assert_equal(whole[2:], batches(source, place, augment, start=2)[:2])
        for mixing in (False, True):
            halves = [
                batches(source, place, augment, rank=rank, world=2, mixing=mixing)
                for rank in (0, 1)
            ]
            for batch, first, second in zip(whole, *halves, strict=True):
                own = torch.cat([first.images[:2], second.images[:2]])
                assert torch.equal(own, batch.images)
                if mixing:
                    assert torch.equal(first.images[2], batch.images[3])
                    assert torch.equal(second.images[2], batch.images[1])


def test_a_packed_store_is_used_as_it_is(folder, tmp_path):
    pack_data(Splits(name="photos", train=train(folder)), tmp_path / "store")
    packed = random_subset(open_store(tmp_path / "store").part("train"), 7, seed=0)
    plain = random_subset(train(folder), 7, seed=0)
    assert list(packed.names) == list(plain.names)
    augment = augmenting(side=64)  # so large that no image is shrunk
    images, told = decode_images(packed, augment, CPU, place="auto", workers=0)
    assert told.endswith("in the packed store")
    assert images.pixels.numel() == (tmp_path / "store" / "train.pixels").stat().st_size
    for place in ("auto", "memory", "disk", "none"):
        assert_equal(batches(plain, "none", augment), batches(packed, place, augment))
    # Where images are shrunk or converted first, they are decoded like any other.
    for other in (augmenting(side=16), augmenting("pad"), augmenting(mean=GRAY, side=64)):
        assert decode_images(packed, other, CPU, place="none", workers=0) is None
        assert_equal(batches(plain, "none", other), batches(packed, "memory", other))
    assert not (cache_folder() / "decoded").exists()


@pytest.mark.parametrize("short_side", [0, 32])
@pytest.mark.parametrize("crop", ["pad", "none", "resize"])
def test_a_store_of_the_models_size_is_used_as_it_is(tmp_path, scenes, crop, short_side):
    pre = Preprocessing(size=(32, 32), short_side=short_side)
    augment = BatchAugment(pre, Augment(crop=crop), seed=0)
    side = augment.decoded_size
    images = [scene.resize(side[::-1]) for scene in scenes[:6]]
    source = Gallery(images, np.arange(6) % 2, [f"{i}" for i in range(6)])
    pack_data(Splits(name="x", train=source), tmp_path / "store")
    packed = open_store(tmp_path / "store").part("train")
    assert decode_images(packed, augment, CPU, place="none", workers=0) is not None
    assert_equal(batches(source, "none", augment), batches(packed, "auto", augment))


def test_images_on_the_device_are_those_of_the_store_alone(folder, tmp_path):
    """What `_copied` leaves out, on any device."""
    pack_data(Splits(name="photos", train=train(folder)), tmp_path / "store")
    packed = open_store(tmp_path / "store").part("train")
    some = random_subset(packed, 4, seed=1)
    images, _ = decode_images(some, augmenting(side=64), CPU, place="disk", workers=0)
    copy = decoded._copied(images, CPU.device)
    assert copy.pixels.numel() == int(some_bytes(images))
    for index in range(4):
        assert np.array_equal(copy.image(index), images.image(index))


@pytest.mark.parametrize("crop", ["inception", "pad"])
def test_the_device_cuts_as_memory_does(folder, crop):
    """The same addresses, whichever device computes them; from parts as from whole images."""
    augment = augmenting(crop)
    images, _ = decode_images(train(folder), augment, CPU, place="memory", workers=0)
    indices, positions = np.array([3, 0, 8, 3, 5]), np.arange(70, 75)
    boxes, flips = augment.boxes(positions, images.shapes[indices]), augment.flips(positions)
    assert set(flips) == {True, False}
    expected = images.cut(indices, boxes, flips, CPU.device)
    size = tuple(boxes[:, 2:].max(0).tolist())
    found = images._gather(indices, boxes, flips, size)
    parts, inner = cut_parts([images.image(index) for index in indices.tolist()], boxes)
    assert parts.pixels.numel() < images.shapes[indices].prod(1).sum() * 3
    again = parts._gather(np.arange(5), inner, flips, size)
    for row, (height, width) in enumerate(boxes[:, 2:].tolist()):
        for one in (found, again):
            assert torch.equal(one[row, :, :height, :width], expected[row, :, :height, :width])


def some_bytes(images) -> int:
    return images.shapes.prod(1).sum() * 3


# Broken images.


@pytest.mark.parametrize("place", ["memory", "disk", "none"])
def test_a_broken_image_is_named_once_and_the_next_one_takes_its_place(folder, place):
    source = train(folder)
    broken = [0, 1, 8]  # the first two, and the last, after which comes the third
    for index in broken:
        (folder / source.names[index]).write_bytes(b"torn")
    augment = augmenting("none")
    found = decode_images(source, augment, CPU, place=place, workers=0)
    if found is not None:
        assert [one.name for one in found[0].broken] == [source.names[i] for i in broken]
        assert all("is not an image" in one.reason for one in found[0].broken)
        assert found[0].numbers.tolist() == [2, 2, 2, 3, 4, 5, 6, 7, 2]
    parts = batches(source, place, augment)
    names = {one.name for batch in parts for one in batch.broken}
    assert names == ({source.names[i] for i in broken} if place == "none" else set())
    assert_equal(batches(source, "none", augment), parts)


@pytest.mark.parametrize("place", ["memory", "disk", "none"])
def test_nothing_but_broken_images_is_an_error(tmp_path, place):
    source = Gallery([None] * 4, np.arange(4) % 2, list("abcd"))
    with pytest.raises(VitrailError, match="none of the 4 training images can be decoded"):
        batches(source, place, augmenting())


# The cache on disk.


def files() -> dict[str, Path]:
    """The files of the only cache, by suffix."""
    (pixels,) = (cache_folder() / "decoded").glob("*.pixels")
    return {"pixels": pixels, "npz": pixels.with_suffix(".npz")}


def key(source: Source, augment: BatchAugment) -> str:
    before = set((cache_folder() / "decoded").glob("*.pixels"))
    decode_images(source, augment, CPU, place="disk", workers=0)
    (new,) = set((cache_folder() / "decoded").glob("*.pixels")) - before
    return new.stem


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "garbage"])
@pytest.mark.parametrize("kind", ["pixels", "npz"])
def test_a_damaged_cache_is_built_again(folder, kind, damage):
    source, augment = train(folder), augmenting()
    expected = batches(source, "disk", augment)
    path = files()[kind]
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "garbage" and kind == "pixels":
        path.write_bytes(whole + b"more")
    else:
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 255
        parts = {"truncated": whole[:-9], "empty": b"", "garbage": bytes(changed)}
        path.write_bytes(parts[damage])
    assert_equal(expected, batches(source, "disk", augment))
    assert files()[kind].stat().st_size == len(whole)


def test_a_cache_is_for_these_images_and_settings(folder):
    source = train(folder)
    keys = [key(source, augmenting()), key(source, augmenting("pad"))]
    keys += [key(source, augmenting(side=16)), key(source, augmenting(mean=GRAY))]
    keys += [key(random_subset(source, 8, seed=0), augmenting())]
    image = folder / source.names[3]
    Image.effect_noise((80, 80), 90).convert("RGB").save(image)  # other content
    keys += [key(train(folder), augmenting())]
    image.rename(image.with_name("renamed.png"))
    keys += [key(train(folder), augmenting())]
    assert len(set(keys)) == 7


def test_what_changes_neither_pixels_nor_crops_changes_no_cache(folder):
    augment = augmenting()
    decode_images(train(folder), augment, CPU, place="disk", workers=0)
    other = BatchAugment(augment.preprocessing, Augment(flip=False, erasing=0.5), seed=9)
    moved = folder.rename(folder.with_name("moved"))
    decode_images(train(moved), other, CPU, place="disk", workers=0)
    assert files()["npz"].exists()  # still one


def test_a_tar_file_counts_as_changed_when_the_file_is(tmp_path):
    path = write_tar(tmp_path / "x.tar", labeled(4))
    first = source_digest(open_shards(str(path)).part("train"))
    assert source_digest(open_shards(str(path)).part("train")) == first
    os.utime(path, (1, 1))
    source = open_shards(str(path)).part("train")
    assert source_digest(source) != first
    other = write_tar(tmp_path / "y" / "x.tar", labeled(4, start=1))
    assert source_digest(open_shards(str(other)).part("train")) != source_digest(source)
    assert source_digest(Joined(source, source)) != source_digest(source)


def test_full_disk_is_a_failure_in_one_line_and_leaves_nothing(folder, monkeypatch):
    source, augment = train(folder), augmenting()

    def full(file, **arrays):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.np, "savez", full)
    with pytest.raises(FailureError) as said:
        batches(source, "disk", augment)
    assert str(said.value).startswith(f"cannot write {cache_folder()}")
    assert "(No space left on device)" in str(said.value)
    assert str(said.value).endswith("system.cache=none decodes images in every epoch instead")
    assert "\n" not in str(said.value)
    assert not list((cache_folder() / "decoded").iterdir())
    monkeypatch.undo()
    monkeypatch.setenv("VITRAIL_CACHE", str(folder.parent / "cache"))
    assert_equal(batches(source, "none", augment), batches(source, "disk", augment))


def test_a_failure_while_pixels_are_written_leaves_nothing(folder, monkeypatch):
    resource = pytest.importorskip("resource")
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    source, augment = train(folder), augmenting(side=64)
    source_digest(source)  # its cache of hashes is larger than nothing
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(FailureError, match=r"\.pixels \(File too large\); free some space"):
            batches(source, "disk", augment)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list((cache_folder() / "decoded").iterdir())


def test_a_folder_that_cannot_be_written_is_a_failure_in_one_line(folder, tmp_path):
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "decoded").write_text("a file, where a folder should be")
    with pytest.raises(FailureError, match=r"cannot write .*decoded.* system\.cache=none") as said:
        batches(train(folder), "disk", augmenting())
    assert "\n" not in str(said.value)


def test_the_caches_used_longest_ago_make_room(folder, monkeypatch):
    source = train(folder)
    augments = [augmenting(side=side) for side in (24, 25, 26, 27)]
    keys = [key(source, augment) for augment in augments[:3]]
    kept = cache_folder() / "decoded"
    for age, name in enumerate(keys):
        for suffix in (".pixels", ".npz"):
            os.utime(kept / f"{name}{suffix}", (1000 + age, 1000 + age))
    decode_images(source, augments[0], CPU, place="disk", workers=0)  # used again
    taken = sum(path.stat().st_size for path in kept.iterdir())
    monkeypatch.setenv("VITRAIL_DECODED_CACHE_GB", str(1.1 * taken / 1e9))
    unfinished = kept / ".abc.pixels.123.part"
    for age in (0, 2 * decoded._ABANDONED):
        unfinished.write_bytes(b"half")
        now = unfinished.stat().st_mtime
        os.utime(unfinished, (now - age, now - age))
        if not age:
            newest = key(source, augments[3])
            assert unfinished.exists()  # another process may be writing it
    assert {path.stem for path in kept.glob("*.pixels")} == {keys[0], keys[2], newest}
    assert {path.stem for path in kept.glob("*.npz")} == {keys[0], keys[2], newest}
    decode_images(source, augments[1], CPU, place="disk", workers=0)
    assert not unfinished.exists()
    assert sum(path.stat().st_size for path in kept.iterdir()) <= 1.1 * taken


def test_what_does_not_fit_is_decoded_every_time_or_refused(folder, monkeypatch):
    source, augment = train(folder), augmenting()
    monkeypatch.setattr(decoded, "available_memory", lambda: 1000)
    _, told = decode_images(source, augment, CPU, place="auto", workers=0)
    assert told.endswith("in the disk cache")
    monkeypatch.setenv("VITRAIL_DECODED_CACHE_GB", "0.00001")
    assert decode_images(source, augment, CPU, place="auto", workers=0) is None
    for place in ("memory", "device", "disk"):
        with pytest.raises(
            VitrailError, match=r"take about .* may take .*; use system\.cache=auto"
        ):
            decode_images(source, augment, CPU, place=place, workers=0)
    monkeypatch.setenv("VITRAIL_DECODED_CACHE_GB", "plenty")
    with pytest.raises(VitrailError, match="VITRAIL_DECODED_CACHE_GB=plenty: expected gigabytes"):
        decode_images(source, augment, CPU, place="auto", workers=0)


def test_workers_decode_the_same(folder):
    source, augment = train(folder), augmenting()
    one, two = (
        decode_images(source, augment, CPU, place="memory", workers=workers)[0]
        for workers in (0, 2)
    )
    assert torch.equal(one.pixels, two.pixels)
