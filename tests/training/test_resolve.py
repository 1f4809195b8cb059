"""Where runs, sweeps and comparisons are written, and how an unfinished one is found again."""

import json
from pathlib import Path

import pytest

import vitrail
from vitrail import runs
from vitrail.runs import Run
from vitrail.training.resolve import comparison_folder, resolve_config
from vitrail.training.sweep import sweep

SHORT = {"train.steps": 2, "train.evaluations": 0, "data.subset": 32, "train.batch": 8}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "birds"):
        (tmp_path / name).mkdir()
    return tmp_path


def begin(
    folder: str, what: str, *settings: str, status: str = "stopped", started: str = ""
) -> Run:
    """A run folder as an interrupted or finished run leaves it."""
    order = resolve_config(what, settings, lists=True)
    run = runs.create(Path(folder), order.config, order.facts(), resume=False)
    run.update(status=status, started=started or runs.now())
    run.checkpoint.touch()
    return run


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("photos", "photos"),
        ("./photos/", "photos"),
        ("digits/vit", "digits-vit"),
        ("digits", "digits"),
        ("https://example.org/sets/flowers-{000..012}.tar", "flowers"),
        ("shards/*.tar.gz", "shards"),
        (f"{'long' * 60}.tar", "long" * 10),
    ],
)
def test_a_folder_has_a_short_name_whatever_is_set(what, name):
    settings = ["train.freeze=true", "model.init=/weights/vit_tiny_patch16_224.safetensors"]
    for given in ([], settings):
        assert resolve_config(what, given).run_folder(None, resume=False) == (
            Path("runs") / name,
            True,
        )


def test_the_data_of_this_folder_are_named_after_it(here, monkeypatch):
    monkeypatch.chdir(here / "photos")
    assert resolve_config(".").run_folder(None, resume=False)[0] == Path("runs/photos")


def test_runs_are_numbered_and_the_next_command_names_the_folder(capsys):
    first, second = (vitrail.train("digits/vit", SHORT, device="cpu") for _ in range(2))
    assert first.folder == Path("runs/digits-vit")
    assert second.folder == Path("runs/digits-vit-2")
    assert second.info()["name"] == "digits-vit-2"
    assert "vitrail predict runs/digits-vit-2 photo.jpg" in capsys.readouterr().err
    assert (second.folder / "report.html").exists()
    assert second.info()["model"]["keep_head"] is False  # nothing is taken from the first run


def test_a_name_is_free_once_its_run_has_failed_without_a_checkpoint():
    begin("runs/photos", "photos", status="failed").checkpoint.unlink()
    with runs.open_folder(Path("runs/photos"), numbered=True) as folder:
        assert folder == Path("runs/photos")


def test_what_is_no_run_is_left_alone(here):
    (here / "runs" / "photos").mkdir(parents=True)
    (here / "runs" / "photos" / "notes.txt").touch()
    (here / "runs" / "photos-2").touch()
    with runs.open_folder(Path("runs/photos"), numbered=True) as folder:
        assert folder == Path("runs/photos-3")


def test_two_processes_that_begin_together_get_two_folders(monkeypatch):
    def held_elsewhere(folder):
        raise runs.BusyError("another process is training")

    held = runs.lock_folder
    monkeypatch.setattr(
        runs, "lock_folder", lambda one: (held if one.name[-1] == "2" else held_elsewhere)(one)
    )
    with runs.open_folder(Path("runs/photos"), numbered=True) as folder:
        assert folder == Path("runs/photos-2")


def test_resume_finds_the_newest_unfinished_run_with_the_same_settings(capsys):
    begin("runs/photos", "photos", started="2026-01-01")
    begin("runs/photos-2", "photos", "train.freeze=true", started="2026-01-02")
    begin("runs/mine", "photos", "train.freeze=true", "system.workers=3", started="2026-01-03")
    begin("runs/photos-3", "photos", "train.freeze=true", started="2026-01-04", status="finished")
    begin("runs/birds", "birds", "train.freeze=true", started="2026-01-05")
    begin("runs/sweep/trials/one", "photos", "train.freeze=true", started="2026-01-06")

    def resumed(*settings: str) -> tuple[Path, bool]:
        return resolve_config("photos", settings).run_folder(None, resume=True)

    assert resumed() == (Path("runs/photos"), False)
    assert resumed("train.freeze=true") == (Path("runs/mine"), False)
    Run(Path("runs/mine")).update(status="finished")
    assert resumed("train.freeze=true", "system.workers=9") == (Path("runs/photos-2"), False)
    Run(Path("runs/photos-2")).update(status="finished")
    assert resumed("train.freeze=true") == (Path("runs/photos-3"), False)
    assert capsys.readouterr().err == ""
    assert resumed("optim.lr=0.5") == (Path("runs/photos"), True)
    assert "to resume" in capsys.readouterr().err


def test_resume_without_such_a_run_starts_one_in_place_of_a_failed_one():
    failed = begin("runs/digits-vit", "digits/vit", status="failed")
    failed.checkpoint.unlink()
    run = vitrail.train("digits/vit", SHORT, resume=True, device="cpu")
    assert (run.folder, run.info()["status"]) == (Path("runs/digits-vit"), "finished")


def test_a_run_folder_and_out_are_taken_as_they_are():
    begin("runs/photos", "photos")
    assert resolve_config("runs/photos").run_folder(None, resume=True) == (
        Path("runs/photos"),
        False,
    )
    assert resolve_config("photos").run_folder("my place", resume=True) == (Path("my place"), False)


def test_a_new_run_says_how_to_continue_the_old_one(capsys):
    run = begin("runs/photos", "photos")
    assert resolve_config("photos").run_folder(None, resume=False) == (Path("runs/photos"), True)
    assert "vitrail train runs/photos --resume" in capsys.readouterr().err
    run.update(status="finished")
    resolve_config("photos").run_folder(None, resume=False)
    assert capsys.readouterr().err == ""


def test_a_damaged_run_is_in_nobodys_way():
    begin("runs/photos", "photos")
    Path("runs/photos/config.toml").write_text("[")
    assert resolve_config("photos").run_folder(None, resume=True) == (Path("runs/photos"), True)


def test_the_same_sweep_is_continued_and_another_gets_a_number():
    grid = "optim.lr=[0.1,0.2]"
    first = resolve_config("photos", [grid], lists=True)
    assert first.sweep_folder(None) == (Path("runs/photos-sweep"), True)
    begin("runs/photos-sweep/trials/trial", "photos", grid)
    assert first.sweep_folder(None) == (Path("runs/photos-sweep"), False)
    other = resolve_config("photos", ["optim.lr=[0.3]"], lists=True)
    assert other.sweep_folder(None) == (Path("runs/photos-sweep"), True)
    with runs.open_folder(other.sweep_folder(None)[0], numbered=True) as folder:
        assert folder == Path("runs/photos-sweep-2")


def test_a_sweep_in_a_folder_named_after_its_settings_is_continued():
    grid = "optim.lr=[0.1,0.2]"
    old = "runs/photos+sweep.optim.lr=-0.1-0.2"
    begin(f"{old}/trials/trial+optim.lr=0.1", "photos", grid)
    assert resolve_config("photos", [grid], lists=True).sweep_folder(None) == (Path(old), False)


def test_a_sweep_over_several_data_sets_is_continued():
    sources = 'data.source=["photos","birds"]'
    begin("runs/x-sweep/photos/trials/trial", "flowers/vit", sources)
    found = resolve_config("flowers/vit", [sources], lists=True).sweep_folder(None)
    assert found == (Path("runs/x-sweep"), False)


def test_the_same_comparison_is_continued_and_another_gets_a_number():
    def place(*recipes: str, grid: str = "optim.lr=[0.1]") -> Path:
        return comparison_folder(
            {name.replace("/", "-"): resolve_config(name, [grid], lists=True) for name in recipes}
        )

    assert place("flowers/vit", "flowers/resnet") == Path("runs/comparison")
    begin("runs/comparison/flowers-vit/trials/trial", "flowers/vit", "optim.lr=[0.1]")
    assert place("flowers/vit", "flowers/resnet") == Path("runs/comparison")
    assert place("flowers/resnet", "digits/vit") == Path("runs/comparison-2")
    assert place("flowers/vit", "flowers/resnet", grid="optim.lr=[0.2]") == Path(
        "runs/comparison-2"
    )


def test_a_sweep_writes_all_of_it_into_its_numbered_folder():
    begin("runs/digits-vit-sweep/trials/trial", "digits/vit", "optim.lr=[9.0]")
    settings = SHORT | {"optim.lr": [0.01], "train.evaluations": 1}
    result = sweep("digits/vit", settings, seeds=1, device="cpu")
    folder = Path("runs/digits-vit-sweep-2")
    assert result["report"] == str(folder / "report.html")
    assert json.loads((folder / "sweep.json").read_text())["seeds"][0]["run"] == str(
        folder / "seed0"
    )
    assert sweep("digits/vit", settings, seeds=1, device="cpu") == result


@pytest.mark.parametrize(
    ("what", "settings", "warmup"),
    [
        ("finetune/cifar10", [], 500),
        ("finetune/cifar10", ["train.steps=1000"], 50),
        ("finetune/cifar10", ["train.steps=20000"], 500),  # a longer run keeps it
        ("finetune/cifar10", ["train.steps=1000", "optim.warmup=500"], 500),
        ("cifar10/vit", ["train.epochs=30"], 192),
        ("cifar10/vit", ["train.steps=1000"], 100),  # the recipe counts epochs
        ("cifar10/vit", ["train.minutes=5"], 1920),
    ],
)
def test_a_shorter_run_has_a_shorter_warmup(what, settings, warmup):
    assert resolve_config(what, settings).config.optim.warmup == warmup
