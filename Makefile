# Each target sets up what it needs; a second call installs nothing.
PYTHON ?= python3.11
EXTRA  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
ARGS   ?=
WORKERS ?= 2

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(EXTRA)
# uv ignores PIP_FIND_LINKS, so pass it on; without it uv finds torch's CPU wheels itself. Not for CUDA: a CPU build of torch
# in that folder would satisfy the pin.
ifeq ($(EXTRA),cpu)
  ifneq ($(PIP_FIND_LINKS),)
    export UV_FIND_LINKS := $(PIP_FIND_LINKS)
  else
    BACKEND := --torch-backend cpu
  endif
else ifeq ($(UV_FIND_LINKS),$(PIP_FIND_LINKS))
  unexport UV_FIND_LINKS  # check-cuda's make for CPUs has exported it
endif

# Keep bytecode: otherwise each of the hundreds of processes that tests start would spend seconds compiling its imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lock audit licences docs demo check fast test test-long test-nightly lint check-cuda format clean
help:     ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 20
	@echo '  variables: EXTRA=cpu|cuda  PYTHON=python3.11  WORKERS=2  ARGS="flags for demo, or for pytest"'

setup: $(STAMP)  ## install everything into .venv
# Everything from a registry must have a hash in requirements/, build dependencies included. torch's CPU wheels are on their
# own index, from which nothing else should come, so they are installed first and alone.
UV_INSTALL := $(BIN)/uv pip install --python $(BIN)/python --require-hashes
OVERRIDES  := --overrides requirements/overrides-$(EXTRA).txt
$(STAMP): pyproject.toml setup.py $(wildcard requirements/*-$(EXTRA).txt) $(BIN)/uv
	$(if $(filter cuda,$(EXTRA)),$(BIN)/python tools/cuda_machine.py $(MACHINE))
	$(if $(filter cpu,$(EXTRA)),$(UV_INSTALL) --compile-bytecode --no-deps $(BACKEND) \
	  --constraints requirements/constraints-cpu.txt --requirements requirements/overrides-cpu.txt)
	$(UV_INSTALL) --compile-bytecode --preview-features build-dependency-hashes --require-build-hashes $(OVERRIDES) \
	  --constraints requirements/constraints-$(EXTRA).txt --build-constraints requirements/constraints-$(EXTRA).txt \
	  --requirements pyproject.toml --extra $(EXTRA) --extra torchstore --extra dev
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-* && touch $@

$(BIN)/uv: requirements/uv.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $<
	@touch $@

# Pins stay as long as they resolve together. torch's CPU wheels are on their own index and their hashes are in the overrides;
# TORCH_NEEDS replaces torch here, so that nothing is looked up on that index.
LOCK := $(BIN)/uv pip compile --quiet --python $(BIN)/python --generate-hashes --no-annotate \
  --custom-compile-command "make lock" $(ARGS)
PINS := --extra torchstore --extra dev --extra wandb --python-version 3.11 --python-platform x86_64-manylinux_2_34
TORCH_NEEDS := filelock fsspec jinja2 networkx setuptools sympy typing-extensions
lock: $(BIN)/uv  ## pin new dependencies of pyproject.toml and write all hashes; ARGS="--upgrade-package NAME" moves a pin
	sed "/^torch==/,/[^\\\\]$$/c torch ; sys_platform == 'never'" requirements/overrides-cpu.txt > $(VENV)/overrides.txt
	printf '%s\n' $(TORCH_NEEDS) | $(LOCK) --extra cpu $(PINS) --overrides $(VENV)/overrides.txt \
	  --output-file requirements/constraints-cpu.txt pyproject.toml -
	$(LOCK) --extra cuda $(PINS) --overrides requirements/overrides-cuda.txt \
	  --output-file requirements/constraints-cuda.txt pyproject.toml
	echo uv | $(LOCK) --output-file requirements/uv.txt -

audit: $(STAMP)  ## list known advisories of pinned packages, where the registry answers (2 minutes)
	$(BIN)/python -m tools.audit

licences: $(STAMP)  ## write LICENSES.md, or name the packages whose licence needs review
	$(BIN)/python -m tools.licences

docs: $(STAMP)  ## build the site into .site, offline; a broken link or name is an error
	$(BIN)/python -m tools.figures --check
	$(BIN)/python -m tools.methods --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

demo: $(STAMP)  ## train the bundled model with GRPO, and show that it learned
	$(BIN)/python -m recipes.grpo --steps 10 --evaluation.every 10 --evaluation.tasks 64 --trainer.minibatches 2 --trainer.optimizer.lr 3e-5 --generator.max-tokens 16 --generator.max-model-len 1024 $(ARGS)

# A file's tests share what they start, so a worker takes whole files, in the order of tests/conftest.py; one takes all of the gateway.
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

check: $(STAMP)  ## lint, types and the tests that start no services; run before each commit
	@$(MAKE) --no-print-directory --jobs 2 lint fast

fast: $(STAMP)
	$(PYTEST) -m "not processes and not long" $(ARGS)

test: $(STAMP)  ## all tests except the long ones
	$(PYTEST) $(ARGS)

# Tests that need a machine to themselves: a Slurm of three nodes, an installation of 9 GB.
ALONE := $(addprefix tests/test_,$(addsuffix .py,slurm check_cuda))

test-long: $(STAMP)  ## whole runs under faults, over hosts, on a real Slurm
	$(PYTEST) -m "long and not nightly" $(addprefix --ignore=,$(ALONE)) $(ARGS)
	$(BIN)/python -m pytest -m "long and not nightly" $(ALONE) $(ARGS)

# A night must not pass without the tests of other packages' clients.
test-nightly: export FORGE_RL_REQUIRE_PEERS := 1
test-nightly: $(STAMP)  ## the longest: every layout, command of the docs, kind of run and wheel
	$(PYTEST) -m nightly $(addprefix --ignore=,$(ALONE)) $(ARGS)
	$(BIN)/python -m pytest -m nightly $(ALONE) $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The same installation as for a GPU, including hashes, in a separate folder; only the driver check is skipped.
CUDA := EXTRA=cuda VENV=.cuda MACHINE=--without-driver

check-cuda:  ## check the CUDA path without a GPU, in .cuda (9 GB); ARGS="forward kernels" selects checks
	@$(MAKE) --no-print-directory setup $(CUDA)
	@.cuda/bin/python -m tools.check_cuda $(ARGS)

format: $(STAMP)  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:    ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .cuda .bench .site .mypy_cache .ruff_cache .pytest_cache *.egg-info
