"""A run that is killed and resumed ends where the run that was never killed ends, to the bit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import start
from vitrail.commands import train
from vitrail.errors import FailureError, VitrailError
from vitrail.runs import Run
from vitrail.settings import load
from vitrail.training import checkpoint, training

KILLS = 20
STEPS = 120

RECIPE = """
[model]
variant = "Ti/4"
width = 24
depth = 2
heads = 2
mlp = 48
dropout = 0.1
drop_path = 0.1

[data]
source = "digits"
size = 16
subset = 200

[augment]
crop = "pad"
flip = false
mixup = 0.2
cutmix = 1.0
erasing = 0.2

[train]
steps = 120
batch = 16
average = 0.99
evaluations = 6

[optim]
name = "adamw"
lr = 1e-3
weight_decay = 0.05
warmup = 10

[system]
checkpoint_steps = 3
"""


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def sitting(recipe: Path, out: Path, resume: bool, *settings: str) -> None:
    torch.set_num_threads(1)
    training.train(load(recipe, settings), out, resume=resume, device="cpu")


def complete(recipe: Path, out: Path, resume: bool, *settings: str) -> None:
    process = start(sitting, recipe, out, resume, *settings)
    process.join()
    assert process.exitcode == 0


def same_weights(a: Path, b: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (a, b))
    return first.keys() == second.keys() and all(first[k].equal(second[k]) for k in first)


def metrics(folder: Path) -> list[tuple]:
    """The events without what depends on the clock or on where a sitting began."""
    kept = ("event", "step", "lr", "top1", "n")
    return [tuple(event.get(key) for key in kept) for event in Run(folder).events()]


def moved_on(path: Path, before: int) -> bool:
    return path.exists() and path.stat().st_mtime_ns > before


def test_twenty_kills_change_nothing(recipe, tmp_path):
    never, often = tmp_path / "never", tmp_path / "often"
    complete(recipe, never, False)
    chance = random.Random(0)
    steps = set()
    for _ in range(KILLS):
        last = often / "last.pt"
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = start(sitting, recipe, often, True)
        if chance.random() < 0.8:  # most of them while it trains, some while it starts
            while process.is_alive() and not moved_on(last, before):
                time.sleep(0.002)
        time.sleep(chance.random() * 0.25)
        assert process.is_alive(), "the run ended before it could be killed so often"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        steps.add(checkpoint.read(last)[1].step if last.exists() else 0)
    assert len(steps) > 5
    complete(recipe, often, True)
    assert same_weights(never, often)
    assert metrics(never) == metrics(often)
    assert Run(often).evaluation("test")["top1"] == Run(never).evaluation("test")["top1"]
    assert not list(often.glob(".*.part"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_stop_writes_a_checkpoint_first(recipe, tmp_path, number):
    out = tmp_path / "run"
    settings = ("system.checkpoint_steps=0", "train.evaluations=1")
    process = start(sitting, recipe, out, False, *settings)
    while not (out / "augmented.jpg").exists():
        time.sleep(0.002)
        assert process.is_alive()
    os.kill(process.pid, number)
    process.join()
    info = Run(out).info()
    assert info["status"] == "stopped"
    assert info["message"] == f"stopped by {number.name} at step {info['step']}"
    assert 0 < info["step"] < STEPS
    complete(recipe, out, True, *settings)
    assert Run(out).info()["status"] == "finished"


def test_a_run_is_never_overwritten(recipe, tmp_path):
    out = tmp_path / "run"
    short = ("train.steps=2", "train.evaluations=1")
    train(recipe, short, out=out, device="cpu")
    with pytest.raises(VitrailError, match=r"holds a finished run .*--resume.*--out"):
        train(recipe, short, out=out, device="cpu")
    with pytest.raises(VitrailError, match="nothing is left to do"):
        train(recipe, short, out=out, resume=True, device="cpu")


def test_a_run_goes_on_with_its_own_settings_only(recipe, tmp_path):
    out = tmp_path / "run"
    train(recipe, ["train.steps=2"], out=out, device="cpu")
    Run(out).update(status="running")
    with pytest.raises(
        VitrailError, match=r"begun with optim.lr=\S+, not optim.lr=0.5; .*--resume"
    ):
        train(recipe, ["train.steps=2", "optim.lr=0.5"], out=out, resume=True, device="cpu")
    # How the machine is used may change.
    train(recipe, ["train.steps=2", "system.microbatch=4"], out=out, resume=True, device="cpu")


def test_a_run_folder_is_enough_to_resume(recipe, tmp_path):
    out = tmp_path / "run"
    train(recipe, ["train.steps=2"], out=out, device="cpu")
    assert load(out / "config.toml").train.steps == 2
    Run(out).update(status="running")
    assert train(out, resume=True, device="cpu").folder == out


def test_a_damaged_checkpoint_is_one_line(recipe, tmp_path):
    out = tmp_path / "run"
    train(recipe, ["train.steps=2"], out=out, device="cpu")
    Run(out).update(status="running")
    (out / "last.pt").write_bytes((out / "last.pt").read_bytes()[:1000])
    with pytest.raises(FailureError, match="cannot resume from"):
        train(recipe, ["train.steps=2"], out=out, resume=True, device="cpu")
