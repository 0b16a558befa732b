# make demo: train and show a small translator.   make test: run the tests.   make lint: ruff, mypy, import-linter, tsc, biome.
# make lock: pin requirements.   make audit: look for known vulnerabilities.   make sbom: write the bill of materials.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint format lock audit sbom clean

demo: $(VENV)/ready
	$(BIN)/regard demo

test: $(VENV)/ready-dev node_modules/ready
	$(BIN)/python -m compileall -q -j 2 regard  # once for all processes, also where PYTHONDONTWRITEBYTECODE is set
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/ready-dev node_modules/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	if [ -x node_modules/.bin/biome ]; then node_modules/.bin/tsc -p regard/viewer/web && node_modules/.bin/biome ci --error-on-warnings; \
	else echo "The JavaScript is not checked: npm is missing. Install it, and run make lint again."; fi

format: $(VENV)/ready-dev node_modules/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	if [ -x node_modules/.bin/biome ]; then node_modules/.bin/biome format --write; fi

clean:
	rm -rf $(VENV) node_modules demo build dist *.egg-info

# Packages in pinned versions, checked against hashes; torch first and alone, so that no other package selects its build.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install

$(VENV)/ready: requirements-torch.txt requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Regard needs Python 3.11 or newer; set PYTHON=python3.11 (or later) on the make command." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' requirements-torch.txt)"
	$(PIP) --require-hashes --requirement requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/ready-dev: $(VENV)/ready requirements-dev.lock
	$(PIP) --requirement requirements-torch.txt
	$(PIP) --require-hashes --requirement requirements-dev.lock
	touch $@

# Pin all direct and indirect requirements, with the hashes of all their files. Versions already in the files are kept
# where possible; make lock UPGRADE=--upgrade updates them. torch and what only torch needs are left out.
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-header --no-annotate --excludes .ci/without-torch.txt $(UPGRADE)

lock: $(VENV)/ready
	$(PIP) "$$(grep '^uv==' requirements-dev.txt)"
	$(COMPILE) pyproject.toml requirements-dev.txt --output-file requirements-dev.lock > /dev/null
	echo setuptools | $(COMPILE) pyproject.toml - --constraint requirements-dev.lock --output-file requirements.lock > /dev/null

# Known vulnerabilities of the pinned packages; says so and succeeds where the database cannot be reached.
audit: $(VENV)/ready-dev
	$(BIN)/python .ci/audit.py requirements-dev.lock

# Bill of materials of a release, in CycloneDX format.
sbom: $(VENV)/ready-dev
	PYTHON=$(BIN)/python .ci/sbom

# Checks of the page: axe-core (accessibility), tsc (types) and biome (format, lint). Skipped without npm or network; Chromium is separate.
node_modules/ready: package.json
	mkdir -p node_modules
	if command -v npm > /dev/null && npm install --no-package-lock --no-audit --no-fund --silent; then touch $@; fi
