"""The README's commands print what it says, and its snippets run."""

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

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"```console\n\$ (vitrail .+)\n((?:.*\n)*?)```", README)
PYTHON = re.findall(r"```python\n((?:.*\n)*?)```", README)


@pytest.fixture
def folder(tmp_path, real_weights, monkeypatch):
    """A folder as the README has it: real weights, a photograph."""
    shutil.copy(real_weights, tmp_path)
    china = next(path for path in load_sample_images().filenames if path.endswith("china.jpg"))
    shutil.copy(china, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "output"), CONSOLE)
def test_commands_print_what_the_readme_says(command, output, folder):
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout == output


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


def test_no_placeholder_is_left():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"BENCH|TODO|XXX|FIXME", path.read_text(encoding="utf-8")), path


def test_the_readme_shows_both_verbs():
    assert [command.split()[1] for command, _ in CONSOLE] == ["models", "convert"]


@pytest.mark.parametrize("snippet", PYTHON)
def test_snippets_run(snippet, folder, capsys):
    # The one line that would fetch a file of 391 MB.
    runnable = re.sub(r'^model = vitrail.load\("B/16-augreg.*\n', "", snippet, flags=re.M)
    exec(compile(runnable, "README.md", "exec"), {})
    if "predict" in snippet:
        assert "monastery" in capsys.readouterr().out
        assert (folder / "ti16-hub" / "config.json").exists()


@pytest.mark.parametrize("path", re.findall(r"\]\((docs/[\w.]+)\)", README))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


def test_every_module_is_in_the_tree():
    tree = README.split("## The tree")[1]
    parts = {"block.py", "attention.py", "positions.py", "heads.py", "initialisation.py"}
    # Described as a folder.
    whole = {"benchmarking", "data", "evaluation", "inspection", "objectives", "report"}
    whole |= {"duplicates", "exporting", "prediction", "serving", "training", "vtab"}
    for path in (ROOT / "vitrail").rglob("*.py"):
        if path.name not in {"__init__.py", "__main__.py", "errors.py", "format.py", *parts}:
            name = f"{path.parent.name}/" if path.parent.name in whole else path.name
            assert name in tree, path
