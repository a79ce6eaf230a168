# Everything from a fresh clone: `make demo`, `make test`. The set-up runs once, and again when its inputs change.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.stepgraph-installed
DEV := $(VENV)/.stepgraph-dev-installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# Python keeps what it compiles: each worker and each rank of a test reads the same files, some of them rewritten.
export PYTHONDONTWRITEBYTECODE :=
# Tests that share a fixture of processes run in one worker (`xdist_group`).
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

FAST_SUITES := tests/cpu tests/contract tests/generated
SLOW_SUITES := tests/distributed tests/slow

.PHONY: help venv demo test test-slow test-long time-tests lint docs format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small GPT eager and graphed, and compare them bit for bit"
	@echo "make test       the fast suites"
	@echo "make test-slow  the slower suites, and what is slow in the fast ones"
	@echo "make test-long  what takes long and has a shorter neighbour, and all combinations of parameters; not in CI"
	@echo "make time-tests run the fast suites and note which of their tests are slow, by processor time"
	@echo "make lint       ruff format --check, ruff check, mypy --strict"
	@echo "make docs       the documentation as a site, in site/; a broken link fails"
	@echo "make format     rewrite the sources the way lint wants them"
	@echo "make clean      remove the virtual environment and the caches"

venv: $(DEV)

# Two steps: what a demo needs, and the tools for tests and lint after it. Both are held to constraints.txt: a build of
# torch that pip chose by itself could be several gigabytes larger.
$(DEMO): pyproject.toml constraints.txt
	@echo "Installing torch and stepgraph into $(VENV) (once, about a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[plot]"
	@touch $@

$(DEV): $(DEMO)
	@echo "Installing the tools for tests and lint into $(VENV) (once, less than a minute) ..."
	@$(PIP) -e ".[dev]"
	@touch $@

demo: $(DEMO)
	$(BIN)/stepgraph demo

test: $(DEV)
	$(PYTEST) -m "not slow and not long" $(FAST_SUITES)

test-slow: $(DEV)
	$(PYTEST) -m "slow and not long" $(SLOW_SUITES) $(FAST_SUITES)

test-long: $(DEV)
	$(PYTEST) -m long $(FAST_SUITES) $(SLOW_SUITES)

time-tests: $(DEV)
	$(PYTEST) -m "not long" --note-slow-tests $(FAST_SUITES)

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict stepgraph

# Not --quiet: it would hide the warnings from --strict.
docs: $(DEV)
	$(BIN)/mkdocs build --strict

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find stepgraph tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
