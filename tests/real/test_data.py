"""Real archives open as they are, real photographs are told apart, and learned from."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageOps

import vitrail
from tests.data.gallery import gallery
from tests.data.lists import write_lists
from tests.duplicates.test_find import CHANGES, copies_found
from tests.training.test_sweep import TINY, alone_in
from vitrail.data.opening import open_data
from vitrail.data.shards import open_shards
from vitrail.duplicates.find import pairs
from vitrail.duplicates.fingerprints import fingerprints
from vitrail.runs import Run
from vitrail.training.sweep import sweep
from vitrail.weights.hub import fetch
from vitrail.weights.published import BUILTIN


def test_real_shards_open_as_they_are(cifar_archive):
    data = open_shards(str(cifar_archive))
    assert list(data.parts) == ["test"]
    assert data.labels[:3] == ("airplane", "automobile", "bird")
    assert np.bincount(data.test.targets).tolist() == [1000] * 10
    assert data.test.names[0] == "cat/00000.webp"
    assert data.test.image(9999).size == (32, 32)


@pytest.mark.parametrize("packed", [False, True])
def test_real_flower_photos_have_698_test_pictures(place, flower_archives, packed):
    place.mkdir()
    if packed:
        (place / "flower_photos").mkdir()
        for archive in flower_archives:
            (place / "flower_photos" / archive.name).symlink_to(archive)
    else:
        for archive in flower_archives:
            with tarfile.open(archive) as tar:
                tar.extractall(place, filter="data")
    data = open_data("flower_photos", val=0.0)
    counts = {name: len(part.targets) for name, part in data.parts.items()}
    assert counts == {"train": 2785, "test": 698}
    assert data.test.names[0] == "daisy/100080576_f52e8ee070_n.jpg"
    assert np.bincount(data.test.targets).tolist() == [122, 178, 110, 135, 153]
    assert min(data.test.image(5).size) <= 240


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_found_among_real_photographs(flowers, change):
    assert copies_found(flowers, change) >= 31


def test_unrelated_photographs_are_not_alike(flowers):
    assert pairs(fingerprints(gallery(flowers)), mirrored=True) == []


def test_mirrored_photographs_count_only_when_asked(flowers):
    a = fingerprints(gallery(flowers[:8]))
    b = fingerprints(gallery([ImageOps.mirror(image) for image in flowers[:8]]))
    assert pairs(a, b) == []
    assert [pair.first for pair in pairs(a, b, mirrored=True)] == [str(i) for i in range(8)]


def test_the_builtin_model_is_as_good_as_it_says(cifar_archive, tmp_path):
    with tarfile.open(cifar_archive) as tar:
        chosen = [one for one in tar.getmembers() if one.isfile()][::20]
        tar.extractall(tmp_path, members=chosen, filter="data")
    found = vitrail.evaluate("builtin", tmp_path / "cifar10", batch=100)
    assert found["n"] == 500
    stated = Run(fetch(BUILTIN.source)).evaluation("test")["top1"]
    assert abs(found["top1"] - stated) < 4 * (stated * (1 - stated) / found["n"]) ** 0.5


def test_a_sweep_learns_from_real_photographs(cifar_archive, tmp_path, monkeypatch):
    by_class: dict[str, list[Path]] = {}
    with tarfile.open(cifar_archive) as tar:
        for member in [one for one in tar.getmembers()[:2000] if one.isfile()]:
            tar.extract(member, tmp_path, filter="data")
            path = tmp_path / member.name
            by_class.setdefault(path.parent.name, []).append(path)
    pictures = [files[i] for i in range(110) for _, files in sorted(by_class.items())]
    place = alone_in(tmp_path, monkeypatch)
    write_lists(place / "vtab-1k" / "cifar", test=100, pictures=pictures)
    settings = TINY | {"data.source": "vtab/cifar100"}
    result = sweep("vtab/vit", settings, seeds=1, out=tmp_path / "sweep", device="cpu")
    (best,) = [trial for trial in result["trials"] if trial["chosen"]]
    assert best["val_top1"] == max(trial["val_top1"] for trial in result["trials"])
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["n"] == 100
