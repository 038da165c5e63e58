# make serve   start a server with the default model (ARGS="--http-port 9000" adds options)
# make test    everything that CI runs
# make lint    ruff and mypy
# make bench   measure (ARGS as for `chairlift bench`)
# make setup   only make .venv, for serving; the others do so when they need it
.PHONY: serve test lint bench setup setup-dev

BIN := .venv/bin
# Barriers that spin long starve whatever shares the cores (see chairlift/__init__.py).
export GOMP_SPINCOUNT ?= 2000
SETUP := scripts/setup.sh pyproject.toml constraints.txt constraints-standalone.txt
ARGS ?=

serve: setup
	@$(BIN)/chairlift serve $(ARGS)

test: lint
	$(BIN)/python -m pytest

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup-dev
	$(BIN)/chairlift bench $(ARGS)

setup: .venv/.ready
setup-dev: .venv/.ready-dev

.venv/.ready: $(SETUP)
	@scripts/setup.sh
	@touch $@

.venv/.ready-dev: $(SETUP)
	@scripts/setup.sh dev
	@touch .venv/.ready $@
