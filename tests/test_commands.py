"""From a folder of pictures to a measured model, from Python and on the terminal."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import vitrail
from tests.models import small
from vitrail.commands import Wishes, compare, look_at_data, look_inside, report, sweep
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import FailureError, VitrailError
from vitrail.runs import Run

SHORT = {
    "model.variant": "Ti/8",
    "model.width": 24,
    "model.depth": 2,
    "model.heads": 2,
    "model.mlp": 48,
    "model.init": "",
    "data.size": 32,
    "data.split": "stratified",
    "train.steps": 40,
    "train.batch": 16,
    "train.evaluations": 2,
    "optim.name": "adamw",
    "optim.lr": 3e-3,
    "optim.warmup": 5,
    "augment.area": 0.5,
}
COLOURS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 40, 40)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Sixty pictures of three colours, and one file that is none."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    chance = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for i in range(20):
            noise = chance.normal(0, 25, (40, 48, 3))
            pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02}.jpg")
    (folder / "red" / "broken.jpg").write_bytes(b"no picture at all")
    return folder


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory) -> Run:
    """A short run on them."""
    out = tmp_path_factory.mktemp("runs") / "photos"
    return vitrail.train(photos, SHORT, out=out, device="cpu")


def test_a_folder_becomes_a_measured_model(run, photos):
    info = run.info()
    assert info["status"] == "finished"
    assert info["recipe"] == "finetune/folder"
    assert info["data"]["train"] + info["data"]["val"] + info["data"]["test"] == 61
    assert [name for name, _ in info["data"]["broken"]] in ([], ["red/broken.jpg"])
    tested = run.evaluation("test")
    assert tested["n"] + len(tested["broken"]) == info["data"]["test"]
    assert tested["top1"] == 1.0
    names = {path.name for path in run.folder.iterdir()}
    assert names >= {
        *("config.toml", "run.json", "metrics.jsonl", "log.txt", "model.safetensors"),
        *("last.pt", "augmented.jpg", "evaluation", "inspection", "report.html"),
    }
    inside = json.loads((run.folder / "inspection" / "inspection.json").read_text("utf-8"))
    assert inside["split"] == "test"
    assert {image["truth"] for image in inside["images"]} == {"blue", "green", "red"}
    assert "What it looks at" in (run.folder / "report.html").read_text("utf-8")


def test_a_run_that_cannot_be_looked_into_says_why(run, tmp_path, capsys):
    copy = Run(tmp_path)
    (tmp_path / "config.toml").write_bytes((run.folder / "config.toml").read_bytes())
    look_inside(copy, "cpu")
    said = capsys.readouterr().err
    assert said.startswith("inside   not looked at: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "inspection").exists()


def test_the_model_answers_for_a_picture_by_the_names_of_the_folders(run, photos):
    model = vitrail.load(run.folder)
    assert model.labels == ("blue", "green", "red")
    label, probability = model.predict(photos / "green" / "03.jpg")[0]
    assert label == "green"
    assert probability > 0.5


def test_evaluating_again_gives_what_the_run_measured(run, photos):
    again = vitrail.evaluate(run.folder, photos, device="cpu")
    kept = run.evaluation("test")
    assert again["top1"] == kept["top1"]
    assert again["loss"] == pytest.approx(kept["loss"], rel=1e-4)


def test_bare_weights_of_a_run_are_tested_on_what_the_run_held_out(run, photos):
    by_file = vitrail.evaluate(run.weights, photos, device="cpu")
    assert by_file["n"] == run.evaluation("test")["n"]
    assert by_file["loss"] == pytest.approx(run.evaluation("test")["loss"], rel=1e-4)


def test_another_data_sets_figures_do_not_replace_the_runs_own(run, photos, tmp_path):
    (tmp_path / "others").symlink_to(photos)
    kept = run.evaluation("test")
    vitrail.evaluate(run.folder, tmp_path / "others", split="train", device="cpu")
    assert run.evaluation("test") == kept
    assert run.evaluation("others-train")["n"] > kept["n"]


def test_val_is_no_test_for_a_run_that_learnt_from_it(photos, tmp_path):
    settings = SHORT | {"train.steps": 1, "data.train_on": "train+val", "data.subset": 10}
    run = vitrail.train(photos, settings, out=tmp_path / "all", device="cpu")
    assert run.info()["data"]["train"] == 10  # the subset is one of everything but test
    with pytest.raises(VitrailError, match="learnt from val as well"):
        vitrail.evaluate(run.folder, photos, split="val", device="cpu")


def test_the_verb_prints_one_json_value(run, photos):
    words = ["evaluate", run.folder, photos, "--json", "--split", "val", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"top1", "top5", "n", "ece", "per_class", "confusion"} <= set(result)
    assert all("thumbnail" not in mistake for mistake in result["mistakes"])
    assert Run(run.folder).evaluation("val")["n"] == result["n"]


def test_the_saved_settings_are_a_recipe_that_gives_the_same_weights(run, tmp_path):
    again = vitrail.train(run.folder / "config.toml", out=tmp_path / "again", device="cpu")
    assert same_weights(run, again)


def same_weights(one: Run, other: Run) -> bool:
    """Whether two runs kept the same tensors, to the bit."""
    a, b = load_file(one.weights), load_file(other.weights)
    return a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)


def test_a_frozen_backbone_trains_its_head_alone(run, photos, tmp_path):
    settings = {
        "model.init": str(run.weights),
        "train.freeze": True,
        "data.size": 32,
        "data.split": "stratified",
        "train.steps": 20,
        "train.batch": 16,
    }
    probe = vitrail.train(photos, settings, out=tmp_path / "probe", device="cpu")
    before, after = vitrail.load(run.folder), vitrail.load(probe.folder)
    kept = {k: v for k, v in before.state_dict().items() if not k.startswith("head.")}
    assert all(after.state_dict()[key].equal(value) for key, value in kept.items())
    assert probe.evaluation("test")["top1"] == 1.0


def test_freezing_nothing_is_an_error():
    with pytest.raises(VitrailError, match=r"train.freeze needs weights"):
        vitrail.train("digits/vit", {"train.freeze": True})


def test_a_time_budget_ends_a_run(photos, tmp_path):
    settings = SHORT | {"train.minutes": 0.03, "data.subset": 20, "train.evaluations": 1}
    settings.pop("train.steps")
    run = vitrail.train(photos, settings, out=tmp_path / "brief", device="cpu")
    info = run.info()
    assert info["status"] == "finished"
    assert 1.8 <= info["seconds"] < 20
    assert info["step"] > 1
    events = [event for event in run.events() if event["event"] == "train"]
    assert events[-1]["lr"] < events[len(events) // 2]["lr"]


def test_no_progress_stops_early(photos, tmp_path):
    settings = SHORT | {"train.patience": 2, "train.evaluations": 20, "optim.lr": 1e-9}
    run = vitrail.train(photos, settings, out=tmp_path / "early", device="cpu")
    assert run.info()["step"] < 40
    assert "stopped early" in run.info()["message"]


def test_a_loss_that_is_no_number_ends_with_advice(photos, tmp_path):
    settings = SHORT | {"optim.lr": 1e38, "optim.name": "sgd", "optim.clip": 0.0}
    with pytest.raises(FailureError, match=r"loss is (nan|inf) at step \d+; try a lower optim.lr"):
        vitrail.train(photos, settings, out=tmp_path / "wild", device="cpu")
    assert Run(tmp_path / "wild").info()["status"] == "failed"


@pytest.mark.parametrize(
    "changes",
    [
        {"data.sampling": "balanced", "train.class_weights": "balanced"},
        {"train.objective": "sigmoid", "model.head_bias": -2.0},
        {"optim.name": "lamb", "augment.three_augment": True, "augment.color_jitter": 0.3},
        {"optim.layer_decay": 0.7, "train.label_smoothing": 0.1, "train.average": 0.9},
        {"optim.decay": "staircase", "augment.crop": "resize", "data.crop": 0.8},
        {"data.size": [32, 48], "system.recompute": True, "system.deterministic": True},
        {"train.epochs": 1.0, "system.precision": "bfloat16", "train.keep": "last"},
    ],
)
def test_every_setting_trains(photos, tmp_path, changes):
    steps = {} if "train.epochs" in changes else {"train.steps": 4}
    settings = {k: v for k, v in SHORT.items() if k != "train.steps"} | steps | changes
    run = vitrail.train(photos, settings, out=tmp_path / "run", device="cpu")
    assert run.info()["status"] == "finished"
    assert all(np.isfinite(e["loss"]) for e in run.events())


def test_a_sweep_chooses_on_val_and_tests_once_per_seed(photos, tmp_path):
    settings = SHORT | {"train.steps": 12, "optim.name": "sgd", "optim.clip": 0.0}
    settings["optim.lr"] = [1e38, 0.01]  # the first one fails, which is an answer too
    result = sweep(photos, settings, seeds=2, out=tmp_path / "sweep", device="cpu")
    assert result["chosen"] == {"optim.lr": 0.01}
    assert result["trials"][0]["val_top1"] is None
    assert [row["seed"] for row in result["seeds"]] == [0, 1]
    assert result["mean"] == pytest.approx(np.mean([row["top1"] for row in result["seeds"]]))
    trials = [Run(Path(trial["run"])) for trial in result["trials"]]
    assert all(trial.evaluation("test") == {} for trial in trials)
    finals = [Run(Path(row["run"])) for row in result["seeds"]]
    assert all(final.info()["data"]["val"] is None for final in finals)
    held_out = finals[0].info()["data"]["test"]
    assert all(final.info()["data"]["train"] + held_out == 61 for final in finals)
    assert (tmp_path / "sweep" / "report.html").exists()
    # Run again, it finds everything done.
    times = [(final.folder / "model.safetensors").stat().st_mtime_ns for final in finals]
    assert sweep(photos, settings, seeds=2, out=tmp_path / "sweep", device="cpu") == result
    assert times == [(f.folder / "model.safetensors").stat().st_mtime_ns for f in finals]


def test_two_recipes_are_swept_alike_and_compared(photos, tmp_path):
    for name, variant in {"vit": "Ti/8", "resnet": "R50x1"}.items():
        lines = [f'[model]\nvariant = "{variant}"', f'[data]\nsource = "{photos}"\nsize = 32']
        (tmp_path / f"{name}.toml").write_text("\n".join(lines))
    recipes = [tmp_path / "vit.toml", tmp_path / "resnet.toml"]
    settings = ["train.steps=1", "train.batch=4", "data.split=stratified", "optim.lr=[0.01]"]
    result = compare(recipes, settings, seeds=1, out=tmp_path / "both", device="cpu")
    assert [one["name"] for one in result["sweeps"]] == ["vit", "resnet"]
    page = Path(result["report"]).read_text(encoding="utf-8")
    assert all(name in page for name in ("precision", "recall", "blue", "green", "red"))


def test_several_runs_are_compared_on_one_page(run, tmp_path):
    page = report([run.folder, run.folder], tmp_path / "both.html")
    assert page.read_text(encoding="utf-8").count("photos") > 1


def test_data_is_counted_checked_split_packed_and_shown(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wishes = Wishes(check=True, duplicates=True, sheet=True, pack="store", split=True)
    found = look_at_data(photos, wishes, {"data.split": "stratified"})
    assert [broken.name for part in found["check"].parts for broken in part.broken] == [
        "red/broken.jpg"
    ]
    assert Path(found["sheet"]).stat().st_size > 1000
    assert [name for name, _ in found["pack"]] == ["red/broken.jpg"]
    assert sum(len(names) for names in found["split"].values()) == 61
    packed = look_at_data("store", Wishes())
    assert sum(part.total for part in packed["check"].parts) == 60


def test_a_store_trains_to_the_same_weights_as_its_folder(photos, tmp_path):
    settings = SHORT | {"train.steps": 3}
    whole = tmp_path / "whole"
    for name in COLOURS:
        (whole / name).mkdir(parents=True)
        for path in (photos / name).glob("[0-9]*.jpg"):
            (whole / name / path.name).symlink_to(path)
    look_at_data(whole, Wishes(pack=str(tmp_path / "store")), {"data.split": "stratified"})
    runs = [
        vitrail.train(source, settings, out=tmp_path / f"run{i}", device="cpu")
        for i, source in enumerate([whole, tmp_path / "store"])
    ]
    assert same_weights(*runs)


def test_weights_that_know_other_classes_are_told_apart(run, photos, tmp_path):
    stranger = small("vit", classes=7)
    stranger.preprocess = Preprocessing(size=(64, 64))
    with pytest.raises(VitrailError, match="this model knows 7 classes"):
        vitrail.evaluate(stranger, photos, device="cpu")
