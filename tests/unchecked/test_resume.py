"""A run that is killed and resumed ends where the run that was never killed ends, to the bit."""

import errno
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.processes import start
from vitrail.cli import main
from vitrail.config import load_config
from vitrail.devices import setup_devices
from vitrail.errors import FailureError, VitrailError
from vitrail.runs import Run
from vitrail.training import checkpoint
from vitrail.training import train as training
from vitrail.training.train import train

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


def session(recipe: Path, out: Path, resume: bool, *settings: str) -> None:
    torch.set_num_threads(1)
    training.train_config(load_config(recipe, settings), out, resume=resume, device="cpu")


def complete(recipe: Path, out: Path, resume: bool, *settings: str) -> None:
    process = start(session, recipe, out, resume, *settings)
    process.join()
    assert process.exitcode == 0


def same_weights(a: Path, b: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (a, b))
    return first.keys() == second.keys() and all(first[k].equal(second[k]) for k in first)


def metrics(folder: Path) -> list[tuple]:
    """The events without what depends on the clock or on where a session began."""
    kept = ("event", "step", "lr", "top1", "fewshot", "n")
    return [tuple(event.get(key) for key in kept) for event in Run(folder).events()]


def moved_on(path: Path, before: int) -> bool:
    with suppress(FileNotFoundError):  # it is being replaced
        return path.stat().st_mtime_ns > before
    return False


def test_twenty_kills_change_nothing(recipe, tmp_path):
    never, often = tmp_path / "never", tmp_path / "often"
    complete(recipe, never, False)
    chance, step = random.Random(0), Run(never).info()["seconds"] / STEPS
    steps: list[int] = []
    for _ in range(KILLS):
        last = often / "last.pt"
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = start(session, recipe, often, True)
        if chance.random() < 0.8:  # most of them while it trains, some while it starts
            while process.is_alive() and not moved_on(last, before):
                time.sleep(0.002)
        time.sleep(chance.random() * 4 * step)
        if not process.is_alive():  # steps were faster than those of the first run
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        steps.append(checkpoint.read(last)[1].step if last.exists() else 0)
    assert len(steps) >= KILLS / 2
    assert len(set(steps)) > 5
    complete(recipe, often, True)
    assert same_weights(never, often)
    assert metrics(never) == metrics(often)
    assert Run(often).evaluation("test")["top1"] == Run(never).evaluation("test")["top1"]
    assert not list(often.glob(".*.part"))


ON_DEVICE = (
    *("system.augment=device", "augment.crop=inception", "augment.randaugment_layers=2"),
    *("train.evaluations=2", "system.checkpoint_steps=5"),
)


def test_kills_change_nothing_where_images_are_augmented_on_the_device(recipe, tmp_path):
    """Wherever each session keeps its images."""
    never, often = tmp_path / "never", tmp_path / "often"
    complete(recipe, never, False, *ON_DEVICE, "system.cache=memory")
    for cache in ("memory", "disk", "none"):
        last = often / "last.pt"
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = start(session, recipe, often, True, *ON_DEVICE, f"system.cache={cache}")
        while process.is_alive() and not moved_on(last, before):
            time.sleep(0.002)
        assert process.is_alive(), "the run ended before it could be killed so often"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    complete(recipe, often, True, *ON_DEVICE, "system.cache=disk")
    assert same_weights(never, often)
    assert metrics(never) == metrics(often)


def test_kills_change_neither_few_shot_accuracy_nor_kept_weights(recipe, tmp_path):
    settings = ("train.fewshot=2", "train.keep_all=true", "train.evaluations=20")
    never, often = tmp_path / "never", tmp_path / "often"
    complete(recipe, never, False, *settings)
    for number in (2, 7, 12):
        process = start(session, recipe, often, True, *settings)
        while process.is_alive() and not Run(often).weights_at(6 * number).exists():
            time.sleep(0.002)
        assert process.is_alive(), "the run ended before it could be killed so often"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    complete(recipe, often, True, *settings)
    assert metrics(never) == metrics(often)
    assert not list(often.rglob(".*.part"))
    kept = sorted(path.name for path in never.glob("weights/*"))
    assert kept == sorted(path.name for path in often.glob("weights/*"))
    assert len(kept) == 20
    for name in kept:
        first, second = (load_file(folder / "weights" / name) for folder in (never, often))
        assert all(first[key].equal(second[key]) for key in first)


def test_a_run_resumed_with_augmentation_elsewhere_says_not_bit_exactly(recipe, tmp_path, capsys):
    out = tmp_path / "run"
    settings = ("train.steps=6", "train.evaluations=0", "augment.crop=inception")
    stop = patch.object(training, "_evaluate_on_test", side_effect=KeyboardInterrupt)
    with stop, suppress(KeyboardInterrupt):
        session(recipe, out, False, *settings, "system.augment=device")
    session(recipe, out, True, *settings, "system.augment=cpu")
    assert (
        "not bit-exactly: it was started by another version, or with augmentation on another"
        in (capsys.readouterr().err)
    )
    again = tmp_path / "again"
    with stop, suppress(KeyboardInterrupt):
        session(recipe, again, False, *settings, "system.augment=device")
    session(recipe, again, True, *settings, "system.augment=device")
    said = capsys.readouterr().err
    assert "resumed  at step 6" in said
    assert "not bit-exactly" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_stop_writes_a_checkpoint_first(recipe, tmp_path, number):
    out = tmp_path / "run"
    settings = ("system.checkpoint_steps=0", "train.evaluations=1")
    process = start(session, recipe, out, False, *settings)
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


def test_a_run_begun_by_an_earlier_version_resumes_and_says_not_bit_exactly(
    recipe, tmp_path, capsys
):
    out = tmp_path / "run"
    settings = ("train.steps=6", "train.evaluations=0")
    stop = patch.object(training, "_evaluate_on_test", side_effect=KeyboardInterrupt)
    with stop, suppress(KeyboardInterrupt):
        session(recipe, out, False, *settings)
    content = torch.load(out / "last.pt", weights_only=True)
    del content["counters"]["draws"]
    content["counters"]["step"] = 3
    torch.save(content, out / "last.pt")
    session(recipe, out, True, *settings)
    assert Run(out).info()["status"] == "finished"
    assert "resumed  at step 3, not bit-exactly" in capsys.readouterr().err


def test_a_run_is_never_overwritten(recipe, tmp_path):
    out = tmp_path / "run"
    short = ("train.steps=2", "train.evaluations=1")
    train(recipe, short, out=out, device="cpu")
    with pytest.raises(VitrailError, match=r"holds a finished run \([^)]*\); choose another"):
        train(recipe, short, out=out, device="cpu")
    weights = Run(out).weights.read_bytes()
    train(recipe, short, out=out, resume=True, device="cpu")
    assert Run(out).weights.read_bytes() == weights


@pytest.mark.parametrize("lost", ["report.html", "inspection/inspection.json"])
def test_a_run_killed_after_training_is_finished_by_resuming(recipe, tmp_path, lost):
    out, short = tmp_path / "run", ("train.steps=2", "train.evaluations=1")
    train(recipe, short, out=out, device="cpu")
    (out / lost).unlink()
    done = CliRunner().invoke(main, ["train", str(out), "--resume", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert (out / lost).exists()
    with pytest.raises(VitrailError, match=r"started with optim.lr=\S+, not optim.lr=0.5"):
        train(recipe, [*short, "optim.lr=0.5"], out=out, resume=True, device="cpu")


def test_a_run_goes_on_with_its_own_settings_only(recipe, tmp_path):
    out = tmp_path / "run"
    train(recipe, ["train.steps=2"], out=out, device="cpu")
    Run(out).update(status="running")
    with pytest.raises(
        VitrailError, match=r"started with optim.lr=\S+, not optim.lr=0.5; .*--resume"
    ):
        train(recipe, ["train.steps=2", "optim.lr=0.5"], out=out, resume=True, device="cpu")
    # How the machine is used may change.
    train(recipe, ["train.steps=2", "system.microbatch=4"], out=out, resume=True, device="cpu")


def test_a_run_folder_is_enough_to_resume(recipe, tmp_path):
    out = tmp_path / "run"
    train(recipe, ["train.steps=2"], out=out, device="cpu")
    assert load_config(out / "config.toml").train.steps == 2
    Run(out).update(status="running")
    assert train(out, resume=True, device="cpu").folder == out


def test_a_damaged_checkpoint_is_one_line(recipe, tmp_path):
    out = tmp_path / "run"
    train(recipe, ["train.steps=2"], out=out, device="cpu")
    Run(out).update(status="running")
    for name in ("last.pt", "previous.pt"):
        (out / name).write_bytes((out / name).read_bytes()[:1000])
    with pytest.raises(
        FailureError, match=r"cannot resume .*last\.pt.*previous\.pt.*--out"
    ) as said:
        train(recipe, ["train.steps=2"], out=out, resume=True, device="cpu")
    assert "\n" not in str(said.value)


def interrupted(recipe: Path, out: Path) -> None:
    """A run of 12 steps with checkpoints at 9 and 12 that did not get to its end."""
    session(recipe, out, False, "train.steps=12", "train.evaluations=0")
    Run(out).update(status="running")
    assert [checkpoint.read(out / f"{name}.pt")[1].step for name in ("last", "previous")] == [12, 9]


def flip(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_one_flipped_bit_goes_back_to_the_checkpoint_before(recipe, tmp_path, capsys, share):
    out = tmp_path / "run"
    interrupted(recipe, out)
    weights = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    flip(out / "last.pt", share)
    capsys.readouterr()
    session(recipe, out, True, "train.steps=12", "train.evaluations=0")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "last.pt" in line]
    assert line.startswith("resumed  at step 9")
    assert "damaged" in line
    again = load_file(out / "model.safetensors")
    assert all(weights[key].equal(again[key]) for key in weights)
    # The good checkpoint was not pushed out by the damaged one.
    assert [checkpoint.read(out / f"{name}.pt")[1].step for name in ("last", "previous")] == [12, 9]


def test_a_kill_between_two_renames_leaves_a_checkpoint(recipe, tmp_path, capsys):
    out = tmp_path / "run"
    interrupted(recipe, out)
    (out / "last.pt").unlink()
    session(recipe, out, True, "train.steps=12", "train.evaluations=0")
    assert "resumed  at step 9" in capsys.readouterr().err


def test_a_checkpoint_from_before_there_were_checksums_resumes_unless_it_is_damaged(tmp_path):
    old = tmp_path / "last.pt"
    torch.save({"learner": {"x": torch.arange(1000)}, "counters": {"step": 7}}, old)
    state, counters = checkpoint.read(old)
    assert state["x"].equal(torch.arange(1000))
    assert counters.step == 7
    flip(old, 0.5)
    with pytest.raises(FailureError, match="damaged"):
        checkpoint.read(old)


def test_a_full_disk_leaves_both_checkpoints_as_they_were(tmp_path, monkeypatch):
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    for step in (1, 2):
        checkpoint.write(last, previous, {"x": torch.zeros(9)}, checkpoint.Counters(step=step))

    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.HashedFile, "write", full)
    with pytest.raises(FailureError, match=r"cannot write .*last\.pt \(No space left on device\)"):
        checkpoint.write(last, previous, {"x": torch.zeros(9)}, checkpoint.Counters(step=3))
    assert [checkpoint.read(path)[1].step for path in (last, previous)] == [2, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "previous.pt"]


def test_a_disk_that_cannot_read_the_last_checkpoint_goes_back_to_the_one_before(
    tmp_path, monkeypatch
):
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    for step in (1, 2):
        checkpoint.write(last, previous, {}, checkpoint.Counters(step=step))
    opened = Path.open

    def failing(path, *arguments, **options):
        if path == last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", failing)
    with setup_devices("cpu") as where:
        used, _, counters, problems = checkpoint.read_newest((last, previous), where)
    assert (used, counters.step) == (previous, 1)
    assert problems == ["last.pt cannot be used: Input/output error"]


@pytest.mark.parametrize("missing", ["optimizer", "model", "ema"])
def test_a_checkpoint_that_lacks_something_is_one_line(recipe, tmp_path, missing):
    out = tmp_path / "run"
    interrupted(recipe, out)
    state, counters = checkpoint.read(out / "last.pt")
    del state[missing]
    checkpoint.write(out / "last.pt", out / "previous.pt", state, counters)
    with pytest.raises(FailureError, match=rf"'{missing}' is missing"):
        session(recipe, out, True, "train.steps=12", "train.evaluations=0")
