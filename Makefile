# The two commands: `make serve` and `make test`. Both set up .venv first, which takes no time when it is there.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup serve test unit bench lint format clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## Make .venv with everything, from the lock
	@PYTHON=$(PYTHON) scripts/setup.sh

# exec: Ctrl-C and SIGTERM reach hetero-llm itself.
serve: setup ## Serve a model: make serve ARGS="MODEL --port 8001"
	@exec $(BIN)/hetero-llm serve $(ARGS)

test: setup ## Run the whole suite: make test ARGS="-k gateway"
	@scripts/test.sh $(ARGS)

unit: setup ## Run the unit tests only
	@$(BIN)/python -m pytest tests/unit -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: setup ## Measure the start, the overhead of the gateway, and simulated engines; see benchmarks/README.md
	@$(BIN)/python -m benchmarks.startup
	@$(BIN)/python -m benchmarks.overhead
	@$(BIN)/python -m benchmarks.sim_harness

lint: setup ## Style, format, types, import rules, changelog
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/towncrier build --draft --version next >/dev/null

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv and what tools left behind
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
