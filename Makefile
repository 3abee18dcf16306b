# Everything runs in .venv, which is made on first use and remade when what it depends on changes.

PYTHON ?= python3
# Where PyTorch comes from, if not from pip's usual index: the address that pytorch.org's
# "Get started" page shows for your CPU or CUDA build.
TORCH_INDEX ?=
WORKERS ?= auto
PROMPT ?= Explain in two sentences what a KV cache is.
# Arguments of the benchmark: .venv/bin/python -m benchmarks.cpu --help
BENCH ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
TRITON := triton==3.6.0
# One thread a worker: the tests' tensors are small, and the workers already use every core.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

.PHONY: help setup demo test check pytest test-slow test-schema lint format bench constraints clean

help:
	@echo "make demo       fetch the default model and answer a prompt (PROMPT='...')"
	@echo "make test       lint, types and tests (under 25 minutes on 2 cores)"
	@echo "make test-slow  the tests that take longer"
	@echo "make test-schema the server against its OpenAPI document, with schemathesis in .venv-schema"
	@echo "make lint       mend what can be mended, then lint and types"
	@echo "make bench      this CPU: the default model here and in other engines (BENCH='--quick' to try it)"
	@echo "make setup      the environment alone; make clean removes it and all caches"

setup: $(STAMP)

# PyTorch first and alone, so that nothing below can choose another build of it. Its CUDA build
# brings the Triton that it needs; beside its CPU build Triton is for the kernels' tests only.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 13) else \
	  "Octavo needs Python 3.10 to 3.13, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@echo "Installing into $(VENV); PyTorch comes first, and takes some minutes ('make TORCH_INDEX=…' chooses its build)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && ! $(PIP) show -q triton 2>/dev/null; then \
	  echo "$(PIP) install -q $(TRITON)"; $(PIP) install -q $(TRITON); fi
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/octavo pull
	$(BIN)/octavo generate --temperature 0 --max-tokens 80 "$(PROMPT)"

test: check pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: setup
	$(PYTEST) -n $(WORKERS) --dist loadfile --durations=10

test-slow: setup
	$(PYTEST) -m slow --durations=10

# In an environment of its own, since it brings 30 packages that nothing else needs.
test-schema: setup
	test -x .venv-schema/bin/schemathesis || \
	  { $(PYTHON) -m venv .venv-schema && .venv-schema/bin/pip install -q schemathesis==4.32.5; }
	SCHEMATHESIS=$(CURDIR)/.venv-schema/bin/schemathesis $(PYTEST) -m slow tests/server/test_schemathesis.py

lint: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .

bench: setup
	$(BIN)/octavo pull --quiet
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m benchmarks.cpu $(BENCH)

constraints: setup
	$(BIN)/python tools/write_constraints.py > constraints.txt
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-schema build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find octavo tests -name __pycache__ -type d -prune -exec rm -rf {} +
