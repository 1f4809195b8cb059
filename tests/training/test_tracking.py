import sys
from types import SimpleNamespace

import pytest

from vitrail.errors import VitrailError
from vitrail.training.tracking import tracker

EVENT = {"event": "val", "step": 7, "top1": 0.5, "loss": 1.25, "note": "words are left out"}


def test_no_tracker_takes_anything(tmp_path):
    track, close = tracker("none", tmp_path, {})
    track(EVENT)
    close()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_one_adapter_serves_both(name, tmp_path, monkeypatch):
    said: list[tuple] = []
    library = SimpleNamespace(
        init=lambda **given: said.append(("init", given)),
        log=lambda numbers, step: said.append(("log", numbers, step)),
        finish=lambda: said.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, name, library)
    track, close = tracker(name, tmp_path / "run", {"optim.lr": 0.1})
    track(EVENT)
    close()
    settings = {"project": "vitrail", "name": "run", "config": {"optim.lr": 0.1}}
    assert said == [
        ("init", settings),
        ("log", {"val/top1": 0.5, "val/loss": 1.25}, 7),
        ("finish",),
    ]


def test_tensorboard_gets_scalars(tmp_path, monkeypatch):
    said: list[tuple] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            said.append(("folder", folder))

        def add_scalar(self, key: str, value: float, step: int) -> None:
            said.append((key, value, step))

        def close(self) -> None:
            said.append(("closed",))

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer)
    )
    track, close = tracker("tensorboard", tmp_path, {})
    track(EVENT)
    close()
    assert said == [
        ("folder", str(tmp_path)),
        ("val/top1", 0.5, 7),
        ("val/loss", 1.25, 7),
        ("closed",),
    ]


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(VitrailError, match=r"system.tracker=wandb needs .*pip install wandb"):
        tracker("wandb", tmp_path, {})
