"""The README's commands and snippets with the weights that it speaks of."""

import pytest

from tests.test_docs import CONSOLE, PYTHON, furnished, printed, run_snippet


@pytest.fixture
def folder(tmp_path, real_weights, monkeypatch):
    return furnished(tmp_path, real_weights, monkeypatch)


@pytest.mark.parametrize(("command", "output"), CONSOLE)
def test_commands_print_exactly_what_the_readme_says(command, output, folder):
    assert printed(command) == output


@pytest.mark.parametrize("snippet", [snippet for snippet in PYTHON if "predict" in snippet])
def test_the_snippet_knows_a_monastery(snippet, folder, capsys):
    run_snippet(snippet)
    assert "monastery" in capsys.readouterr().out
