import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.reporting.folders import (
    FLOWERS,
    Recipe,
    data_uri,
    fake_run,
    read_result,
    write_result,
)
from tests.reporting.pages import Page
from vitrail.errors import DamagedError, FailureError, VitrailError
from vitrail.reporting.page import report, write


def written(folder: Path) -> Page:
    """The page of a run, which must stand alone and be small."""
    target = write(folder)
    assert target == folder / "report.html"
    page = Page(target)
    assert target.stat().st_size < 5_000_000
    assert all(address.startswith(("data:image/", "#")) for address in page.addresses)
    assert "@import" not in page.html
    assert not re.search(r"url\((?!#)", page.html)
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    anchors = {address[1:] for address in page.addresses if address.startswith("#")}
    assert anchors | set(re.findall(r"url\(#([^)]+)\)", page.html)) <= set(page.ids)
    return page


@pytest.fixture(scope="module")
def flowers(tmp_path_factory) -> Path:
    return fake_run(tmp_path_factory.mktemp("runs") / "flowers")


@pytest.fixture(scope="module")
def flowers_page(flowers) -> Page:
    return written(flowers)


def test_the_headline_says_what_was_reached_with_what_and_how_to_do_it_again(flowers, flowers_page):
    page = flowers_page
    result = read_result(flowers)
    assert "Ti/16 on flower_photos" in page.text
    headline = page.section("headline")
    low, high = result["intervals"]["top1"]
    for fact in (
        *(f"{100 * result['top1']:.1f}%", "test", "n = 400"),
        f"{100 * low:.1f} to {100 * high:.1f}%",
        *("5,525,381", "1.26 GMACs", "224 × 224 px", "Ti/16-augreg-in21k"),
        *("5 classes", "2,936 train", "400 val", "400 test"),
        *("13 min", "2026-03-01 09:30", "1 × NVIDIA H200", "bf16"),
        *("0123456789ab", "uncommitted"),
        "vitrail train finetune/folder photos model.variant=Ti/16 'a b'",
        *("finished", "step 500 of 500"),
    ):
        assert fact in headline
    assert "missing" not in page.classes


def test_the_cost_is_shown_as_far_as_it_is_known(flowers_page, tmp_path):
    for said in (
        "compute 1.93 petaFLOPs",
        "images seen 256,000",
        "forward pass 1.26 GMACs",
        "device-days 0.00873",
        "energy 250 Wh",
        "peak memory 3 GiB",
        "sessions 2",
    ):
        assert said in flowers_page.section("cost")
    on_cpu = written(fake_run(tmp_path / "cpu", cost={"energy_joules": None, "sessions": 1}))
    assert "energy not" in on_cpu.section("cost")
    assert "sessions" not in on_cpu.section("cost")
    assert "cost" not in written(fake_run(tmp_path / "old", cost=None)).ids


def test_every_section_is_there_with_its_numbers_and_their_n(flowers, flowers_page):
    page = flowers_page
    result = read_result(flowers)
    wanted = "results curves images classes confusion calibration mistakes settings environment"
    assert {*wanted.split(), "broken"} <= set(page.ids)
    assert page.row("test")[1] == "400"
    assert page.row("val")[1] == "400"
    for score in result["per_class"]:
        name, n, *numbers = page.row(score["name"])[:5]
        expected = [f"{score[key]:.3f}" for key in ("precision", "recall", "f1")]
        assert (n, numbers) == ("80", expected), name
    for row, label in zip(result["confusion"], FLOWERS, strict=True):
        shown = page.row(label, after=1)[1:]
        assert [int(cell or 0) for cell in shown] == row
    for fact in ("0.023", "15 bins", "test", "n = 400"):
        assert fact in page.section("calibration")
    for mistake in result["mistakes"]:
        assert mistake["name"] in page.text
        assert mistake["thumbnail"] in page.addresses
    assert page.row("model.variant") == ["model.variant", "Ti/16"]
    assert page.row("warmup") == ["warmup", "10"]
    assert page.row("betas") == ["betas", "[0.9, 0.999]"]
    assert page.row("roses/cut short.jpg")[1] == "image file is truncated"
    assert "torchvision 0.30.0" in page.text


def test_curves_are_drawn_against_steps_with_epochs_and_against_time(flowers_page):
    page = flowers_page
    for title in (
        "Loss",
        "Validation accuracy",
        "Learning rate",
        "Gradient norm",
        "Images per second",
    ):
        for against in ("step", "time"):
            assert f'aria-label="{title} by {against}"' in page.html
    assert "FLOP utilization" not in page.text  # mfu is null throughout
    assert "epoch" in page.text
    assert "min" in page.text
    assert "100 lines" in page.section("curves")
    assert "n = 400" in page.section("curves")
    assert "var(--train)" in page.html
    assert "#fe" not in page.html  # no stand-in color is left


def test_three_small_charts_stand_in_a_row_and_four_two_by_two(flowers, flowers_page, tmp_path):
    narrow = 'viewBox="0 0 280 170"'
    assert flowers_page.html.count(narrow) == 2 * 3  # against steps, against time
    folder = shutil.copytree(flowers, tmp_path / "gpu")
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"mfu": null', '"mfu": 0.31'))
    page = written(folder)
    assert "FLOP utilization" in page.text
    assert page.html.count('class="card chart wide"') == 2 * 6
    assert narrow not in page.html  # stretched, its letters would be larger than the others


def test_a_rate_that_ends_near_zero_is_drawn_from_zero(tmp_path):
    folder = fake_run(tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [line for line in lines if line["event"] == "train"]
    for number, line in enumerate(reversed(trained)):
        line["lr"] = 1e-12 + 0.002 * number / len(trained)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = written(folder).html
    rate = html[html.index("Learning rate</strong>") : html.index("Gradient norm</strong>")]
    assert ">0.0015<" in rate
    assert "e-" not in re.sub(r"<[^>]*>", "", rate)


def test_without_a_test_split_the_headline_says_that_the_number_flatters(tmp_path):
    folder = fake_run(tmp_path / "flowers")
    (folder / "evaluation" / "test.json").unlink()
    page = written(folder)
    headline = page.section("headline")
    assert f"{100 * read_result(folder, 'val')['top1']:.1f}% top-1 on val n = 400" in headline
    assert "caution" in page.classes


def test_a_run_under_way_shows_what_there_is(tmp_path):
    folder = fake_run(tmp_path / "flowers", status="running", step=120)
    shutil.rmtree(folder / "evaluation")
    (folder / "augmented.jpg").unlink()
    page = written(folder)
    for fact in ("97.5%", "top-1 on val", "n = 400", "step 450", "running", "step 120 of 500"):
        assert fact in page.section("headline")
    assert "evaluation/" in page.section("results")
    assert "augmented.jpg is missing" in page.section("images")
    assert "classes" not in page.ids


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        ("failed", "loss is nan at step 812; try a lower optim.lr", "step 812 of 1,000"),
        ("stopped", "SIGTERM", "--resume"),
    ],
)
def test_a_run_that_did_not_finish_says_why(tmp_path, status, message, said):
    folder = fake_run(tmp_path / "run", status=status, message=message, step=812, steps=1000)
    page = written(folder)
    for fact in (status, message, said):
        assert fact in page.section("headline")


def test_labels_and_names_are_text_whatever_they_hold(tmp_path):
    evil = '<script>alert("1")</script>'
    labels = [evil, "Ünïcödé 花 🌼", "w" * 300, "& \" ' < >", "$x^2$ {{ 7 * 7 }}"]
    bad = [["</pre><img src=x onerror=alert(1)>.jpg", "bell \x07 and \ud800"]]
    folder = fake_run(tmp_path / "run", made=Recipe(labels=labels, skill=0.5), command=evil)
    information = json.loads((folder / "run.json").read_text("utf-8"))
    information["data"] |= {"broken": bad, "name": evil}
    (folder / "run.json").write_text(json.dumps(information), "utf-8")
    page = written(folder)
    assert evil in page.text
    assert "Ünïcödé 花 🌼" in page.text
    assert "w" * 39 + "…" + "w" * 20 in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "<img src=x onerror=alert(1)>.jpg" in page.text
    assert "\x07" not in page.html


@pytest.mark.parametrize(("classes", "heat"), [(2, True), (50, True), (51, False), (1000, False)])
def test_few_classes_and_many_both_work(tmp_path, classes, heat):
    labels = [f"class {index}" for index in range(classes)]
    folder = fake_run(tmp_path / "run", made=Recipe(labels=labels, n_per_class=20, skill=0.7))
    page = written(folder)
    assert ("heat" in page.classes) == heat
    pair = read_result(folder)["confused"][0]
    row = next(row for row in page.rows if row[:2] == [pair["truth"], pair["guess"]])
    assert row[2:4] == [str(pair["n"]), "20"]
    listed = {row[0] for row in page.rows if row}
    assert set(labels) <= listed
    if classes == 1000:
        assert "25 of 1,000 classes" in page.section("classes").replace("\xa0", " ")


def test_of_many_classes_those_without_images_are_not_the_worst(tmp_path):
    labels = [f"class {index}" for index in range(70)]
    folder = fake_run(tmp_path / "run", made=Recipe(labels=labels, steps=20, n_per_class=10))
    result = read_result(folder)
    for row in result["per_class"][4:]:
        row |= {"n": 0, "recall": 0.0, "f1": 0.0, "interval": [0.0, 1.0]}
    write_result(folder, "test", result)
    page = written(folder)
    shown = page.html.split('id="classes"')[1].split("<details>")[0]
    assert [f"class {index}" in shown for index in range(6)] == [True] * 4 + [False] * 2
    assert "lowest F1" not in page.text
    assert "66 of 70 classes" in page.section("classes").replace("\xa0", " ")


def test_a_frozen_run_lacks_no_augmented_images(tmp_path):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=20))
    (folder / "augmented.jpg").unlink()
    config = folder / "config.toml"
    config.write_text(config.read_text("utf-8").replace("[train]", "[train]\nfreeze = true"))
    page = written(folder)
    assert "augmented.jpg" not in page.text
    assert "frozen" in page.section("images")


def test_every_confusion_has_its_own_examples(tmp_path):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=20))
    result = read_result(folder)
    mistake = result["mistakes"][0]
    for number, row in enumerate(result["confused"][:10]):
        picture = data_uri(Image.new("RGB", (20, 20), (25 * number, 0, 0)))
        row["examples"] = [{**mistake, **row, "thumbnail": picture}]
    result["mistakes"] = []
    write_result(folder, "test", result)
    page = written(folder)
    for row in result["confused"][:10]:
        assert row["examples"][0]["thumbnail"] in page.addresses


def test_top5_is_left_out_of_five_classes(tmp_path, flowers_page):
    assert "top-5" not in flowers_page.text
    labels = [f"class {index}" for index in range(6)]
    page = written(fake_run(tmp_path / "run", made=Recipe(labels=labels, steps=20)))
    assert page.text.count("top-5") == 3  # the table, and the curves against steps and time


def test_a_class_without_pictures_has_no_recall(tmp_path):
    folder = fake_run(tmp_path / "run")
    result = read_result(folder)
    result["per_class"][2] |= {"n": 0, "recall": 0.0, "f1": 0.0, "interval": [0.0, 1.0]}
    result["confusion"][2] = [0] * 5
    write_result(folder, "test", result)
    row = written(folder).row("roses")
    assert row[1] == "0"
    assert row[3:] == ["–", "–", "no images of this class"]


def look_into(folder: Path, **changes) -> Path:
    """What an inspection leaves in a run's folder."""
    inside = folder / "inspection"
    inside.mkdir()
    for name in ("filters.png", "positions.png", "picture-1.jpg", "picture-2.jpg"):
        Image.new("RGB", (40, 20), "teal").save(inside / name)
    seen = [[0.5, 0.5]]
    image = {"truth": "daisy", "probability": 0.9, "rollout": seen, "gradient_rollout": seen}
    heads = [{"layer": layer, "heads": [20.0, 90.5], "uniform": 116.5} for layer in range(3)]
    found = {
        "split": "test",
        "images": [
            image | {"name": "daisy/<1>.jpg", "guess": "daisy"},
            image | {"name": "daisy/2.jpg", "guess": "tulips"},
        ],
        "attention_distance": {"n": 1234, "layers": heads},
        "absent": {"positions": "nobody <knows>"},
    }
    (inside / "inspection.json").write_text(json.dumps(found | changes), "utf-8")
    return inside


def test_what_the_model_looks_at_is_shown_where_it_was_looked_into(tmp_path, flowers_page):
    assert "inside" not in flowers_page.ids
    folder = fake_run(tmp_path / "run", made=Recipe(steps=20))
    look_into(folder)
    page = written(folder)
    assert "inside" in page.ids
    inside = page.section("inside").replace("\xa0", " ")
    assert "2 images from test" in inside
    assert "attention rollout, rollout for" in inside
    assert "daisy 90.0% daisy/<1>.jpg" in page.text
    assert re.search(r"tulips .*daisy.* 90.0% daisy/2.jpg", page.text)
    assert "1,234 images from test" in inside
    assert "Mean attention distance" in page.html
    assert "nobody <knows>" in inside
    assert sum(address.startswith("data:image/png") for address in page.addresses) == 2


def test_a_large_image_of_an_inspection_is_made_smaller(tmp_path):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=5))
    inside = look_into(folder)
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)
    Image.fromarray(noise).save(inside / "filters.png")
    page = written(folder)
    assert sum(address.startswith("data:image/png") for address in page.addresses) == 1
    (inside / "filters.png").write_bytes(bytes(500_000))
    with pytest.raises(VitrailError, match=r"filters\.png"):
        write(folder)


def test_a_model_without_mistakes_is_not_missing_any(tmp_path):
    folder = fake_run(tmp_path / "run", made=Recipe(skill=1.0))
    page = written(folder)
    assert "100.0% top-1 on test" in page.text
    assert "all 400 images of test" in page.section("mistakes")
    assert "missing" not in page.classes


def test_a_loss_that_was_no_number_leaves_a_gap_and_a_note(tmp_path):
    folder = fake_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    train = [i for i, row in enumerate(lines) if json.loads(row)["event"] == "train"]
    broken = json.loads(lines[train[7]]) | {"loss": float("nan"), "grad_norm": float("inf")}
    lines[train[7]] = json.dumps(broken)
    (folder / "metrics.jsonl").write_text("\n".join(lines), "utf-8")
    page = written(folder)
    for name in ("loss", "grad norm"):
        assert re.search(f"1 of 100 .*{name}.* step 40", page.section("curves"))


def test_thousands_of_lines_are_drawn_as_a_mean_within_a_band(tmp_path):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=5000, every=1))
    page = written(folder)
    assert "5,000 lines" in page.section("curves")
    drawing = page.html.split('aria-label="Gradient norm by step"')[1].split("</svg>")[0]
    assert len(re.findall(r"[ML] ", drawing)) < 2000  # 500 of the line, 1,000 of the band, axes
    assert "opacity: 0.18" in drawing


def test_a_metrics_file_cut_short_loses_one_line(tmp_path):
    folder = fake_run(tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text("utf-8")
    (folder / "metrics.jsonl").write_text(text[:-30], "utf-8")
    page = written(folder)
    assert 'aria-label="Loss by step"' in page.html
    assert "missing" not in page.classes


@pytest.mark.parametrize("name", ["metrics.jsonl", "augmented.jpg", "evaluation"])
def test_a_run_that_has_just_begun_has_a_page(tmp_path, name):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=20), best=None, cost=None)
    shutil.rmtree(folder / name) if name == "evaluation" else (folder / name).unlink()
    page = written(folder)
    assert name in page.text
    assert "missing" in page.classes


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("run.json", "empty"), ("run.json", "half"), ("run.json", "list")),
        *(("config.toml", "half"), ("config.toml", "list")),
        *(("evaluation/test.json", "empty"), ("evaluation/test.json", "half")),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, name, how):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=20))
    data = (folder / name).read_bytes()
    broken = {"empty": b"", "half": data[: len(data) // 2 - 3] + b'"', "list": b"[1]\n[2"}[how]
    (folder / name).write_bytes(broken)
    for paths in ([folder], [folder, fake_run(tmp_path / "other", made=Recipe(steps=5))]):
        with pytest.raises(DamagedError, match=f"{name} is damaged") as caught:
            report(paths, tmp_path / "page.html")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("odd", [3, "<script>alert(1)</script>", [], {}, [None], [[]], {"a": {}}])
def test_values_of_another_kind_are_one_line_and_never_a_script(tmp_path, odd):
    for key in json.loads((fake_run(tmp_path / "run") / "run.json").read_text("utf-8")):
        folder = fake_run(tmp_path / "run", made=Recipe(steps=5), **{key: odd})
        (folder / "metrics.jsonl").write_text("", "utf-8")  # drawing takes long
        shutil.rmtree(folder / "evaluation")
        with suppress(DamagedError):
            assert "script" not in Page(report([folder])).tags


def test_a_malformed_class_is_one_line(tmp_path):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=5))
    result = read_result(folder)
    result["per_class"][0]["f1"] = "<b>"
    write_result(folder, "test", result)
    with pytest.raises(DamagedError, match="evaluation/"):
        report([folder])


def test_only_pictures_become_addresses(tmp_path):
    folder = fake_run(tmp_path / "run")
    result = read_result(folder)
    for mistake, odd in zip(
        result["mistakes"],
        ("https://example.com/a.jpg", "javascript:alert(1)", "data:text/html,<b>", "", None, 3),
        strict=False,
    ):
        mistake["thumbnail"] = odd
    write_result(folder, "test", result)
    assert "no image" in written(folder).text


def test_a_huge_sheet_is_made_smaller(tmp_path):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=5))
    noise = np.random.default_rng(0).integers(0, 256, (2000, 3000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "augmented.jpg", quality=95)
    assert (folder / "augmented.jpg").stat().st_size > 5_000_000
    page = written(folder)
    assert "sheet" in page.classes


def test_other_results_in_the_folder_are_left_alone(tmp_path):
    folder = fake_run(tmp_path / "run")
    write_result(folder, "benchmark", {"images_per_second": 12.0})
    assert "benchmark" not in written(folder).text


def test_the_same_files_give_the_same_page(flowers, flowers_page):
    assert write(flowers).read_text("utf-8") == flowers_page.html


def test_what_is_no_run_is_one_line(tmp_path):
    with pytest.raises(VitrailError, match="is not a run folder"):
        write(tmp_path / "nowhere")
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    with pytest.raises(VitrailError, match="is not a run folder"):
        write(tmp_path / "photos")
    assert not (tmp_path / "photos" / "report.html").exists()


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    folder = fake_run(tmp_path / "run")
    (folder / "report.html").mkdir()
    with pytest.raises(FailureError, match="cannot write"):
        write(folder)
    assert [path.name for path in folder.iterdir() if path.name.endswith(".part")] == []
