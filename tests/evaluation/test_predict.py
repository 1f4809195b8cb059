"""Files and folders in, answers out: in order, whatever is broken, as `evaluate` would answer."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from rich.cells import cell_len

import vitrail
from tests.evaluation.examples import predict
from tests.models import small
from vitrail import VitrailError
from vitrail.cli import main
from vitrail.data.opening import open_data
from vitrail.data.preprocessing import Preprocessing

LABELS = ("blue", "green", "red")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Twenty-one pictures of three classes, in odd places."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    chance = np.random.default_rng(0)
    for number in range(21):
        place = folder / LABELS[number % 3] / ("deep/er" if number % 2 else "")
        place.mkdir(parents=True, exist_ok=True)
        pixels = chance.integers(0, 255, (30 + number, 48, 3), dtype=np.uint8)
        name = f"{number:02}.{('jpg', 'JPG', 'PNG')[number % 3]}"
        Image.fromarray(pixels).save(place / name)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    found = small("vit", size=32, classes=3)
    found.preprocess, found.labels = Preprocessing(size=(32, 32), short_side=36), LABELS
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    vitrail.save(found, path)
    return path


def invoke(*arguments: object, **more):
    return CliRunner().invoke(main, ["predict", *map(str, arguments)], **more)


def test_a_table_stays_aligned_beside_wide_labels(tmp_path, photos, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = small("vit", size=32, classes=3)
    found.labels = ("犬と猫", "dog", "e\u0301te\u0301")
    found.preprocess = Preprocessing(size=(32, 32))
    vitrail.save(found, tmp_path / "model.safetensors")
    Image.open(next(photos.rglob("*.jpg"))).save(tmp_path / "写真.png")
    Image.open(next(photos.rglob("*.jpg"))).save(tmp_path / "photo.png")
    lines = invoke("model.safetensors", ".").output.splitlines()
    assert len(lines) == 2
    assert len({cell_len(line) for line in lines}) == 1


def test_no_cell_of_a_csv_is_a_formula(tmp_path, photos, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = small("vit", size=32, classes=3)
    labels = ('=HYPERLINK("http://x")', "-1.5", "@SUM(1)")
    found.preprocess, found.labels = Preprocessing(size=(32, 32)), labels
    vitrail.save(found, tmp_path / "model.safetensors")
    (tmp_path / "+1 cat.jpg").write_bytes(next(photos.rglob("*.jpg")).read_bytes())
    found = invoke("model.safetensors", "+1 cat.jpg", "-", "--csv", "-", input=b"")
    first, second = csv.DictReader(io.StringIO(found.stdout))
    assert first["path"] == "'+1 cat.jpg"
    assert second["path"] == "-"
    assert {first[f"label_{i}"] for i in (1, 2, 3)} == {f"'{labels[0]}", "-1.5", "'@SUM(1)"}
    assert sum(float(first[f"probability_{i}"]) for i in (1, 2, 3)) == pytest.approx(1)


@pytest.mark.parametrize("workers", [1, 3])
def test_answers_are_those_of_evaluate(model, photos, workers):
    source = open_data(photos, val=0.0, test=0.0).part("train")
    known, _ = predict(vitrail.load(model), source)
    found = list(vitrail.predict(model, photos, batch=2, workers=workers))
    by_name = {str(Path(row["path"]).relative_to(photos)): row["top"] for row in found}
    assert set(by_name) == set(known.names)
    for name, guesses, probabilities in zip(
        known.names, known.guesses, known.probabilities, strict=True
    ):
        assert [one["label"] for one in by_name[name]] == [LABELS[i] for i in guesses]
        told = [one["probability"] for one in by_name[name]]
        assert np.abs(np.array(told) - probabilities).max() < 1e-4


def test_the_order_is_that_of_the_input(model, photos):
    files = sorted(photos.rglob("*.*"), key=lambda path: path.name)[::-1]
    found = [row["path"] for row in vitrail.predict(model, files, batch=1, workers=4)]
    assert found == [str(path) for path in files]
    again = [row["path"] for row in vitrail.predict(model, [photos / "red", files[3]], batch=2)]
    assert again == [*sorted(again[:-1]), str(files[3])]
    assert len(again) == 8


def test_a_broken_file_is_named_and_the_rest_goes_on(model, photos, tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    whole = next(photos.rglob("*.jpg"))
    rows = list(vitrail.predict(model, [tmp_path, tmp_path / "empty", tmp_path / "no.png", whole]))
    assert [set(row) for row in rows] == [{"path", "error"}] * 3 + [{"path", "top"}]
    assert rows[0]["error"].endswith("a.jpg is not an image")
    assert rows[1]["error"].endswith("is a folder without images")
    assert rows[2]["error"].endswith("does not exist")


def test_photographs_in_a_format_that_cannot_be_decoded_are_named(model, photos, tmp_path):
    (tmp_path / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    whole = next(photos.rglob("*.jpg"))
    rows = list(vitrail.predict(model, [tmp_path, tmp_path / "IMG_1.HEIC", whole]))
    assert [set(row) for row in rows] == [{"path", "error"}] * 2 + [{"path", "top"}]
    for row in rows[:2]:
        assert row["error"] == (
            f"{tmp_path}/IMG_1.HEIC is a HEIC file, which cannot be decoded; save it as JPEG"
        )


def test_links_and_unicode_names_are_followed_and_circles_are_not(model, photos, tmp_path):
    place = tmp_path / "çöñ 写真"
    place.mkdir()
    (place / "ürsprung.jpg").symlink_to(next(photos.rglob("*.jpg")))
    (place / "round").symlink_to(place)
    (place / "notes.txt").write_text("not a picture")
    result = invoke(model, tmp_path, "--json")
    assert result.exit_code == 0
    (row,) = map(json.loads, result.stdout.splitlines())
    assert row["path"] == str(place / "ürsprung.jpg")


def test_a_name_that_is_no_text_is_printed_all_the_same(model, photos, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.jpg"
    try:
        os.link(next(photos.rglob("*.jpg")), name)
    except OSError:
        pytest.skip("this disk takes no such names")
    result = invoke(model, tmp_path, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["path"].endswith("\\xff.jpg")


def test_standard_input_is_a_picture(model, photos):
    data = next(photos.rglob("*.jpg")).read_bytes()
    command = [sys.executable, "-m", "vitrail", "predict", str(model), "-", "--json"]
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    row = json.loads(done.stdout)
    assert row["path"] == "-"
    assert sum(one["probability"] for one in row["top"]) == pytest.approx(1, abs=1e-5)


def test_the_table_has_a_line_per_picture_and_one_picture_a_line_per_guess(model, photos):
    result = invoke(model, photos, "--top", 2)
    lines = result.stdout.splitlines()
    assert len(lines) == 21
    assert all(line.count("%") == 2 for line in lines)
    alone = invoke(model, next(photos.rglob("*.jpg")))
    assert sorted(line.split()[0] for line in alone.stdout.splitlines()) == list(LABELS)


def test_csv_holds_what_json_holds(model, photos, tmp_path):
    (tmp_path / "broken, so.jpg").write_bytes(b"")
    target = tmp_path / "out.csv"
    result = invoke(model, photos, tmp_path, "--csv", target, "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    with target.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["path"] for row in table] == [row["path"] for row in rows]
    assert table[-1]["error"] == rows[-1]["error"]
    assert table[0]["label_1"] == rows[0]["top"][0]["label"]
    assert float(table[0]["probability_3"]) == pytest.approx(rows[0]["top"][2]["probability"])
    piped = invoke(model, photos, tmp_path, "--csv", "-")
    assert list(csv.DictReader(io.StringIO(piped.stdout))) == table
    assert "skipped" in piped.stderr


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_features_are_what_the_head_reads(model, photos, tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    target = tmp_path / f"features.{suffix}"
    result = invoke(model, tmp_path, photos, "--features", target, "--json", "--batch", 4)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()][1:]
    paths, vectors = read(target)
    assert paths == [row["path"] for row in rows]
    loaded = vitrail.load(model)
    assert loaded.preprocess is not None
    pixels = torch.stack([loaded.preprocess(path) for path in paths])
    with torch.no_grad():
        assert np.abs(vectors - loaded.features(pixels).numpy()).max() < 1e-4
    plain = invoke(model, photos, "--json").stdout.splitlines()
    assert [json.loads(line)["top"][0]["label"] for line in plain] == [
        row["top"][0]["label"] for row in rows
    ]


def read(path: Path) -> tuple[list[str], np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return file["paths"].tolist(), file["vectors"]
    import pyarrow.parquet as pq

    columns = pq.read_table(path).to_pydict()
    return columns["path"], np.array(columns["features"], dtype=np.float32)


def test_a_model_without_classes_gives_features_alone(photos):
    model = small("vit", size=32, classes=0)
    model.preprocess = Preprocessing(size=(32, 32))
    with pytest.raises(VitrailError, match="no classes; request features"):
        vitrail.predict(model, photos)
    row = next(vitrail.predict(model, photos, features=True))
    assert row["top"] == []
    assert row["features"].shape == (192,)


class Small:
    """A device whose memory holds so many pictures at once."""

    def __init__(self, model, most: int) -> None:
        self.most, self.seen = most, []
        model.embedding.register_forward_pre_hook(self.weigh)

    def weigh(self, module, inputs) -> None:
        self.seen.append(len(inputs[0]))
        if len(inputs[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_batches_are_halved_until_they_fit(model, photos):
    loaded = vitrail.load(model)
    expected = [row["top"] for row in vitrail.predict(loaded, photos, batch=1)]
    memory = Small(loaded, most=3)
    found = [row["top"] for row in vitrail.predict(loaded, photos, batch=10, workers=1)]
    assert memory.seen[:3] == [10, 5, 2]
    assert max(memory.seen[3:]) == 2
    assert [one[0]["label"] for one in found] == [one[0]["label"] for one in expected]


def test_one_picture_that_does_not_fit_is_one_line(model, photos):
    loaded = vitrail.load(model)
    Small(loaded, most=0)
    with pytest.raises(VitrailError, match="out of memory with 1 images at once"):
        list(vitrail.predict(loaded, photos))


def test_a_generator_left_early_leaves_everything_as_it_was(model, photos):
    loaded = vitrail.load(model).train()
    before = torch.get_num_threads()
    found = vitrail.predict(loaded, photos, batch=1, workers=2)
    next(found)
    assert torch.is_grad_enabled()
    found.close()
    assert loaded.training
    assert torch.get_num_threads() == before


def test_a_damaged_model_is_one_line(model, photos):
    loaded = vitrail.load(model)
    with torch.no_grad():
        loaded.head.bias += float("nan")
    with pytest.raises(VitrailError, match="NaN or infinite"):
        list(vitrail.predict(loaded, photos))


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["{photos}", "--top", 0], 2, "top = 0"),
        (["{photos}", "--features", "x.csv"], 2, ".npz or .parquet"),
        (["{photos}", "--json", "--csv", "-"], 2, "both write to stdout"),
        (["nowhere.jpg"], 1, "no image could be predicted: 1 file skipped"),
        (["{photos}", "--csv", "no/such/folder/a.csv"], 1, "cannot write no/such/folder/a.csv"),
    ],
)
def test_mistakes_are_one_line(model, photos, arguments, code, complaint):
    result = invoke(model, *(str(word).format(photos=photos) for word in arguments))
    assert result.exit_code == code
    assert complaint in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output
