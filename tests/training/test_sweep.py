"""One setting for several datasets: chosen by their mean on val, tested once, one table."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.lists import write_lists
from tests.data.pictures import write
from vitrail import runs
from vitrail.cli import main, show_sweeps
from vitrail.config import Config, load_config, with_settings
from vitrail.data.opening import open_run_data
from vitrail.errors import DamagedError, FailureError, VitrailError
from vitrail.evaluation.show import task_table
from vitrail.reporting.sweeps import tables
from vitrail.runs import Run
from vitrail.training.multi_dataset import image_origin
from vitrail.training.resolve import resolve_config
from vitrail.training.sweep import (
    Sweep,
    Trial,
    _on_several_datasets,
    best_val,
    chosen,
    compare,
    sweep,
)
from vitrail.vtab import tasks as vtab
from vitrail.vtab.files import DSPRITES

TINY = {
    "model.variant": "Ti/8",
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "model.mlp": 32,
    "model.init": "",
    "data.size": 32,
    "train.batch": 32,
    "train.evaluations": 1,
    "optim.warmup": 1,
    "optim.lr": [0.01, 0.1],
    "train.steps": [2, 8],
}


@pytest.fixture(scope="module")
def colors(tmp_path_factory) -> list[Path]:
    """1,100 small pictures of ten classes, which their colors tell apart, class after class."""
    folder = tmp_path_factory.mktemp("colors")
    chance = np.random.default_rng(0)
    means = chance.integers(40, 216, (10, 3))
    paths = []
    for number in range(1100):
        pixels = means[number % 10] + chance.normal(0, 30, (32, 32, 3))
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1])
    return paths


def alone_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where datasets lie; nothing can be fetched."""
    vtab.say_once.cache_clear()
    monkeypatch.setenv("VITRAIL_CACHE", str(folder / "cache"))
    monkeypatch.setenv("VITRAIL_DATA", str(folder / "data"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return folder / "data"


@pytest.fixture
def place(monkeypatch, tmp_path) -> Path:
    return alone_in(tmp_path, monkeypatch)


@dataclass(frozen=True)
class Swept:
    """A sweep over two tasks that are there and one that is not, and what it said."""

    folder: Path
    settings: dict[str, Any]
    result: dict[str, Any]
    said: str

    @property
    def present(self) -> list[dict[str, Any]]:
        return [task for task in self.result["tasks"] if not task["absent"]]


@pytest.fixture(scope="module")
def swept(colors, tmp_path_factory) -> Iterator[Swept]:
    folder = tmp_path_factory.mktemp("vtab")
    settings = TINY | {"data.source": ["vtab/cifar100", "vtab/dsprites_ori", "vtab/dmlab"]}
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stderr(said):
        place = alone_in(folder, monkeypatch)
        write_lists(place / "vtab-1k" / "cifar", test=100, pictures=colors)
        write_lists(place / "vtab-1k" / "dsprites_ori", classes=16, test=40)
        out = folder / "sweep"
        result = sweep("vtab/vit", settings, seeds=2, out=out, device="cpu")
        yield Swept(folder, settings, result, said.getvalue())


def test_the_setting_with_the_best_mean_on_the_val200_sets_is_chosen(swept):
    trials = swept.result["trials"]
    assert len(trials) == 4
    for trial in trials:
        assert list(trial["data"]) == ["vtab/cifar100", "vtab/dsprites_ori"]
        vals = [row["val_top1"] for row in trial["data"].values()]
        assert trial["val_top1"] == pytest.approx(np.mean(vals))
        assert all(Run(Path(r["run"])).evaluation("test") == {} for r in trial["data"].values())
    (best,) = [trial for trial in trials if trial["chosen"]]
    assert best["val_top1"] == max(trial["val_top1"] for trial in trials)
    assert swept.result["chosen"] == best["settings"]


def test_every_task_is_retrained_on_its_thousand_and_tested_on_all_of_test(swept):
    found = [(task["title"], task["n"], task["images"]) for task in swept.present]
    assert found == [
        ("CIFAR-100", 100, "the benchmark's 1,000"),
        ("dSpr-Ori", 40, "the benchmark's 1,000"),
    ]
    for task in swept.present:
        for seed, row in enumerate(task["seeds"]):
            run = Run(Path(row["run"]))
            config = load_config(run.folder / "config.toml")
            assert run.info()["data"]["train"] == 1000
            assert run.info()["data"]["val"] is None
            assert run.evaluation("test")["top1"] == row["top1"]
            assert config.seed == seed
            assert config.optim.lr == swept.result["chosen"]["optim.lr"]


def test_flips_are_a_setting_of_the_run_and_told(swept):
    flips = [
        load_config(Path(task["seeds"][0]["run"]) / "config.toml").augment.flip
        for task in swept.present
    ]
    assert flips == [True, False]
    assert "on vtab/dsprites_ori (augment.flip=false)" in swept.said


def test_an_absent_task_is_listed_and_in_no_mean(swept):
    result, (natural, structured) = swept.result, swept.present
    assert result["absent"] == ["vtab/dmlab"]
    assert "cannot be downloaded" in result["tasks"][2]["absent"]
    assert "absent   vtab/dmlab" in swept.said
    assert result["groups"] == [
        {"group": "natural", "tasks": 1, "present": 1, "mean": natural["mean"]},
        {"group": "structured", "tasks": 2, "present": 1, "mean": structured["mean"]},
    ]
    assert result["mean"] == pytest.approx((natural["mean"] + structured["mean"]) / 2)
    by_seed = [np.mean([task["seeds"][i]["top1"] for task in swept.present]) for i in range(2)]
    assert result["std"] == pytest.approx(np.std(by_seed, ddof=1))


def test_the_result_is_kept_as_json_and_as_a_page(swept):
    kept = json.loads((swept.folder / "sweep" / "sweep.json").read_text())
    own = {key: value for key, value in swept.result.items() if key not in ("name", "report")}
    assert kept == own
    page = Path(swept.result["report"]).read_text(encoding="utf-8")
    for words in ("CIFAR-100", "structured mean", "1 of 2 tasks", "absent", "chosen"):
        assert words in page


def test_the_same_command_finds_everything_done(swept):
    out = swept.folder / "sweep"
    again = sweep("vtab/vit", swept.settings, seeds=2, out=out, device="cpu")
    assert again == swept.result


def test_a_terminal_shows_the_table(swept, capsys):
    show_sweeps(swept.result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "group", "top-1", "n"]
    assert lines[1].startswith("CIFAR-100")
    assert lines[3].split() == ["DMLab", "structured", "–", "absent"]
    assert lines[6].endswith("2 of 3 tasks")


def row(title: str, group: str, mean: float | None, absent: str = "") -> dict:
    return {
        "data": f"vtab/{title}",
        "title": title,
        "group": group,
        "images": "" if absent else "own draw of 1,000",
        "absent": absent,
        "mean": mean,
        "std": None,
        "n": 0 if absent else 50,
    }


def test_the_table_has_the_form_of_table_9():
    result = {
        "tasks": [row("DTD", "natural", 0.5), row("DMLab", "structured", None, "not there")],
        "groups": [
            {"group": "natural", "tasks": 1, "present": 1, "mean": 0.5},
            {"group": "structured", "tasks": 1, "present": 0, "mean": None},
        ],
        "seeds": [{"seed": 0, "top1": 0.5}],
        "mean": 0.5,
        "std": None,
        "n": 50,
        "present": 1,
        "absent": ["vtab/DMLab"],
    }
    found = task_table(result, "VTAB")
    assert found.rows == [
        ("DTD", "natural", "50.00", "50", "own draw of 1,000"),
        ("DMLab", "structured", "–", "", "absent"),
        ("natural mean", "", "50.00", "", "1 of 1 tasks"),
        ("structured mean", "", "–", "", "0 of 1 tasks"),
        ("mean", "", "50.00", "50", "1 of 2 tasks"),
    ]
    for words in ("percent", "1 seed.", "vtab/DMLab"):
        assert words in found.note
    assert found.strong == {2, 3, 4}


def test_the_trials_are_a_table_too():
    trials = [
        {"settings": {"optim.lr": 0.1}, "val_top1": None, "val_loss": None, "chosen": False},
        {"settings": {"optim.lr": 0.01}, "val_top1": 0.75, "val_loss": 0.5, "chosen": True},
    ]
    (found,) = tables({"trials": trials, "chosen": {"optim.lr": 0.01}})
    assert found.columns == ("optim.lr", "val top-1", "val loss", "")
    assert found.rows == [("0.1", "–", "–", "diverged"), ("0.01", "75.00", "0.5000", "chosen")]
    assert found.strong == {1}


def test_retraining_that_diverges_is_one_line_however_often_it_is_tried(place, tmp_path):
    write_lists(place / "vtab" / "dtd", classes=47)
    settings = TINY | {"data.source": "vtab/dtd", "optim.lr": [0.01], "train.steps": [1]}
    out = tmp_path / "sweep"
    sweep("vtab/vit", settings, seeds=1, out=out, device="cpu")
    Run(out / "seed0").update(
        status="failed", message="loss is nan at step 1; try a lower optim.lr"
    )
    with pytest.raises(FailureError, match=r"seed0: loss is nan at step 1; try a lower optim.lr"):
        sweep("vtab/vit", settings, seeds=1, out=out, device="cpu")


def trial(folder: Path, status: str, top1: float) -> Trial:
    """One that was evaluated once, and then ended like that."""
    run = runs.create(folder, Config(), {}, resume=False)
    run.log_event(event="val", step=1, top1=top1, loss=1.0)
    run.update(status=status, message="loss is nan at step 2")
    return Trial({"optim.lr": top1}, {"digits": run})


def test_a_trial_that_diverged_does_not_win_by_what_it_was_before(tmp_path):
    diverged = trial(tmp_path / "a", "failed", 0.9)
    finished = trial(tmp_path / "b", "finished", 0.1)
    assert best_val(diverged.runs["digits"]) == {}
    assert chosen([diverged, finished]) is finished
    with pytest.raises(FailureError, match="every trial failed; the last: loss is nan at step 2"):
        chosen([diverged])


def test_a_sweep_chooses_as_its_runs_do(tmp_path):
    """By balanced accuracy with class weights, and by the loss where that ties."""
    trials = []
    for name, weights in (("a", "balanced"), ("b", "balanced"), ("c", "balanced")):
        config = with_settings(Config(), {"train.class_weights": weights})
        run = runs.create(tmp_path / name, config, {}, resume=False)
        low = 0.2 if name == "a" else 0.5
        loss = 1.0 if name == "b" else 0.5
        run.log_event(event="val", step=1, top1=0.9, balanced_accuracy=low / 2, loss=2.0)
        run.log_event(event="val", step=2, top1=0.9 - low, balanced_accuracy=low, loss=loss)
        run.update(status="finished")
        trials.append(Trial({"optim.lr": low}, {"digits": run}, balanced=True))
    assert [best_val(one.runs["digits"])["step"] for one in trials] == [2, 2, 2]
    assert chosen(trials) is trials[2]


def test_a_task_that_comes_later_may_change_the_choice(place, tmp_path):
    write_lists(place / "vtab" / "dtd", classes=47)
    settings = TINY | {"train.steps": [1], "data.source": ["vtab/dtd", "vtab/dmlab"]}
    out = tmp_path / "sweep"
    first = sweep("vtab/vit", settings, seeds=1, out=out, device="cpu")
    (won,) = [row for row in first["trials"] if row["chosen"]]
    # What wins with the new task too is left to chance no longer.
    metrics = Path(won["data"]["vtab/dtd"]["run"]) / "metrics.jsonl"
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    worse = [event | {"top1": -5.0} if event["event"] == "val" else event for event in events]
    metrics.write_text("".join(json.dumps(event) + "\n" for event in worse))
    write_lists(place / "vtab" / "dmlab", classes=6)
    second = sweep("vtab/vit", settings, seeds=1, out=out, device="cpu")
    assert second["absent"] == []
    assert second["chosen"] != first["chosen"]
    paths = [Path(result["tasks"][0]["seeds"][0]["run"]) for result in (first, second)]
    assert [load_config(path / "config.toml").optim.lr for path in paths] == [
        result["chosen"]["optim.lr"] for result in (first, second)
    ]


def test_a_grid_can_be_extended_in_the_same_folder(tmp_path, capsys):
    def extended(**more: Any) -> tuple[dict[str, Any], str]:
        given = TINY | {
            "data.size": 8,
            "model.variant": "Ti/4",
            "train.steps": 12,
            "data.subset": 64,
        }
        given |= {"train.batch": 64} | {name.replace("_", ".", 1): x for name, x in more.items()}
        result = sweep("digits", given, seeds=1, out=tmp_path, device="cpu")
        return result, capsys.readouterr().err

    first, _ = extended(optim_lr=[1e-6])
    (before,) = first["seeds"]
    same, said = extended(optim_lr=[1e-6, 1e-7])
    assert (same["chosen"], same["seeds"]) == (first["chosen"], first["seeds"])
    assert (said.count("trial  "), said.count("retrain  ")) == (1, 0)
    # Another winner is retrained beside the old one, which counts no longer.
    second, said = extended(optim_lr=[1e-6, 0.1])
    assert second["chosen"] == {"optim.lr": 0.1}
    assert (said.count("trial  "), said.count("retrain  ")) == (1, 1)
    (after,) = second["seeds"]
    assert load_config(Path(after["run"]) / "config.toml").optim.lr == 0.1
    assert load_config(Path(before["run"]) / "config.toml").optim.lr == 1e-6
    assert str(tmp_path) in after["run"] != before["run"]
    # One more setting to try: what was trained with its present value is known.
    third, said = extended(optim_lr=[1e-6, 0.1], system_log_steps=[10, 1])
    assert len({trial["run"] for trial in third["trials"]}) == 4
    assert (said.count("trial  "), said.count("retrain  ")) == (2, 0)
    with pytest.raises(
        VitrailError, match=r"was started with .*train.steps=12, not .*train.steps=11"
    ):
        extended(optim_lr=[0.1], train_steps=11)


RULE = "finetune/bit_hyperrule"


def test_without_a_grid_the_hyperrule_is_tried_and_retrained_alike(tmp_path, monkeypatch, capsys):
    """With val the data may be over a threshold of the rule, and without it below."""
    final = load_config(RULE, ["data.source=digits", "data.train_on=train+val"])
    images = len(open_run_data(final).part("train").targets)
    monkeypatch.setattr(
        "vitrail.training.build.hyperrule", lambda n, _: {"train.steps": 2 if n == images else 1}
    )
    given = DIGITS | {"data.source": "digits", "data.subset": 0}
    result = sweep(RULE, given, seeds=1, out=tmp_path, device="cpu")
    (trial,), (seed,) = result["trials"], result["seeds"]
    assert (trial["settings"], trial["chosen"], result["chosen"]) == ({}, True, {})
    configs = [load_config(Path(one["run"]) / "config.toml") for one in (trial, seed)]
    assert [one.train.steps for one in configs] == [2, 2]
    assert [one.data.train_on for one in configs] == ["train", "train+val"]
    assert "chosen   the settings of the recipe  val" in capsys.readouterr().err
    show_sweeps(result)
    assert f"n = {seed['n']}, 1 seed)" in capsys.readouterr().out


# Several recipes.

DIGITS = {name: value for name, value in TINY.items() if name not in ("optim.lr", "train.steps")}
DIGITS |= {"model.variant": "Ti/4", "data.size": 8, "data.subset": 200, "train.batch": 64}


def write_recipe(path: Path, **sections: str) -> Path:
    path.write_text("\n".join(f"[{name}]\n{lines}" for name, lines in sections.items()))
    return path


def slow_recipe(folder: Path) -> Path:
    """Learns nothing with any of its learning rates, and has splits of its own."""
    return write_recipe(
        folder / "slow.toml",
        data='source = "digits"\nval = 0.3',
        train="steps = 60",
        sweep='"optim.lr" = [1e-9, 1e-8]',
    )


@pytest.fixture
def slow(tmp_path) -> Path:
    return slow_recipe(tmp_path)


def compared(recipes: list[str | Path], out: Path, seeds: int = 2, **more: Any) -> dict[str, Any]:
    settings = DIGITS | {name.replace("_", ".", 1): x for name, x in more.items()}
    return compare(recipes, settings, seeds=seeds, out=out, device="cpu", best=True)


def finals(folder: Path) -> list[str]:
    """The runs on train and val."""
    found = [run for run in runs.find_runs(folder, "**/run.json") if run.evaluation("test")]
    return sorted(str(run.folder.relative_to(folder)) for run in found)


def compared_with_rule(folder: Path) -> tuple[dict[str, Any], str]:
    """A grid and BiT's HyperRule, which has none, and what was said."""
    given = {"data_source": "digits", "optim_clip": 1.0, "train_batch": 8}
    with redirect_stderr(io.StringIO()) as said:
        result = compared([slow_recipe(folder), RULE], folder / "out", seeds=1, **given)
    return result, said.getvalue()


@pytest.fixture(scope="module")
def for_best(tmp_path_factory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("best")
    return folder, *compared_with_rule(folder)


def test_the_best_trial_of_all_recipes_is_retrained_and_no_other(for_best):
    folder, result, said = for_best
    lost, won = result["sweeps"]
    assert (lost["name"], won["name"], result["best"]) == ("slow", RULE, RULE)
    assert (len(lost["trials"]), lost["chosen"], won["chosen"]) == (2, None, {})
    (trial,) = won["trials"]
    assert trial["val_top1"] > max(one["val_top1"] for one in lost["trials"])
    assert [one["chosen"] for one in (trial, *lost["trials"])] == [True, False, False]
    assert finals(folder / "out") == ["finetune-bit_hyperrule/seed0"]
    assert won["mean"] == won["seeds"][0]["top1"]
    assert "seeds" not in lost
    assert f"chosen   {RULE}  val" in said


def test_trials_of_all_recipes_have_the_same_val_images(for_best):
    _, result, said = for_best
    runs_of = [Path(one["trials"][0]["run"]) for one in result["sweeps"]]
    configs = [load_config(run / "config.toml") for run in runs_of]
    assert [one.train.steps for one in configs] == [60, 500]  # what the rule sets is not shared
    first, second = (open_run_data(one) for one in configs)
    assert first.val.names == second.val.names
    assert first.train.names == second.train.names
    assert f"data     {RULE} with data.val=0.3, as slow" in said


def test_all_trials_are_on_the_page_and_in_the_json(for_best, capsys):
    folder, result, _ = for_best
    assert json.loads((folder / "out" / "sweep.json").read_text()) == result
    page = Path(result["report"]).read_text(encoding="utf-8")
    for words in ("Trials of slow", "1e-08", f"Trials of {RULE}", "the recipe"):
        assert words in page
    show_sweeps(result)
    shown = capsys.readouterr().out
    highest = max(one["val_top1"] for one in result["sweeps"][0]["trials"])
    assert f"slow  val {100 * highest:.2f}%, not retrained" in shown
    assert f"{RULE}  test" in shown


def test_the_same_comparison_finds_everything_done(for_best):
    folder, result, _ = for_best
    again, said = compared_with_rule(folder)
    assert again == result
    assert "trial  " not in said
    assert "retrain  " not in said


def test_an_interrupted_comparison_is_continued(slow, tmp_path, monkeypatch, capsys):
    fast = write_recipe(
        tmp_path / "fast.toml",
        data='source = "digits"',
        train="steps = 30",
        sweep='"optim.lr" = [0.1]',
    )
    ended = Sweep.retrain
    monkeypatch.setattr(Sweep, "retrain", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compared([slow, fast], tmp_path / "out", seeds=1)
    monkeypatch.setattr(Sweep, "retrain", ended)
    capsys.readouterr()
    result = compared([slow, fast], tmp_path / "out", seeds=1)
    said = capsys.readouterr().err
    assert (said.count("trial  "), said.count("retrain  ")) == (0, 1)
    assert result["best"] == "fast"
    (seed,) = result["sweeps"][1]["seeds"]
    assert finals(tmp_path / "out") == [str(Path(seed["run"]).relative_to(tmp_path / "out"))]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"data": 'source = "cifar10"'}, r"data.source of other is not that of slow; set data.sou"),
        ({"data": "val = 0.1"}, r"data.source of other is not that of slow; set data.source"),
        (
            {"data": 'source = "digits"', "train": 'class_weights = "balanced"'},
            r"train.class_weights of other is not that of slow; set train.class_weights",
        ),
        ({"sweep": '"data.source" = ["digits"]'}, "not that of slow; set data.source"),
        (
            {"data": 'source = "digits"', "train": 'objective = "masked"'},
            "a sweep chooses by val top-1",
        ),
    ],
)
def test_trials_that_cannot_be_compared_are_one_line(slow, tmp_path, second, message):
    other = write_recipe(tmp_path / "other.toml", **second)
    with pytest.raises(VitrailError, match=message):
        compared([slow, other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def several(tmp_path, place) -> list[Path]:
    """The same model on digits, on colors, and on data that is not there."""
    for label in range(3):
        for part, count in {"train": 12, "test": 4}.items():
            for number in range(count):
                pixels = np.full((8, 8, 3), 80 * label + number, np.uint8)
                path = tmp_path / "colors" / part / f"{label}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    sources = {"digits": "digits", "colors": tmp_path / "colors", "pets": "pets"}
    return [
        write_recipe(
            tmp_path / f"{name}.toml",
            data=f'source = "{source}"\nval = 0.2\nsplit = "stratified"',
            train="steps = 8",
            sweep='"optim.lr" = [0.01, 0.1]',
        )
        for name, source in sources.items()
    ]


def test_one_model_on_several_datasets_gets_their_average(several, tmp_path, capsys):
    result = compare(several, DIGITS | {"data.subset": 30}, seeds=2, out=tmp_path / "out")
    assert [one["name"] for one in result["sweeps"]] == ["digits", "colors"]
    found = result["average"]
    digits, colors, absent = found["datasets"]
    assert (digits["data"], colors["n"], absent["data"]) == ("digits", 12, "pets")
    assert "cannot be downloaded" in absent["absent"]
    assert "absent   pets: pets is not in" in capsys.readouterr().err
    for row, one in zip((digits, colors), result["sweeps"], strict=True):
        assert (row["seeds"], row["mean"], row["absent"]) == (one["seeds"], one["mean"], "")
    by_seed = [
        (digits["seeds"][seed]["top1"] + colors["seeds"][seed]["top1"]) / 2 for seed in range(2)
    ]
    assert [row["top1"] for row in found["seeds"]] == pytest.approx(by_seed)
    assert found["mean"] == pytest.approx(np.mean(by_seed))
    assert found["std"] == pytest.approx(np.std(by_seed, ddof=1))
    assert (found["present"], found["absent"]) == (2, ["pets"])
    assert json.loads((tmp_path / "out" / "sweep.json").read_text()) == result
    page = Path(result["report"]).read_text(encoding="utf-8")
    for words in ("Average over datasets", "2 of 3 datasets", "excluded from the average: pets"):
        assert words in page
    show_sweeps(result)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["dataset", "seed", "0", "seed", "1", "mean", "n"] in shown
    assert ["pets", "–", "–", "–", "absent"] in shown
    (last,) = [words for words in shown if words and words[0] == "average"]
    assert last[1:3] == [f"{100 * mean:.2f}" for mean in by_seed]
    assert last[-4:] == ["2", "of", "3", "datasets"]


@pytest.mark.parametrize(
    ("recipes", "settings", "averaged"),
    [
        (["cifar10", "pets"], [], True),
        (["cifar10", "pets"], ["model.init=L/16-in21k"], True),
        (["cifar10", "pets"], ["data.source=digits"], False),
        (["cifar10"], [], False),
        (["cifar10", "imagenet_l16_512"], [], False),
        (["cifar10", "imagenet_l16_512"], ["model.init=L/16-in21k"], True),
        (["cifar10", "pets"], ['data.source=["digits","cifar10"]'], False),
    ],
)
def test_an_average_is_of_one_model_on_different_data(recipes, settings, averaged):
    resolved = [resolve_config(f"finetune/{one}", settings, lists=True) for one in recipes]
    assert _on_several_datasets([one.config for one in resolved]) is averaged


def test_no_dataset_at_all_is_one_line(several, tmp_path):
    several[1].write_text(several[2].read_text().replace("pets", "cifar10"))
    with pytest.raises(FailureError, match="none of 2 datasets can be opened; cifar10 is not in"):
        compare(several[1:], DIGITS, out=tmp_path / "out")


def test_a_damaged_file_is_no_absence(place, tmp_path):
    write_lists(place / "vtab" / "dtd", classes=47)
    (place / "dsprites").mkdir()
    (place / "dsprites" / DSPRITES).write_bytes(b"PK damaged")
    settings = TINY | {"data.source": ["vtab/dtd", "vtab/dsprites_ori"]}
    with pytest.raises(DamagedError, match=r"cannot read .*dsprites"):
        sweep("vtab/vit", settings, out=tmp_path / "x", device="cpu")
    assert not (tmp_path / "x").exists()


def test_who_drew_the_thousand_images_is_told(place):
    one = write(place / "one.png")
    for part, n in {"train": 800, "val": 200, "test": 94}.items():
        for i in range(n):
            path = place / "vtab" / "dtd" / part / f"c{i % 47:02d}" / f"{part}{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(one)
    assert image_origin("vtab/dtd") == "1,000 as the data has them"
    (place / "vtab" / "dtd" / "val" / "c00" / "more.png").symlink_to(one)
    assert image_origin("vtab/dtd") == "own draw of 1,000"
    assert image_origin("vtab/svhn") == "own draw of 1,000"
    write_lists(place / "vtab" / "dtd", classes=47)
    assert image_origin("vtab/dtd") == "the benchmark's 1,000"


def test_nothing_there_at_all_is_one_line(place, tmp_path):
    settings = TINY | {"data.source": ["vtab/dmlab", "vtab/resisc45"]}
    with pytest.raises(
        FailureError, match="none of 2 datasets can be opened; vtab/dmlab cannot be"
    ):
        sweep("vtab/vit", settings, out=tmp_path / "x", device="cpu")


def test_a_name_that_nobody_knows_is_a_mistake_and_not_an_absence(place, tmp_path):
    write_lists(place / "vtab" / "dtd", classes=47)
    settings = TINY | {"data.source": ["vtab/dtd", "vtab/cifar10O"]}
    with pytest.raises(VitrailError, match="did you mean 'vtab/cifar100'") as caught:
        sweep("vtab/vit", settings, out=tmp_path / "x", device="cpu")
    assert caught.value.exit_code == 2


def test_one_data_set_leaves_the_recipes_list_aside():
    order = resolve_config("vtab/vit", {"data.source": "vtab/pets"}, lists=True)
    assert order.config.data.source == "vtab/pets"
    assert "data.source" not in order.config.sweep
    assert "optim.lr" in order.config.sweep


def test_a_task_brings_bits_settings_and_a_user_can_change_them():
    assert resolve_config("vtab/dsprites_ori").config.augment.flip is False
    assert resolve_config("vtab/vit", ["data.source=vtab/dmlab"]).config.augment.crop == "none"
    assert resolve_config("vtab/pets").config.augment.flip is True
    settings = ["data.source=vtab/dsprites_ori", "augment.flip=true"]
    assert resolve_config("vtab/vit", settings).config.augment.flip is True
    assert resolve_config("vtab/vit", settings[::-1]).config.augment.flip is True


def test_a_recipe_that_names_a_task_gets_its_settings_too(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[augment]\ncrop = "resize"\n[data]\nsource = "vtab/dsprites_loc"\n')
    order = resolve_config(recipe)
    assert (order.config.augment.flip, order.config.augment.crop) == (False, "resize")
    assert order.changed == ()
    assert load_config(recipe) == order.config
    # Other data does not inherit what the recipe's had set for itself.
    assert resolve_config(recipe, ["data.source=vtab/pets"]).config.augment.flip is True
    assert resolve_config(recipe, ["data.source=vtab/dmlab"]).config.augment.crop == "none"
    assert load_config(recipe, ["augment.flip=true"]).augment.flip is True


def test_the_verb_config_shows_what_a_task_brings(capsys):
    main(["config", "vtab/vit", "data.source=vtab/dsprites_ori"], standalone_mode=False)
    assert "\nflip = false" in capsys.readouterr().out
