# serve  start a server with the default model: make serve ARGS="--http-port 9000"
# test   everything CI runs                     lint   ruff and mypy
# setup  make .venv                             bench  measure (perf/)
.PHONY: serve test lint setup bench

BIN := .venv/bin
ARGS ?=

serve: setup
	@$(BIN)/chairlift serve $(ARGS)

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt constraints-standalone.txt scripts/setup.sh
	@./scripts/setup.sh
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/chairlift bench $(ARGS)
