"""Few-shot accuracy in the evaluations of a run, and the weights of every evaluation."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
from tests.data.pictures import write_classes
from vitrail.errors import VitrailError
from vitrail.runs import Run

SETTINGS = {
    **{"model.width": 16, "model.depth": 1, "model.heads": 2, "model.mlp": 16, "train.batch": 16},
    **{"train.steps": 6, "train.evaluations": 3, "train.keep_all": True, "train.fewshot": 2},
}


def trained(out: Path, what: str = "digits/vit", **settings) -> Run:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return vitrail.train(what, SETTINGS | named, out=out, device="cpu")


def measured(run: Run) -> list[float]:
    return [event["fewshot"] for event in run.events() if event["event"] == "val"]


def by_command(run: Run, step: int, split: str = "val", data: str | Path = "digits") -> float:
    """What `vitrail fewshot` says of the weights of an evaluation."""
    options = {"shots": [2], "seeds": run.info()["seed"] + 1, "split": split, "device": "cpu"}
    return vitrail.fewshot(run.weights_at(step), data, **options)["results"][-1]["accuracy"]


MASKED = {"train__objective": "masked", "augment__mixup": 0.0, "augment__cutmix": 0.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return trained(tmp_path_factory.mktemp("few") / "run", train__ema=0.5, seed=1)


def test_each_evaluation_has_what_the_command_measures(run):
    assert measured(run) == [by_command(run, step) for step in (2, 4, 6)]
    assert "  2-shot " in run.log()
    assert "few-shot" in (run.folder / "report.html").read_text("utf-8")


def test_the_weights_of_every_evaluation_are_kept(run):
    files = sorted((run.folder / "weights").iterdir())
    assert [file.name for file in files] == [f"step-{step}.safetensors" for step in (2, 4, 6)]
    best = load_file(run.weights_at(run.info()["best"]["step"]))
    saved = load_file(run.weights)
    assert all(torch.equal(best[name], x) for name, x in saved.items())
    before = run.evaluation("test")
    partial = vitrail.evaluate(run.weights_at(2), "digits", split="test", device="cpu")
    assert partial["n"] == before["n"]
    assert run.evaluation("test") == before  # those of the selected weights


def test_it_does_not_change_training(run, tmp_path):
    plain = trained(
        tmp_path / "plain", train__ema=0.5, seed=1, train__fewshot=0, train__keep_all=False
    )
    one, other = load_file(run.weights), load_file(plain.weights)
    assert all(torch.equal(one[name], x) for name, x in other.items())
    assert not (plain.folder / "weights").exists()
    assert not any("fewshot" in event for event in plain.events())
    losses = [[e["loss"] for e in each.events() if e["event"] == "val"] for each in (run, plain)]
    assert losses[0] == losses[1]


def test_masked_training_measures_the_labels_it_does_not_train_on(tmp_path):
    run = trained(tmp_path / "run", **MASKED)
    assert measured(run) == [by_command(run, step) for step in (2, 4, 6)]
    assert "top1" not in run.events()[-1]


def test_masked_training_without_labels_needs_other_data(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(40):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(images / f"{number}.png")
    settings = MASKED | {"data__source": str(images)}
    with pytest.raises(VitrailError, match=r"^train.fewshot=2 needs labels, which images does not"):
        trained(tmp_path / "none", **settings)
    run = trained(tmp_path / "run", train__fewshot_data="digits", **settings)
    assert measured(run)[-1] == by_command(run, 6, "test")


def test_data_without_a_test_split_is_one_line(tmp_path):
    write_classes(tmp_path / "other", {"a": 3, "b": 3})
    with pytest.raises(VitrailError, match="other has no test split"):
        trained(tmp_path / "run", train__fewshot_data=str(tmp_path / "other"), data__test=0.0)


def test_a_resumed_run_measures_the_same_and_drops_later_weights(run, tmp_path):
    settings = {"train__ema": 0.5, "seed": 1, "system__checkpoint_steps": 3}
    stopped = trained(tmp_path / "run", **settings)
    for path in (stopped.checkpoint, stopped.weights):
        path.unlink()
    stopped.update(status="stopped")
    late = stopped.weights_at(99)
    late.write_bytes(stopped.weights_at(6).read_bytes())
    again = vitrail.train(stopped.folder, resume=True, device="cpu")
    assert measured(again) == measured(run)
    assert not late.exists()
    one, other = load_file(again.weights_at(6)), load_file(run.weights_at(6))
    assert all(torch.equal(one[name], x) for name, x in other.items())
