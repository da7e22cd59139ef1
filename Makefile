# One command for each thing a developer or an operator does. `make` alone lists them.

VENV    ?= .venv
ARGS    ?=
PYTHON  := $(VENV)/bin/python
STAMPS  := $(VENV)/.stamps

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve test check bench format lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMPS)/run $(STAMPS)/demo  ## a virtual environment, locked packages, llama.cpp built for this machine, the demo model

serve: install  ## the server with the demo model; flags: make serve ARGS="--port 9000 --parallel 4"
	$(PYTHON) -m server --demo $(ARGS)

test: check $(STAMPS)/demo  ## check, then all tests; one of them: make test ARGS="tests/engine -k utf8"
	$(PYTHON) -m pytest $(ARGS)

check: $(STAMPS)/dev  ## format, lint, types, import rules, the Dockerfile; changes nothing
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/hadolint Dockerfile.cuda

bench: $(STAMPS)/dev $(STAMPS)/demo  ## measure the server; ARGS="--against URL" puts a second one beside it
	$(PYTHON) -m server.ops.bench $(ARGS)

format: $(STAMPS)/dev  ## rewrite the code in the project's format
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix-only .

lock: $(STAMPS)/dev  ## work the requirements*.txt files out anew from pyproject.toml
	scripts/lock $(PYTHON)

clean:  ## remove caches and build products; .venv and the wheel folder stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find server tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# ── what is installed; a stamp is older than its source when it must be done again ──────────────────────────────────

$(STAMPS)/venv: scripts/venv
	scripts/venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/run: $(STAMPS)/venv requirements.txt $(STAMPS)/llama
	scripts/pip $(PYTHON) requirements.txt
	@touch $@

$(STAMPS)/dev: $(STAMPS)/run requirements-dev.txt
	scripts/pip $(PYTHON) requirements-dev.txt
	@touch $@

$(STAMPS)/llama: $(STAMPS)/venv scripts/build_llama requirements-build.txt requirements-llama.txt
	scripts/build_llama $(PYTHON)
	@touch $@

$(STAMPS)/demo: $(STAMPS)/venv requirements-demo.txt
	scripts/pip $(PYTHON) requirements-demo.txt
	@touch $@
