import json
import subprocess
import sys

import pytest

from vitrail.config import load_config
from vitrail.errors import FailureError, VitrailError
from vitrail.files import read_json_lines
from vitrail.runs import Run, create, find_runs, is_run, lock_folder, run_name


@pytest.fixture
def run(tmp_path) -> Run:
    return create(
        tmp_path / "runs" / "one", load_config(), {"command": "vitrail train"}, resume=False
    )


def test_a_new_folder_says_what_it_is(run):
    assert is_run(run.folder)
    info = run.info()
    assert info["status"] == "running"
    assert info["command"] == "vitrail train"
    assert load_config(run.folder / "config.toml") == load_config()


def test_events_after_a_step_are_forgotten(run):
    for step in (10, 20, 30):
        run.log_event(event="train", step=step)
    run.drop_after(20)
    assert [event["step"] for event in run.events()] == [10, 20]


def test_a_line_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + "[" * 200_000 + '\n{"step": 2}\n{"st')
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("text", ["{", "[" * 200_000])
def test_a_broken_run_json_counts_as_empty(run, text):
    (run.folder / "run.json").write_text(text)
    assert run.info() == {}


def test_only_the_main_process_writes(run):
    other = Run(run.folder, writes=False)
    other.update(status="failed")
    other.log_event(event="train", step=1)
    other.say("nothing")
    assert run.info()["status"] == "running"
    assert run.events() == []


def test_test_counts_before_val(run):
    assert run.score() == (None, "val", 0)
    run.update(best={"top1": 0.5, "n": 10})
    assert run.score() == (0.5, "val", 10)
    run.write_evaluation("test", {"top1": 0.25, "n": 4})
    assert run.score() == (0.25, "test", 4)
    assert run.summary()["top1"] == 0.25


def test_runs_are_found_oldest_first(tmp_path):
    for name, started in {"b": "2026-01-02", "a": "2026-01-03", "c": "2026-01-01"}.items():
        create(tmp_path / name, load_config(), {}, resume=False).update(started=started)
    assert [run.folder.name for run in find_runs(tmp_path)] == ["c", "b", "a"]
    assert find_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("recipe", "settings", "name"),
    [
        ("cifar10/vit", [], "cifar10-vit"),
        ("cifar10/vit", ["optim.lr=3e-4"], "cifar10-vit+optim.lr=3e-4"),
        ("photos", ["system.workers=4"], "photos"),
        (
            "photos",
            ["model.init=/a/long/path/to/vit.safetensors"],
            "photos+model.init=vit.safetensors",
        ),
        ("photos", ["optim.milestones=[0.3, 0.6]"], "photos+optim.milestones=-0.3-0.6"),
    ],
)
def test_a_folder_is_named_after_what_was_changed(recipe, settings, name):
    assert run_name(recipe, settings) == name


def test_long_names_are_cut_and_stay_apart():
    one, other = (run_name("x", [f"data.source={'y' * 19}"] * 20 + [s]) for s in ("a=1", "a=2"))
    assert len(one) <= 120
    assert one != other


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FailureError, match="cannot create"):
        create(tmp_path / "file" / "run", load_config(), {}, resume=False)


def test_what_a_killed_session_was_writing_goes(run):
    (run.folder / ".last.pt.1.part").write_text("half")
    create(run.folder, load_config(), {}, resume=True)
    assert not list(run.folder.glob(".*.part"))


def test_a_run_that_failed_before_its_first_checkpoint_is_in_nobodys_way(run):
    run.update(status="failed", message="B/17 is not known")
    run.log_event(event="train", step=1)
    again = create(run.folder, load_config(), {}, resume=False)
    assert again.info()["status"] == "running"
    assert not again.events()
    run.update(status="failed")
    run.checkpoint.touch()
    with pytest.raises(VitrailError, match="holds a failed run"):
        create(run.folder, load_config(), {}, resume=False)


def test_only_one_process_trains_in_a_folder(run):
    folder = run.folder
    assert run.summary()["status"] == "running"  # by a version without locks, as far as is known
    code = "import sys; from pathlib import Path; from vitrail.runs import lock_folder\n"
    code += "with lock_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(VitrailError, match=r"another process is training in .*one right now"):
            lock_folder(folder).__enter__()
        assert run.summary()["status"] == "running"
        other.kill()
        other.wait()
        assert run.summary()["status"] == "interrupted"
        with lock_folder(folder):  # what is killed holds nothing
            pass


def test_an_existing_run_is_described(run):
    run.update(status="finished", best={"top1": 0.9412, "n": 100})
    with pytest.raises(VitrailError, match=r"holds a finished run \(94.12%\)"):
        create(run.folder, load_config(), {}, resume=False)
    assert json.loads((run.folder / "run.json").read_text())["status"] == "finished"
