# `make test` and `make demo` create the environment themselves; nothing else has to be installed first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := $(VENV)-oldest
NEWEST := $(VENV)-newest
LATEST := $(VENV)-latest
# in the order of the files; the tests of a file share the processes that its fixtures have started
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install test test-slow test-oldest test-newest test-latest coverage demo docs lint types package format clean
help:
	@echo "make demo       the complete workflow on text that every Python contains: tokenizer, data, pretraining, continuations"
	@echo "make test       ruff, mypy and pytest (default and 2-4 process tests)"
	@echo "make test-slow  larger parallel layouts and long runs"
	@echo "make test-oldest  pytest with the oldest torch that pyproject.toml allows (a download of gigabytes)"
	@echo "make test-newest  pytest with the newest versions that pyproject.toml allows"
	@echo "make test-latest  pytest with the latest torch, transformers, datasets, accelerate, peft and deepspeed"
	@echo "make coverage   the default tests, and which lines of src/gptlm they run"
	@echo "make lint types  ruff; mypy"
	@echo "make package    wheel and sdist in dist, checked by twine"
	@echo "make docs       the documentation as a site in build/site"
	@echo "make install    create $(VENV) and install"
	@echo "make format     format the code with ruff"

install: $(STAMP)
$(STAMP): pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("gptlm needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and the other libraries, some minutes without output"
	$(BIN)/python -m pip install -q -c requirements/constraints.txt torch==2.13.0
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q -c requirements/constraints.txt -e '.[dev]'
	touch $(STAMP)

test: lint types
	$(BIN)/python -m pytest -n 2 -m 'not distributed and not slow and not gpu'
	$(BIN)/python -m pytest $(SPREAD) -m 'distributed and not slow and not gpu'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-oldest:
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	grep -v '^torch==' requirements/constraints.txt > $(OLDEST)/constraints.txt
	DS_BUILD_OPS=0 $(OLDEST)/bin/python -m pip install -q -c $(OLDEST)/constraints.txt torch==2.11.0 -e '.[test]'
	$(OLDEST)/bin/python -m pytest -n 2 -m 'not distributed and not slow and not gpu'
	$(OLDEST)/bin/python -m pytest $(SPREAD) -m 'distributed and not slow and not gpu'

test-newest:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	DS_BUILD_OPS=0 $(NEWEST)/bin/python -m pip install -q --upgrade --upgrade-strategy eager -e '.[test]'
	$(NEWEST)/bin/python -m pytest -n 2 -m 'not distributed and not slow and not gpu'
	$(NEWEST)/bin/python -m pytest $(SPREAD) -m 'distributed and not slow and not gpu'

# the second installation ignores the caps of pyproject.toml: pip only warns about them
test-latest:
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	DS_BUILD_OPS=0 $(LATEST)/bin/python -m pip install -q -e '.[test]'
	DS_BUILD_OPS=0 $(LATEST)/bin/python -m pip install -q --upgrade torch transformers datasets accelerate peft deepspeed
	$(LATEST)/bin/python -m pytest -n 2 -m 'not distributed and not slow and not gpu'
	$(LATEST)/bin/python -m pytest $(SPREAD) -m 'distributed and not slow and not gpu'

# three tests fail with coverage alone (CONTRIBUTING.md): the second run and the table come all the same
coverage: $(STAMP)
	-$(BIN)/python -m pytest -n 2 --cov --cov-report= -m 'not distributed and not slow and not gpu'
	$(BIN)/python -m pytest $(SPREAD) --cov --cov-append --cov-report=term:skip-covered -m 'distributed and not slow and not gpu'

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

package: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(LATEST) .coverage* demo build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
