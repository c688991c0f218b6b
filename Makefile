# make run    set up, optimize the example model for five minutes, show the report
# make test   set up with the development tools, then everything that the CI checks
# make lint   ruff, mypy and the import layers alone
# make clean  remove the environment, caches and builds (runs in .autokernel/ and results.tsv stay)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt
DEV_TOOLS := pytest pytest-xdist hypothesis ruff mypy import-linter transformers build hatchling numpy mcp playwright matplotlib
MODEL ?= examples/llama.py
MINUTES ?= 5
WORKERS ?= auto

# The first of these that is new enough makes the environment.
PYTHONS := python3.12 python3.11 python3 python

.PHONY: run test lint clean

run: $(VENV)/.installed
	$(BIN)/autokernel run $(MODEL) --minutes $(MINUTES)
	$(BIN)/autokernel report

test: lint
	$(BIN)/python -m pytest -q -m "not alone" -n $(WORKERS) --dist worksteal
	$(BIN)/python -m pytest -q -m alone -n $(WORKERS) --dist loadfile --own-core

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@for python in $(PYTHONS); do \
	  if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$("$$python" --version)"; exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "error: no Python 3.11 or newer with the venv module was found" >&2; \
	echo "hint: install python3.12 (Debian and Ubuntu: also python3.12-venv) and run make again" >&2; exit 1

# Done again only when the dependencies change.
$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing autokernel and its dependencies into $(VENV)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools"
	@$(PIP_INSTALL) $(DEV_TOOLS)
	@touch $@
