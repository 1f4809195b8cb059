"""VTAB's datasets from small copies of their public files."""

import gzip
import json
import re
import struct
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.pictures import write
from vitrail.data.catalog import open_named
from vitrail.errors import DamagedError, FailureError
from vitrail.vtab import tasks as vtab
from vitrail.vtab.files import (
    BYTES,
    DSPRITES,
    SMALLNORB,
    WHOLE_NUMBERS,
    by_video,
    mat_array,
    mat_rows,
    npz_rows,
)


@pytest.fixture
def place(monkeypatch, tmp_path):
    """Where datasets lie; nothing can be fetched."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return tmp_path / "data"


def shown(source, index: int) -> np.ndarray:
    return np.asarray(source.image(index))


# dSprites


@pytest.fixture
def sprites(place):
    """2,100 pictures whose first pixels are their number in binary."""
    n = 2100
    pixels = np.zeros((n, 64, 64), np.uint8)
    pixels[:, 0, :16] = (np.arange(n)[:, None] >> np.arange(16)) & 1
    latents = np.stack([np.arange(n) * 0, np.arange(n) % 3, np.arange(n) % 6], 1)
    rest = np.stack([np.arange(n) % 40, np.arange(n) % 32, np.arange(n) // 50 % 32], 1)
    path = place / "dsprites" / DSPRITES
    path.parent.mkdir(parents=True)
    np.savez_compressed(path, imgs=pixels, latents_classes=np.c_[latents, rest])
    return path


@pytest.mark.parametrize(
    ("task", "rule"), [("loc", lambda i: i % 32 // 2), ("ori", lambda i: int(i % 40 / 2.5))]
)
def test_dsprites_are_white_on_black_with_their_latents_classes(sprites, task, rule):
    data = open_named(f"vtab/dsprites_{task}")
    assert vtab.sizes(data) == (800, 200, 210)
    assert len(data.labels) == 16
    for part in data.parts.values():
        for index in (0, 7, len(part.targets) - 1):
            number = int(part.names[index])
            picture = shown(part, index)
            assert picture.shape == (64, 64, 3)
            bits = picture[0, :16, 0] > 0
            assert (bits * 2 ** np.arange(16)).sum() == number
            assert set(np.unique(picture)) <= {0, 255}
            assert part.targets[index] == rule(number)


def test_rows_of_an_npz_come_in_the_order_asked_for(sprites):
    whole = np.load(sprites)["imgs"]
    wanted = np.array([900, 3, 3, 1599])
    assert (npz_rows(sprites, "imgs", wanted) == whole[wanted]).all()


def test_a_damaged_npz_is_one_line(sprites):
    sprites.write_bytes(sprites.read_bytes()[:5000])
    with pytest.raises(FailureError, match=r"cannot read .*npz \(.*\); delete it and download it"):
        open_named("vtab/dsprites_loc")


@pytest.mark.parametrize(
    "pixels", [np.zeros((4, 2, 2), np.int64), np.asfortranarray(np.zeros((4, 2, 2), np.uint8))]
)
def test_an_npz_of_other_numbers_is_one_line(tmp_path, pixels):
    np.savez(tmp_path / "x.npz", imgs=pixels)
    with pytest.raises(DamagedError, match=r"x.npz \(imgs is not an array of bytes in row order\)"):
        npz_rows(tmp_path / "x.npz", "imgs", np.array([1]))


# small NORB


def write_matrix(path, array) -> None:
    """As NYU's files have it: kind, dimensions, at least three sizes, the numbers."""
    kind = BYTES if array.dtype == np.uint8 else WHOLE_NUMBERS
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    header = struct.pack(f"<2i{len(sizes)}i", kind, array.ndim, *sizes)
    body = header + array.astype("<i4" if kind == WHOLE_NUMBERS else np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)


@pytest.fixture(params=["", ".gz"])
def norb(place, request):
    """900 pictures to learn from and 500 to test on, each of one gray, black on the right."""
    for part, n in {"train": 900, "test": 500}.items():
        pixels = np.zeros((n, 2, 96, 96), np.uint8)
        pixels[:, 0] = (np.arange(n) % 251)[:, None, None]
        info = np.stack(
            [np.arange(n) % 10, np.arange(n) % 9, 2 * (np.arange(n) % 18), np.arange(n) % 6], 1
        )
        stem = place / "smallnorb" / SMALLNORB[part]
        write_matrix(stem.with_name(f"{stem.name}-dat.mat{request.param}"), pixels)
        write_matrix(stem.with_name(f"{stem.name}-info.mat{request.param}"), info)
    return place


@pytest.mark.parametrize(("task", "classes"), [("azim", 18), ("elev", 9)])
def test_small_norb_shows_the_left_camera_and_halves_its_test_part(norb, task, classes):
    data = open_named(f"vtab/smallnorb_{task}")
    assert vtab.sizes(data) == (800, 200, 250)
    assert len(data.labels) == classes
    assert all(name.startswith("test/") for part in (data.val, data.test) for name in part.names)
    for part in data.parts.values():
        number = int(part.names[5].partition("/")[2])
        assert (shown(part, 5) == number % 251).all()
        assert shown(part, 5).shape == (96, 96, 3)
        assert part.targets[5] == number % classes


def test_a_file_that_is_no_matrix_is_one_line(tmp_path):
    (tmp_path / "x.mat").write_bytes(b"\0" * 40)
    with pytest.raises(FailureError, match="not a matrix of small NORB"):
        mat_array(tmp_path / "x.mat")
    write_matrix(tmp_path / "y.mat", np.zeros((3, 4), np.uint8))
    with pytest.raises(FailureError, match="not a matrix of whole numbers"):
        mat_array(tmp_path / "y.mat")
    write_matrix(tmp_path / "z.mat", np.zeros((3, 2, 4, 4), np.int64))
    with pytest.raises(DamagedError, match=r"z.mat \(not a matrix of bytes\)"):
        mat_rows(tmp_path / "z.mat", np.array([1]))


# CLEVR


@pytest.fixture
def scenes(place):
    """Scenes of 3 to 10 objects, the nearest of them at depths from 7.6 on."""
    folder = place / "clevr" / "CLEVR_v1.0" / "scenes"
    folder.mkdir(parents=True)
    for part, n in {"train": 2000, "val": 64}.items():
        found = [
            {
                "image_filename": f"CLEVR_{part}_{i:06d}.png",
                "objects": [
                    {"pixel_coords": [1, 2, 7.6 + i % 7 * 0.5 + k]} for k in range(3 + i % 8)
                ],
            }
            for i in range(n)
        ]
        (folder / f"CLEVR_{part}_scenes.json").write_text(json.dumps({"scenes": found[::-1]}))
    write(place / "clevr" / "CLEVR_v1.0" / "images" / "val" / "CLEVR_val_000000.png")
    return place


@pytest.mark.parametrize(
    ("task", "rule"), [("count", lambda i: i % 8), ("dist", lambda i: min(i % 7, 5))]
)
def test_clevr_labels_follow_from_its_scenes(scenes, task, rule):
    data = open_named(f"vtab/clevr_{task}")
    assert vtab.sizes(data) == (800, 200, 64)
    for part in data.parts.values():
        for name, target in zip(part.names, part.targets, strict=True):
            assert target == rule(int(name[-10:-4]))
    assert all("_val_" in name for name in data.test.names)
    assert data.test.image(0).size == (16, 12)


def test_scenes_that_cannot_be_read_are_one_line(scenes):
    path = scenes / "clevr" / "CLEVR_v1.0" / "scenes" / "CLEVR_val_scenes.json"
    path.write_text('{"scenes": [{"image_filename": "x.png"}]}')
    with pytest.raises(FailureError, match=r"cannot read .*CLEVR_val_scenes.json \('objects'\)"):
        open_named("vtab/clevr_count")


# KITTI


@pytest.fixture
def streets(place):
    """2,100 pictures of 30 videos; every tenth has no vehicle."""
    n, raw = 2100, place / "Kitti" / "raw"
    for folder in ("image_2", "label_2"):
        (raw / "training" / folder).mkdir(parents=True)
    one = write(place / "one.png")
    for i in range(n):
        kind, z = ("Tram", 5.0) if i % 10 == 0 else ("Car", i % 10 * 4.0)
        line = (
            f"{kind} 0 0 0 0 0 0 0 1 1 1 0.5 1.5 {z} 0\nDontCare -1 -1 -10 0 0 0 0 -1 -1 -1 -1000 "
        )
        (raw / "training" / "label_2" / f"{i:06d}.txt").write_text(line + "-1000 -1000 -10\n")
        (raw / "training" / "image_2" / f"{i:06d}.png").symlink_to(one)
    frames = [f"2011_09_26 2011_09_26_drive_{i % 30:04d}_sync {i:010d}" for i in range(n)]
    order = np.random.default_rng(0).permutation(n)
    with zipfile.ZipFile(raw / "devkit_object.zip", "w") as archive:
        archive.writestr("mapping/train_mapping.txt", "\n".join(frames))
        archive.writestr("mapping/train_rand.txt", ",".join(str(i + 1) for i in order))
    return [f"2011_09_26_drive_{i % 30:04d}_sync" for i in order]


def test_kitti_asks_for_the_nearest_vehicle_and_keeps_videos_together(streets):
    data = open_named("vtab/kitti_dist")
    assert vtab.sizes(data) == (800, 200, 210)
    videos = {
        part: {streets[int(name[:6])] for name in source.names}
        for part, source in data.parts.items()
    }
    assert len(videos["test"]) == len(videos["val"]) == 3
    assert not videos["train"] & (videos["val"] | videos["test"])
    assert not videos["val"] & videos["test"]
    for name, target in zip(data.test.names, data.test.targets, strict=True):
        i = int(name[:6]) % 10
        assert target == (3 if i == 0 else 0 if i <= 2 else 1 if i <= 5 else 2)
    assert data.test.image(0).size == (16, 12)


def test_videos_are_drawn_as_tfds_draws_them():
    videos = [f"v{i:03d}" for i in range(40)]
    found = by_video(videos)
    old = np.random.RandomState(123)
    test = old.choice(videos, 4, replace=False)
    assert {videos[i] for i in found["test"]} == set(test)
    val = old.choice([v for v in videos if v not in test], 4, replace=False)
    assert {videos[i] for i in found["val"]} == set(val)
    assert sorted(i for part in found.values() for i in part) == list(range(40))


def test_a_devkit_that_cannot_be_read_is_one_line(streets, place):
    (place / "Kitti" / "raw" / "devkit_object.zip").write_bytes(b"no zip")
    with pytest.raises(FailureError, match=r"cannot read .*devkit_object.zip"):
        open_named("vtab/kitti_dist")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Car 0 0", "list index out of range"),
        ("Car 0 0 0 0 0 0 0 1 1 1 0.5 1.5 near 0", "could not convert string to float"),
        ("Car 0 0 0 0 0 0 0 1 1 1 0.5 1.5 -500 0", "a distance of -500 is below -100"),
    ],
)
def test_a_damaged_label_is_one_line_that_names_the_file(streets, place, line, reason):
    path = place / "Kitti" / "raw" / "training" / "label_2" / "000007.txt"
    path.write_text(line)
    with pytest.raises(DamagedError, match=rf"cannot read .*000007.txt \({reason}"):
        open_named("vtab/kitti_dist")


# Retinopathy, Caltech 101, Camelyon


def test_retinopathys_public_half_is_val_and_its_private_half_test(place):
    folder = place / "vtab" / "retinopathy"
    for part in ("train", "test"):
        write(folder / part / "1_left.jpeg")
    rows = [f"{i}_left,{i % 5}" for i in range(820)]
    (folder / "trainLabels.csv").write_text("image,level\n" + "\n".join(rows))
    half = [f"{i}_left,{i % 5},{'Public' if i < 210 else 'Private'}" for i in range(250)]
    (folder / "retinopathy_solution.csv").write_text("image,level,Usage\n" + "\n".join(half))
    data = open_named("vtab/retinopathy")
    assert vtab.sizes(data) == (800, 200, 40)
    assert data.test.names[0] == "210_left.jpeg"
    assert data.test.targets.tolist() == [i % 5 for i in range(210, 250)]
    assert data.train.image(list(data.train.names).index("1_left.jpeg")).size == (16, 12)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("trainLabels.csv", "picture,grade\n1,2\n", "line 2 has the image ''; expected .+"),
        ("trainLabels.csv", "image,level\na,1\n\nb\n", "line 4 has the level ''; expected"),
        ("trainLabels.csv", "image,level\na,5\n", "line 2 has the level '5'; expected"),
        ("trainLabels.csv", "image,level\na,-1\n", "line 2 has the level '-1'; expected"),
        ("retinopathy_solution.csv", "image,level,Usage\na,1\n", "line 2 has the Usage ''"),
    ],
)
def test_a_damaged_table_is_one_line_that_names_the_file(place, file, text, reason):
    folder = place / "vtab" / "retinopathy"
    folder.mkdir(parents=True)
    (folder / "trainLabels.csv").write_text("image,level\na,1\n")
    (folder / "retinopathy_solution.csv").write_text("image,level,Usage\na,1,Public\n")
    (folder / file).write_text(text)
    with pytest.raises(DamagedError, match=rf"cannot read .*{file} \({re.escape(reason)}"):
        open_named("vtab/retinopathy")


def test_caltechs_background_is_a_class(place):
    one = write(place / "one.jpg")
    for label in ["BACKGROUND_Google", *(f"c{i:03d}" for i in range(101))]:
        folder = place / "caltech101" / "101_ObjectCategories" / label
        folder.mkdir(parents=True)
        for i in range(1, 33):
            (folder / f"image_{i:04d}.jpg").symlink_to(one)
    (place / "caltech101" / "Annotations").mkdir()
    data = open_named("vtab/caltech101")
    assert vtab.sizes(data) == (800, 200, 204)
    assert data.labels[0] == "BACKGROUND_Google"
    assert len(data.labels) == 102


@pytest.fixture
def tissue(place, monkeypatch):
    """What the files of PatchCamelyon hold; an empty one is damaged."""
    (place / "pcam").mkdir(parents=True)
    arrays = {}
    for part, n in {"train": 810, "valid": 200, "test": 20}.items():
        stem = f"camelyonpatch_level_2_split_{part}"
        arrays[f"{stem}_x.h5"] = {"x": np.full((n, 4, 4, 3), 7, np.uint8)}
        arrays[f"{stem}_y.h5"] = {"y": (np.arange(n) % 2).reshape(n, 1, 1, 1)}
        for kind in "xy":
            (place / "pcam" / f"{stem}_{kind}.h5").write_bytes(b"")

    class File(dict):
        def __init__(self, path):
            if not arrays[path.name]:
                raise OSError("Unable to open file (truncated file)")
            super().__init__(arrays[path.name])

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            pass

    monkeypatch.setitem(sys.modules, "h5py", SimpleNamespace(File=File))
    return arrays


def test_camelyon_comes_in_its_three_parts(tissue):
    data = open_named("vtab/camelyon")
    assert vtab.sizes(data) == (800, 200, 20)
    assert data.labels == ("normal", "tumour")
    assert data.test.targets.tolist() == [0, 1] * 10
    assert shown(data.val, 3)[0, 0].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("file", "holds", "reason"),
    [
        ("train_y", {}, "Unable to open file"),
        ("valid_x", {}, "Unable to open file"),
        ("test_y", {"x": np.zeros(20)}, "'y'"),
        ("test_y", {"y": np.arange(20)}, "expected classes 0 and 1"),
        ("test_x", {"x": np.zeros((19, 4, 4, 3), np.uint8)}, "19 images and 20 labels"),
    ],
)
def test_a_damaged_hdf5_file_is_one_line_that_names_it(tissue, file, holds, reason):
    tissue[f"camelyonpatch_level_2_split_{file}.h5"] = holds
    with pytest.raises(DamagedError, match=rf"cannot read .*{file}.h5 \({reason}"):
        open_named("vtab/camelyon")


def test_an_hdf5_file_that_breaks_later_is_one_line_as_well(tissue):
    data = open_named("vtab/camelyon")
    tissue["camelyonpatch_level_2_split_test_x.h5"] = {}
    with pytest.raises(DamagedError, match=r"cannot read .*test_x.h5"):
        data.test.image(0)
