"""The public names; the import arrow is checked by import-linter beside the tests."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import vitrail


def test_the_public_names_are_these():
    assert sorted(vitrail.PUBLIC) == [
        "Classifier",
        "VitrailError",
        "benchmark",
        "convert",
        "create",
        "evaluate",
        "export",
        "fewshot",
        "inspect",
        "load",
        "paper",
        "predict",
        "report",
        "save",
        "serve",
        "sweep",
        "train",
    ]
    for name in vitrail.PUBLIC:
        assert getattr(vitrail, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = vitrail.nothing


PACKAGE = Path(vitrail.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def calls(of: str) -> list[tuple[str, ast.Call]]:
    """Where a function is called under this name, as `Image.open`."""
    return [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == of
    ]


def test_no_image_is_opened_without_a_list_of_formats():
    found = calls("Image.open")
    assert found
    assert [
        place for place, call in found if "formats" not in [word.arg for word in call.keywords]
    ] == []


def test_only_the_console_writes_to_the_terminal():
    written = [*calls("click.echo"), *calls("click.secho"), *calls("sys.stderr.write")]
    assert {place.partition(":")[0] for place, _ in written} == {"console.py"}


def distribution(requirement: str) -> str:
    """The normalized name of a package: `python-multipart` for `python_multipart>=0.0.20`."""
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def imported() -> set[str]:
    """The packages that the library imports, anywhere in it."""
    modules = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.partition(".")[0])
    known = packages_distributions()
    return {
        distribution(known[module][0]) for module in modules - sys.stdlib_module_names - {"vitrail"}
    }


def test_every_package_that_is_imported_is_declared_and_no_other():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    core = {distribution(one) for one in project["dependencies"]}
    extras = {
        distribution(one) for extra in project["optional-dependencies"].values() for one in extra
    }
    # torch brings Triton where it can use it.
    assert imported() - extras - {"triton"} == core


def test_the_library_needs_no_test_oracle_and_no_extra():
    code = (
        "import sys, vitrail; "
        "[sys.modules.__setitem__(name, None) for name in ('timm', 'transformers', 'scipy', "
        "'sklearn', 'huggingface_hub', 'beartype')]; "
        "vitrail.create('Ti/16', depth=1); vitrail.load; vitrail.convert; "
        "from vitrail.weights.published import listing; assert listing()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
