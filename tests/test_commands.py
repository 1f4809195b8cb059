"""From a folder of pictures to a measured model, from Python and on the terminal."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image, ImageOps
from safetensors.torch import load_file

import vitrail
from tests.data.gallery import scene
from tests.models import small
from vitrail.cli import main
from vitrail.data.check import CheckOptions, check_dataset
from vitrail.data.opening import open_data
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.store import pack_data
from vitrail.errors import FailureError, VitrailError
from vitrail.evaluation.held_out import select_images
from vitrail.model.vit import ViT
from vitrail.reporting.page import report
from vitrail.runs import Run
from vitrail.training import train as training
from vitrail.training.sweep import compare, sweep
from vitrail.training.train import inspect_run

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
COLORS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 40, 40)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Sixty pictures of three colors, and one file that is none."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    chance = np.random.default_rng(0)
    for name, color in COLORS.items():
        (folder / name).mkdir(parents=True)
        for i in range(20):
            noise = chance.normal(0, 25, (40, 48, 3))
            pixels = (np.array(color) + noise).clip(0, 255).astype(np.uint8)
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
    assert "Inspection" in (run.folder / "report.html").read_text("utf-8")


@pytest.mark.parametrize("freeze", [False, True])
def test_images_that_training_skips_are_named_and_counted(photos, tmp_path, capsys, freeze):
    for part in ("train", "test"):
        shutil.copytree(photos, tmp_path / "photos" / part)
        for i in range(6):
            (tmp_path / "photos" / part / "red" / f"torn{i}.jpg").write_bytes(b"torn")
    settings = {k: v for k, v in SHORT.items() if k != "data.split"} | {"train.steps": 20}
    if freeze:
        weights = tmp_path / "weights.safetensors"
        whole = vitrail.create("Ti/8", classes=3, size=32, width=24, depth=2, heads=2, mlp=48)
        whole.labels, whole.preprocess = tuple(COLORS), Preprocessing(size=(32, 32))
        vitrail.save(whole, weights)
        settings = {"model.init": str(weights), "train.freeze": True, "data.size": 32}
        settings |= {"train.steps": 2, "train.batch": 16}
    settings |= {"data.val": 0.0, "train.evaluations": 0}
    run = vitrail.train(tmp_path / "photos", settings, out=tmp_path / "run", device="cpu")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped")]
    assert len(lines) == 5 + 5 + 1
    assert all(str(tmp_path / "photos") in line for line in lines[:10])
    assert lines[-1] == f"skipped  14 in all, listed in {run.folder / 'report.html'}"
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert all(f"torn{i}.jpg" in page for i in range(6))


def test_classes_that_a_part_lacks_are_named_by_training_as_by_vitrail_data(photos, tmp_path):
    few = tmp_path / "few"
    shutil.copytree(photos, few)
    for path in sorted((few / "green").iterdir())[2:]:
        path.unlink()
    warning = "val has no images of 'green'; add some, or try data.split=stratified"
    assert warning in check_dataset(few, CheckOptions())["check"].warnings()
    settings = SHORT | {"train.steps": 1, "train.evaluations": 0, "data.split": "hash"}
    run = vitrail.train(few, settings, out=tmp_path / "run", device="cpu")
    assert f"warning  {warning}" in run.log()
    assert vitrail.load(run.folder).training_data["every_class"]


def test_a_run_that_cannot_be_looked_into_says_why(run, tmp_path, capsys):
    copy = Run(tmp_path)
    (tmp_path / "config.toml").write_bytes((run.folder / "config.toml").read_bytes())
    inspect_run(copy, "cpu")
    said = capsys.readouterr().err
    assert said.startswith("inspect  failed: ")
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


def test_weights_are_tested_on_what_their_run_held_out_wherever_they_are(run, photos, tmp_path):
    kept = run.evaluation("test")
    away = tmp_path / "elsewhere.safetensors"
    away.write_bytes(run.weights.read_bytes())
    for model in (run.weights, away, vitrail.load(away)):
        found = vitrail.evaluate(model, photos, device="cpu")
        assert found["n"] == kept["n"]
        assert found["loss"] == pytest.approx(kept["loss"], rel=1e-4)


def test_a_model_of_an_earlier_version_is_tested_on_what_its_training_held_out(tmp_path):
    for name, count in (("large", 60), ("small", 2)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / f"{i}.png")
    model = small("vit", classes=2)
    learned = {"source": "photos", "val": 0.1, "test": 0.1, "split": "hash", "train_on": "train"}
    tested = []
    for told in (learned, {**learned, "every_class": True}, {}):
        model.training_data = told
        tested.append(sorted(select_images(model, tmp_path / "photos", "test").source.names))
    assert len(tested[0]) + 1 == len(tested[1])
    assert tested[1] == tested[2] == sorted([*tested[0], "small/0.png"])


def test_another_data_sets_figures_do_not_replace_the_runs_own(run, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "others")
    kept = run.evaluation("test")
    vitrail.evaluate(run.folder, tmp_path / "others", split="train", device="cpu")
    assert run.evaluation("test") == kept
    assert run.evaluation("others-train")["n"] > kept["n"]


def test_val_is_no_test_for_a_run_that_was_trained_on_it(photos, tmp_path):
    settings = SHORT | {"train.steps": 1, "train.evaluations": 0}
    settings |= {"data.train_on": "train+val"}
    run = vitrail.train(photos, settings, out=tmp_path / "all", device="cpu")
    (tmp_path / "alias").symlink_to(photos)  # the same images by another name
    for data in (photos, tmp_path / "alias"):
        with pytest.raises(VitrailError, match=r"trained on all \d+ images of .*\(val\)"):
            vitrail.evaluate(run.folder, data, split="val", device="cpu")
    (run.folder / "training_images.npy").unlink()  # as in runs from before
    with pytest.raises(VitrailError, match=r"trained on all \d+ images of .*\(val\)"):
        vitrail.evaluate(run.folder, photos, split="val", device="cpu")


def test_a_subset_of_everything_but_test_is_known_by_its_images(photos, tmp_path):
    settings = SHORT | {"train.steps": 1, "train.evaluations": 0, "data.subset": 10}
    settings |= {"data.train_on": "train+val"}
    run = vitrail.train(photos, settings, out=tmp_path / "some", device="cpu")
    assert run.info()["data"]["train"] == 10
    found = vitrail.evaluate(run.folder, photos, split="all", device="cpu")
    assert found["left_out"] == 10


def test_weights_do_not_go_on_with_another_test_part(run, photos, tmp_path):
    settings = SHORT | {"model.init": str(run.folder), "data.test": 0.4}
    with pytest.raises(VitrailError, match=r"trained on .* with data.test=0.1, not 0.4: test wou"):
        vitrail.train(photos, settings, out=tmp_path / "other", device="cpu")


def test_a_val_part_that_nothing_can_be_read_of_is_one_line(photos, tmp_path):
    for part in ("train", "val"):
        shutil.copytree(photos, tmp_path / "parts" / part)
    for path in (tmp_path / "parts" / "val").rglob("*.jpg"):
        path.write_bytes(b"no picture at all")
    with pytest.raises(VitrailError, match="no image of val can be decoded"):
        vitrail.train(tmp_path / "parts", SHORT, out=tmp_path / "run", device="cpu")


def test_a_result_that_cannot_be_kept_is_told_all_the_same(run, photos, monkeypatch, capsys):
    def full(*arguments):
        raise FailureError("cannot write test.json")

    monkeypatch.setattr(Run, "write_evaluation", full)
    result = vitrail.evaluate(run.folder, photos, device="cpu")
    assert result["top1"] == run.evaluation("test")["top1"]
    assert "the result is not saved: cannot write test.json" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_other_pictures(photos, tmp_path):
    folder = tmp_path / "growing"
    shutil.copytree(photos, folder)
    settings = SHORT | {"train.steps": 2, "data.split": "hash"}
    run = vitrail.train(folder, settings, out=tmp_path / "run", device="cpu")
    run.update(status="stopped")
    for name in "abcdefgh":  # of which one at least is hashed into train
        shutil.copy(photos / "red" / "01.jpg", folder / "red" / f"{name}.jpg")
    with pytest.raises(VitrailError, match=r"started with other training images \(49 then, 5"):
        vitrail.train(folder, settings, out=tmp_path / "run", resume=True, device="cpu")


def test_broken_pictures_of_val_are_named_and_stay_named(photos, tmp_path):
    settings = SHORT | {"train.steps": 1, "train.evaluations": 1, "data.val": 0.45}
    run = vitrail.train(photos, settings, out=tmp_path / "run", device="cpu")
    seen = [name for name, _ in run.info()["data"]["broken"]]
    tested = [name for name, _ in run.evaluation("test")["broken"]]
    assert seen + tested == ["red/broken.jpg"]
    assert "broken" not in run.info()["best"]
    run.update(status="stopped")
    run = vitrail.train(photos, settings, out=tmp_path / "run", resume=True, device="cpu")
    assert [name for name, _ in run.info()["data"]["broken"]] == seen


@pytest.mark.parametrize("below", ["", "all"])
def test_masked_patches_need_no_classes(photos, tmp_path, capsys, below):
    folder = tmp_path / "unlabeled" / below
    folder.mkdir(parents=True)
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
        shutil.copy(path, folder / f"{number}.jpg")
    settings = SHORT | {"train.objective": "masked", "train.steps": 2, "data.split": "hash"}
    run = vitrail.train(tmp_path / "unlabeled", settings, out=tmp_path / "run", device="cpu")
    assert run.info()["data"]["classes"] == 1
    again = settings | {"model.init": str(run.folder)}
    vitrail.train(tmp_path / "unlabeled", again, out=tmp_path / "more", device="cpu")
    assert "train.freeze" not in capsys.readouterr().err  # a masked run has no head to train alone
    with pytest.raises(VitrailError, match=r"has no sub-folders|one class only"):
        vitrail.train(tmp_path / "unlabeled", SHORT, out=tmp_path / "not", device="cpu")


@pytest.mark.parametrize("target", ["mean", "grid", "pixels"])
def test_masked_patches_first_then_classes(photos, tmp_path, target):
    settings = SHORT | {"train.objective": "masked", "train.masked": target, "train.steps": 8}
    first = vitrail.train(photos, settings, out=tmp_path / "masked", device="cpu")
    events = first.events()
    val = [event for event in events if event["event"] == "val"]
    assert len(val) == 2
    assert val[-1]["loss"] < val[0]["loss"]
    assert "top1" not in val[0]
    assert not first.evaluation("test")
    assert "masked" in (first.folder / "report.html").read_text(encoding="utf-8")
    assert f"next     vitrail train DATA model.init={first.folder}" in first.log()
    kept = vitrail.load(first.folder)
    assert (kept.head, kept.labels) == (None, ())
    settings = SHORT | {"model.init": str(first.folder), "train.steps": 30}
    second = vitrail.train(photos, settings, out=tmp_path / "classes", device="cpu")
    assert second.evaluation("test")["top1"] > 0.5


def test_weights_of_another_shape_are_one_line(run, photos, tmp_path):
    settings = SHORT | {"model.init": str(run.folder), "model.depth": 3}
    with pytest.raises(
        VitrailError, match=r"with depth 2, but the settings request 3; remove model.depth"
    ):
        vitrail.train(photos, settings, out=tmp_path / "other", device="cpu")


def test_few_shots_from_python_and_on_the_terminal(run, photos):
    found = vitrail.fewshot(run.folder, photos, shots=[1, 5], seeds=2, device="cpu")
    assert [(row["shots"], row["seed"]) for row in found["results"]] == [
        (1, 0),
        (1, 1),
        (5, 0),
        (5, 1),
    ]
    assert {row["n"] for row in found["results"]} == {run.evaluation("test")["n"]}
    assert found["results"][-1]["accuracy"] == 1.0
    words = ["fewshot", str(run.folder), str(photos), "--shots", "1,5", "--seeds", "2"]
    told = CliRunner().invoke(main, [*words, "--device", "cpu", "--json"])
    assert json.loads(told.stdout) == found
    shown = CliRunner().invoke(main, [*words, "--device", "cpu", "--split", "train"])
    assert "100.00 ± 0.00%" in shown.stdout


def test_shots_that_are_no_numbers_are_one_line(run, photos):
    told = CliRunner().invoke(main, ["fewshot", str(run.folder), str(photos), "--shots", "few"])
    assert (told.exit_code, told.stderr) == (
        2,
        "Error: --shots few: expected comma-separated numbers, e.g. 1,5,10\n",
    )


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
    with pytest.raises(VitrailError, match=r"train.freeze requires pre-trained weights"):
        vitrail.train("digits/vit", {"train.freeze": True})


def test_a_time_budget_ends_a_run(photos, tmp_path):
    settings = SHORT | {"train.minutes": 0.03, "data.subset": 20, "train.evaluations": 1}
    settings |= {"train.steps": 0, "optim.warmup": 0}
    run = vitrail.train(photos, settings, out=tmp_path / "brief", device="cpu")
    info = run.info()
    assert info["status"] == "finished"
    assert 1.8 <= info["seconds"] < 20
    assert info["step"] > 1
    events = [event for event in run.events() if event["event"] == "train"]
    assert events[-1]["lr"] < settings["optim.lr"]


def test_no_progress_stops_early(photos, tmp_path):
    settings = SHORT | {"train.patience": 2, "train.evaluations": 20, "optim.lr": 1e-9}
    run = vitrail.train(photos, settings, out=tmp_path / "early", device="cpu")
    assert run.info()["step"] < 40
    assert "early stopping" in run.info()["message"]


def test_a_run_that_did_all_its_steps_did_not_stop_early(photos, tmp_path):
    settings = SHORT | {"train.patience": 1, "train.steps": 4, "optim.lr": 1e-9}
    run = vitrail.train(photos, settings, out=tmp_path / "whole", device="cpu")
    assert (run.info()["step"], run.info()["message"]) == (4, "")


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
        {"optim.layer_decay": 0.7, "train.label_smoothing": 0.1, "train.ema": 0.9},
        {"optim.decay": "staircase", "optim.milestones": [0.5], "data.crop": 0.8},
        {"augment.crop": "resize", "augment.area": 0.0},
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


def test_a_sigmoid_run_is_measured_as_it_was_trained(photos, tmp_path):
    settings = SHORT | {"train.objective": "sigmoid", "train.steps": 4, "train.keep": "last"}
    run = vitrail.train(photos, settings, out=tmp_path / "run", device="cpu")
    val = [event for event in run.events() if event["event"] == "val"][-1]
    again = vitrail.evaluate(run.folder, photos, split="val", device="cpu")
    assert again["loss"] == pytest.approx(val["loss"], abs=1e-4)
    model = vitrail.load(shutil.copy(run.weights, tmp_path / "moved.safetensors"))
    image = photos / "red" / "00.jpg"
    with torch.inference_mode():
        logits = model(model.preprocess(image)[None])[0]
    expected = dict(zip(model.labels, logits.sigmoid().tolist(), strict=True))
    assert dict(model.predict(image)) == pytest.approx(expected)
    row = next(vitrail.predict(run.folder, image, device="cpu"))
    found = {one["label"]: one["probability"] for one in row["top"]}
    assert found == pytest.approx(expected, abs=1e-4)
    frozen = settings | {"model.init": str(run.folder), "train.freeze": True}
    frozen.pop("augment.area")
    probe = vitrail.train(photos, frozen, out=tmp_path / "probe", device="cpu")
    val = [event for event in probe.events() if event["event"] == "val"][-1]
    again = vitrail.evaluate(probe.folder, photos, split="val", device="cpu")
    assert again["loss"] == pytest.approx(val["loss"], abs=1e-4)


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
    options = CheckOptions(check=True, duplicates=True, sheet=True, pack="store", split=True)
    found = check_dataset(photos, options, {"data.split": "stratified"})
    assert [broken.name for part in found["check"].parts for broken in part.broken] == [
        "red/broken.jpg"
    ]
    assert Path(found["sheet"]).stat().st_size > 1000
    assert [name for name, _ in found["pack"]] == ["red/broken.jpg"]
    assert sum(len(names) for names in found["split"].values()) == 61
    packed = check_dataset("store", CheckOptions())
    assert sum(part.total for part in packed["check"].parts) == 60


def parts_of(where: Path | str, *settings: str) -> dict[str, list[str]]:
    return check_dataset(where, CheckOptions(split=True), settings)["split"]


@pytest.mark.parametrize("brought", [(), ("train", "test")])
def test_a_store_is_split_as_what_was_packed_would_be(photos, tmp_path, brought):
    folder = tmp_path / "photos"
    for part in brought or ("",):
        shutil.copytree(photos, folder / part, ignore=shutil.ignore_patterns("broken.jpg"))
    store = tmp_path / "store"
    check_dataset(folder, CheckOptions(pack=str(store)))
    assert list(open_data(store, val=0.0, test=0.0).parts) == list(brought or ("train",))
    for settings in ((), ("data.val=0.3",), ("data.split=stratified", "data.val=0.2")):
        assert parts_of(store, *settings) == parts_of(folder, *settings)


def test_a_store_of_parts_that_were_packed_keeps_them(photos, tmp_path):
    pack_data(open_data(photos, val=0.2), tmp_path / "store")
    split = parts_of(photos, "data.val=0.2")
    gone = {"red/broken.jpg"}
    assert {part: set(names) for part, names in parts_of(tmp_path / "store").items()} == {
        part: set(names) - gone for part, names in split.items()
    }


def test_holding_out_what_the_data_brings_is_refused_where_it_is_given(photos, tmp_path):
    for part in ("train", "val", "test"):
        shutil.copytree(photos, tmp_path / "photos" / part)
    for name, settings in {
        "data.val": {"data.val": 0.2},
        "data.test": {"data.test": 0.3},
        "data.split": {"data.split": "stratified"},
    }.items():
        refused = rf"^{name}=.* has no effect: photos already has .*; remove {name}$"
        with pytest.raises(VitrailError, match=refused):
            check_dataset(tmp_path / "photos", CheckOptions(), settings)
        with pytest.raises(VitrailError, match=refused):
            vitrail.train(tmp_path / "photos", settings, out=tmp_path / "run", device="cpu")
        tried = {name: [*settings.values(), *settings.values()]}
        with pytest.raises(VitrailError, match=refused):
            sweep(tmp_path / "photos", tried, out=tmp_path / "sweep", device="cpu")
    assert not (tmp_path / "run").exists()
    check_dataset(tmp_path / "photos", CheckOptions(), {"data.val": 0.0, "data.test": 0.0})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\nval = 0.2\nsplit = "stratified"\n[model]\nvariant = "Ti/8"\n')
    settings = {k: v for k, v in SHORT.items() if k != "data.split"} | {"train.steps": 1}
    run = vitrail.train(
        recipe, settings | {"data.source": str(tmp_path / "photos")}, out=tmp_path / "run"
    )
    assert run.info()["data"]["val"] == 61


def test_what_comes_back_in_a_test_set_is_named_listed_and_left_out(tmp_path):
    large, held = tmp_path / "large", tmp_path / "held"
    for folder, seeds in ((large, range(12)), (held, (3, 8, 20))):
        for seed in seeds:
            place = folder / ("odd" if seed % 2 else "even")
            place.mkdir(parents=True, exist_ok=True)
            scene(seed).save(place / f"{seed}.png")
    other = tmp_path / "other" / "test"
    for name in ("a", "b"):
        (other / name).mkdir(parents=True)
        scene(5 if name == "a" else 30).resize((100, 75)).save(other / name / "1.jpg")
    options = CheckOptions(
        against=(str(held), str(tmp_path / "other")),
        report=str(tmp_path / "page.html"),
        filtered=str(tmp_path / "kept.txt"),
        pack=str(tmp_path / "store"),
    )
    found = check_dataset(large, options, {"data.val": 0.0, "data.test": 0.0})
    gone = ["even/8.png", "odd/3.png", "odd/5.png"]
    assert (found["kept"], found["removed"]) == (9, 3)
    assert sorted(name for name, _ in found["pack"]) == gone
    assert dict(found["pack"])["odd/5.png"] == "duplicate of a/1.jpg in test of other"
    kept = (tmp_path / "kept.txt").read_text().splitlines()
    assert len(kept) == 9
    assert not set(kept) & set(gone)
    store = open_data(tmp_path / "store", val=0.0, test=0.0)
    assert list(store.part("train").names) == kept
    assert "test of other" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("mirrored", [False, True])
def test_mirror_images_count_where_that_is_asked_for(tmp_path, mirrored):
    for seed in range(4):
        for folder, picture in (("a", scene(seed)), ("b", ImageOps.mirror(scene(seed)))):
            place = tmp_path / folder / ("odd" if seed % 2 else "even")
            place.mkdir(parents=True, exist_ok=True)
            picture.save(place / f"{seed}.png")
    options = CheckOptions(against=(str(tmp_path / "b"),), mirrored=mirrored)
    found = check_dataset(tmp_path / "a", options, {"data.val": 0.0, "data.test": 0.0})
    assert sum(len(one.pairs) for one in found["duplicates"].sections) == 4 * mirrored
    with pytest.raises(VitrailError, match=r"--mirrored need --duplicates"):
        check_dataset(tmp_path / "a", CheckOptions(mirrored=True))


def test_a_store_trains_to_the_same_weights_as_its_folder(photos, tmp_path):
    settings = SHORT | {"train.steps": 3}
    whole = tmp_path / "whole"
    for name in COLORS:
        (whole / name).mkdir(parents=True)
        for path in (photos / name).glob("[0-9]*.jpg"):
            (whole / name / path.name).symlink_to(path)
    check_dataset(whole, CheckOptions(pack=str(tmp_path / "store")), {"data.split": "stratified"})
    runs = [
        vitrail.train(source, settings, out=tmp_path / f"run{i}", device="cpu")
        for i, source in enumerate([whole, tmp_path / "store"])
    ]
    assert same_weights(*runs)


def test_weights_that_know_other_classes_are_told_apart(run, photos, tmp_path):
    stranger = small("vit", classes=7)
    stranger.preprocess = Preprocessing(size=(64, 64))
    with pytest.raises(VitrailError, match="this model has 7 classes"):
        vitrail.evaluate(stranger, photos, device="cpu")


def test_features_of_a_frozen_run_serve_what_follows(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    whole = vitrail.create("Ti/8", classes=3, size=32, width=24, depth=2, heads=2, mlp=48)
    whole.labels, whole.preprocess = tuple(COLORS), Preprocessing(size=(32, 32))
    vitrail.save(whole, tmp_path / "whole.safetensors")
    vitrail.evaluate(tmp_path / "whole.safetensors", photos, split="test", device="cpu")
    assert not (tmp_path / "cache" / "features").exists()  # nobody asked for features
    settings = {"model.init": str(tmp_path / "whole.safetensors"), "train.freeze": True}
    settings |= {"data.size": 32, "data.split": "stratified", "train.steps": 20}
    probe = vitrail.train(photos, settings, out=tmp_path / "probe", device="cpu")
    seen = []
    monkeypatch.setattr(ViT, "tokens", lambda self, images: seen.append(len(images)))
    vitrail.fewshot(probe.folder, photos, shots=[1], seeds=1, split="test", device="cpu")
    again = vitrail.evaluate(probe.folder, photos, split="test", device="cpu")
    assert seen == []
    assert again["loss"] == pytest.approx(probe.evaluation("test")["loss"], abs=1e-6)
    vitrail.evaluate(probe.folder, photos, split="val", device="cpu")
    assert seen == []


@pytest.mark.parametrize(
    ("command", "deleted"),
    [
        ("vitrail demo --out demo", True),
        ("vitrail train digits/vit --out demo", False),
        ("", False),
    ],
)
def test_a_demo_replaces_no_run_but_an_earlier_demo(tmp_path, monkeypatch, command, deleted):
    monkeypatch.setattr(training, "train", lambda *args, **options: Run(options["out"]))
    folder = tmp_path / "demo"
    folder.mkdir()
    info = {"recipe": "digits/vit", "command": command}
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")
    training.demo(folder)
    assert folder.exists() != deleted
