# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Whatever the machine prefers: without bytecode, each of many processes compiles torch anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check tests install

demo: install
	$(BIN)/vitrail demo

test: check tests

install: .venv/installed

# The stamp is as new as the dependencies it was made from.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]'
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# The second run has shape checking off: the checking wrappers cannot be compiled or exported.
# The third is an extra, with real weights and photographs that lie beside some checkouts.
tests: install
	$(BIN)/python -m pytest -q -n 2 --ignore tests/unchecked --ignore tests/real
	$(BIN)/python -m pytest -q -n 2 -o addopts=--import-mode=importlib tests/unchecked
	@if [ -d ../shared ]; then $(BIN)/python -m pytest -q -n 2 tests/real; \
	else echo "tests/real is left out: it needs weights and photographs in ../shared"; fi
