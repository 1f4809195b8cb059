"""The short inspection in a run's folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.models import small
from vitrail.data.dataset import ArraySource
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.inspection.inspect_model import _SUMMARY_AVERAGED, _SUMMARY_SHOWN, summarize


@pytest.fixture
def source() -> ArraySource:
    pixels = np.random.default_rng(0).integers(0, 256, (90, 20, 20, 3), dtype=np.uint8)
    targets = np.arange(90) % 7
    names = [f"{target}/{number}" for number, target in enumerate(targets)]
    return ArraySource(tuple("abcdefg"), targets, names, pixels)


def model(kind: str = "vit"):
    made = small(kind)
    made.labels, made.preprocess = tuple("abcdefg"), Preprocessing(size=(64, 64))
    return made


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def test_a_handful_is_shown_and_more_are_averaged(source, tmp_path):
    found = summarize(model(), source, "test", tmp_path, seconds=1000.0)
    assert found == json.loads((tmp_path / "inspection.json").read_text("utf-8"))
    assert found["split"] == "test"
    assert _SUMMARY_SHOWN < found["attention_distance"]["n"] <= _SUMMARY_SHOWN + _SUMMARY_AVERAGED
    truths = [image["truth"] for image in found["images"]]
    assert len(set(truths)) == _SUMMARY_SHOWN
    assert all(image["name"].startswith(str(ord(image["truth"]) - 97)) for image in found["images"])
    names = {path.name for path in tmp_path.iterdir()}
    shown = {f"picture-{number}.jpg" for number in range(1, _SUMMARY_SHOWN + 1)}
    assert names == {"inspection.json", "filters.png", "positions.png"} | shown
    assert size_of(tmp_path / "picture-1.jpg") == (4 * 176 + 3 * 6, 176)


def test_time_is_bounded_but_one_picture_is_always_shown(source, tmp_path):
    (tmp_path / "picture-5.jpg").write_text("of an earlier look")
    found = summarize(model(), source, "test", tmp_path, seconds=0.0)
    assert found["attention_distance"]["n"] == len(found["images"]) == 1
    assert sorted(path.name for path in tmp_path.glob("*.jpg")) == ["picture-1.jpg"]


def test_a_network_without_attention_has_filters_and_features(source, tmp_path):
    found = summarize(model("resnet"), source, "val", tmp_path, seconds=1000.0)
    assert found["attention_distance"] is None
    assert len(found["images"]) == _SUMMARY_SHOWN
    assert set(found["absent"]) == {"positions", "attention"}
    assert size_of(tmp_path / "picture-1.jpg") == (2 * 176 + 6, 176)


def test_broken_pictures_are_passed_over(source, tmp_path):
    class Damaged(ArraySource):
        def image(self, index: int) -> Image.Image:
            if index % 2:
                raise VitrailError("cut short")
            return super().image(index)

    damaged = Damaged(source.labels, source.targets, source.names, source.pixels)
    found = summarize(model(), damaged, "test", tmp_path, seconds=1000.0)
    assert all(int(image["name"].split("/")[1]) % 2 == 0 for image in found["images"])
    assert found["images"]
