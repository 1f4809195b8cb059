"""Descriptions of experiments: all of the package's are complete, and mistakes are named."""

import pytest

from vitrail.errors import VitrailError
from vitrail.reproduction.claims import Results, decide
from vitrail.reproduction.experiment import (
    EXPERIMENTS,
    experiment_names,
    load_experiment,
    shared_scales,
)

DESIGNS = [
    pytest.param(load_experiment(name).at(scale), id=f"{name}-{scale}")
    for name in experiment_names()
    for scale in load_experiment(name).scales
]
SMALLEST = """
title = "A test"
about = "Two widths."
rows = [{ name = "a" }, { name = "b", settings = { "model.width" = 96 } }]

[scales.smoke]
"""
CLAIMED = SMALLEST.replace(
    "[scales", '[[claims]]\ntext = ""\npaper = ""\ntest = "above"\nscales = ["smoke"]\n\n[scales'
)


def test_every_file_is_listed():
    files = {path.stem for path in EXPERIMENTS.glob("*.toml")} - {"scales"}
    assert set(experiment_names()) == files


def test_every_table_and_figure_with_results_has_an_experiment():
    tables = (f"table{i}" for i in (1, 2, 5, 6, 7, 8, 9))
    figures = (f"figure{i}" for i in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
    for name in (*tables, *figures, "section4.6", "flowers"):
        assert load_experiment(name).title


def test_every_experiment_has_a_smoke_scale_and_a_larger_one():
    for name in experiment_names():
        scales = load_experiment(name).scales
        assert "smoke" in scales
        assert len(scales) > 1


@pytest.mark.parametrize("design", DESIGNS)
def test_claims_name_cells_that_are_there(design):
    assert design.cells
    assert len({cell.name for cell in design.cells}) == len(design.cells)
    results = Results(design, {})
    for claim in design.claims:
        decision = decide(claim, results)
        assert decision.parts
        assert decision.verdict is None


@pytest.mark.parametrize("design", DESIGNS)
def test_charts_have_axes(design):
    experiment, results = design.experiment, Results(design, {})
    if experiment.form == "chart" and not experiment.x:
        first = [point for point in design.points if point.cells[0].column is design.columns[0]]
        assert all(results.x(point) for point in first)
    for row in experiment.published.rows:
        assert len(row) == len(experiment.published.columns)


def test_each_claim_can_be_decided_where_accuracy_is_compared():
    tested = {
        claim.text
        for name in experiment_names()
        for scale in ("small", "medium", "published", "full")
        if scale in load_experiment(name).scales
        for claim in load_experiment(name).at(scale).claims
    }
    known = {claim.text for name in experiment_names() for claim in load_experiment(name).claims}
    assert tested == known
    assert len(known) >= 25


def test_a_cell_has_the_settings_of_scale_row_and_column():
    design = load_experiment("table8").at("smoke")
    cell = design.select("2-D | every layer")[0].cells[0]
    (stage,) = design.stages(cell)
    assert stage.recipe == "digits/vit"
    assert stage.settings["model.positions"] == "factorized"
    assert stage.settings["model.injection"] == "every"
    assert stage.settings["train.steps"] == shared_scales()["smoke"].settings["train.steps"]


def test_a_further_stage_has_the_settings_of_the_scale_alone():
    design = load_experiment("section4.6").at("smoke")
    first, second = design.stages(design.select("mean color")[0].cells[0])
    assert first.settings["train.objective"] == "masked"
    assert "train.objective" not in second.settings
    assert second.settings["data.subset"] == 256


def test_without_a_recipe_weights_start_the_further_stage():
    design = load_experiment("figure2").at("published")
    (stage,) = design.stages(design.cells[2])
    assert stage.recipe == "vtab/vit"
    assert stage.settings["model.init"] == "L/16-in21k"
    assert stage.settings["data.source"] == "vtab/dtd"
    assert stage.settings["train.steps"] == 2500


def test_rows_stand_for_the_mean_of_their_columns():
    design = load_experiment("figure2").at("smoke")
    (point,) = design.select("larger ViT")
    assert len(point.cells) == 2
    assert load_experiment("table5").at("smoke").select("ViT")[0].name == "ViT | few"


def test_a_name_may_be_a_table_or_figure_that_is_covered():
    assert load_experiment("table6") == load_experiment("figure5")


def test_an_experiment_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SMALLEST)
    design = load_experiment(str(path)).at("smoke")
    assert [cell.name for cell in design.cells] == ["a", "b"]
    assert design.experiment.name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('title = 1\nabout = ""\n[scales.smoke]\n', "title = 1"),
        (SMALLEST.replace("title", "titel"), "did you mean 'title'"),
        ('title = "A"\n[scales.smoke]\n', "about is missing"),
        (SMALLEST.replace("smoke", "huge"), "unknown scale 'huge'"),
        (SMALLEST.replace('"b"', "3"), "name = 3"),
        ("title = ", "cannot read"),
        (CLAIMED.replace('["smoke"]', '["smokey"]'), "no scale 'smokey'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(VitrailError) as error:
        load_experiment(str(path))
    assert message in str(error.value)
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"b"', '"a"', "each row needs a name of its own"),
        ('"b"', '""', "each row needs a name of its own"),
        ('"b"', '"b", columns = ["c"]', "'b' has no column 'c'"),
        ("rows = ", 'columns = [{ name = "few", x = 0 }]\nrows = ', "x = 0 of 'few'"),
        ("rows = ", 'measure = "topp1"\nrows = ', "did you mean 'top1'"),
        ("rows = ", 'measure = "fewshot"\nrows = ', 'add measures = ["fewshot"]'),
        ("rows = ", 'x = ["gmac"]\nrows = ', "did you mean 'gmacs'"),
        ("[scales.smoke]", "[scales.smoke]\nseeds = -1", "scales.smoke.seeds = -1"),
        ("rows = ", 'train = false\nmeasures = ["fewshot"]\nrows = ', "trains nothing to measure"),
        ("[scales.smoke]", '[scales.smoke]\ntrain = false\nmeasures = ["real"]', "trains nothing"),
        ("rows = ", "columns = ", "has no rows"),
    ],
)
def test_cells_that_make_no_sense_are_errors(tmp_path, before, after, message):
    path = tmp_path / "mine.toml"
    path.write_text(SMALLEST.replace(before, after))
    with pytest.raises(VitrailError) as error:
        load_experiment(str(path)).at("smoke")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_row_needs_a_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SMALLEST.replace("smoke", "published"))
    with pytest.raises(VitrailError, match="'a' has no recipe at the scale published"):
        load_experiment(str(path)).at("published")


def test_the_scoreboard_keeps_its_name(tmp_path):
    path = tmp_path / "index.toml"
    path.write_text(SMALLEST)
    with pytest.raises(VitrailError, match=r"index\.html"):
        load_experiment(str(path))


def test_unknown_names_are_errors(tmp_path):
    with pytest.raises(VitrailError, match="did you mean 'table8'"):
        load_experiment("tabel8")
    with pytest.raises(VitrailError, match="cannot read"):
        load_experiment(str(tmp_path / "missing.toml"))
    with pytest.raises(VitrailError, match="it has smoke, medium, published, full"):
        load_experiment("table2").at("small")
    with pytest.raises(VitrailError, match="did you mean '1-D'"):
        load_experiment("table8").at("smoke").select("1D")
