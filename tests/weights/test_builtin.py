"""The model that comes with Vitrail: it works without a download, and is as good as it says."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.datasets import load_sample_images

import vitrail
from vitrail.cli import main
from vitrail.model.variants import parse_variant
from vitrail.reporting.page import report
from vitrail.runs import Run, is_run
from vitrail.weights.hub import fetch
from vitrail.weights.published import BUILTIN

FOLDER = fetch(BUILTIN.source)
PHOTOGRAPH = next(path for path in load_sample_images().filenames if "flower" in path)


def run(*words: str) -> str:
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_is_a_finished_run_of_a_few_megabytes():
    assert is_run(FOLDER)
    assert Run(FOLDER).info()["status"] == "finished"
    assert Run(FOLDER).info()["command"].startswith("vitrail train cifar10/")
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 9e6


def test_it_holds_no_picture_of_the_data():
    assert Run(FOLDER).evaluation("test")["mistakes"] == []
    pictures = [path.name for path in FOLDER.rglob("*") if path.suffix in (".png", ".jpg")]
    assert sorted(pictures) == ["filters.png", "positions.png"]


def test_the_table_describes_it():
    model = vitrail.load("builtin")
    size = {"size": BUILTIN.size, "classes": BUILTIN.classes}
    assert model.architecture == parse_variant(BUILTIN.variant, **size, **BUILTIN.options)
    assert model.training_data["source"] == "cifar10"
    assert "builtin" in run("models", "builtin")


def test_a_folder_of_that_name_is_not_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vitrail.save(vitrail.create("Ti/16", 3, size=32, depth=1), tmp_path / "builtin")
    assert vitrail.load("builtin").architecture.classes == 10
    for folder in ("./builtin", Path("builtin")):
        assert vitrail.load(folder).architecture.classes == 3


def test_it_predicts_and_shows_what_it_looks_at(tmp_path):
    answer = json.loads(run("predict", "builtin", PHOTOGRAPH, "--json"))
    assert {guess["label"] for guess in answer["top"]} < set(vitrail.load("builtin").labels)
    run("inspect", "builtin", PHOTOGRAPH, "--out", str(tmp_path / "inside"))
    assert (tmp_path / "inside" / "model.png").exists()


def test_its_page_says_how_good_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stated = f"{100 * Run(FOLDER).evaluation('test')['top1']:.2f}"
    assert report(["builtin"]) == Path("report.html")
    assert stated in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not (FOLDER / "report.html").exists()
    guide = (Path(__file__).parents[2] / "docs" / "builtin.md").read_text(encoding="utf-8")
    assert f"{stated}%" in guide


def test_its_card_says_so_too(tmp_path):
    run("export", "builtin", str(tmp_path / "card"), "--format", "hub")
    assert "on the test split of cifar10, n = 10,000" in (
        tmp_path / "card" / "README.md"
    ).read_text(encoding="utf-8")


def test_it_says_what_version_0_1_made_it_say():
    """Of two photographs; how good it is, only CIFAR-10 can tell, in real/."""
    model = vitrail.load("builtin")
    expected = {
        "china.jpg": {"bird": 0.38467, "truck": 0.25743},
        "flower.jpg": {"cat": 0.48594, "frog": 0.19155},
    }
    for path in load_sample_images().filenames:
        found = dict(model.predict(path, top=2))
        assert found == pytest.approx(expected[Path(path).name], abs=1e-3)


def test_its_figures_agree_with_each_other():
    found = Run(FOLDER).evaluation("test")
    confusion = np.array(found["confusion"])
    assert confusion.sum() == found["n"] == 10_000
    assert found["top1"] == pytest.approx(np.trace(confusion) / 10_000)
    assert [row["n"] for row in found["per_class"]] == confusion.sum(1).tolist() == [1000] * 10
