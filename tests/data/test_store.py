"""Packed pictures are the pictures, and a store is whole or not there."""

import json
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
from PIL import Image

from tests.data.pictures import contents, photo, same, write, write_classes
from vitrail.data.dataset import ArraySource, Source, Splits
from vitrail.data.folder import open_folder
from vitrail.data.store import is_store, open_store, pack_data, shrunk
from vitrail.errors import FailureError, VitrailError


@pytest.fixture
def data(tmp_path) -> Splits:
    for start, part in enumerate(("train", "val", "test")):
        write_classes(tmp_path / "photos" / part, {"Löwe": 3, "b": 2}, start=10 * start)
    return open_folder(tmp_path / "photos")


def failure(folder) -> str:
    with pytest.raises(VitrailError) as caught:
        open_store(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_store_gives_back_every_part_to_the_pixel(tmp_path, data):
    assert pack_data(data, tmp_path / "new" / "store") == []
    again = open_store(tmp_path / "new" / "store")
    assert again.name == "photos"
    assert list(again.parts) == ["train", "val", "test"]
    for part, source in data.parts.items():
        packed = again.part(part)
        assert contents(packed) == contents(source)
        assert not packed.blocks.any()
        for index in range(len(source.targets)):
            assert same(packed.image(index), source.image(index))


def test_a_store_travels_without_its_pixels(tmp_path, data):
    pack_data(data, tmp_path / "store")
    source = open_store(tmp_path / "store" / "store.json").train
    source.image(0)
    sent = pickle.dumps(source)
    assert len(sent) < 3000
    assert same(pickle.loads(sent).image(4), data.train.image(4))


def test_what_is_done_to_a_picture_does_not_reach_the_store(tmp_path, data):
    pack_data(data, tmp_path / "store")
    source = open_store(tmp_path / "store").train
    source.image(0).paste("red", (0, 0, 9, 9))
    assert same(source.image(0), data.train.image(0))


def test_a_source_alone_becomes_a_train_part(tmp_path, data):
    pack_data(Splits(name="store", train=data.val), tmp_path / "store")
    again = open_store(tmp_path / "store")
    assert (again.name, list(again.parts)) == ("store", ["train"])


@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [
        ((300, 200), 100, (150, 100)),
        ((200, 301), 100, (100, 150)),
        ((80, 90), 100, (80, 90)),
        ((300, 200), 0, (300, 200)),
        ((1000, 10), 5, (500, 5)),
    ],
)
def test_pictures_shrink_to_a_short_side_and_never_grow(size, side, expected):
    picture = np.asarray(Image.new("RGB", size, "red"))
    assert shrunk(picture, side).shape == (*expected[::-1], 3)


def test_shrinking_smooths(tmp_path):
    fine = Image.fromarray(np.indices((64, 64)).sum(0).astype(np.uint8) % 2 * 255).convert("RGB")
    small = shrunk(np.asarray(fine), 8)
    assert abs(small.astype(int) - 127).max() < 10


def test_broken_pictures_are_left_out_and_named(tmp_path):
    folder = write_classes(tmp_path / "photos", {"a": 3, "b": 2})
    (folder / "a" / "1.png").write_bytes(b"")
    cut = (folder / "b" / "0.png").read_bytes()
    (folder / "b" / "0.png").write_bytes(cut[: len(cut) // 2])
    broken = pack_data(open_folder(folder), tmp_path / "store")
    assert [name for name, _ in broken] == ["a/1.png", "b/0.png"]
    assert "is not an image" in broken[0][1]
    source = open_store(tmp_path / "store").train
    assert contents(source) == {"a/0.png": "a", "a/2.png": "a", "b/1.png": "b"}
    assert same(source.image(2), photo(4))


def test_progress_counts_every_picture(tmp_path, data):
    seen: list[tuple[int, int | None]] = []
    pack_data(data, tmp_path / "s", progress=lambda n, total=None: seen.append((n, total)))
    assert seen == [(0, 15), *[(1, None)] * 15]


def test_a_store_is_never_written_over_anything(tmp_path, data):
    (tmp_path / "store").mkdir()
    with pytest.raises(VitrailError, match="exists; delete it"):
        pack_data(data, tmp_path / "store")


@dataclass(frozen=True)
class Trouble:
    """A source that fails in the middle."""

    source: Source
    error: Exception

    def __getattr__(self, name):
        return getattr(self.source, name)

    def rgb(self, index: int, side: int) -> np.ndarray:
        if index == 3:
            raise self.error
        return self.source.rgb(index, side)


@pytest.mark.parametrize(
    "error",
    [FailureError("the network is gone"), KeyboardInterrupt(), OSError(28, "No space left")],
)
def test_nothing_stays_of_a_store_that_failed(tmp_path, data, error):
    trouble = Trouble(data.val, error)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FailureError):
        pack_data(replace(data, val=trouble), tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_full_disk_is_a_failure_in_one_line_and_leaves_nothing(tmp_path, data):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    pixels = np.zeros((4, 200, 200, 3), np.uint8)
    big = ArraySource(("a", "b"), np.array([0, 1, 0, 1]), list("wxyz"), pixels)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(FailureError, match=r"^cannot write .*store \(File too large\); free"):
            pack_data(Splits(name="store", train=big), tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_pictures_that_are_all_broken_are_no_store(tmp_path):
    for name in ("a/1.png", "b/1.png"):
        write(tmp_path / "photos" / name).write_bytes(b"")
    with pytest.raises(VitrailError, match="none of the 2 images of train can be decoded"):
        pack_data(open_folder(tmp_path / "photos"), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_damaged_store_is_one_line(tmp_path, data):
    store = tmp_path / "store"
    pack_data(data, store)
    whole = {path.name: path.read_bytes() for path in store.iterdir()}
    assert set(whole) == {"store.json"} | {
        f"{part}.{kind}" for part in ("train", "val", "test") for kind in ("pixels", "npz")
    }
    for name, body in whole.items():
        for damage in (None, b"", body[: len(body) // 2], b"?" * len(body), b"[" * 200_000):
            if damage is None:
                (store / name).unlink()
            elif name.endswith(".pixels") and len(damage) == len(body):
                continue  # other pixels are pixels
            else:
                (store / name).write_bytes(damage)
            message = failure(store)
            assert "is not a complete store" in message
            assert message.endswith("pack the data again")
        (store / name).write_bytes(body)
    open_store(store)


def test_an_index_that_contradicts_itself_is_refused(tmp_path, data):
    store = tmp_path / "store"
    pack_data(data, store)
    about = json.loads((store / "store.json").read_text(encoding="utf-8"))
    (store / "store.json").write_text(json.dumps(about | {"labels": ["b"]}))
    assert "the index of train is inconsistent" in failure(store)
    (store / "store.json").write_text(json.dumps(about | {"format": "vitrail store 2"}))
    assert "was packed by another version" in failure(store)


def test_only_a_store_is_taken_for_one(tmp_path, data):
    pack_data(data, tmp_path / "store")
    assert is_store(tmp_path / "store")
    assert not is_store(tmp_path / "photos")
    assert not is_store(tmp_path / "nothing")


def test_a_store_packed_again_in_the_same_place_shows_its_new_pixels(tmp_path):
    for value in (10, 20):
        pixels = np.full((2, 4, 4), value, np.uint8)
        source = ArraySource(("a", "b"), np.array([0, 1]), ["x", "y"], pixels)
        pack_data(Splits(name="store", train=source), tmp_path / "store")
        assert open_store(tmp_path / "store").train.image(0).getpixel((0, 0))[0] == value
        (tmp_path / "store").rename(tmp_path / f"old-{value}")
