"""The paper's rule, and a meter that adds up over sessions."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitrail import create, load, save
from vitrail.config import load_config
from vitrail.devices import Devices, energy, peak_memory, peak_rss, read_energy, reset_peak
from vitrail.runs import Run
from vitrail.training import train as training
from vitrail.training.cost import (
    DAY,
    Meter,
    cost_of_weights,
    earlier_cost,
    exaflops,
    plan_compilation,
)
from vitrail.training.objectives import build_objective
from vitrail.training.train import train
from vitrail.weights import published
from vitrail.weights.native import COSTS

GMACS = {
    name: cost["gmacs"]
    for name, cost in json.loads(published.COSTS.read_text(encoding="utf-8")).items()
}
CPU = Devices(torch.device("cpu"), torch.float32)
JFT = 303_000_000
"""Images."""
# Model, epochs, exaFLOPs, and how near the rule comes.
TABLE_6 = [
    ("B/32", 7, 55, 0.025),
    ("B/16", 7, 224, 0.005),
    ("L/32", 7, 196, 0.005),
    ("L/16", 7, 783, 0.005),
    ("L/16", 14, 1567, 0.005),
    ("H/14", 14, 4262, 0.005),
    ("R50+B/32", 7, 106, 0.02),
    ("R50+B/16", 7, 274, 0.005),
    ("R50+L/32", 7, 246, 0.005),
    ("R50+L/16", 14, 1668, 0.005),
    # The paper's ResNets are cheaper than their convolutions, all by the same 3 to 4 per cent.
    ("R50x1", 7, 50, 0.05),
    ("R50x2", 7, 199, 0.04),
    ("R101x1", 7, 96, 0.04),
    ("R152x1", 7, 141, 0.04),
    ("R152x2", 7, 563, 0.04),
    ("R152x2", 14, 1126, 0.04),
    ("R200x3", 14, 3306, 0.04),
]
SHORT = [
    *("model.width=16", "model.depth=1", "model.heads=2", "model.mlp=16", "data.subset=64"),
    *("train.batch=8", "train.evaluations=1", "system.checkpoint_steps=1"),
]


@pytest.mark.parametrize(("name", "epochs", "published", "within"), TABLE_6)
def test_the_rule_gives_the_papers_table_6(name, epochs, published, within):
    assert exaflops(GMACS[name], JFT * epochs) == pytest.approx(published, rel=within)


def meter(before, joules, **changes) -> Meter:
    plain = {"gmacs": 2.0, "trained_gmacs": 2.0, "batch": 10}
    counted = iter(joules)
    return Meter(
        devices=Devices(CPU.device, CPU.precision),
        before=before,
        joules_at_first=next(counted),
        joules=lambda: next(counted),
        **plain | changes,
    )


def test_a_second_session_adds_to_the_first():
    first = meter(earlier_cost({}), [1000.0, 1250.0]).read(step=3)
    assert first["energy_joules"] == 250.0
    assert first["images_seen"] == 30
    assert first["exaflops"] == pytest.approx(6 * 2e9 * 30 / 1e18)
    assert first["sessions"] == 1
    first |= {"device_days": 0.5, "peak_memory_bytes": 1 << 60}
    second = meter(earlier_cost({"cost": first}), [5.0, 10.0, 15.0])
    assert second.read(step=4)["energy_joules"] == 255.0
    told = second.read(step=5)
    assert told["energy_joules"] == 260.0
    assert told["images_seen"] == 50
    assert 0.5 < told["device_days"] < 0.51
    assert told["peak_memory_bytes"] == 1 << 60
    assert told["sessions"] == 2


@pytest.mark.parametrize(
    ("before", "counted"),
    [(0.0, [None, None]), (0.0, [3.0, None]), (0.0, [None, 3.0]), (None, [3.0, 4.0])],
)
def test_energy_that_is_not_all_known_is_not_guessed(before, counted):
    told = meter({"device_days": 0.0, "energy_joules": before}, counted).read(step=1)
    assert told["energy_joules"] is None


def test_a_run_from_before_costs_were_kept_keeps_its_time():
    told = earlier_cost({"seconds": DAY / 2, "processes": 4})
    assert told == {"device_days": 2.0, "energy_joules": None}


def test_a_frozen_backbone_costs_the_features_it_computes_and_its_head():
    first = meter(earlier_cost({}), [None, None], trained_gmacs=0.001).read(5, 100)
    head, forward = 6 * 0.001e9 * 50, 2 * 2e9 * 100
    assert first["exaflops"] == pytest.approx((head + forward) / 1e18)
    again = meter(earlier_cost({"cost": first}), [None, None], trained_gmacs=0.001)
    assert again.read(5, 50)["exaflops"] == pytest.approx((head + 1.5 * forward) / 1e18)


def test_every_run_says_what_it_cost_and_a_resumed_one_all_of_it(tmp_path):
    run = train("digits/vit", ["train.steps=4", *SHORT], out=tmp_path / "run", device="cpu")
    cost = run.info()["cost"]
    assert set(cost) == {
        *("gmacs", "images_seen", "features_computed", "exaflops", "device_days"),
        *("energy_joules", "peak_memory_bytes", "sessions", "pretraining"),
    }
    assert cost["pretraining"] is None
    assert cost["images_seen"] == 4 * 8
    assert cost["gmacs"] == run.info()["model"]["gmacs"]
    assert cost["exaflops"] == pytest.approx(exaflops(cost["gmacs"], 32))
    assert run.info()["seconds"] - 0.1 <= DAY * cost["device_days"]
    assert cost["energy_joules"] is None
    assert cost["peak_memory_bytes"] > 100e6
    assert (cost["sessions"], "Cost" in (run.folder / "report.html").read_text()) == (
        1,
        True,
    )
    run.update(status="stopped")
    again = train(run.folder, resume=True, device="cpu").info()["cost"]
    assert again["images_seen"] == 32
    assert again["sessions"] == 2
    assert again["device_days"] > cost["device_days"]


def total(run: Run) -> dict[str, float]:
    """What a run and all that it began with cost."""
    cost = run.info()["cost"]
    before = cost["pretraining"] or dict.fromkeys(COSTS, 0.0)
    return {name: cost[name] + before[name] for name in COSTS}


def test_the_cost_of_initial_weights_goes_with_them(tmp_path):
    def trained(name: str, *settings: str) -> Run:
        options = ["train.steps=4", *SHORT, "train.keep_all=true", *settings]
        return train("digits/vit", options, out=tmp_path / name, device="cpu")

    first = trained("first", "train.evaluations=2")
    second = trained("second", f"model.init={first.folder}")
    assert second.info()["cost"]["pretraining"] == total(first)
    third = trained("third", f"model.init={second.weights}")
    assert third.info()["cost"]["pretraining"] == total(second)
    assert total(third)["exaflops"] == pytest.approx(3 * first.info()["cost"]["exaflops"])
    page = (third.folder / "report.html").read_text("utf-8")
    assert "<dt>pre-training</dt>" in page
    assert "<dt>pre-training</dt>" not in (first.folder / "report.html").read_text("utf-8")

    # Half of a run, and weights away from their run.
    half = trained("half", f"model.init={first.weights_at(2)}")
    assert half.info()["cost"]["pretraining"]["exaflops"] == pytest.approx(
        first.info()["cost"]["exaflops"] / 2
    )
    second.weights.rename(tmp_path / "moved.safetensors")
    moved = trained("moved", f"model.init={tmp_path / 'moved.safetensors'}")
    known = moved.info()["cost"]["pretraining"]
    assert known["exaflops"] == total(second)["exaflops"]
    assert known["device_days"] == pytest.approx(total(second)["device_days"], rel=0.5)

    # A resumed run does not look again.
    first.update(cost=first.info()["cost"] | {"exaflops": 5.0})
    half.update(status="stopped")
    again = train(half.folder, resume=True, device="cpu").info()["cost"]
    assert again["pretraining"] == half.info()["cost"]["pretraining"]


def test_weights_of_unknown_cost_leave_it_unknown_down_the_chain(tmp_path):
    begun = tmp_path / "begun.safetensors"
    save(create("Ti/4", classes=10, size=8, depth=1), begun)
    options = ["data.size=8", "data.source=digits", "data.crop=0", "train.steps=2", *SHORT[4:]]

    def trained(name: str, init: Path) -> Run:
        settings = [f"model.init={init}", *options]
        return train("finetune/folder", settings, out=tmp_path / name, device="cpu")

    first = trained("first", begun)
    second = trained("second", first.folder)
    assert first.info()["cost"]["pretraining"] is second.info()["cost"]["pretraining"] is None
    assert "not known" in (second.folder / "report.html").read_text("utf-8")
    # Before, runs recorded nothing of their initial weights.
    cost = first.info()["cost"]
    del cost["pretraining"]
    first.update(cost=cost)
    assert cost_of_weights(load(first.folder)) is None
    first.update(cost=cost | {"pretraining": {"exaflops": "much", "device_days": 1}})
    assert cost_of_weights(load(first.folder)) is None
    first.update(model={"init": ""})
    assert cost_of_weights(load(first.folder)) == {name: cost[name] for name in COSTS}


def test_a_frozen_run_counts_its_features(tmp_path):
    save(create("Ti/4", classes=10, size=8, depth=1), tmp_path / "begun.safetensors")
    settings = [f"model.init={tmp_path / 'begun.safetensors'}", "train.freeze=true", "data.size=8"]
    settings += ["data.source=digits", "data.crop=0", "train.steps=2", *SHORT[4:]]
    info = train("finetune/folder", settings, out=tmp_path / "probe", device="cpu").info()
    seen = info["data"]["train"] + info["data"]["val"]
    forward = exaflops(info["model"]["gmacs"], seen) / 3
    assert forward < info["cost"]["exaflops"] < 1.05 * forward
    again = train("finetune/folder", settings, out=tmp_path / "again", device="cpu").info()
    assert again["cost"]["features_computed"] == 0  # they were kept
    assert again["cost"]["exaflops"] < 0.05 * forward


def test_the_time_of_a_frozen_run_has_that_of_its_features(tmp_path, monkeypatch):
    def slowly(*arguments):
        time.sleep(1.0)
        return build_objective(*arguments)

    monkeypatch.setattr(training, "build_objective", slowly)
    save(create("Ti/4", classes=10, size=8, depth=1), tmp_path / "begun.safetensors")
    settings = [f"model.init={tmp_path / 'begun.safetensors'}", "train.freeze=true", "data.size=8"]
    settings += ["data.source=digits", "data.crop=0", "train.steps=2", *SHORT[4:]]
    run = train("finetune/folder", settings, out=tmp_path / "probe", device="cpu")
    rounded = 0.1
    assert run.info()["seconds"] > 1.0 + run.events()[-1]["seconds"] - rounded
    run.update(status="stopped")
    before = run.info()["seconds"]
    again = train(run.folder, resume=True, device="cpu")
    assert again.info()["seconds"] > 1.0 + before - rounded


def test_the_peak_of_memory_is_that_since_it_was_reset():
    reset_peak(CPU.device)
    before = peak_memory(CPU.device)
    much = np.ones(200 << 20, dtype=np.uint8)
    risen = peak_memory(CPU.device)
    assert risen - before > 190 << 20
    assert peak_rss() > 190 << 20
    del much
    reset_peak(CPU.device)
    assert peak_memory(CPU.device) < risen - (150 << 20)


def test_a_cpu_tells_no_energy():
    assert energy(CPU.device) is None


def driver(refusal: int = 0) -> SimpleNamespace:
    """A management library with one GPU, which may refuse to count."""

    def handle_of(name, handle) -> int:
        handle._obj.value = 7
        return 0 if name == b"GPU-1234" else 6

    def energy_of(handle, millijoules) -> int:
        millijoules._obj.value = 2500 * handle.value
        return refusal

    return SimpleNamespace(
        nvmlDeviceGetHandleByUUID=handle_of, nvmlDeviceGetTotalEnergyConsumption=energy_of
    )


@pytest.mark.parametrize("uuid", ["1234", "GPU-1234"])
def test_the_drivers_millijoules_are_joules(uuid):
    assert read_energy(driver(), uuid) == 17.5


def test_a_driver_that_does_not_count_is_not_guessed_for():
    assert read_energy(driver(refusal=3), "1234") is None
    assert read_energy(driver(), "5678") is None


@pytest.fixture
def gpu(monkeypatch) -> Devices:
    monkeypatch.setattr(Devices, "peak", lambda self: 989e12)
    return Devices(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "variant", "compiled", "length"),
    [
        (["train.steps=500"], "B/16", False, "78 s"),
        (["train.steps=20000"], "B/16", True, "52 min"),
        (["train.epochs=90"], "B/16", True, "1.7 h"),
        (["train.minutes=4"], "B/16", False, "4 min"),
        (["train.minutes=6"], "B/16", True, "6 min"),
        # A small batch does not make a step as short as its arithmetic.
        (["train.steps=100000", "train.batch=1"], "Ti/16", True, "26 min"),
    ],
)
def test_a_run_is_compiled_if_it_is_long_enough(gpu, settings, variant, compiled, length):
    chosen, note = plan_compilation(load_config(None, settings), 224_000, create(variant), gpu)
    assert chosen is compiled
    shown = "" if compiled else "not "
    assert note == f"{shown}compiled (auto: about {length} of training)"


def test_compilation_is_a_matter_of_the_gpu_and_of_the_user(gpu):
    def plan(*settings: str, devices: Devices = gpu) -> tuple[bool, str]:
        config = load_config(None, ["train.steps=20000", *settings])
        return plan_compilation(config, 100, create("B/16"), devices)

    cpu = Devices(torch.device("cpu"), torch.float32)
    assert plan(devices=cpu) == (False, "")
    assert plan("system.compile=true", devices=cpu) == (True, "compiled")
    assert plan("system.compile=true", "train.steps=1") == (True, "compiled")
    assert plan("system.compile=false") == (False, "")
    assert plan("model.init=builtin", "train.freeze=true") == (False, "")
