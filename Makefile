# make demo: train and show a small translator.   make test: run the tests.   make lint: ruff, mypy, import-linter, tsc.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint format bench clean

demo: $(VENV)/ready
	$(BIN)/regard demo

test: $(VENV)/ready-dev node_modules/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/ready-dev node_modules/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	if [ -x node_modules/.bin/tsc ]; then node_modules/.bin/tsc -p regard/viewer/web; fi

format: $(VENV)/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) node_modules demo build dist *.egg-info

# Runtime dependencies in pinned versions; torch first and alone, so that no other package selects its build.
$(VENV)/ready: requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Regard needs Python 3.11 or newer; set PYTHON=python3.11 (or later) on the make command." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements-dev.txt setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements-dev.txt --no-build-isolation --editable .
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	touch $@

# Checks of the page: axe-core (accessibility) and tsc (types). Skipped without npm or network; Chromium is separate.
node_modules/ready: package.json
	mkdir -p node_modules
	if command -v npm > /dev/null && npm install --no-package-lock --no-audit --no-fund --silent; then touch $@; fi
