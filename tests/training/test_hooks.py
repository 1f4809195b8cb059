from types import SimpleNamespace

import pytest

import vitrail
from vitrail.training import hooks
from vitrail.training.hooks import Hooks
from vitrail.training.objectives import classification


def test_every_evaluation_that_was_asked_for_takes_place(tmp_path):
    settings = {"train.steps": 49, "train.evaluations": 49, "train.batch": 8}
    run = vitrail.train("digits/vit", settings, out=tmp_path / "run", device="cpu")
    assert [one["step"] for one in run.events() if one["event"] == "val"] == [*range(1, 50)]


def test_the_speed_is_that_of_learning_wherever_val_is_looked_at(tmp_path, monkeypatch):
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    noted, looked = Hooks.note_skipped, Hooks.validate
    monkeypatch.setattr(hooks, "time", SimpleNamespace(perf_counter=lambda: now))
    # Each update takes a second, each look at val a hundred.
    monkeypatch.setattr(Hooks, "note_skipped", lambda *a: (advance(1), noted(*a))[1])
    monkeypatch.setattr(Hooks, "validate", lambda *a: (advance(100), looked(*a))[1])
    settings = {"train.steps": 20, "train.evaluations": 3, "train.batch": 32, "system.log_steps": 4}
    run = vitrail.train("digits/vit", settings, out=tmp_path / "run")
    speeds = [one["images_per_second"] for one in run.events() if one["event"] == "train"]
    assert len(speeds) == 5
    assert speeds[1:] == [32.0] * 4  # the first counts from a moment of the true clock


@pytest.mark.parametrize(
    ("weights", "looks", "best"),
    [
        # (top-1, balanced accuracy, loss) of three evaluations: a tie is decided by the loss.
        ("none", [(0.4, 0.3, 1.1), (0.4, 0.3, 0.9), (0.4, 0.3, 1.0)], 2),
        ("none", [(0.4, 0.3, 0.9), (0.5, 0.2, 1.5), (0.4, 0.5, 0.1)], 2),
        # With class weights all classes count alike.
        ("balanced", [(0.9, 0.3, 0.1), (0.8, 0.6, 0.2), (0.8, 0.6, 0.3)], 2),
    ],
)
def test_the_best_evaluation(tmp_path, monkeypatch, weights, looks, best):
    names = ("top1", "balanced_accuracy", "loss")
    scripted = (dict(zip(names, look, strict=True), top5=1.0, n=9) for look in looks)
    monkeypatch.setattr(classification, "summary", lambda *found: next(scripted))
    settings = {"train.steps": 3, "train.evaluations": 3, "train.batch": 8, "data.test": 0.0}
    settings |= {"train.class_weights": weights, "system.checkpoint_steps": 1}
    run = vitrail.train("digits/vit", settings, out=tmp_path / "run", device="cpu")
    assert run.info()["best"]["step"] == best


def test_balanced_accuracy_is_told_where_it_decides(tmp_path, capsys):
    settings = {"train.steps": 1, "train.evaluations": 1, "train.batch": 8}
    settings |= {"train.class_weights": "balanced"}
    run = vitrail.train("digits/vit", settings, out=tmp_path / "run", device="cpu")
    (val,) = [event for event in run.events() if event["event"] == "val"]
    assert 0 <= val["balanced_accuracy"] <= 1
    assert f"balanced {100 * val['balanced_accuracy']:.2f}%" in capsys.readouterr().err
