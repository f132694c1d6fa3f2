# Needs python3 (3.10 or newer) and make. Every target sets up .venv first; that does nothing when nothing changed.
PYTHON ?= python3
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS
# of `make test`; each starts up to four ranks
PROCESSES ?= 2
BIN := .venv/bin
PYTHON_GPU ?= $(BIN)/python
STAMP := .venv/installed
PROJECTS := pyproject.toml $(wildcard slapo_*/pyproject.toml) $(wildcard plugins/*/pyproject.toml)

.PHONY: setup demo test test-all lint format docs bench gpu clean

setup: $(STAMP)

$(STAMP): requirements-dev.txt constraints.txt $(PROJECTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -r requirements-dev.txt
	touch $@

demo: setup
	$(BIN)/slapo train --tp 2 --pp 2 --steps 30 --reference --report demo

test: setup
	$(BIN)/python -m pytest -q -n $(PROCESSES) --dist worksteal -m "not slow and not gpu"

test-all: setup
	$(BIN)/python -m pytest -q -m "not gpu"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The first page is build/docs/index.html. Needs no network once `setup` is done.
docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs

# The output is a whole page: `make -s bench > benchmarks/README.md`
bench: setup
	@$(BIN)/python -m benchmarks

# Needs a CUDA device, or several, and a CUDA build of torch in the environment of `PYTHON_GPU`.
gpu:
	$(PYTHON_GPU) -m pytest -q -m gpu tests/gpu tests/slapo_memory
	$(PYTHON_GPU) -m benchmarks.gpu.step
	$(PYTHON_GPU) -m benchmarks.gpu.checkpoint
	$(PYTHON_GPU) -m benchmarks.gpu.stages
	$(PYTHON_GPU) -m benchmarks.gpu.blocks
	$(PYTHON_GPU) -m benchmarks.handwritten --device cuda
	$(PYTHON_GPU) -m benchmarks.gpu.engines
	$(PYTHON_GPU) -m benchmarks.gpu.kernels
	$(PYTHON_GPU) -m benchmarks.gpu.plan

clean:
	rm -rf .venv build dist demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
