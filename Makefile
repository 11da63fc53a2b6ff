# `make test` and `make demo` create the environment themselves; nothing else has to be installed first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := $(VENV)-oldest

.PHONY: help install test test-slow test-oldest demo docs lint format clean
help:
	@echo "make demo       the complete workflow on text that every Python contains: tokenizer, data, pretraining, continuations"
	@echo "make test       ruff, mypy and pytest (default and 2-4 process tests)"
	@echo "make test-slow  larger parallel layouts and long runs"
	@echo "make test-oldest  pytest with the oldest torch that pyproject.toml allows (a download of gigabytes)"
	@echo "make docs       the documentation as a site in build/site"
	@echo "make install    create $(VENV) and install"
	@echo "make format     format the code with ruff"

install: $(STAMP)
$(STAMP): pyproject.toml requirements/constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "gptlm needs Python 3.11 or newer: make PYTHON=python3.11"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c requirements/constraints.txt torch==2.13.0
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q -c requirements/constraints.txt -e '.[dev]'
	touch $(STAMP)

test: lint
	$(BIN)/python -m pytest -n 2 -m 'not distributed and not slow and not gpu'
	$(BIN)/python -m pytest -m 'distributed and not slow and not gpu'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-oldest:
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	grep -v '^torch==' requirements/constraints.txt > $(OLDEST)/constraints.txt
	DS_BUILD_OPS=0 $(OLDEST)/bin/python -m pip install -q -c $(OLDEST)/constraints.txt torch==2.11.0 -e '.[test]'
	$(OLDEST)/bin/python -m pytest -n 2 -m 'not distributed and not slow and not gpu'
	$(OLDEST)/bin/python -m pytest -m 'distributed and not slow and not gpu'

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) demo build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
