# `make demo` and `make test` set up everything they need in .venv, once.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?= -q
PYTEST_FLAGS ?=

# What the demo continues; any other text: make demo PROMPT='def fibonacci(n):'
define PROMPT
def read_config(filename, encoding=None):
    """Read and parse a configuration file.
endef
export PROMPT

.PHONY: demo test test-newest lint types check format docs clean

demo: $(VENV)/.installed
	$(VENV)/bin/eagle3 generate "$$PROMPT" --dtype mixed --max-new-tokens 160

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

# The part of the tests that needs no PyTorch, with the newest releases of everything: PYTHON=python3.12 VENV=.venv-newest.
test-newest: $(VENV)/.installed-light
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .

types: $(VENV)/.installed-dev
	$(VENV)/bin/pyright

check: lint types test
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs:
	@echo "There is no documentation site yet; README.md is the documentation."

clean:
	rm -rf $(VENV) .venv-newest build dist .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp says that an installation is complete; another pyproject.toml asks for it again.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e .
	touch $@

$(VENV)/.installed-light: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --upgrade --upgrade-strategy eager -e '.[test-light]'
	touch $@

# PyTorch's own index has smaller builds for machines without a GPU: PIP_FLAGS='-q --extra-index-url ...'.
$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-test
