# Everything from a fresh clone: `make demo`, `make test`. The set-up runs once, and again when its inputs change.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stepgraph-installed

FAST_SUITES := tests/cpu tests/contract
SLOW_SUITES := tests/distributed tests/slow

.PHONY: help venv demo test test-slow lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small GPT eager and graphed, and compare them bit for bit"
	@echo "make test       the fast suites"
	@echo "make test-slow  the slower suites, and what is slow in the fast ones"
	@echo "make lint       ruff format --check, ruff check, mypy --strict"
	@echo "make format     rewrite the sources the way lint wants them"
	@echo "make clean      remove the virtual environment and the caches"

venv: $(STAMP)

# torch is pinned through constraints.txt in the same command as everything else,
# so that pip settles on one build of it before it resolves what depends on it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/stepgraph demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(FAST_SUITES)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) $(SLOW_SUITES)
	$(BIN)/python -m pytest -n $(WORKERS) -m slow $(FAST_SUITES)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict stepgraph

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find stepgraph tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
