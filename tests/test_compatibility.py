"""What version 0.1 left on users' disks still works: runs, stopped and finished, and weights.

`fixtures/make.py` tells how the files were made.
"""

import io
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file
from starlette.testclient import TestClient

import vitrail
from vitrail.cli import main
from vitrail.data.opening import open_data
from vitrail.serving.app import application
from vitrail.serving.models import open_models

FIXTURES = Path(__file__).parent / "fixtures"
RUNS = ("run-0.1", "finished-0.1")
LOGITS = np.load(FIXTURES / "weights" / "logits.npz")


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def invoke(*words: object) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(params=RUNS)
def run(request, tmp_path) -> Path:
    """A copy of a run folder."""
    return shutil.copytree(FIXTURES / request.param, tmp_path / "run")


@pytest.fixture(scope="module")
def digit() -> Image.Image:
    return open_data("digits").test.image(0)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> tuple[Path, str]:
    """The stopped run after `--resume`, and what that said."""
    folder = shutil.copytree(FIXTURES / "run-0.1", tmp_path_factory.mktemp("runs") / "run-0.1")
    return folder, invoke("train", folder, "--resume", "--device", "cpu")


def comparable(folder: Path) -> dict[str, torch.Tensor]:
    """The weights without the bias of the keys.

    It moves all scores of a query alike, so its gradient is nothing but rounding, which Adam
    blows up to steps of full length.
    """
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("qkv.bias"):
            tensor.view(3, -1)[1] = 0
    return tensors


def test_a_stopped_run_resumes_and_ends_where_the_unstopped_one_did(resumed):
    folder, said = resumed
    assert "resumed  at step 20" in said
    assert "not bit-exactly" not in said
    assert read(folder / "run.json")["status"] == "finished"
    found, expected = comparable(folder), comparable(FIXTURES / "finished-0.1")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def test_a_resumed_run_has_the_curves_of_the_unstopped_one(resumed):
    def curves(folder: Path) -> list[tuple]:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        return [(event["event"], event["step"], event.get("top1")) for event in events]

    folder, _ = resumed
    assert curves(folder) == curves(FIXTURES / "finished-0.1")
    assert (folder / "report.html").exists()


def test_a_finished_run_is_known_as_such(tmp_path):
    folder = shutil.copytree(FIXTURES / "finished-0.1", tmp_path / "run")
    weights = (folder / "model.safetensors").read_bytes()
    assert "holds a finished run" in invoke("train", folder, "--resume", "--device", "cpu")
    assert (folder / "model.safetensors").read_bytes() == weights
    assert (folder / "report.html").exists()


def test_a_run_loads_with_its_classes_and_training_data(run):
    model = vitrail.load(run)
    assert model.labels == tuple("0123456789")
    assert model.training_data["source"] == "digits"
    assert model.preprocess.size == (8, 8)


def test_a_run_is_evaluated_as_it_was(run):
    found = vitrail.evaluate(run, "digits", device="cpu")
    assert found["n"] == 359
    if run_finished(run):
        expected = read(FIXTURES / "finished-0.1" / "evaluation" / "test.json")
        for key in ("top1", "top5", "balanced_accuracy", "confusion"):
            assert found.get(key) == expected.get(key), key
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    val = vitrail.evaluate(run, "digits", split="val", device="cpu")
    assert val["top1"] == pytest.approx(read(run / "run.json")["best"]["top1"])


def run_finished(folder: Path) -> bool:
    return read(folder / "run.json")["status"] == "finished"


def test_a_run_predicts(run, digit, tmp_path):
    digit.save(tmp_path / "digit.png")
    expected = vitrail.load(run).predict(digit, top=3)
    (answer,) = [
        json.loads(line)
        for line in invoke("predict", run, tmp_path / "digit.png", "--json", "--top", 3).split("\n")
        if line.startswith("{")
    ]
    assert [guess["label"] for guess in answer["top"]] == [label for label, _ in expected]


def test_a_run_is_reported(run):
    invoke("report", run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "digits" in page
    assert ("30.6" if run_finished(run) else "16.4") in page  # on test, or the best on val


def test_both_runs_are_compared(tmp_path):
    target = tmp_path / "report.html"
    invoke("report", *(FIXTURES / name for name in RUNS), "--out", target)
    assert all(name in target.read_text(encoding="utf-8") for name in RUNS)


def test_a_run_is_served(run, digit):
    file = io.BytesIO()
    digit.save(file, "PNG")
    expected = vitrail.load(run).predict(digit)
    served = application(open_models([run], torch.device("cpu")))
    with TestClient(served) as client:
        answer = client.post("/predict", content=file.getvalue()).json()
    top = answer["results"][0]["top"]
    assert [guess["label"] for guess in top] == [label for label, _ in expected]
    assert top[0]["probability"] == pytest.approx(expected[0][1], abs=1e-4)


@pytest.mark.parametrize("family", [name for name in LOGITS if name != "images"])
def test_weights_of_every_family_give_the_logits_they_gave(family, tmp_path):
    packed = FIXTURES / "weights" / f"{family}.safetensors.xz"
    path = tmp_path / "model.safetensors"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    model = vitrail.load(path)
    assert model.labels == tuple("abcde")
    assert model.activation == ("sigmoid" if family == "vit-options" else "softmax")
    assert (model.preprocess.size, model.preprocess.short_side) == ((32, 32), 36)
    with torch.inference_mode():
        logits = model(torch.from_numpy(LOGITS["images"]) / 127.5 - 1).numpy()
    np.testing.assert_allclose(logits, LOGITS[family], atol=1e-4)
