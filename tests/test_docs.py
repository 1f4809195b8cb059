"""The README's commands print what it says, and its snippets run."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sklearn.datasets import load_sample_images

import vitrail
from tests.models import timm_checkpoint
from vitrail.config import load_config
from vitrail.model.variants import parse_variant
from vitrail.training.build import chosen_options
from vitrail.weights.published import model_cost

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"```console\n\$ (vitrail .+)\n((?:.*\n)*?)```", README)
PYTHON = re.findall(r"```python\n((?:.*\n)*?)```", README)


@pytest.fixture(scope="session")
def documented(tmp_path_factory) -> Path:
    """Of the name, the shape and the classes of the checkpoint in the README, but with random
    weights; real/ has the same with the real ones."""
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    return timm_checkpoint(tmp_path_factory.mktemp("documented") / name)


@pytest.fixture
def folder(tmp_path, documented, monkeypatch) -> Path:
    """A folder as the README has it."""
    return furnished(tmp_path, documented, monkeypatch)


def furnished(folder: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights and a photograph, where commands are run."""
    shutil.copy(weights, folder)
    china = next(path for path in load_sample_images().filenames if path.endswith("china.jpg"))
    shutil.copy(china, folder)
    monkeypatch.chdir(folder)
    return folder


def printed(command: str) -> str:
    """What a command line writes to stdout."""
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=environment, check=True
    )
    return result.stdout


@pytest.mark.parametrize(("command", "output"), CONSOLE)
def test_commands_print_what_the_readme_says(command, output, folder):
    def shape(text: str) -> str:
        """How far logits move depends on the weights."""
        return re.sub(r"(?<=changes logits by )\S+", "…", text)

    assert shape(printed(command)) == shape(output)


def test_the_reference_of_the_command_line_is_what_help_says():
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == runpy.run_path(str(ROOT / "docs" / "cli.py"))["reference"]()


def test_the_librarys_guide_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n((?:.*\n)*?)```", guide))
    exec(compile(code, "library.md", "exec"), {})
    assert (tmp_path / "runs" / "library" / "report.html").exists()


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)  # what a reader sees is their own
    space: dict[str, object] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), space)
    assert (tmp_path / "runs" / "tour" / "inside" / "model.png").exists()


SMALL_MODELS = re.findall(
    r"^\| .*\| `(model\..+)` \| ([\d.]+) \| ([\d.]+) M \|$",
    (ROOT / "docs" / "models.md").read_text(encoding="utf-8"),
    re.M,
)


@pytest.mark.parametrize(("settings", "gmacs", "millions"), SMALL_MODELS)
def test_small_models_cost_what_the_table_says(settings, gmacs, millions):
    resnet = re.search(r"=(Axial-)?R[^+]*$", settings.split()[0])
    reset = ("model.depth=0", "model.mlp=0", "model.pool=", "model.positions=") if resnet else ()
    config = load_config("cifar10/small", [*reset, *settings.split()])
    options = chosen_options(config.model)
    architecture = parse_variant(config.model.variant, classes=10, size=32, **options)
    cost = model_cost(architecture)
    assert (f"{cost.gmacs:.3f}", f"{cost.parameters / 1e6:.2f}") == (gmacs, millions)


def test_no_placeholder_is_left():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"BENCH|TODO|XXX|FIXME", path.read_text(encoding="utf-8")), path


def test_the_readme_shows_both_verbs():
    assert [command.split()[1] for command, _ in CONSOLE] == ["models", "convert"]


def run_snippet(snippet: str) -> None:
    # The one line that would fetch a file of 391 MB.
    runnable = re.sub(r'^model = vitrail.load\("B/16-augreg.*\n', "", snippet, flags=re.M)
    exec(compile(runnable, "README.md", "exec"), {})


@pytest.mark.parametrize("snippet", PYTHON)
def test_snippets_run(snippet, folder, documented, capsys):
    run_snippet(snippet)
    if "predict" in snippet:
        answers = ast.literal_eval(capsys.readouterr().out)
        assert len({label for label, _ in answers} & set(vitrail.load(documented).labels)) == 3
        assert (folder / "ti16-hub" / "config.json").exists()


@pytest.mark.parametrize("path", re.findall(r"\]\((docs/[\w.]+)\)", README))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


MODULES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "vitrail").rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


TREES = {
    "README.md": README.split("## The tree")[1],
    "architecture.md": (ROOT / "docs" / "architecture.md")
    .read_text(encoding="utf-8")
    .split("## The modules")[1],
}


def tree(page: str) -> dict[str, str]:
    """What a page's tree says of each folder of the package; "vitrail" is the top."""
    text: dict[str, str] = {}
    inside = "vitrail"
    for line in TREES[page].split("```")[1].partition("\ntests/")[0].splitlines():
        if top := re.match(r"[├└]── (\w+)(/?)", line):
            inside = f"vitrail/{top[1]}" if top[2] else "vitrail"
        nested = re.match(r"│   [├└]── (\w+)/", line)
        folder = f"{inside}/{nested[1]}" if nested else inside
        text[folder] = f"{text.get(folder, '')}\n{line}"
    return text


@pytest.mark.parametrize("path", MODULES)
def test_every_module_is_in_the_tree(path):
    folder, _, name = path.rpartition("/")
    assert re.search(rf"(?<![\w.]){re.escape(name)}", tree("architecture.md")[folder])


@pytest.mark.parametrize("page", TREES)
def test_every_module_and_package_of_a_tree_exists_and_no_package_is_left_out(page):
    found = tree(page)
    for folder, text in found.items():
        for name in re.findall(r"\w+\.py\b", text):
            assert f"{folder}/{name}" in MODULES, name
    packages = {path.rpartition("/")[0] for path in MODULES}
    assert packages <= set(found)
