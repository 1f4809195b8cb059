"""Two processes under torchrun learn what one process learns from the same batches."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.data.lists import write_lists
from tests.processes import start, together
from vitrail.benchmarking.benchmark import benchmark
from vitrail.config import load_config
from vitrail.devices import setup_devices
from vitrail.model import create
from vitrail.runs import Run
from vitrail.training.cost import DAY, Meter, earlier_cost
from vitrail.training.hooks import Hooks
from vitrail.training.loop import Loop
from vitrail.training.sweep import compare, present, sweep
from vitrail.training.train import train_config
from vitrail.weights.load import load as load_weights
from vitrail.weights.load import save

RECIPE = """
[model]
variant = "Ti/4"
width = 24
depth = 2
heads = 2
mlp = 48

[data]
source = "digits"
size = 16
subset = 101

[augment]
crop = "pad"
flip = false

[train]
steps = 12
batch = 16
evaluations = 2
average = 0.9

[optim]
name = "sgd"
lr = 0.1
warmup = 3

[system]
checkpoint_steps = 5
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def alone(recipe) -> Path:
    """What one process makes of the recipe."""
    together(1, one, recipe, recipe.parent / "alone")
    return recipe.parent / "alone"


def one(recipe: Path, out: Path, *settings: str, resume: bool = False) -> None:
    torch.set_num_threads(1)
    train_config(load_config(recipe, settings), out, device="cpu", resume=resume)


def again(recipe: Path, out: Path, *settings: str) -> None:
    one(recipe, out, *settings, resume=True)


def assert_same(one: Path, other: Path, but: str = "nothing") -> None:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    for key in (key for key in a if not key.endswith(but)):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize("microbatch", ["0", "3"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_weights_of_one(recipe, alone, tmp_path, parallel, microbatch):
    settings = (f"system.parallel={parallel}", f"system.microbatch={microbatch}")
    together(2, one, recipe, tmp_path / "two", *settings)
    assert_same(alone, tmp_path / "two")
    tested, expected = (Run(folder).evaluation("test") for folder in (tmp_path / "two", alone))
    assert tested["n"] == expected["n"] == 359  # which two processes cannot share evenly
    assert tested["top1"] == expected["top1"]
    assert Run(tmp_path / "two").info()["processes"] == 2


def test_accumulation_gives_the_weights_of_whole_batches(recipe, alone, tmp_path):
    together(1, one, recipe, tmp_path / "parts", "system.microbatch=5")
    assert_same(alone, tmp_path / "parts")


MIXED = ("augment.crop=inception", "augment.mixup=0.2", "augment.cutmix=1.0", "augment.mixed=0.8")
MASKED = (
    *("train.objective=masked", "model.pool=mean", "system.checkpoint_steps=0"),
    *("train.steps=6", "train.evaluations=2", "train.keep=last"),
)


ON_DEVICE = (*MIXED, "system.augment=device", "augment.randaugment_layers=1")
CACHES = {"one": "memory", "ddp": "disk", "fsdp": "none"}


@pytest.mark.parametrize(
    "settings", [MIXED, MASKED, ON_DEVICE], ids=["mixed", "masked", "augmented on the device"]
)
def test_any_number_of_processes_mixes_and_masks_as_one(recipe, tmp_path, settings):
    settings = (*settings, "train.fewshot=2", "train.keep_all=true")
    on_device = "system.augment=device" in settings
    cached = {name: [f"system.cache={CACHES[name]}"] * on_device for name in CACHES}
    together(1, one, recipe, tmp_path / "one", *settings, *cached["one"])
    together(2, one, recipe, tmp_path / "ddp", *settings, "system.microbatch=3", *cached["ddp"])
    parallel = "system.parallel=fsdp"
    together(4, one, recipe, tmp_path / "fsdp", *settings, parallel, *cached["fsdp"])
    vals = []
    for name in ("one", "ddp", "fsdp"):
        assert_same(tmp_path / "one", tmp_path / name)
        vals.append([x for x in Run(tmp_path / name).events() if x["event"] == "val"])
    assert len(vals[0]) == 2
    for val in vals[1:]:
        assert [x["n"] for x in val] == [x["n"] for x in vals[0]]
        assert [x["loss"] for x in val] == pytest.approx([x["loss"] for x in vals[0]], abs=1e-5)
        few = [x["fewshot"] for x in vals[0]]
        assert [x["fewshot"] for x in val] == pytest.approx(few, abs=0.01)
    assert min(vals[0][-1]["fewshot"], vals[2][-1]["fewshot"]) > 0.2
    kept = [Run(tmp_path / name).weights_at(vals[0][0]["step"]) for name in ("one", "fsdp")]
    torch.testing.assert_close(*map(load_file, kept), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, "ddp"), (2, "fsdp")), ((2, "fsdp"), (1, "ddp")), ((1, "ddp"), (2, "ddp"))],
)
def test_a_run_resumes_on_another_number_of_processes(recipe, tmp_path, before, after):
    settings = (*MIXED, "optim.name=adamw", "optim.lr=0.003", "train.evaluations=0")
    together(1, one, recipe, tmp_path / "whole", *settings)
    half = tmp_path / "half"
    together(before[0], stopped, recipe, half, *settings, f"system.parallel={before[1]}")
    assert Run(half).info()["step"] == 5
    together(after[0], again, recipe, half, *settings, f"system.parallel={after[1]}")
    assert Run(half).info()["status"] == "finished"
    # The gradient of a key's bias is zero but for rounding, which Adam makes as large as any other.
    assert_same(tmp_path / "whole", half, but="qkv.bias")


def stopped(recipe: Path, out: Path, *settings: str) -> None:
    """Ends as if the machine had failed right after the first checkpoint."""
    save = Hooks.save

    def save_and_fail(self: Hooks, loop: Loop) -> None:
        save(self, loop)
        raise KeyboardInterrupt

    with patch.object(Hooks, "save", save_and_fail), suppress(KeyboardInterrupt):
        one(recipe, out, *settings)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_two_processes_began_two_processes_end(recipe, tmp_path, parallel):
    settings = (f"system.parallel={parallel}", "optim.name=adamw", "optim.lr=0.01")
    longer = (*settings, "train.steps=60", "train.evaluations=0")
    together(2, one, recipe, tmp_path / "whole", *longer)
    half = tmp_path / "half"
    process = start(together, 2, one, recipe, half, *longer)
    while not ((half / "previous.pt").exists() and (half / "last.pt").exists()):
        time.sleep(0.002)
        assert process.is_alive()
    for child in children(process.pid):
        os.kill(child, signal.SIGKILL)
    process.join()
    assert Run(half).info()["status"] == "running"
    if (half / "last.pt").exists():
        (half / "last.pt").write_bytes(b"damaged")  # both of them go back to the one before
    together(2, again, recipe, half, *longer)
    assert_same(tmp_path / "whole", half)
    assert "using previous.pt" in Run(half).log()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def spent(out: Path, known: tuple[bool, bool]) -> None:
    """What each of two processes says that both of them used."""
    with setup_devices("cpu") as where:
        joules = iter([0.0, 100.0 * (where.rank + 1)] if known[where.rank] else [None, None])
        meter = Meter(
            devices=where,
            gmacs=1.0,
            trained_gmacs=1.0,
            batch=1,
            before=earlier_cost({}),
            joules_at_first=next(joules),
            joules=lambda: next(joules),
            began=time.perf_counter() - DAY,
        )
        found = meter.read(step=1)
    (out / f"{where.rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("known", "joules"), [((True, True), 300.0), ((True, False), None)])
def test_costs_are_those_of_all_processes(tmp_path, known, joules):
    together(2, spent, tmp_path, known)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["energy_joules"] == joules
        assert found["device_days"] == pytest.approx(2, rel=0.01)


def test_masked_patches_train_on_two_processes(recipe, tmp_path):
    old = tmp_path / "old.safetensors"
    save(create("Ti/4", classes=10, size=16, width=24, depth=2, heads=2, mlp=48), old)
    begun = [f"model.init={old}", "model.pool="]
    together(2, one, recipe, tmp_path / "two", *MASKED, *begun)
    run = Run(tmp_path / "two")
    assert run.info()["status"] == "finished"
    assert load_weights(tmp_path / "two").head is None  # what an old head said is not kept
    val = [event for event in run.events() if event["event"] == "val"]
    assert val[-1]["n"] == run.info()["data"]["val"]


def test_torchrun_starts_the_same(recipe, alone, tmp_path):
    words = ["train", str(recipe), "--out", str(tmp_path / "two"), "--device", "cpu"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", "-m", "vitrail", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert_same(alone, tmp_path / "two")
    assert done.stderr.count("recipe ") == 1  # one process speaks for all


def numbered(recipe: Path, folder: Path) -> None:
    os.chdir(folder)
    config = load_config(recipe, ["train.steps=1"])
    with setup_devices(
        "cpu", "float32"
    ):  # or a fast process would join the group that is just ending
        for _ in range(2):
            run = train_config(config, Path("runs/tiny"), numbered=True, device="cpu")
    (folder / os.environ["RANK"]).write_text(str(run.folder))


def test_two_processes_agree_on_the_number_of_their_folder(recipe, tmp_path):
    together(2, numbered, recipe, tmp_path)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["runs/tiny-2"] * 2
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny", "tiny-2"}


def swept(recipe: Path, out: Path) -> None:
    with (out.parent / f"said{os.environ['RANK']}").open("w") as said, redirect_stderr(said):
        sweep(recipe, ["optim.lr=[0.1,1e38]"], seeds=1, out=out, device="cpu")


def test_a_sweep_of_two_processes_finds_what_one_finds_and_one_of_them_speaks(recipe, tmp_path):
    together(1, swept, recipe, tmp_path / "alone")
    one = (tmp_path / "said0").read_text()
    together(2, swept, recipe, tmp_path / "pair")
    results = [
        json.loads((tmp_path / name / "sweep.json").read_text()) for name in ("alone", "pair")
    ]
    assert [result["chosen"] for result in results] == [{"optim.lr": 0.1}] * 2
    assert results[0]["mean"] == results[1]["mean"]
    assert_same(tmp_path / "alone" / "seed0", tmp_path / "pair" / "seed0")
    assert (tmp_path / "said1").read_text() == ""
    assert one.count("retrain  seed 0") == (tmp_path / "said0").read_text().count("retrain") == 1
    assert (tmp_path / "pair" / "report.html").exists()


def swept_for_best(recipe: Path, out: Path) -> None:
    other = out.parent / "other.toml"
    compare([recipe, other], seeds=1, out=out, device="cpu", best=True)


def test_two_processes_retrain_the_best_trial_of_two_recipes(recipe, tmp_path):
    grid = '\n[sweep]\n"optim.lr" = [1e38]\n'
    (tmp_path / "other.toml").write_text(recipe.read_text() + grid)
    together(2, swept_for_best, recipe, tmp_path / "pair")
    result = json.loads((tmp_path / "pair" / "sweep.json").read_text())
    won, lost = result["sweeps"]
    assert (result["best"], won["chosen"], lost["chosen"]) == (won["name"], {}, None)
    assert lost["trials"][0]["val_top1"] is None
    assert Run(Path(won["seeds"][0]["run"])).evaluation("test")["top1"] == won["mean"]
    assert (tmp_path / "pair" / "report.html").exists()


def look_for_tasks(folder: Path) -> None:
    """Each process has another disk."""
    rank = os.environ["RANK"]
    os.environ["VITRAIL_DATA"] = str(folder / rank)
    sources = '["vtab/dtd","vtab/pets","vtab/svhn"]'
    config = load_config("vtab/vit", [f"sweep.data.source={sources}"])
    with setup_devices("cpu") as where:
        there, absent = present(config, where, ())
    (folder / f"{rank}.json").write_text(json.dumps([there, list(absent)]))


def test_processes_agree_on_what_is_absent_though_each_sees_another_disk(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for rank, tasks in {"0": ("dtd", "pets"), "1": ("dtd", "svhn")}.items():
        for task in tasks:
            classes = {"dtd": 47, "pets": 37, "svhn": 10}[task]
            write_lists(tmp_path / rank / "vtab" / task, classes=classes)
    together(2, look_for_tasks, tmp_path)
    for rank in "01":
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [["vtab/dtd"], ["vtab/pets", "vtab/svhn"]]


def write_benchmark(folder: Path) -> None:
    result = benchmark(
        ["Ti/16"], sizes=(32,), depths=(1,), batches=(2, 4), train=True, seconds=0.2, device="cpu"
    )
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


def test_a_benchmark_of_two_processes_agrees_on_the_time_of_all(tmp_path):
    together(2, write_benchmark, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["processes"] == second["processes"] == 2
    speeds = [[one["images_per_second"] for one in found["batches"]] for found in (first, second)]
    assert speeds[0] == speeds[1]
    assert [one["batch"] for one in first["batches"]] == [2, 4]
    assert (first["latency_ms"], first["largest_batch"]) == (None, None)
