# On a fresh machine with Python 3.11 or newer: `make demo` runs the main job, `make test` all checks. Both set up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit wheel clean

demo: $(VENV)/.installed
	$(BIN)/fedtail demo

test: lint types unit wheel

lint: $(VENV)/.installed-test
	$(BIN)/ruff check src tests

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2

# The wheel, installed in a bare environment outside the clone, runs the main job.
wheel: $(VENV)/.installed-test
	PYTHON=$(BIN)/python sh tests/bare_wheel.sh

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
