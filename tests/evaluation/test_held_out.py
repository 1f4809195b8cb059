"""A model is measured on images that it did not learn from, wherever they lie now."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.data.pictures import write
from vitrail.data.opening import open_data
from vitrail.data.store import pack_data
from vitrail.errors import VitrailError
from vitrail.evaluation.held_out import select_images
from vitrail.evaluation.show import closing
from vitrail.runs import Run

SHORT = {
    **{"model.variant": "Ti/8", "model.init": "", "model.width": 24, "model.depth": 1},
    **{"model.heads": 2, "model.mlp": 24, "data.size": 16, "train.steps": 2, "train.batch": 8},
    **{"train.evaluations": 1, "optim.warmup": 0, "data.test": 0.2},
}


def folder_of(folder: Path, seed: int, n: int = 20, labels: str = "abc") -> Path:
    for label in labels:
        for i in range(n):
            write(folder / label / f"{i:02}.png", seed=seed + 1000 * ord(label) + i)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory.mktemp("data") / "photos", seed=0)


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    return vitrail.train(photos, SHORT, out=out, device="cpu")


@pytest.fixture
def moved(run, photos, tmp_path) -> Path:
    shutil.copytree(photos, tmp_path / "moved")
    return tmp_path / "moved"


def names(source) -> set[str]:
    return set(source.names)


def test_a_folder_the_model_never_saw_is_measured_whole(run, tmp_path, capsys):
    folder_of(tmp_path / "new_photos", seed=50_000)
    found = vitrail.evaluate(run.folder, tmp_path / "new_photos", device="cpu")
    assert (found["n"], found["split"], found["left_out"]) == (60, "all", 0)
    said = capsys.readouterr().err
    assert "images   new_photos: 60 of 60 images, all new to the model" in said
    assert Run(run.folder).evaluation("new_photos-all")["n"] == 60
    assert not [line for line in closing(found) if line.startswith("excluded")]


def test_a_folder_too_small_to_split_is_measured(run, tmp_path):
    folder_of(tmp_path / "few", seed=50_000, n=1)
    assert vitrail.evaluate(run.folder, tmp_path / "few", device="cpu")["n"] == 3


def test_a_copy_of_the_training_folder_leaks_nothing(run, photos, moved):
    model, whole = vitrail.load(run.folder), open_data(photos, val=0.1, test=0.2)
    for place in (photos, moved):
        part = select_images(model, place)
        assert (part.split, part.left_out) == ("test", 0)
        assert names(part.source) == names(whole.part("test"))
        rest = select_images(model, place, "all")
        assert rest.left_out == len(whole.part("train").targets)
        assert not names(rest.source) & names(whole.part("train"))


def test_kept_weights_of_an_evaluation_leak_nothing(run, moved):
    kept = run.weights_at(2)
    kept.parent.mkdir()
    shutil.copy(run.weights, kept)
    whole, kept = (select_images(vitrail.load(one), moved, "all") for one in (run.folder, kept))
    assert kept.left_out == whole.left_out > 0


def test_other_names_and_a_packed_copy_leak_nothing(run, photos, moved, tmp_path):
    model = vitrail.load(run.folder)
    for path in moved.rglob("*.png"):
        path.rename(path.with_name(f"again-{path.name}"))
    part = select_images(model, moved)
    assert part.left_out > 0
    assert "excluded because the model was trained on them" in part.note
    learned = {f"{name[:2]}again-{name[2:]}" for name in open_data(photos, test=0.2).train.names}
    assert not names(part.source) & learned
    pack_data(open_data(photos, val=0.0, test=0.0), tmp_path / "store", side=8)
    assert select_images(model, tmp_path / "store", "all").left_out == len(learned)


def test_training_images_among_others_are_left_out_and_counted(run, photos, tmp_path, capsys):
    folder = folder_of(tmp_path / "mixed", seed=50_000)
    taken = open_data(photos, test=0.2).part("train").names[:5]
    for name in taken:
        shutil.copy(photos / name, folder / name[0] / f"copy-{name[2:]}")
    found = vitrail.evaluate(run.folder, folder, device="cpu")
    assert (found["n"], found["left_out"], found["split"]) == (60, 5, "all")
    assert (
        "60 of 65 images; 5 excluded because the model was trained on them"
        in capsys.readouterr().err
    )


def test_the_training_folder_is_known_after_more_images_came_to_it(run, moved):
    folder_of(moved, seed=70_000, labels="d")
    for path in [*(moved / "d").iterdir()]:
        path.rename(moved / "a" / f"new-{path.name}")
    part = select_images(vitrail.load(run.folder), moved)
    assert part.split == "test"
    assert part.left_out == 0


def test_train_is_measured_whole_where_it_is_named(run, photos):
    part = select_images(vitrail.load(run.folder), photos, "train")
    assert len(part.source.targets) == run.info()["data"]["train"]


def test_nothing_but_training_images_is_an_error(run, photos, tmp_path):
    for name in open_data(photos, test=0.2).part("train").names:
        (tmp_path / "seen" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / name, tmp_path / "seen" / name)
    with pytest.raises(VitrailError, match=r"trained on all \d+ images of .*seen \(all\)"):
        vitrail.evaluate(run.folder, tmp_path / "seen", split="all", device="cpu")


def test_a_run_from_before_keeps_the_split_rule_and_names_split_all(run, tmp_path, capsys):
    shutil.copytree(run.folder, tmp_path / "before")
    (tmp_path / "before" / "training_images.npy").unlink()
    folder_of(tmp_path / "new_photos", seed=50_000)
    found = vitrail.evaluate(tmp_path / "before", tmp_path / "new_photos", device="cpu")
    assert found["split"] == "test"
    assert found["n"] < 30
    assert "--split all evaluates all of a folder that it never saw" in capsys.readouterr().err
    found = vitrail.evaluate(
        tmp_path / "before", tmp_path / "new_photos", split="all", device="cpu"
    )
    assert found["n"] == 60


def test_a_damaged_record_is_one_line(run, photos, tmp_path):
    shutil.copytree(run.folder, tmp_path / "run")
    for content in (b"nothing", b""):
        (tmp_path / "run" / "training_images.npy").write_bytes(content)
        with pytest.raises(VitrailError, match=r"training_images.npy cannot be read .*; delete it"):
            vitrail.evaluate(tmp_path / "run", photos, device="cpu")


def test_weights_that_start_a_run_hand_on_their_training_images(run, photos, tmp_path):
    folder = folder_of(tmp_path / "more", seed=50_000)
    settings = {name: SHORT[name] for name in SHORT if not name.startswith("model.")}
    settings |= {"model.init": str(run.folder)}
    second = vitrail.train(folder, settings, out=tmp_path / "second", device="cpu")
    own, learned = (np.load(one.folder / "training_images.npy") for one in (run, second))
    assert set(own.tolist()) < set(learned.tolist())
    part = select_images(vitrail.load(second.folder), photos, "all")
    assert part.left_out == len(own)


def test_a_run_is_not_tested_on_training_images_of_its_first_weights(run, moved, tmp_path, capsys):
    settings = {name: SHORT[name] for name in SHORT if not name.startswith("model.")}
    settings |= {"model.init": str(run.folder), "data.test": 0.5}
    second = vitrail.train(moved, settings, out=tmp_path / "second", device="cpu")
    held = open_data(moved, test=0.5).part("test")
    learned = set(open_data(moved, test=0.2).part("train").names)
    seen = sum(name in learned for name in held.names)
    assert f"excluded {seen} test images" in capsys.readouterr().err
    assert second.evaluation("test")["n"] == len(held.targets) - seen > 0


def test_a_folder_without_some_classes_is_measured_over_the_others(run, tmp_path, capsys):
    folder_of(tmp_path / "fewer", seed=50_000, labels="ac")
    found = vitrail.evaluate(run.folder, tmp_path / "fewer", device="cpu")
    assert found["n"] == 40
    assert found["absent"] == ["b"]
    assert "classes  2 of 3: " in (said := capsys.readouterr().err)
    assert "has no 'b'" in said
    assert [row["n"] for row in found["per_class"]] == [20, 0, 20]
    recalls = [row["recall"] for row in found["per_class"] if row["n"]]
    assert found["balanced_accuracy"] == pytest.approx(sum(recalls) / 2)
    # The model may still answer with a class that the folder lacks, which is wrong.
    whole = vitrail.evaluate(run.folder, folder_of(tmp_path / "all", seed=50_000), device="cpu")
    rows = [whole["per_class"][i]["recall"] for i in (0, 2)]
    assert rows == pytest.approx(recalls)


def test_swapped_images_do_not_resume(run, photos, moved, tmp_path):
    out = tmp_path / "swapped"
    begun = vitrail.train(moved, SHORT, out=out, device="cpu")
    begun.update(status="stopped")
    one, two = (moved / name for name in open_data(moved, test=0.2).part("train").names[:2])
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(
        VitrailError, match=r"other training images \(\d+ both times, but not the same"
    ):
        vitrail.train(moved, SHORT, out=out, resume=True, device="cpu")
    # A run from before is checked by names alone, and says nothing of contents.
    from vitrail.training.summary import data_fingerprint

    data = begun.info()["data"] | {
        "fingerprint": data_fingerprint(open_data(moved, test=0.2).train)
    }
    begun.update(data=data)
    vitrail.train(moved, SHORT, out=out, resume=True, device="cpu")
    assert not begun.info()["data"]["fingerprint"].startswith("2:")


def test_fewshot_takes_all_of_a_new_folder_but_what_it_was_shown(run, tmp_path):
    folder_of(tmp_path / "new", seed=50_000)
    found = vitrail.fewshot(run.folder, tmp_path / "new", shots=[2], seeds=1, device="cpu")
    assert found["split"] == "all"
    assert found["results"][0]["n"] == 60 - 6
