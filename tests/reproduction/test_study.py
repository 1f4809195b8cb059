"""Studies on digits: every number is measured once, whatever happens in between."""

import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vitrail
from tests.processes import start
from vitrail.cli import main
from vitrail.console import say
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.reproduction import study as study_module
from vitrail.reproduction.experiment import list_experiments, load_experiment
from vitrail.reproduction.paper import paper, plan_paper
from vitrail.reproduction.plan import plan
from vitrail.reproduction.study import Study
from vitrail.runs import Run, is_locked, lock_folder

EXPERIMENT = """
title = "Two widths"
about = "A test."

[[rows]]
name = "narrow"
settings = { "model.width" = 24 }

[[rows]]
name = "wide"

[[claims]]
text = "Wider is better"
paper = "not in it"
test = "above"
pairs = [["wide", "narrow"]]

[scales.smoke]
settings = { "train.steps" = 2 }
"""
GRID = EXPERIMENT.replace('name = "wide"', 'name = "wide"\ngrid = { "optim.lr" = [1e-4, 3e-3] }')
STAGES = EXPERIMENT.replace(
    'name = "wide"', 'name = "wide"\nthen = [{ settings = { "data.size" = 16 } }]'
)


@pytest.fixture
def described(tmp_path):
    def write(text: str = EXPERIMENT) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return str(path)

    return write


def run(name: str, out: Path, **options) -> dict:
    return paper([name], scale="smoke", out=out, device="cpu", **options)


def results(out: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (out / "results").iterdir()}


def times(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()}


def test_a_number_is_measured_once(described, tmp_path):
    out = tmp_path / "study"
    first = run(described(), out)
    (experiment,) = first["experiments"]
    assert (experiment["done"], experiment["tasks"]) == (4, 4)
    assert experiment["claims"][0]["verdict"] in ("held", "not held", "undecided")
    before = times(out)
    assert run(described(), out)["experiments"] == first["experiments"]
    assert times(out) == before
    # With one more row, only that is run.
    more = EXPERIMENT.replace(
        "[[claims]]", '[[rows]]\nname = "more"\nsettings = { "model.depth" = 1 }\n[[claims]]'
    )
    run(described(more), out)
    assert len(times(out)) == 6
    assert before.items() <= times(out).items()


def test_a_result_says_what_it_is_of(described, tmp_path):
    run(described(), tmp_path / "study")
    for key, result in results(tmp_path / "study").items():
        folder = tmp_path / "study" / "runs" / key
        assert result["top1"] == Run(folder).evaluation("test")["top1"]
        assert result["n"] == 359
        assert result["exaflops"] > 0
        assert result["versions"]["torch"]
        assert not (folder / "last.pt").exists()
        assert result["command"].startswith("vitrail train digits/vit ")
        assert "train.steps=2" in result["command"]


def test_the_command_of_a_result_trains_the_same(described, tmp_path, monkeypatch):
    run(described(), tmp_path / "study")
    result = next(one for one in results(tmp_path / "study").values() if one["seed"] == 1)
    monkeypatch.chdir(tmp_path)
    words = result["command"].split()[1:]
    main([*words, "--out", "again", "--device", "cpu"], standalone_mode=False)
    assert Run(tmp_path / "again").evaluation("test")["top1"] == result["top1"]


def test_the_commands_of_a_page_train_every_stage(described, tmp_path, monkeypatch):
    out = tmp_path / "study"
    run(described(STAGES), out)
    design = load_experiment(described(STAGES)).at("smoke")
    found = Study([design], out).results(design).by_cell["wide"][0]
    assert len(found["commands"]) == 2
    monkeypatch.chdir(tmp_path)
    for command, more in zip(found["commands"], ([], ["--out", "again"]), strict=True):
        main([*command.split()[1:], *more, "--device", "cpu"], standalone_mode=False)
    assert Run(tmp_path / "again").evaluation("test")["top1"] == found["top1"]
    page = (out / "mine.html").read_text()
    assert "vitrail paper mine.toml --scale smoke" in page
    assert f"--out runs/{found['parent']}" in page


def test_no_stage_of_a_trial_sees_val(described):
    settings = 'settings = { "train.steps" = 2, "data.train_on" = "train+val" }'
    text = STAGES.replace('settings = { "train.steps" = 2 }', settings)
    text += 'grid = { "optim.lr" = [1e-4, 3e-3] }\n'
    design = load_experiment(described(text)).at("smoke")
    study = Study([design], Path("unused"))
    for cell in design.cells:
        for trial in study.trials(design, cell).values():
            assert {task.config.data.train_on for task in trial.lineage()} == {"train"}


def test_settings_are_chosen_on_val(described, tmp_path):
    out = tmp_path / "study"
    run(described(GRID), out)
    found = results(out).values()
    trials = [one for one in found if one["trial"]]
    assert len(trials) == 2
    assert all(one["top1"] is None and one["val_top1"] is not None for one in trials)
    best = max(trials, key=lambda one: (one["val_top1"], -one["val_loss"]))
    rate = next(setting for setting in best["settings"] if setting.startswith("optim.lr="))
    wide = [one for one in found if not one["trial"] and "model.width=24" not in one["settings"]]
    assert len(wide) == 2
    for one in wide:
        assert rate in one["settings"]
        assert "data.train_on=train+val" in one["settings"]


def test_a_stage_starts_from_the_weights_of_the_one_before(described, tmp_path):
    out = tmp_path / "study"
    run(described(STAGES), out)
    later = [one for one in results(out).values() if one["parent"]]
    assert len(later) == 2
    for one in later:
        parent = results(out)[one["parent"]]
        assert parent["seed"] == one["seed"]
        # As in Table 6: the compute of pre-training alone.
        assert one["compute"] == pytest.approx(parent["exaflops"])
        assert one["exaflops"] != pytest.approx(parent["exaflops"])


def test_weights_that_are_needed_again_are_trained_again(described, tmp_path):
    out = tmp_path / "study"
    run(described(), out)
    before = results(out)
    for folder in (out / "runs").iterdir():
        (folder / "model.safetensors").unlink()
    # A repository holds results without weights: they are enough for the page ...
    assert run(described(), out)["experiments"][0]["done"] == 4
    assert results(out) == before
    # ... and what is fine-tuned from them is trained to the same accuracy.
    run(described(STAGES), out)
    after = results(out)
    assert {key: one["top1"] for key, one in before.items()}.items() <= {
        key: one["top1"] for key, one in after.items()
    }.items()


def test_a_new_measure_of_a_known_run_trains_nothing(described, tmp_path, monkeypatch):
    out = tmp_path / "study"
    run(described(), out)
    monkeypatch.setattr(study_module, "train_config", lambda *_, **__: pytest.fail("trained"))
    run(described(EXPERIMENT.replace("[[rows]]", 'measures = ["fewshot"]\n[[rows]]', 1)), out)
    assert all(one["fewshot"] > 0 for one in results(out).values())
    assert all(one["measured"] == ["fewshot"] for one in results(out).values())


def test_a_failure_does_not_stop_the_others(described, tmp_path, monkeypatch):
    train = study_module.train_config

    def failing(config, *arguments, **options):
        if config.model.width == 24:
            raise VitrailError("no space left")
        return train(config, *arguments, **options)

    monkeypatch.setattr(study_module, "train_config", failing)
    result = run(described(), tmp_path / "study")
    assert len(result["failures"]) == 2
    assert "narrow" in result["failures"][0]
    assert "no space left" in result["failures"][0]
    assert result["experiments"][0]["done"] == 2
    assert result["experiments"][0]["claims"][0]["verdict"] == "not measured"
    # It is not a result, so it is tried again.
    monkeypatch.undo()
    assert run(described(), tmp_path / "study")["experiments"][0]["done"] == 4


def test_a_run_that_diverges_is_a_result(described, tmp_path):
    text = EXPERIMENT.replace(
        '"model.width" = 24', '"optim.name" = "sgd", "optim.lr" = 1e30, "optim.clip" = 0.0'
    )
    result = run(described(text.replace('"train.steps" = 2', '"train.steps" = 20')), tmp_path)
    assert result["experiments"][0]["done"] == 4
    assert result["failures"] == []
    assert result["experiments"][0]["results"]["narrow"] == {}
    assert "diverged" in (tmp_path / "mine.html").read_text()


def test_what_would_start_from_a_run_that_diverged_has_no_figure(described, tmp_path):
    diverging = '"optim.name" = "sgd", "optim.lr" = 1e30, "optim.clip" = 0.0, "train.steps" = 20'
    text = STAGES.replace('name = "wide"', f'name = "wide"\nsettings = {{ {diverging} }}')
    result = run(described(text), tmp_path)
    (experiment,) = result["experiments"]
    assert (experiment["done"], experiment["tasks"]) == (6, 6)
    assert experiment["results"]["wide"] == {}
    messages = {one["message"] for one in results(tmp_path).values() if one["parent"]}
    assert messages == {"the stage before it diverged"}


def test_a_damaged_result_is_measured_again(described, tmp_path):
    run(described(), tmp_path)
    before = results(tmp_path)
    path = next((tmp_path / "results").iterdir())
    for text in ("", "[]", '{"a": 1}', '{"status": "finished"}', "{"):
        path.write_text(text)
        study = Study([load_experiment(described()).at("smoke")], tmp_path)
        (task,) = (one for one in study.tasks_of(study.designs[0]) if one.key == path.stem)
        assert study.result(task) is None
    run(described(), tmp_path)
    assert results(tmp_path)[path.stem]["top1"] == before[path.stem]["top1"]


def test_runs_are_done_in_the_order_of_the_experiment(described, tmp_path):
    study = Study([load_experiment(described(STAGES)).at("smoke")], tmp_path)
    titles = [(task.title, task.config.seed) for task in study.tasks_of(study.designs[0])]
    assert titles == [
        ("mine  narrow", 0), ("mine  narrow", 1),
        ("mine  wide  stage 1", 0), ("mine  wide  stage 2", 0),
        ("mine  wide  stage 1", 1), ("mine  wide  stage 2", 1),
    ]  # fmt: skip


def test_a_cell_that_others_start_from_is_measured(described, tmp_path):
    text = STAGES.replace("[[rows]]", 'measures = ["fewshot"]\n[[rows]]', 1)
    text = text.replace("[[claims]]", '[[rows]]\nname = "first stage"\n\n[[claims]]')
    study = Study([load_experiment(described(text)).at("smoke")], tmp_path)
    measured = [task for task in study.tasks_of(study.designs[0]) if task.measures]
    assert len(measured) == 6


def test_after_the_time_no_run_is_started(described, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        clock = iter(range(0, 10_000, 20))
        patch.setattr(study_module.time, "monotonic", lambda: float(next(clock)))
        result = run(described(), tmp_path, minutes=1.0)
    assert 0 < result["experiments"][0]["done"] < 4
    assert "the same command continues" in capsys.readouterr().err
    assert run(described(), tmp_path)["experiments"][0]["done"] == 4


def in_another_process(folder: Path, name: str) -> None:
    torch.set_num_threads(1)  # a forked process has none of the others that its parent used
    design = load_experiment(name).at("smoke")
    Study([design], folder, "cpu").work()


def test_processes_share_a_study(described, tmp_path):
    name, out = described(STAGES), tmp_path / "study"
    helpers = [start(in_another_process, out, name) for _ in range(2)]
    for helper in helpers:
        helper.join()
    assert [helper.exitcode for helper in helpers] == [0, 0]
    found = results(out)
    assert len(found) == 6
    for key in found:
        # Each run was trained once, from the beginning to the end.
        assert Run(out / "runs" / key).info()["cost"]["sessions"] == 1


def test_what_another_process_is_at_is_left_to_it(described, tmp_path):
    study = Study([load_experiment(described()).at("smoke")], tmp_path, "cpu")
    first, second = study.ready_tasks()[:2]
    busy = multiprocessing.get_context("fork").Event()
    done = multiprocessing.get_context("fork").Event()
    holder = start(hold, tmp_path / "locks" / first.key, busy, done)
    busy.wait(60)
    assert not study._do(first)
    assert study._do(second)
    done.set()
    holder.join()
    assert study.result(first) is None
    assert study.result(second) is not None


def hold(folder: Path, busy, done) -> None:
    with lock_folder(folder):
        busy.set()
        done.wait(60)


def test_jobs_are_processes_of_the_same_study(described, tmp_path):
    result = run(described(), tmp_path, jobs=2)
    assert result["experiments"][0]["done"] == 4
    page = Path(result["experiments"][0]["page"]).read_text(encoding="utf-8")
    assert "2 runs at a time, each of which takes longer than alone" in page


def test_jobs_end_with_the_process_that_started_them(described, tmp_path):
    name = described(EXPERIMENT.replace('"train.steps" = 2', '"train.steps" = 100000'))
    words = ["paper", name, "--scale", "smoke", "--jobs", "2", "--out", str(tmp_path / "study")]
    process = subprocess.Popen([sys.executable, "-m", "vitrail", *words, "--device", "cpu"])

    def locked() -> int:
        return sum(map(is_locked, (tmp_path / "study" / "runs").glob("*")))

    try:
        assert eventually(lambda: locked() == 2, 120)
    finally:
        process.kill()
        process.wait()
    assert eventually(lambda: locked() == 0, 60)


def eventually(holds, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.2)
    return holds()


def test_the_plan_counts_every_run_once(described):
    study = Study([load_experiment(described(STAGES)).at("smoke")], Path("none"))
    runs = plan(study, study.designs[0])
    assert len(runs) == 6
    assert {run.seen for run in runs} == {2 * 64}
    assert all(run.images == 512 for run in runs)
    later = [run for run in runs if run.task.parent]
    assert all(run.gmacs > 3 * runs[0].gmacs for run in later)  # at twice the size


@pytest.mark.parametrize("scale", ["smoke", "tiny", "small", "medium"])
def test_every_experiment_has_a_plan(scale):
    # Not those whose models are the largest.
    names = [
        one["name"]
        for one in list_experiments()
        if scale in one["scales"] and one["name"] not in ("figure12", "figure2")
    ]
    for name, row in plan_paper(names, scale=scale).items():
        assert row["runs"] > 0
        trained = load_experiment(name).train
        assert all((kind["exaflops"] > 0) == trained for kind in row["kinds"])
        assert all(kind["images"] > 0 for kind in row["kinds"] if trained)


@pytest.mark.parametrize("name", ["table2", "table5", "table6"])
def test_full_plans_cost_what_the_paper_says(name):
    paper = {"b32": 55, "b16": 224, "l32": 196, "l16_7ep": 783, "l16_14ep": 1567, "h14": 4262}
    design = load_experiment(name).at("full")
    vits = [row for row in design.rows if row.recipe.removeprefix("pretrain/jft/") in paper]
    assert len(vits) == {"table2": 2, "table5": 5, "table6": 6}[name]
    cifar10 = [column for column in design.columns if column.name == "CIFAR-10"]
    design = replace(design, rows=tuple(vits), columns=tuple(cifar10))
    for run in plan(Study([design], Path("none")), design):
        if run.task.parent is None:
            expected = paper[run.task.recipe.removeprefix("pretrain/jft/")]
            assert run.exaflops == pytest.approx(expected, rel=0.05)
        assert run.gpu_hours > 0 < run.state_bytes


def test_a_substitute_replaces_only_data_that_is_left_open():
    study = Study(
        [load_experiment("table5").at("full")], Path("none"), overrides={"data.source": "mine"}
    )
    tasks = study.tasks_of(study.designs[0], expected=True)
    data = {task.recipe: task.config.data.source for task in tasks}
    assert data["pretrain/jft/b16"] == "mine"
    assert data["pretrain/imagenet/b16"] == "imagenet"
    assert data["finetune/pets"] == "pets"
    study = Study(
        [load_experiment("table8").at("small")], Path("none"), overrides={"data.source": "mine"}
    )
    assert {task.config.data.source for task in study.tasks_of(study.designs[0])} == {"mine"}


def test_resnets_are_fine_tuned_by_either_rule():
    """Appendix B.1.1: with the learning rates of Table 4 or BiT's HyperRule, chosen on val."""
    design = load_experiment("figure5").at("full")
    rows = [row for row in design.rows if row.name in ("R50x1", "ViT-B/16")]
    design = replace(design, rows=tuple(rows))
    study = Study([design], Path("none"))
    for name, recipes in (
        ("R50x1 | CIFAR-10", 4 * ["finetune/cifar10"] + ["finetune/bit_hyperrule"]),
        ("ViT-B/16 | CIFAR-10", 4 * ["finetune/cifar10"]),
    ):
        (cell,) = (one for one in design.cells if one.name == name)
        trials = list(study.trials(design, cell).values())
        assert [task.recipe for task in trials] == recipes
        assert {task.config.data.source for task in trials} == {"cifar10"}
        assert {task.config.data.val for task in trials} == {0.02}
        assert {task.config.data.train_on for task in trials} == {"train"}
    planned = {run.data: run for run in plan(study, design) if "hyperrule" in run.task.recipe}
    assert planned["cifar10"].seen == 10_000 * 512
    assert planned["pets"].seen == 500 * 512
    assert planned["pets"].task.config.data.size == 384


def test_the_alternative_with_the_best_accuracy_on_val_is_kept(described, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(
        '[model]\nvariant = "Ti/4"\nwidth = 24\ndepth = 1\nheads = 2\nmlp = 24\n'
        "[data]\nsize = 8\n[train]\nsteps = 30\nbatch = 64\n[optim]\nlr = 3e-3\n"
    )
    wide = f'name = "wide"\nalternatives = ["{other}"]\nsettings = {{ "optim.lr" = 1e-9 }}'
    run(described(EXPERIMENT.replace('name = "wide"', wide)), tmp_path)
    found = results(tmp_path).values()
    trials = {one["recipe"]: one["val_top1"] for one in found if one["trial"]}
    assert trials[str(other)] > trials["digits/vit"]
    kept = [one for one in found if not one["trial"] and one["recipe"] == str(other)]
    assert [one["seed"] for one in sorted(kept, key=lambda one: one["seed"])] == [0, 1]
    assert all("data.train_on=train+val" in one["settings"] for one in kept)
    assert not any("optim.lr=1e-09" in one["settings"] for one in found if not one["trial"])


def test_options_of_vits_leave_resnets_alone():
    design = load_experiment("figure4").at("smoke")
    study = Study([design], Path("none"), overrides={"model.depth": 3, "train.batch": 32})
    configs = {task.title.split()[1]: task.config for task in study.tasks_of(design)}
    assert (configs["ViT"].model.depth, configs["ViT"].model.width) == (3, 48)
    assert (configs["ResNet"].model.depth, configs["ResNet"].model.width) == (0, 0)
    assert {config.train.batch for config in configs.values()} == {32}


def test_data_that_an_experiment_leaves_open_can_be_set():
    (row,) = plan_paper(["section4.6"], ["data.source=mine"], scale="full").values()
    data = {kind["recipe"]: kind["data"] for kind in row["kinds"]}
    assert data["pretrain/masked/b16"] == data["pretrain/jft/b16"] == "mine"
    assert data["pretrain/imagenet/b16"] == "imagenet"


def test_data_that_is_not_public_is_named_before_anything_starts(tmp_path):
    with pytest.raises(VitrailError, match=r"table8 .*data\.source=my_data"):
        paper(["table8"], scale="full", out=tmp_path, device="cpu")
    assert not (tmp_path / "results").exists()


def test_experiments_are_listed(capsys):
    main(["paper"], standalone_mode=False)
    listed = capsys.readouterr().out
    for one in list_experiments():
        assert one["name"] in listed
    main(["paper", "table8", "--scale", "smoke", "--plan", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["table8"]["runs"] == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table8", "--scale", "huge"], "no scale 'huge'"),
        (["tabel8"], "did you mean 'table8'"),
        (["table8", "--jobs", "0"], "--jobs"),
        (["table8", "--scale", "smoke", "optim.lrr=3"], "optim.lrr"),
        (["table2", "--scale", "small"], "has no scale 'small'"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["paper", *words])
    assert end.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (EXPERIMENT.replace('["wide", ', '["wyde", '), [], "did you mean 'wide'"),
        (EXPERIMENT.replace("above", "over"), [], "unknown test 'over'"),
        (EXPERIMENT, ["model.width=32"], "model.width cannot be set"),
        (EXPERIMENT, ["seed=3"], "seed cannot be set"),
        (GRID, ["optim.lr=0.01"], "optim.lr cannot be set"),
        (EXPERIMENT + 'columns = [{ name = "a" }, { name = "b" }]', [], "stands for several cells"),
    ],
)
def test_nothing_runs_before_a_mistake_is_named(text, settings, message, described, tmp_path):
    with pytest.raises(VitrailError, match=message):
        paper([described(text)], settings, scale="smoke", out=tmp_path / "study", device="cpu")
    assert not (tmp_path / "study").exists()


def test_an_experiment_may_be_named_twice():
    # By its name, and by that of a figure that it covers; at this scale, it has its own measures.
    (name,) = plan_paper(["figure7", "figure10"], scale="published")
    assert name == "figure7"


def test_two_experiments_of_one_name_are_an_error(described, tmp_path):
    path = Path(described()).rename(tmp_path / "table8.toml")
    with pytest.raises(VitrailError, match="two experiments are named 'table8'"):
        plan_paper(["table8", str(path)], scale="smoke")


def test_text_is_never_markup(described, tmp_path):
    text = EXPERIMENT.replace("Wider is better", "<i>*Wider* | `is`</i>").replace("wide", "<b>wide")
    path = Path(described(text)).rename(tmp_path / "my [own] test.toml")
    run(str(path), tmp_path / "study")
    page = (tmp_path / "study" / "my [own] test.html").read_text()
    assert "&lt;b&gt;wide" in page
    assert "<b>wide" not in page
    line = next(
        one for one in (tmp_path / "study" / "README.md").read_text().splitlines() if "my" in one
    )
    assert line.startswith(r"| [my \[own\] test](my%20%5Bown%5D%20test.html) | \<i\>\*Wider\* \| ")
    index = (tmp_path / "study" / "index.html").read_text()
    assert "my%20%5Bown%5D%20test.html" in index
    assert "table8.html" not in index  # it has no page yet


def test_a_page_names_the_settings_that_were_given(described, tmp_path):
    paper([described()], ["optim.lr=0.002"], scale="smoke", out=tmp_path, device="cpu")
    assert "With optim.lr=0.002." in (tmp_path / "mine.html").read_text()


def test_settings_apply_to_the_first_stage(described, tmp_path):
    say("")  # a line between progress and results
    paper([described(STAGES)], ["optim.lr=0.002"], scale="smoke", out=tmp_path, device="cpu")
    found = results(tmp_path).values()
    assert all(("optim.lr=0.002" in one["settings"]) == (one["parent"] is None) for one in found)


def test_published_weights_are_inspected_without_training(described, tmp_path):
    weights = tmp_path / "weights.safetensors"
    model = vitrail.create("Ti/4", depth=3, size=16)
    model.preprocess = Preprocessing(size=(16, 16))
    vitrail.save(model, weights)
    text = f"""
title = "Inside"
about = "A test."
train = false
measure = "distance_growth"
measures = ["inspection"]
rows = [{{ name = "ViT" }}]

[[claims]]
text = "Attention distance grows by more than twice that of uniform attention"
paper = "not in it"
test = "positive"
margin = 2.0

[scales.smoke]
recipe = "digits/vit"
settings = {{ "model.init" = "{weights}", "data.size" = 16 }}
"""
    (experiment,) = run(described(text), tmp_path / "study")["experiments"]
    # There are no other seeds to wait for.
    assert experiment["claims"][0]["verdict"] == "not held"
    assert "points" not in experiment["claims"][0]["evidence"][0]
    (result,) = results(tmp_path / "study").values()
    assert len(result["distances"]["layers"]) == 3
    assert result["parameters"] == sum(p.numel() for p in vitrail.load(weights).parameters())
    (planned,) = plan_paper([described(text)], scale="smoke")["mine"]["kinds"]
    assert planned["parameters"] == result["parameters"]
    assert result["hardware"]
    assert {"filters", "positions", "picture-1"} <= result["images"].keys()
    assert "<h3>ViT</h3>" in (tmp_path / "study" / "mine.html").read_text()
    assert not (tmp_path / "study" / "runs").exists()


def test_a_run_that_starts_from_a_file_is_planned(described, tmp_path):
    weights = tmp_path / "weights.safetensors"
    vitrail.save(vitrail.create("Ti/2", depth=1, classes=3, size=8), weights)
    text = EXPERIMENT.replace(
        '{ "model.width" = 24 }', f'{{ "model.init" = "{weights}", "model.variant" = "" }}'
    )
    first, second = plan_paper([described(text)], scale="smoke")["mine"]["kinds"]
    assert first["parameters"] == sum(
        p.numel() for p in vitrail.create("Ti/2", depth=1, classes=10, size=8).parameters()
    )
    assert second["parameters"] != first["parameters"]


def test_the_speed_of_a_trained_model_is_measured_once(described, tmp_path):
    run(described('measures = ["speed"]\n' + EXPERIMENT), tmp_path)
    for result in results(tmp_path).values():
        measured = {"images_per_second", "largest_batch"} <= result.keys()
        assert measured == (result["seed"] == 0)


def test_fine_tuning_has_no_pretraining_head(described):
    text = STAGES.replace('{ "model.width" = 24 }', '{ "model.width" = 24, "model.hidden" = true }')
    text = text.replace(
        '"model.hidden" = true }',
        '"model.hidden" = true }\nthen = [{ settings = { "data.size" = 16 } }]',
    )
    (design,) = [load_experiment(described(text)).at("smoke")]
    first, second = plan(Study([design], Path("unused")), design)[:2]
    assert first.task.config.model.hidden
    hidden = 24 * 24 + 24
    positions = (64 - 16) * 24
    assert second.parameters == first.parameters - hidden + positions
