# Each target sets up what it needs; a second call installs nothing.
PYTHON ?= python3.11
EXTRA  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
ARGS   ?=
WORKERS ?= 2

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(EXTRA)
# uv does not read pip's variable for folders of wheels; without such a folder it finds torch's CPU wheels itself. For CUDA
# such a folder is left out: a torch for CPUs in it would be taken for the one that is pinned.
ifeq ($(EXTRA),cpu)
  ifneq ($(PIP_FIND_LINKS),)
    export UV_FIND_LINKS := $(PIP_FIND_LINKS)
  else
    BACKEND := --torch-backend cpu
  endif
endif

# Bytecode is kept: each of the hundreds of processes that tests start would compile what it imports, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lock audit licences docs demo check fast test test-long lint check-cuda format clean
help:     ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 20
	@echo '  variables: EXTRA=cpu|cuda  PYTHON=python3.11  WORKERS=2  ARGS="flags for demo, or for pytest"'

setup: $(STAMP)  ## install everything into .venv
# Everything from a registry must have a hash in requirements/: what runs while a package is built too. torch's CPU wheels
# are on an index of their own, and all else should not come from there: so they are first, and alone.
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

# Pins stay as they are as long as they fit together. torch's CPU wheels are on an index of their own, whose hashes are in the
# overrides; what torch itself needs stands in for it, so that nothing else is looked up there.
LOCK := $(BIN)/uv pip compile --quiet --python $(BIN)/python --generate-hashes --no-annotate \
  --custom-compile-command "make lock" $(ARGS)
PINS := --extra torchstore --extra dev --extra wandb --python-version 3.11 --python-platform x86_64-manylinux_2_34
TORCH_NEEDS := filelock fsspec jinja2 networkx setuptools sympy typing-extensions
lock: $(BIN)/uv  ## pin what is new in pyproject.toml, and write all hashes; ARGS="--upgrade-package NAME" moves a pin
	sed "/^torch==/,/[^\\\\]$$/c torch ; sys_platform == 'never'" requirements/overrides-cpu.txt > $(VENV)/overrides.txt
	printf '%s\n' $(TORCH_NEEDS) | $(LOCK) --extra cpu $(PINS) --overrides $(VENV)/overrides.txt \
	  --output-file requirements/constraints-cpu.txt pyproject.toml -
	$(LOCK) --extra cuda $(PINS) --overrides requirements/overrides-cuda.txt \
	  --output-file requirements/constraints-cuda.txt pyproject.toml
	echo uv | $(LOCK) --output-file requirements/uv.txt -

audit: $(STAMP)  ## list known advisories of what is pinned, as far as the registry tells (2 minutes)
	$(BIN)/python -m tools.audit

licences: $(STAMP)  ## write LICENSES.md, or name the package whose licence needs a look
	$(BIN)/python -m tools.licences

docs: $(STAMP)  ## build the site into .site, which needs no network; a broken link or name is an error
	$(BIN)/python -m tools.figures --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

demo: $(STAMP)  ## train the bundled model with GRPO, and show that it learned
	$(BIN)/python -m recipes.grpo --steps 10 --evaluation.every 10 --evaluation.tasks 64 --trainer.minibatches 2 $(ARGS)

# A file's tests share what they start, so a worker takes whole files, in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

check: $(STAMP)  ## lint, types and the tests that start no services: what to run while writing
	@$(MAKE) --no-print-directory --jobs 2 lint fast

fast: $(STAMP)
	$(PYTEST) -m "not processes and not long" $(ARGS)

test: $(STAMP)  ## all tests but the long ones
	$(PYTEST) $(ARGS)

# Long tests that leave half of the machine idle, and do not look at what others do.
SHARED := tests/test_families_engine.py tests/test_layouts.py

test-long: $(STAMP)  ## whole runs under every fault, two hosts, wheels in fresh environments; most one at a time, as each fills the machine
	$(PYTEST) -m long $(SHARED) $(ARGS)
	$(BIN)/python -m pytest -m long $(addprefix --ignore=,$(SHARED)) $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The same installation as for a GPU, hashes and all, in a folder of its own; only the driver is not looked at.
CUDA := EXTRA=cuda VENV=.cuda MACHINE=--without-driver

check-cuda:  ## what a CPU can prove of CUDA, in .cuda: no GPU needed, 9 GB; ARGS="forward triton" names some of the checks
	@$(MAKE) --no-print-directory setup $(CUDA)
	@.cuda/bin/python -m tools.check_cuda $(ARGS)

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:    ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .cuda .bench .site .mypy_cache .ruff_cache .pytest_cache *.egg-info
