"""What a person sees: nothing on a terminal is obeyed, and progress is told in a log, too."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image
from rich.cells import cell_len

import vitrail
from tests.data.pictures import encoded, photo, write_tar
from tests.models import small
from vitrail import console
from vitrail.cli import main
from vitrail.config import load_config
from vitrail.console import (
    UNSAFE,
    byte_progress,
    count_progress,
    echo,
    escaped,
    log_progress,
    print_table,
    say,
)
from vitrail.data.preprocessing import Preprocessing
from vitrail.files import hash_mismatch
from vitrail.runs import Run
from vitrail.training.train import train_config

SHORT = ["train.steps=3", "train.evaluations=1", "data.subset=32", "train.batch=8"]
HOSTILE = "red\x1b[31m\x9b2J\x07\u202egnp"
"""A terminal would change its color, clear the screen, ring, and write backwards."""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def assert_safe(result: Result, code: int) -> None:
    assert result.exit_code == code, result.output
    assert "red" in result.output
    assert not UNSAFE.search(result.output.replace("\n", ""))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    found = small("vit", size=32, classes=2)
    found.preprocess, found.labels = Preprocessing(size=(32, 32)), (HOSTILE, "plain")
    vitrail.save(found, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_commands_to_a_terminal_are_written_out(capsys):
    echo(f"one\n{HOSTILE}")
    echo(json.dumps({"label": HOSTILE}, ensure_ascii=False))
    say(f"{HOSTILE}\nforged")
    print_table(("label", "n"), [(HOSTILE, "1"), ("two\nlines", "2")])
    written = capsys.readouterr()
    assert written.out.splitlines()[:2] == ["one", escaped(HOSTILE)]
    assert json.loads(written.out.splitlines()[2]) == {"label": HOSTILE}
    assert len(written.out.splitlines()) == 6
    assert len(written.err.splitlines()) == 1
    assert not UNSAFE.search((written.out + written.err).replace("\n", ""))
    assert escaped("naïve 犬 \N{DOG FACE}\t→ שלום") == "naïve 犬 \N{DOG FACE}\t→ שלום"


def test_labels_and_paths_of_predictions_are_shown_not_obeyed(model, tmp_path):
    photo().save(tmp_path / "plain.png")
    (tmp_path / "plain.png").rename(tmp_path / f"{HOSTILE}.png")
    (tmp_path / f"broken {HOSTILE}.png").write_bytes(b"nothing")
    images = sorted(tmp_path.glob("*.png"))
    for more in ((), ("--json",), ("--csv", "-")):
        assert_safe(invoke("predict", model, *images, *more), 0)
    row = json.loads(invoke("predict", model, images[1], "--json").stdout)
    assert HOSTILE in {guess["label"] for guess in row["top"]}
    assert_safe(invoke("predict", model, tmp_path / f"{HOSTILE}.jpg"), 1)


def test_names_in_a_tar_are_shown_not_obeyed(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    files = {f"{HOSTILE}/{HOSTILE}.png": b"broken", f"{HOSTILE}/1.png": encoded(1)}
    write_tar(tmp_path / "a.tar", files | {"other/1.png": encoded(2)})
    for more in (("--check",), ("--split",), ("--json",)):
        assert_safe(invoke("data", tmp_path / "a.tar", "data.val=0", "data.test=0", *more), 0)


def test_a_recipe_and_a_run_are_shown_not_obeyed(tmp_path):
    (tmp_path / "bad.toml").write_text('"red\\u001b[31m" = 1\n')
    assert_safe(invoke("config", tmp_path / "bad.toml"), 2)
    (tmp_path / "good.toml").write_text(
        f'[data]\nsource = "{ascii(HOSTILE)[1:-1]}"\n'.replace("\\x", "\\u00")
    )
    found = invoke("config", tmp_path / "good.toml")
    assert_safe(found, 0)
    assert tomllib.loads(found.output)["data"]["source"] == HOSTILE
    folder = tmp_path / "runs" / HOSTILE
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    facts = {"status": HOSTILE, "started": HOSTILE, "name": HOSTILE}
    (folder / "run.json").write_text(json.dumps(facts))
    assert_safe(invoke("runs", tmp_path / "runs"), 0)
    assert_safe(invoke(HOSTILE), 2)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "memory"),
        (RecursionError(), "deep"),
        (RuntimeError("out of memory"), "memory"),
    ],
)
def test_running_out_of_memory_is_one_line(monkeypatch, error, said):
    def fail(*_):
        raise error

    monkeypatch.setattr("vitrail.weights.published.listing", fail)
    result = invoke("models")
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_columns_stay_aligned_beside_wide_characters_and_accents(capsys):
    print_table(
        ("class", "n", "share"),
        [("犬と猫", "12", "a"), ("e\u0301te\u0301", "3", "b"), ("dog", "456", "c")],
    )
    lines = capsys.readouterr().out.splitlines()
    assert {cell_len(line) for line in lines[1:]} == {cell_len(lines[1])}
    assert lines[3].startswith("dog     456")


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by hand."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


def test_a_line_every_half_minute_and_none_for_what_is_short(clock, capsys):
    with count_progress("features of train") as advance:
        for _ in range(7):
            clock(10)
            advance(100, total=1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "features of train  300 of 1,000 (30%), 70 s left",
        "features of train  600 of 1,000 (60%), 40 s left",
    ]


def test_without_a_total_the_count_is_told(clock, capsys):
    advance = log_progress("reading")
    clock(31)
    advance(12_345)
    assert capsys.readouterr().err == "reading  12,345\n"


def test_a_process_that_does_not_speak_is_silent(clock, capsys):
    with count_progress("evaluating test", visible=False) as advance:
        clock(100)
        advance(1, total=2)
    assert capsys.readouterr().err == ""


def test_a_download_says_how_far_it_is(clock, capsys):
    with byte_progress("weights.npz") as advance:
        advance(0, 400_000_000)
        clock(45)
        advance(100_000_000, 400_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "fetching weights.npz",
        "fetching weights.npz  0.1 GB of 0.4 GB (25%), 2 min left",
    ]


def test_a_checksum_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(console, "LOG_INTERVAL", 0)
    path = tmp_path / "weights.npz.part"
    path.write_bytes(bytes(2_000_000))
    assert hash_mismatch(path, {"sha256": "00"}).startswith("sha256 ")
    assert "checking weights.npz  2.0 MB of 2.0 MB (100%)" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A few steps on digits, without a report."""
    return train_config(
        load_config("digits/vit", SHORT), tmp_path_factory.mktemp("runs") / "run", device="cpu"
    )


def test_training_and_its_evaluations_tell_in_a_log(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(console, "LOG_INTERVAL", 0)
    run = train_config(load_config("digits/vit", SHORT), tmp_path / "run", device="cpu")
    lines = capsys.readouterr().err.splitlines()
    for start in ("step 1/3  eta ", "step 3/3  ", "evaluating val  ", "evaluating test  "):
        assert any(line.startswith(start) for line in lines), start
    assert "(100%)" not in run.log()  # a watched log needs it, a kept one does not


def test_features_and_evaluate_tell_in_a_log(run, monkeypatch, capsys):
    monkeypatch.setattr(console, "LOG_INTERVAL", 0)
    vitrail.fewshot(run.folder, "digits", shots=[1], seeds=1, device="cpu")
    assert "features of train  " in capsys.readouterr().err
    vitrail.evaluate(run.folder, "digits", device="cpu")
    assert "evaluating test  " in capsys.readouterr().err


def test_prediction_tells_in_a_log_and_keeps_stdout_clean(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "LOG_INTERVAL", 0)
    for number in range(3):
        Image.new("RGB", (40, 40), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    done = CliRunner().invoke(main, ["predict", "builtin", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.stderr
    assert "predicting  3 of 3 (100%)" in done.stderr
    assert all(line.startswith("{") for line in done.stdout.splitlines())
