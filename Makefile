# Two commands do everything: `make ablation` and `make test`. Each makes or refreshes .venv by itself.
PYTHON ?= python3
SCALE ?= laptop
BIN := .venv/bin

# Test files at once. Each takes about a core; Ray's start is what a busy machine makes slow.
JOBS ?= 2
# A file stays on one process, and files keep the order that tests/conftest.py gives them.
SPREAD := --dist loadfile --no-loadscope-reorder

.PHONY: ablation test test-fast check bench chaos test-gpu clean

ablation: .venv/ready
	$(BIN)/titans sweep run ablation --scale $(SCALE)

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(SPREAD) --durations 10

# Without Ray, kernels compiled ahead of time, and all but one case of each kernel in the interpreter.
test-fast: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(SPREAD) --durations 10 -m "not cluster and not slow"

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[peers]'
	$(BIN)/titans bench memory --against titans-pytorch

# Faults at random moments; the table goes to the end. FAULTS=10 is a short one.
FAULTS ?= 100
SEED ?= 0
chaos: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED)

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
