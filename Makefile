# make demo, make test: each does the set-up first; a second run re-installs nothing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
LOCKS  := requirements/cpu.lock requirements/dev.lock
# The stamps are named after the locks' contents: a changed lock installs, nothing else does.
RUN_STAMP := $(VENV)/.run-$(shell cat requirements/cpu.lock pyproject.toml | sha256sum | cut -c1-16)
DEV_STAMP := $(VENV)/.dev-$(shell cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-16)
ARGS   ?=
NAME   ?= overhead

export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup setup-dev setup-browser demo test test-fast lint format protos lock bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | column -t -s "$$(printf '\t')"

setup: $(RUN_STAMP)  ## install Kvorum for CPU into .venv

setup-dev: $(DEV_STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is older than Python 3.11: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): | $(BIN)/python
	@echo "installing the locked packages into $(VENV) (about 3 GB, some minutes, once)"
	$(BIN)/python -m pip install -qq --no-deps --disable-pip-version-check -r requirements/cpu.lock
	$(BIN)/python -m pip install -qq --no-deps --disable-pip-version-check --no-build-isolation -e .
	@rm -f $(VENV)/.run-* && touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(BIN)/python -m pip install -qq --no-deps --disable-pip-version-check -r requirements/dev.lock
	@rm -f $(VENV)/.dev-* && touch $@

setup-browser:  ## install Chromium and promtool, Debian's, for the tests of the viewer's page and of deploy/ (root)
	@command -v chromium >/dev/null && command -v promtool >/dev/null || { \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium prometheus; }

demo: setup  ## start a cluster, stream prompts through it, stay up until Ctrl-C (ARGS=--once ends it)
	@$(BIN)/kvorum demo $(ARGS)

test: setup-dev  ## all tests, with real engines
	$(BIN)/python -m pytest tests $(ARGS)

test-fast: setup-dev  ## the tests that need no engine
	$(BIN)/python -m pytest tests/unit -m "not engine and not cluster" $(ARGS)

lint: setup-dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup-dev  ## regenerate the gRPC stubs
	$(BIN)/python protos/generate.py

lock:  ## rewrite requirements/*.lock from requirements/*.in
	$(PYTHON) requirements/refresh.py

bench: setup-dev  ## run tests/bench/NAME.py, print both sides, write bench-results/NAME.json
	$(BIN)/python -m tests.bench.$(NAME) $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
