# Each target sets up what it needs; a second call installs nothing.
PYTHON ?= python3.11
EXTRA  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
ARGS   ?=
WORKERS ?= 2

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(EXTRA)
# uv does not read pip's variable for folders of wheels; without such a folder it finds torch's CPU wheels itself.
ifneq ($(PIP_FIND_LINKS),)
  export UV_FIND_LINKS := $(PIP_FIND_LINKS)
else ifeq ($(EXTRA),cpu)
  BACKEND := --torch-backend cpu
endif

.PHONY: help setup demo check fast test test-long lint format clean
help:     ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 20
	@echo '  variables: EXTRA=cpu|cuda  PYTHON=python3.11  WORKERS=2  ARGS="flags for demo, or for pytest"'

setup: $(STAMP)  ## install everything into .venv
$(STAMP): pyproject.toml setup.py $(wildcard requirements/*-$(EXTRA).txt)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode $(BACKEND) \
	  --overrides requirements/overrides-$(EXTRA).txt \
	  $(if $(wildcard requirements/constraints-$(EXTRA).txt),--constraints requirements/constraints-$(EXTRA).txt) \
	  --editable '.[$(EXTRA),torchstore,dev]'
	@rm -f $(VENV)/.installed-* && touch $@

demo: $(STAMP)  ## train the bundled model with GRPO, and show that it learned
	$(BIN)/python -m recipes.grpo --steps 8 --eval-every 8 --held-out-tasks 64 --trainer.minibatches 2 $(ARGS)

# A file's tests share what they start, so a worker takes whole files, in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

check: $(STAMP)  ## lint, types and the tests that start no services: what to run while writing
	@$(MAKE) --no-print-directory --jobs 2 lint fast

fast: $(STAMP)
	$(PYTEST) -m "not processes and not long" $(ARGS)

test: $(STAMP)  ## all tests but the long ones
	$(PYTEST) $(ARGS)

test-long: $(STAMP)  ## whole runs under every fault, two hosts, wheels in fresh environments; one at a time, as each fills the machine
	$(BIN)/python -m pytest -m long $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:    ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .bench .mypy_cache .ruff_cache .pytest_cache *.egg-info
