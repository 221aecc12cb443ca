# Developer commands; VENV is any environment with `pip install -e ".[dev]"`.
VENV ?= .venv
PYTHON = $(VENV)/bin/python

.PHONY: setup check format test

setup:
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -e ".[dev]"

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(VENV)/bin/shellcheck $$(git ls-files '*.sh' .ci/run)

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test:
	OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m pytest
