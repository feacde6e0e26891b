# Two cores are enough for everything here; nothing but a package index is reached, and only by the set-up.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test test-slow lint bench
.DEFAULT_GOAL := train

train: .venv/ready
	$(BIN)/abovemup train

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy abovemup

bench: .venv/ready
	$(BIN)/abovemup bench

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "abovemup needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps mup==1.0.0  # a peer in the tests; its own dependencies are not needed
	@touch $@
