# `make demo` and `make test` set up everything they need in .venv first; both may be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
# Test processes; each uses one thread, so that two of them share two cores.
WORKERS ?= 2

# Model code must never look for a hub: every weight used here comes out of an installed package.
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test lint types tests compile-all setup clean

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

# The Triton kernels run under Triton's interpreter in a process of their own: its switch is read at import.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" --cov

tests: .venv/.ready-dev
	TRITON_INTERPRET=1 $(PYTEST) --cov-report= --cov-fail-under=0 tests/interpreter
	$(PYTEST) --cov-append --cov-report=term-missing:skip-covered

# Takes long: every configuration of every kernel for every device, without a GPU.
compile-all: .venv/.ready-dev
	TILEWISE_COMPILE=all $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/compile

setup: .venv/.ready-dev

.venv/.ready-run: pyproject.toml constraints.txt constraints-interpreter.txt scripts/setup.sh
	sh scripts/setup.sh run "$(PYTHON)"

.venv/.ready-dev: .venv/.ready-run
	sh scripts/setup.sh dev "$(PYTHON)"

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find src -name '*.egg-info' -prune -exec rm -rf {} +
