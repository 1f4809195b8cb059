from types import SimpleNamespace

import vitrail
from vitrail.training import oversight
from vitrail.training.oversight import Oversight


def test_every_evaluation_that_was_asked_for_takes_place(tmp_path):
    settings = {"train.steps": 49, "train.evaluations": 49, "train.batch": 8}
    run = vitrail.train("digits/vit", settings, out=tmp_path / "run", device="cpu")
    assert [one["step"] for one in run.events() if one["event"] == "val"] == [*range(1, 50)]


def test_the_speed_is_that_of_learning_wherever_val_is_looked_at(tmp_path, monkeypatch):
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    noted, looked = Oversight.note_broken, Oversight.evaluate
    monkeypatch.setattr(oversight, "time", SimpleNamespace(perf_counter=lambda: now))
    # Each update takes a second, each look at val a hundred.
    monkeypatch.setattr(Oversight, "note_broken", lambda *a: (advance(1), noted(*a))[1])
    monkeypatch.setattr(Oversight, "evaluate", lambda *a: (advance(100), looked(*a))[1])
    settings = {"train.steps": 20, "train.evaluations": 3, "train.batch": 32, "system.log_steps": 4}
    run = vitrail.train("digits/vit", settings, out=tmp_path / "run")
    speeds = [one["images_per_second"] for one in run.events() if one["event"] == "train"]
    assert len(speeds) == 5
    assert speeds[1:] == [32.0] * 4  # the first counts from a moment of the true clock
