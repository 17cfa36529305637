# Every target works on a fresh clone with nothing installed but Python 3.10 or newer.
PYTHON ?= python3
LOWEST ?= python3.10
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow test-lowest lint format bench readme tables docs docs-serve dist clean

demo: $(INSTALLED)  ## train on embedded data, compare five strategies, draw the trajectory
	$(BIN)/aswa-hf demo

test: $(INSTALLED)  ## the tests that CI runs
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)  ## the long ones too
	$(BIN)/python -m pip install --quiet --no-build-isolation "deepspeed>=0.19"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -m "slow or not slow"

# The lower bounds of pyproject.toml as exact versions; what they need in turn is the newest that fits.
test-lowest:  ## the tests with the oldest Python (LOWEST=python3.10) and the oldest dependencies that are supported
	$(LOWEST) -m venv --clear .venv-lowest
	sed -n 's/^    "\([a-z0-9-]*\)>=\([^"]*\)".*/\1==\2/p' pyproject.toml > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --constraint .venv-lowest/constraints.txt --editable ".[dev]"
	.venv-lowest/bin/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## speed and memory beside the peers and the machine's limit; DATA="folder …" adds graphs
	$(BIN)/python -m pip install --quiet --editable ".[bench,space]"
	$(BIN)/python benchmarks/averaging.py
	$(BIN)/python benchmarks/average_checkpoints.py
	$(BIN)/python benchmarks/vision.py
	$(BIN)/python benchmarks/kge.py --data countries $(DATA)
	$(BIN)/python benchmarks/queries.py --data countries $(DATA)
	$(BIN)/python benchmarks/space.py --data countries $(DATA)
	$(BIN)/python benchmarks/distributed.py

readme: $(INSTALLED)  ## measures the figures of the README again
	$(BIN)/python scripts/measure_readme.py

tables: $(INSTALLED)  ## fills the tables of the pages from results/
	$(BIN)/python scripts/tables.py

DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

docs: $(INSTALLED)  ## the site in site/; a warning is an error
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(DOCS) build --strict

docs-serve: $(INSTALLED)  ## shows the site, and builds it again when a page changes
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(DOCS) serve

dist: $(INSTALLED)  ## the source archive and the wheel
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build

# Touched only after a successful install, so an interrupted one is tried again.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-lowest .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
