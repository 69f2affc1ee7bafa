# `make demo` and `make test` set up everything they need in .venv first; both may be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
# Test processes; each uses one thread, so that two of them share two cores.
WORKERS ?= 2

# Model code must never look for a hub: every weight used here comes out of an installed package.
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test lint types tests setup clean

help:
	@echo "make demo    set up .venv and run the demo (writes tilewise-demo/index.html)"
	@echo "make test    set up .venv, then ruff, mypy and the tests with branch coverage"
	@echo "make lint | types | tests    one part of make test"
	@echo "make clean   remove .venv and every cache"

demo: .venv/.ready-run
	$(BIN)/python -m tilewise demo

test: lint types tests

lint: .venv/.ready-dev
	$(BIN)/python -m ruff check .

types: .venv/.ready-dev
	$(BIN)/python -m mypy

tests: .venv/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term-missing:skip-covered

setup: .venv/.ready-dev

.venv/.ready-run: pyproject.toml constraints.txt constraints-interpreter.txt scripts/setup.sh
	sh scripts/setup.sh run "$(PYTHON)"

.venv/.ready-dev: .venv/.ready-run
	sh scripts/setup.sh dev "$(PYTHON)"

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find src -name '*.egg-info' -prune -exec rm -rf {} +
