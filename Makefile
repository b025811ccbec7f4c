# Each target installs what it needs into .venv first; a second run installs nothing.
# `make help` lists the targets. All paths are relative, so the checkout may lie anywhere.

SHELL := /bin/sh
.DEFAULT_GOAL := help

# The newest of the supported interpreters that runs and can make a venv; override with PYTHON=...
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3 python; do \
	"$$name" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info)' \
	>/dev/null 2>&1 && { echo "$$name"; break; }; done)
UV_VERSION := 0.13.9

VENV := .venv
BIN := $(VENV)/bin
# The locks are complete, so pip resolves nothing. The first import makes the byte code, which is
# quicker than making all of it; where imports may not write any, all is made here instead.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip -qq
# The build tool is in the locks, so installing the project itself fetches nothing.
INSTALL_PROJECT := $(PIP) install --no-deps --no-build-isolation --editable .
COMPILE_ALL := [ -z "$$PYTHONDONTWRITEBYTECODE" ] || $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: help
help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'

# ---------------------------------------------------------------- set-up

$(VENV)/.created:
	@if [ -z "$(strip $(PYTHON))" ]; then \
		echo "Perdure needs Python 3.11 or later with the venv module, and found none on PATH." >&2; \
		echo "Install one (on Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
		exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Perdure needs Python 3.11 or later; PYTHON=$(PYTHON) is older or does not run." >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created requirements/runtime.lock pyproject.toml
	@echo "Installing the runtime into $(VENV)" >&2
	@$(PIP) install --no-compile --no-deps --require-hashes -r requirements/runtime.lock
	@$(INSTALL_PROJECT)
	@$(COMPILE_ALL)
	@touch $@

# The development lock holds everything of the runtime lock at the same versions.
$(VENV)/.dev: $(VENV)/.created requirements/dev.lock requirements/runtime.lock pyproject.toml
	@echo "Installing the development set into $(VENV)" >&2
	@$(PIP) install --no-compile --no-deps --require-hashes -r requirements/dev.lock
	@$(INSTALL_PROJECT)
	@$(COMPILE_ALL)
	@touch $(VENV)/.runtime $@

.PHONY: setup
setup: $(VENV)/.dev  ## install everything for development into .venv

# ---------------------------------------------------------------- use

# DATA=file.csv  REGION=name  MODEL=name  YES=1 (ask nothing)  JSON=1 (machine-readable)  CRASH=1 (kill a worker half-way)
# Switches are on with any value but 0, no and false.
is_on = $(filter-out 0 no false,$(1))
DEMO_FLAGS = $(if $(DATA),--data "$(DATA)") $(if $(REGION),--region "$(REGION)") $(if $(MODEL),--model "$(MODEL)") \
	$(if $(call is_on,$(YES)),--yes) $(if $(call is_on,$(JSON)),--json) $(if $(call is_on,$(CRASH)),--crash)

.PHONY: demo
demo: $(VENV)/.runtime  ## the guided tour; DATA= REGION= MODEL= YES=1 JSON=1 CRASH=1
	@$(BIN)/perdure demo $(strip $(DEMO_FLAGS))

.PHONY: serve
serve: $(VENV)/.runtime  ## run the server; ARGS= adds options
	@$(BIN)/perdure serve $(ARGS)

.PHONY: bench
bench: $(VENV)/.dev  ## measure throughput and latency; ARGS= adds options
	$(BIN)/perdure bench $(ARGS)

# ---------------------------------------------------------------- checks

# Each process has a PostgreSQL of its own. JOBS=0 runs all in one process, for a debugger.
# The byte code of tests is kept even where imports may not write any: making it anew costs each
# process as much as a tenth of the quick tests.
# One process more than the two cores that CI has: tests also wait, for processes and for each other.
JOBS := 3
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(JOBS) --dist worksteal

.PHONY: test
test: $(VENV)/.dev  ## all tests but those of test-node and crash; ARGS= adds options, JOBS= processes
	$(PYTEST) $(ARGS)

.PHONY: test-quick
test-quick: $(VENV)/.dev  ## the quick tests: without PostgreSQL, streams, snippets and mutants
	$(PYTEST) -m "not slow and not crash_full" -k "not postgres and not openapi and not snippets and not mutants" \
		--ignore tests/crash --ignore tests/streams $(ARGS)

.PHONY: test-node
test-node: $(VENV)/.dev  ## tests with JavaScript clients; needs node and npm
	@command -v node >/dev/null && command -v npm >/dev/null || { \
		echo "make test-node needs node and npm on PATH (on Debian: apt-get install nodejs npm)." >&2; exit 1; }
	cd tests/node && npm ci --no-audit --no-fund
	$(BIN)/pytest tests/node $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.dev  ## Schemathesis against the API, five minutes on each store; ARGS= adds options
	$(BIN)/python -m tests.server.fuzz $(ARGS)

.PHONY: crash
crash: $(VENV)/.dev  ## the long campaigns: kill -9, crowds of clients, seeds of the simulation
	$(BIN)/python -m pytest tests/crash tests/store tests/streams tests/sim tests/server -m crash_full $(ARGS)

SEEDS := 1..500
.PHONY: sim
sim: $(VENV)/.dev  ## simulate many seeds on a virtual clock; SEEDS=1..500, ARGS='--store sqlite --jobs 2'
	$(BIN)/perdure-sim --seeds $(SEEDS) $(ARGS)

MINUTES := 5
.PHONY: chaos
chaos: $(VENV)/.dev  ## disturb real processes and databases while runs go on; MINUTES=5 a store, ARGS= adds options
	$(BIN)/perdure-chaos --minutes $(MINUTES) $(ARGS)

.PHONY: model
model:  ## check the formal model of lease, fence and cancel; needs spin and a C compiler
	@command -v spin >/dev/null && command -v cc >/dev/null || { \
		echo "make model needs spin and cc on PATH (on Debian: apt-get install spin gcc)." >&2; exit 1; }
	@formal/check.sh

# Off: 102 (awaits in finally stand in shielded scopes with a limit, which it cannot see through
# helpers), 106 (a style of import), 114 (knows the name `start` only by convention), 124 (a port's
# methods are async whether one adapter awaits or not), 9xx (for trio; off by default).
ASYNC_OFF := ASYNC102,ASYNC106,ASYNC114,ASYNC124,ASYNC9

.PHONY: check
check: $(VENV)/.dev  ## every static check, fast ones first
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	find src -name '*.py' -print0 | xargs -0 -n 60 -P 2 $(BIN)/flake8-async --anyio --disable=$(ASYNC_OFF)
	$(BIN)/pyright
	@echo "Reports, which fail nothing:"
	@$(BIN)/deptry src || true
	@$(BIN)/vulture || true

.PHONY: lock
lock: $(VENV)/.lock-tool  ## make both locks afresh from pyproject.toml; UPGRADE=1 takes the newest versions
	$(PIN) $(if $(filter 1,$(UPGRADE)),--upgrade) --extra dev --output-file requirements/dev.lock
	$(PIN) --extra postgres --extra openai --constraint requirements/dev.lock --output-file requirements/runtime.lock

# No header, no annotation and no index line: a lock holds names, versions and hashes only.
PIN = $(VENV)-lock/bin/uv pip compile pyproject.toml requirements/build.in --quiet --universal --python-version 3.11 \
	--generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links

$(VENV)/.lock-tool: $(VENV)/.created Makefile
	"$(PYTHON)" -m venv $(VENV)-lock
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)-lock/bin/python -m pip --quiet install uv==$(UV_VERSION)
	@touch $@

.PHONY: clean
clean:  ## remove .venv, caches and build results; runs and databases stay
	rm -rf $(VENV) $(VENV)-lock build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
