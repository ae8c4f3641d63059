# Two commands do everything: `make ablation` and `make test`. Each makes or refreshes .venv by itself.
PYTHON ?= python3
SCALE ?= laptop
BIN := .venv/bin

# Test files at once. Each takes about a core; Ray's start is what a busy machine makes slow.
JOBS ?= 2
# A file stays on one process, and files keep the order that tests/conftest.py gives them.
SPREAD := --dist loadfile --no-loadscope-reorder

.PHONY: ablation test test-fast test-all check docs bench chaos test-gpu clean

ablation: .venv/run
	$(BIN)/titans sweep run ablation --scale $(SCALE)

# What continuous integration runs: all but what is marked `nightly`.
test: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(SPREAD) --durations 10 -m "not nightly"

# Without Ray, and without what takes seconds; of each parametrised test the first case.
test-fast: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(SPREAD) --durations 10 --first-cases -m "not cluster and not slow and not nightly"

# Everything, the experiments' own tests too.
test-all: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(SPREAD) --durations 10 tests benchmarks experiments tools

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/counts.py

# A site in site/: the pages of docs/, and the API from the docstrings.
docs: .venv/docs
	$(BIN)/mkdocs build --quiet

bench: .venv/run
	$(PIP) --editable '.[peers]'
	$(BIN)/titans bench memory --against titans-pytorch

# Faults at random moments; the table goes to the end. FAULTS=10 is a short one.
FAULTS ?= 100
SEED ?= 0
chaos: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.chaos --faults $(FAULTS) --seed $(SEED)

# Needs torch, Triton, numpy, click and pytest only, and installs nothing: with .venv where it is made.
test-gpu:
	PYTHONPATH=$(CURDIR)/kernels $(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -m gpu -rs tests/kernels

# Installations, each with what its commands need. A stamp is written last: one that was cut off starts over.
PIP = $(BIN)/python -m pip install --quiet --constraint constraints.txt

.venv/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(TORCH_FOR_CPU)
	$(PIP) --editable '.[train]'
	touch $@

.venv/test .venv/dev .venv/docs: .venv/run
	$(PIP) --editable '.[$(@F)]'
	touch $@

# Without a GPU, and where no other index is configured, torch comes from its index of CPU builds: the default
# one brings gigabytes of CUDA libraries.
define TORCH_FOR_CPU
@command -v nvidia-smi >/dev/null || [ -n "$$PIP_INDEX_URL$$PIP_EXTRA_INDEX_URL" ] || $(BIN)/python -m pip config list | grep -q index-url \
	|| $(PIP) --retries 1 --index-url https://download.pytorch.org/whl/cpu torch || true
endef

clean:
	rm -rf .venv
