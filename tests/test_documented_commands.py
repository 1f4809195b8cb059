"""Every command, setting, model and recipe that a page, a recipe or `--help` names is one."""

import re
import shlex
from pathlib import Path

import click
import pytest
import torch

from vitrail import runs
from vitrail.cli import main
from vitrail.config import (
    RECIPES,
    Config,
    explanations,
    load_config,
    parse_setting,
    recipe_names,
    schema,
    set_value,
    with_settings,
)
from vitrail.data.catalog import known_datasets
from vitrail.errors import VitrailError
from vitrail.model import create
from vitrail.training.build import chosen_options
from vitrail.training.resolve import resolve_config
from vitrail.training.sweep import points
from vitrail.weights.published import BUILTIN, NAMES

ROOT = Path(__file__).parents[1]
SECTIONS = "|".join(sorted({name.partition(".")[0] for name in schema() if "." in name}))
VALUE = r"'\[[^']*\]'|\[[^\]]*\]|[^\s`',;)|]*"
SETTING = re.compile(rf"(?<![\w.\"{{])(?:{SECTIONS})\.\w+=(?:{VALUE})")
MODELS = ("models", "model", "source")
"""What verbs call the models that they are given."""


def help_of(command: click.Command) -> str:
    """What a verb says about itself."""
    options = [one.help or "" for one in command.params if isinstance(one, click.Option)]
    return "\n".join([command.help or "", *options])


def header(recipe: Path) -> str:
    """The comments of a recipe as running text."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.lstrip("# ") for line in lines if line.startswith("#"))


PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
}
TEXTS = PAGES | {
    **{
        path.relative_to(RECIPES).as_posix(): header(path)
        for path in sorted(RECIPES.rglob("*.toml"))
    },
    **{f"vitrail {name} --help": help_of(command) for name, command in main.commands.items()},
    "vitrail --help": help_of(main),
    "vitrail config": "\n".join(explanations().values()),
}


def typed(text: str) -> list[str]:
    """The command lines of a page's code blocks."""
    fences = re.findall(r"```sh\n((?:.*\n)*?)```", text)
    lines = "".join(fences).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("vitrail ")]


def spans(text: str) -> list[str]:
    """What a page has between backticks in running text."""
    running = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", running)]


def inline(text: str) -> list[str]:
    """The commands in running text, without what stands before `vitrail`."""
    found = (re.search(r"(?:^| )(vitrail .*)", span) for span in spans(text))
    return [match[1] for match in found if match]


LINES = sorted({line for text in TEXTS.values() for line in (*typed(text), *inline(text))})
SETTINGS = sorted(
    {
        match.rstrip(".")
        for text in TEXTS.values()
        for match in SETTING.findall(text)
        if "…" not in match
    }
)
SPANS = sorted({span for text in TEXTS.values() for span in spans(text)})


def parsed(line: str) -> tuple[str, dict]:
    """The verb and what click makes of the rest; a word it does not know is an error."""
    _, verb, *words = shlex.split(line.partition(" > ")[0], comments=True)
    above = click.Context(main, info_name="vitrail", **main.context_settings)
    return verb, main.commands[verb].make_context(verb, words, parent=above).params


def is_mention(line: str) -> bool:
    """Whether a line names a verb and its options without all that they need."""
    words = shlex.split(line, comments=True)[2:]
    return "…" in line or all(word.startswith(("-", "[")) for word in words)


def is_placeholder(name: str) -> bool:
    """`MODEL`, `RECIPE|FOLDER`: the reader's own."""
    return re.fullmatch(r"[A-Z|]+", name) is not None


def is_model(name: str) -> bool:
    """A published checkpoint, a variant, a file or a run."""
    if is_placeholder(name) or name == BUILTIN.name or name.startswith("runs/") or name in NAMES:
        return True
    if name.endswith((".safetensors", ".npz", ".onnx", ".pt2")):
        return True
    try:
        with torch.device("meta"):
            create(name, classes=10, size=224)
    except VitrailError:
        return False
    return True


def configs(verb: str, asked: dict) -> list[Config]:
    """What would be trained."""
    if verb == "sweep":
        named = [word for word in asked["what"] if "=" not in word]
        given = [word for word in asked["what"] if "=" in word]
        orders = [resolve_config(name, given, lists=True).config for name in named]
        return [with_settings(one, point) for one in orders for point in points(one)]
    return [resolve_config(asked.get("what") or asked["recipe"], asked["settings"]).config]


@pytest.fixture
def things(tmp_path, monkeypatch):
    """A place with the folders and files that pages speak of."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "my_jft", "flower_photos", "FOLDER"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.toml").touch()
    runs.create(tmp_path / "runs" / "photos-2", load_config("digits/vit"), {}, resume=False)


@pytest.mark.parametrize("line", [line for line in LINES if not is_mention(line)])
def test_it_is_understood(line, things):
    verb, asked = parsed(line)
    for name in (asked.get(key) or () for key in MODELS):
        for model in [name] if isinstance(name, str) else name:
            assert is_model(model.rpartition("=")[2]), model
    what = asked.get("what") or asked.get("recipe")
    if verb not in ("train", "sweep", "config") or not what or is_placeholder(str(what)):
        return
    for config in configs(verb, asked):
        init = config.model.init
        assert not init or is_model(init), init
        if not init and config.model.variant:
            with torch.device("meta"):
                options = chosen_options(config.model)
                create(config.model.variant, classes=10, size=config.data.size, **options)


@pytest.mark.parametrize("line", [line for line in LINES if is_mention(line)])
def test_what_is_mentioned_of_a_verb_exists(line):
    _, verb, *words = shlex.split(line)
    command = main if verb.startswith("-") else main.commands[verb]
    known = {"--help"} | {option for one in command.params for option in one.opts}
    named = {word for word in (verb, *words) if word.startswith("-")}
    assert named <= known


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_taken(setting):
    name, value = parse_setting(setting.replace("'", ""))
    swept = isinstance(value, list) and name != "data.size"
    set_value({}, f"sweep.{name}" if swept else name, value)
    for one in value if swept else [value]:
        if name in ("model.init", "model.variant") and one:
            assert is_model(one), one
        if name == "data.source":
            assert one in known_datasets() or one in ("my_jft", "photos/", "FOLDER"), one


@pytest.mark.parametrize(
    "span",
    [span for span in SPANS if re.fullmatch(r"(augment|data|optim|system|train)\.\w+", span)],
)
def test_settings_that_are_named_exist(span):
    assert span in schema()


@pytest.mark.parametrize(
    "span", [span for span in SPANS if re.fullmatch(r"[\w+]+/\d+-[\w-]+|R\d+x\d[\w-]*", span)]
)
def test_models_that_are_named_exist(span):
    assert is_model(span)


@pytest.mark.parametrize(
    "span", [span for span in SPANS if re.fullmatch(r"[a-z0-9]+(/\w+)+", span)]
)
def test_recipes_that_are_named_exist(span):
    folders = {name.partition("/")[0] for name in recipe_names()}
    assert (
        span.partition("/")[0] not in folders or span in recipe_names() or span in known_datasets()
    )


@pytest.mark.parametrize("page", ["README.md", "guide.md", "paper.md"])
def test_the_runs_a_page_goes_on_with_are_those_it_made(page, things, monkeypatch):
    made = {"runs/a", "runs/b"}  # any two
    for line in typed(PAGES[page]):
        verb, asked = parsed(line)
        names = [name for key in ("model", "models", "runs") for name in [asked.get(key) or ()]]
        named = {word for name in names for word in ([name] if isinstance(name, str) else name)}
        named |= set(re.findall(r"model\.init=(runs/\S+)", line))
        assert {name for name in named if name.startswith("runs/")} <= made, line
        if verb == "train":
            made.add(str(resolve_config(asked["what"]).run_folder(asked["out"], resume=False)[0]))
        elif verb == "sweep":
            first = resolve_config(asked["what"][0], lists=True).sweep_folder(asked["out"])[0]
            made.add(f"{first}/seed0")


def test_the_demo_takes_as_long_everywhere():
    readme = re.search(r"`make demo`.*?in about ([\w ]+?),", PAGES["README.md"], re.S)
    assert readme is not None
    assert f"in about {readme[1]}." in (main.commands["demo"].help or "")


def test_every_table_and_figure_of_the_paper_has_its_commands():
    guide = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    titles = " ".join(re.findall(r"^### (.*)$", guide, re.M))
    for number in range(1, 10):
        assert re.search(rf"Tables?\b[^:]*\b{number}\b", titles), f"Table {number}"
    for number in range(2, 15):  # the first is a drawing of the model
        assert re.search(rf"Figures?\b[^:]*\b{number}\b", titles), f"Figure {number}"
    for title, text in re.findall(r"^### (.*)\n((?:(?!### ).*\n)*)", guide, re.M):
        assert "vitrail " in text or title.startswith("What the paper"), title
