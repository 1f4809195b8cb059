import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest

from tests.reporting.folders import FLOWERS, Recipe, fake_run, read_result, write_result
from tests.reporting.pages import Page
from vitrail.errors import VitrailError
from vitrail.reporting.comparison import compare, letter

VIT = Recipe(skill=0.97)
RESNET = Recipe(skill=0.9, variant="ResNet50", lr=0.01)


def compared(folders: list[Path], target: Path) -> Page:
    assert compare(folders, target) == target
    page = Page(target)
    assert target.stat().st_size < 5_000_000
    assert all(address.startswith(("data:image/", "#")) for address in page.addresses)
    assert len(page.ids) == len(set(page.ids))
    return page


def pair(tmp_path: Path) -> list[Path]:
    return [
        fake_run(tmp_path / "vit", made=VIT),
        fake_run(tmp_path / "resnet", made=RESNET),
    ]


def test_results_settings_and_classes_stand_side_by_side(tmp_path):
    page = compared(pair(tmp_path), tmp_path / "both.html")
    vit, resnet = read_result(tmp_path / "vit"), read_result(tmp_path / "resnet")
    assert "2 runs compared" in page.text
    row = page.row("vit", column=1)
    low, high = vit["intervals"]["top1"]
    assert row[2] == f"{100 * vit['top1']:.1f}%{100 * low:.1f} to {100 * high:.1f}%"
    assert row[3] == "test, 400"
    assert row[4:] == [
        *(f"{vit['macro_f1']:.3f}", "0.023"),
        *("13 min", "5,525,381", "1.26"),
    ]
    assert page.row("vit", column=1, after=1)[2:] == [
        *("1.93 petaFLOPs", "256,000", "0.00873", "250 Wh", "3 GiB")
    ]
    assert page.row("model.variant") == ["model.variant", "Ti/16", "ResNet50"]
    assert page.row("optim.lr") == ["optim.lr", "0.03", "0.01"]
    shown = [row[0] for row in page.rows if row]
    assert "seed" not in shown
    assert "train.batch" not in shown
    assert page.row("class") == ["class", "n", *["A P", "A R", "A F1", "B P", "B R", "B F1"]]
    for index, name in enumerate(FLOWERS):
        scores = [result["per_class"][index] for result in (vit, resnet)]
        numbers = [f"{score[key]:.3f}" for score in scores for key in ("precision", "recall", "f1")]
        assert page.row(name) == [name, "80", *numbers]
    foot = [f"{result['top1']:.3f}" for result in (vit, resnet)]
    assert page.row("accuracy") == ["accuracy", "400", *foot]


def test_curves_lie_over_each_other_against_steps_and_time(tmp_path):
    page = compared(pair(tmp_path), tmp_path / "both.html")
    for title in ("Validation top-1", "Validation loss", "Training loss"):
        for against in ("step", "time"):
            assert f'aria-label="{title} by {against}"' in page.html
    drawing = page.html.split('aria-label="Training loss by step"')[1].split("</svg>")[0]
    assert "var(--run0)" in drawing
    assert "var(--run1)" in drawing


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path):
    vits = [
        fake_run(tmp_path / f"vit+seed={seed}", made=replace(VIT, seed=seed)) for seed in range(3)
    ]
    resnet = fake_run(tmp_path / "resnet", made=RESNET)
    page = compared([*vits, resnet], tmp_path / "all.html")
    assert "4 runs" in page.text
    assert "2 groups" in page.text
    top1 = [read_result(folder)["top1"] for folder in vits]
    row = next(row for row in page.rows if "vit" in row[1])
    assert "3 seeds" in row[1].replace("\xa0", " ")
    assert row[2] == f"{100 * mean(top1):.1f} ± {100 * stdev(top1):.1f}%".replace(" ", "\xa0")
    for seed, value in enumerate(top1):
        assert page.row(f"seed {seed}", column=1)[2].startswith(f"{100 * value:.1f}%")
    assert page.row("seed") == ["seed", "0, 1, 2", "0"]
    recall = [read_result(folder)["per_class"][0]["recall"] for folder in vits]
    assert page.row("daisy")[3] == f"{mean(recall):.3f}"
    assert page.row("accuracy")[2] == f"{mean(top1):.3f} ± {stdev(top1):.3f}"


def test_top5_is_shown_where_there_are_more_than_five_classes(tmp_path):
    labels = [f"class {index}" for index in range(6)]
    fake_run(tmp_path / "six", made=replace(VIT, labels=labels))
    few = fake_run(tmp_path / "five", made=RESNET)
    page = compared([tmp_path / "six", few], tmp_path / "both.html")
    assert "top-5" in page.row("run", column=1)
    top5 = read_result(tmp_path / "six")["top5"]
    assert page.row("six", column=1)[4] == f"{100 * top5:.1f}%"
    assert page.row("five", column=1)[4] == "–"
    assert "top-5" not in compared([few], tmp_path / "one.html").text


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (("redwood", "reduced"), "redwood, reduced"),
        (("seed0", "seed1"), "here"),
        (("vit+seed=0", "vit+seed=1"), "vit"),
        (("vit-s1", "vit-s12"), "vit-s"),
        (("photos", "photos-2"), "photos"),
        (("tulip-fast-a", "tulip-fast-b"), "tulip-fast"),
    ],
)
def test_a_group_is_named_by_whole_words(tmp_path, names, common):
    folders = [
        fake_run(tmp_path / "here" / name, made=replace(VIT, steps=20, seed=seed))
        for seed, name in enumerate(names)
    ]
    other = fake_run(tmp_path / "other", made=replace(RESNET, steps=20))
    page = compared([*folders, other], tmp_path / "all.html")
    assert page.row("A", after=0)[1].startswith(f"{common}2")


def test_values_of_settings_are_not_broken_inside_a_word(tmp_path):
    page = compared(pair(tmp_path), tmp_path / "both.html")
    assert '<td class="v"><span class="label">ResNet50</span></td>' in page.html
    rule = re.search(r"^td\.v {(.*?)}", page.html, re.M)
    assert rule is not None
    assert "overflow-wrap" not in rule[1]


def test_costs_are_those_of_one_run_and_blank_where_unknown(tmp_path):
    cost = {"exaflops": 1.0, "device_days": 1.0, "energy_joules": 10.0, "peak_memory_bytes": 2**30}
    dear = {name: 3 * value for name, value in cost.items()} | {"energy_joules": None}
    fake_run(tmp_path / "vit+seed=0", made=VIT, cost=cost)
    fake_run(tmp_path / "vit+seed=1", made=replace(VIT, seed=1), cost=dear)
    fake_run(tmp_path / "old", made=RESNET, cost=None)
    seeds = [tmp_path / f"vit+seed={seed}" for seed in (0, 1)]
    page = compared([*seeds, tmp_path / "old"], tmp_path / "all.html")
    assert page.row("vit", column=1)[2:] == ["2 exaFLOPs", "–", "2", "10 J", "2 GiB"]
    assert page.row("old", column=1, after=1)[2:] == ["–"] * 5
    only_old = compared([tmp_path / "old"], tmp_path / "old.html")
    assert "device-days" not in only_old.text


def costing(exaflops: float, pretraining: float | None = None) -> dict:
    before = {"exaflops": pretraining, "device_days": 1.0}
    known = {"exaflops": exaflops, "device_days": 1.0, "energy_joules": None}
    return known | {"pretraining": None if pretraining is None else before}


def drawing(page: Page) -> str:
    """The chart of accuracy against compute."""
    return page.html.split('aria-label="Top-1 against compute')[1].split("</svg>")[0]


def test_accuracy_is_drawn_against_compute_and_the_front_is_named(tmp_path):
    for seed, skill in enumerate((0.95, 0.97)):
        made = replace(VIT, seed=seed, skill=skill)
        fake_run(tmp_path / f"vit+seed={seed}", made=made, cost=costing(40.0))
    fake_run(tmp_path / "resnet", made=RESNET, cost=costing(2.0))
    worse = Recipe(skill=0.5, variant="R50x2")
    fake_run(tmp_path / "$worse$", made=worse, cost=costing(3.0))
    page = compared(sorted(tmp_path.iterdir()), tmp_path / "all.html")
    chart = drawing(page)
    assert chart.startswith(" by exaFLOPs of training")
    for color, one in enumerate("ABC"):
        assert re.search(rf"fill: var\(--run{color}\)[^>]*>{one}</text>", chart)
    assert "worse" not in chart
    assert ">2</text>" in chart
    assert ">20</text>" in chart  # a logarithmic axis
    listed = page.html.split("as little compute as these:")[1].split("</ul>")[0]
    assert re.findall(r">([A-C])</span>", listed) == ["B", "C"]
    assert "$worse$" not in listed


def test_compute_is_that_of_pre_training_where_it_is_known(tmp_path):
    fake_run(tmp_path / "a", made=VIT, cost=costing(0.1, 200.0))
    fake_run(tmp_path / "b", made=RESNET, cost=costing(0.2, 300.0))
    page = compared([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html")
    assert drawing(page).startswith(" by exaFLOPs of pre-training")
    assert page.row("a", column=1, after=1)[2:4] == ["100 petaFLOPs", "200 exaFLOPs"]
    scratch = fake_run(tmp_path / "c", made=Recipe(lr=0.1), cost=costing(100.0), model={"init": ""})
    page = compared([tmp_path / "a", scratch], tmp_path / "mixed.html")
    assert drawing(page).startswith(" by exaFLOPs of pre-training or training")
    published = fake_run(tmp_path / "d", made=Recipe(lr=0.2), cost=costing(0.3))
    page = compared([tmp_path / "a", tmp_path / "b", published], tmp_path / "some.html")
    assert "The compute of pre-training is not known for C" in page.section("cost")
    assert not re.search(r">C</text>", drawing(page))
    page = compared([tmp_path / "a", published], tmp_path / "one.html")
    assert "Top-1 against compute" not in page.html


def test_without_results_or_costs_there_is_nothing_to_draw(tmp_path):
    folders = pair(tmp_path)
    shutil.rmtree(folders[0] / "evaluation")
    assert "Top-1 against compute" not in compared(folders, tmp_path / "a.html").html
    old = fake_run(tmp_path / "old", made=Recipe(lr=0.2), cost=None)
    assert "Top-1 against compute" not in compared([folders[1], old], tmp_path / "b.html").html


def test_few_shot_accuracy_has_a_chart_only_if_a_run_measured_it(tmp_path):
    folders = pair(tmp_path)
    assert "Few-shot accuracy" not in compared(folders, tmp_path / "without.html").html
    path = folders[0] / "metrics.jsonl"
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    rows = [row | ({"fewshot": 0.5} if row["event"] == "val" else {}) for row in rows]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    page = compared(folders, tmp_path / "with.html")
    drawn = page.html.split('aria-label="Few-shot accuracy by step"')[1].split("</svg>")[0]
    assert "var(--run0)" in drawn
    assert "var(--run1)" not in drawn


def test_a_seed_that_is_not_measured_yet_is_not_counted(tmp_path):
    folders = [fake_run(tmp_path / f"{seed}", made=replace(VIT, seed=seed)) for seed in range(3)]
    shutil.rmtree(folders[2] / "evaluation")
    page = compared(folders, tmp_path / "all.html")
    assert "2 of 3 seeds" in page.text
    assert "1 of 3 runs have no results" in page.text


def test_runs_measured_on_different_images_are_not_passed_off_as_equal(tmp_path):
    vit, resnet = pair(tmp_path)
    result = read_result(resnet)
    write_result(resnet, "test", result | {"n": 123})
    page = compared([vit, resnet], tmp_path / "a.html")
    assert "same number of images" in page.section("results")
    (resnet / "evaluation" / "test.json").unlink()
    page = compared([vit, resnet], tmp_path / "b.html")
    assert "not on a test split" in page.section("results")
    assert page.row("vit", column=1)[3] == "val, 400"
    (vit / "evaluation" / "val.json").unlink()
    page = compared([vit, resnet], tmp_path / "c.html")
    assert "same split" in page.section("results")


def test_classes_with_their_own_n_for_each_run(tmp_path):
    vit = fake_run(tmp_path / "vit", made=VIT)
    resnet = fake_run(tmp_path / "resnet", made=replace(RESNET, n_per_class=40))
    page = compared([vit, resnet], tmp_path / "both.html")
    assert page.row("class") == ["class", *["n", "A P", "A R", "A F1", "n", "B P", "B R", "B F1"]]
    assert [page.row("daisy")[i] for i in (1, 5)] == ["80", "40"]
    assert [page.row("accuracy")[i] for i in (1, 3)] == ["400", "200"]


def test_other_classes_are_not_laid_side_by_side(tmp_path):
    vit = fake_run(tmp_path / "vit", made=VIT)
    other = fake_run(tmp_path / "other", made=replace(RESNET, labels=["cat", "dog"]))
    page = compared([vit, other], tmp_path / "both.html")
    assert "classes" not in page.ids


def test_many_classes_show_those_that_differ_most(tmp_path):
    labels = [f"class {index}" for index in range(200)]
    folders = [
        fake_run(tmp_path / made.variant.replace("/", ""), made=replace(made, labels=labels))
        for made in (VIT, RESNET)
    ]
    page = compared(folders, tmp_path / "both.html")
    apart = {
        a["name"]: abs(a["f1"] - b["f1"])
        for a, b in zip(*(read_result(folder)["per_class"] for folder in folders), strict=True)
    }
    shown = [row[0] for row in page.rows if row and row[0].startswith("class ")]
    assert len(shown) == 60
    assert shown[0] == max(apart, key=apart.__getitem__)
    assert min(apart[name] for name in shown) >= sorted(apart.values())[-60] - 1e-12


def test_thirty_runs_and_hundreds_of_lines_each_stay_small(tmp_path):
    made = Recipe(steps=700, every=1)
    first = fake_run(tmp_path / "0", made=made)
    folders = [first]
    for index in range(1, 30):
        folder = tmp_path / f"{index}"
        shutil.copytree(first, folder)
        text = (folder / "config.toml").read_text("utf-8").replace("0.03", f"0.1{index:02d}")
        (folder / "config.toml").write_text(text, "utf-8")
        folders.append(folder)
    page = compared(folders, tmp_path / "all.html")
    assert "AD" in page.text.split()
    assert (tmp_path / "all.html").stat().st_size < 3_000_000


def test_a_run_that_failed_at_the_start_is_compared(tmp_path):
    vit = fake_run(tmp_path / "vit<b>", made=VIT)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "run.json").write_text(json.dumps({"status": "failed"}), "utf-8")
    (bare / "config.toml").write_text("seed = 3\n", "utf-8")
    page = compared([vit, bare], tmp_path / "both.html")
    assert "vit<b>" in page.text
    assert page.row("seed") == ["seed", "0", "3"]
    assert "1 of 2 runs did not finish" in page.section("results")
    page = compared([bare], tmp_path / "one.html")
    assert "metrics.jsonl" in page.section("curves")


def test_a_folder_named_twice_is_one_run(tmp_path):
    vit = fake_run(tmp_path / "vit", made=VIT)
    page = compared([vit, tmp_path / "." / "vit"], tmp_path / "both.html")
    assert "1 run compared" in page.text


def test_nothing_to_compare_is_one_line(tmp_path):
    with pytest.raises(VitrailError, match="no runs to compare"):
        compare([], tmp_path / "both.html")


def test_letters_go_on_after_z():
    assert [letter(index) for index in (0, 25, 26, 51, 52, 701, 702)] == [
        *("A", "Z", "AA", "AZ", "BA", "ZZ", "AAA")
    ]
