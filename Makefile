# Everything runs in .venv; nothing is installed outside it. `make` alone prints the targets.
#
#   PYTHON=python3.12   the interpreter that .venv is made with
#   PYTEST_ARGS='-k x'  more arguments for pytest
#   BENCHMARKS=relay    the modules of benchmarks/ that `make bench` runs, instead of all
#   ENGINE=sglang       the engine that `make demo-engine` shows, and the only one that `make engines` installs

PYTHON ?= python3
PYTEST_ARGS ?=
ENGINE ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-dev
SOURCES := stopguard tests tools dashboards $(wildcard benchmarks adapters/stopguard_*)
BENCHMARKS ?= $(filter-out _%,$(basename $(notdir $(wildcard benchmarks/*.py))))

# What a caller's environment must not change about the installation.
unexport PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT VIRTUAL_ENV

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-vllm demo-engine engines test check lint types unit format bench compiled docs constraints clean distclean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## A storm of stops against the built-in engine, and its settled book
	@$(BIN)/stopguard demo

demo-vllm: $(STAMP) ## A storm of stops against a real engine: vLLM, or ENGINE=sglang|llamacpp|deepinfer
	@$(BIN)/stopguard demo --engine $(or $(ENGINE),vllm)

demo-engine: demo-vllm ## The same, by a better name for other engines

engines: $(STAMP) ## Install the real engines for tests and demos, once, in the user's cache (ENGINE=… only one)
	@$(BIN)/python -m tools.engines $(ENGINE)

test: lint types ## All checks and all tests; those of the real engines last
	$(BIN)/python -m tools.all_tests $(PYTEST_ARGS)

check: lint types unit ## The quick loop: lint, types and unit tests, under two minutes

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy $(SOURCES)

unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit -m "not slow" $(PYTEST_ARGS)

format: $(STAMP) ## Rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure what StopGuard costs, beside its peers
	@for name in $(BENCHMARKS); do echo "== benchmarks/$$name.py"; $(BIN)/python -m benchmarks.$$name || exit 1; done

compiled: $(STAMP) ## A wheel in dist/ whose heart and relay are compiled: the same code, half the CPU a request
	$(BIN)/python tools/compiled_wheel.py dist

docs: $(STAMP) ## Write the generated pages of docs/ again
	$(BIN)/python -m dashboards.generate
	@for script in docs/generate_*.py; do \
	  if [ -e "$$script" ]; then echo "$$script"; $(BIN)/python "$$script" || exit 1; fi; done

constraints: $(STAMP) ## Write constraints.txt from what is in .venv
	$(BIN)/python -m pip freeze --exclude-editable --exclude pip --exclude setuptools > constraints.txt
	@touch $(STAMP)

clean: ## Remove caches and build products
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -path ./$(VENV) -prune -o -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## `make clean`, and remove .venv
	rm -rf $(VENV)

# The environment is made once, and again when what it is made from changes. A .venv that somebody made by hand is
# used as it is. Where the distribution split `ensurepip` off (Debian without python3-venv), the pip beside $(PYTHON)
# fills the environment instead.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || \
	  { echo "StopGuard needs Python 3.11 or newer, and '$(PYTHON)' was not found: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "StopGuard needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV) (only when dependencies change; about a minute) ..."
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
	  if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv --clear $(VENV); \
	  else $(PYTHON) -m venv --clear --without-pip $(VENV); fi; fi
	@if $(BIN)/python -c 'import pip' 2>/dev/null; then pip="$(BIN)/python -m pip"; \
	  else pip="$(PYTHON) -m pip --python $(BIN)/python"; fi; \
	  $$pip -qq --disable-pip-version-check install --no-input -c constraints.txt -e '.[dev]'
	@touch $@
