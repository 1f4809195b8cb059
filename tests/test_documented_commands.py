"""Every command that a page tells a reader to type can be typed: verbs, options, recipes, names."""

import re
import shlex
from pathlib import Path

import click
import pytest
import torch

from vitrail.cli import main
from vitrail.config import Config
from vitrail.model import create
from vitrail.orders import understand
from vitrail.training.building import chosen_options
from vitrail.training.sweep import points, with_point
from vitrail.weights.published import find

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def commands(page: Path) -> list[str]:
    """The command lines of a page."""
    fences = re.findall(r"```sh\n((?:.*\n)*?)```", page.read_text(encoding="utf-8"))
    lines = "".join(fences).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("vitrail ")]


LINES = sorted({line for page in PAGES for line in commands(page)})


def parsed(line: str) -> tuple[str, dict]:
    """The verb and what click makes of the rest; a word it does not know is an error."""
    _, verb, *words = shlex.split(line, comments=True)
    above = click.Context(main, info_name="vitrail", **main.context_settings)
    return verb, main.commands[verb].make_context(verb, words, parent=above).params


def configs(verb: str, asked: dict) -> list[Config]:
    """What would be trained."""
    if verb == "sweep":
        named = [word for word in asked["what"] if "=" not in word]
        given = [word for word in asked["what"] if "=" in word]
        orders = [understand(name, given, lists=True).config for name in named]
        return [with_point(one, point) for one in orders for point in points(one)]
    return [understand(asked.get("what") or asked["recipe"], asked["settings"]).config]


@pytest.fixture
def things(tmp_path, monkeypatch):
    """A place with the folders that pages speak of."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "my_jft", "flower_photos"):
        (tmp_path / name).mkdir()


@pytest.mark.parametrize("line", LINES)
def test_it_is_understood(line, things):
    verb, asked = parsed(line)
    if verb not in ("train", "sweep", "config") or not (asked.get("what") or asked.get("recipe")):
        return
    for config in configs(verb, asked):
        init = config.model.init
        assert not init or init.startswith("runs/") or find(init), init
        if not init:
            with torch.device("meta"):
                options = chosen_options(config.model)
                create(config.model.variant, classes=10, size=config.data.size, **options)


@pytest.mark.parametrize("line", [line for line in LINES if re.match("vitrail (insp|eval)", line)])
def test_the_model_it_names_is_one(line):
    name = parsed(line)[1]["model"]
    other = name.startswith("runs/") or name.endswith((".safetensors", ".npz")) or name == "MODEL"
    assert other or find(name), name


def test_every_table_and_figure_of_the_paper_has_its_commands():
    guide = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    titles = " ".join(re.findall(r"^## (.*)$", guide, re.M))
    for number in range(1, 10):
        assert re.search(rf"Tables?\b[^:]*\b{number}\b", titles), f"Table {number}"
    for number in range(2, 15):  # the first is a drawing of the model
        assert re.search(rf"Figures?\b[^:]*\b{number}\b", titles), f"Figure {number}"
    for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", guide, re.M):
        assert "vitrail " in text or title.startswith("What the paper"), title
