# Two commands do everything: `make ablation` and `make test`. Each makes or refreshes .venv by itself.
PYTHON ?= python3
SCALE ?= laptop
BIN := .venv/bin

.PHONY: ablation test check bench test-gpu clean

ablation: .venv/ready
	$(BIN)/titans sweep run ablation --scale $(SCALE)

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[peers]'
	$(BIN)/titans bench memory --against titans-pytorch

# Needs torch, Triton, numpy, click and pytest only, and installs nothing: with .venv where it is made.
test-gpu:
	PYTHONPATH=$(CURDIR)/kernels $(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -m gpu -rs tests/kernels

# The stamp is written last: an installation that was cut off starts over.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv
