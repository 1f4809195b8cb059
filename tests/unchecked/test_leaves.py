"""Packages that can be deleted: training and prediction work without any one of them."""

import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.abc import MetaPathFinder
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.processes import start

LEAVES = (
    *("inspection", "reporting", "exporting", "serving", "benchmarking", "duplicates", "vtab"),
    *("imagenet", "reproduction"),
)
SHORT = ("train.steps=1", "train.evaluations=1", "data.subset=32", "train.batch=8")


class Blocked(MetaPathFinder):
    """Lets nobody import a package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name, path, target=None):
        if name == self.package or name.startswith(f"{self.package}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block(leaf: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vitrail"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Blocked(f"vitrail.{leaf}"))


def show_tasks(folder: Path) -> None:
    block("reporting")
    from vitrail.cli import show_sweeps

    task = {"title": "Pets", "group": None, "absent": "", "mean": 0.9, "std": None, "n": 20}
    means = {"groups": [], "mean": 0.9, "std": None, "n": 20, "present": 1, "absent": []}
    result = {"name": "vit", "tasks": [{**task, "images": ""}], "seeds": [{}], **means}
    with (folder / "stdout.txt").open("w") as stdout, redirect_stdout(stdout):
        show_sweeps(result | {"report": str(folder / "report.html")})


def test_a_sweep_is_shown_without_reporting(tmp_path):
    process = start(show_tasks, tmp_path)
    process.join()
    assert process.exitcode == 0
    shown = (tmp_path / "stdout.txt").read_text()
    assert "90.00" in shown
    assert "report.html" not in shown


def train_and_predict(leaf: str, folder: Path) -> None:
    block(leaf)
    from vitrail.cli import main

    out = str(folder / "run")
    words = ["train", "digits/vit", *SHORT, "--out", out, "--device", "cpu"]
    with (folder / "stderr.txt").open("w") as stderr, redirect_stderr(stderr):
        main(words, standalone_mode=False)
    main(["predict", out, str(folder / "image.png"), "--json"], standalone_mode=False)
    assert f"vitrail.{leaf}" not in sys.modules


@pytest.mark.parametrize("leaf", LEAVES)
def test_training_and_prediction_work_without_a_leaf(leaf, tmp_path):
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    process = start(train_and_predict, leaf, tmp_path)
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "run" / "model.safetensors").exists()
    said = (tmp_path / "stderr.txt").read_text()
    assert ("skipped: vitrail." in said) == (leaf in ("inspection", "reporting"))
