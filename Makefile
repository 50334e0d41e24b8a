# Two commands: `make demo` and `make test`. Both make .venv in this folder, with everything they need, if it is not there.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Without an NVIDIA GPU: the torch whose CPU build is tested.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH := torch==2.13.0
else
TORCH := torch>=2.11
endif

.PHONY: help demo test test-all test-gpu test-agents lint style types site checks pytest docs clean

help:
	@echo "make demo   create .venv, install, and let the built-in model answer"
	@echo "make test   ruff, import-linter, pyright, the docs and the tests"
	@echo "make test-all   also what runs the code of another test, and Ray"
	@echo "make test-gpu   the tests that need a GPU"
	@echo "make test-agents   sessions of agents that people run; installs them"
	@echo "make docs   rewrite every generated page"
	@echo "make site   build the docs as a site into site/"
	@echo "make clean  remove .venv and what tools left behind"

demo: $(VENV)/.installed
	@$(BIN)/torchweave generate demo '12+30=' '907-48=' 'sort: pear fig apple'

# The type checker and the site run beside the first tests: alone they leave a core idle for a minute.
test: style
	@$(MAKE) --jobs=2 checks pytest

checks: types site

# docs/develop/testing.md says what this leaves out and when to run the rest.
MARKED := not (whole or agents)

test-all:
	@$(MAKE) test MARKED='not agents'

# Files that need more GPUs than there are skip themselves.
test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m gpu tests/gpu

# Agents that people run, in .agents; they need npm, and their versions are the newest.
NODE_CLIENTS := @anthropic-ai/claude-code @openai/codex @qwen-code/qwen-code opencode-ai ai @ai-sdk/openai zod
PYTHON_CLIENTS := openai-agents langgraph langchain-openai smolagents[openai] pydantic-ai-slim[openai]

test-agents: $(VENV)/.installed-test
	npm install --prefix .agents --no-audit --no-fund --silent $(NODE_CLIENTS)
	$(PYTHON) -m venv .agents/python
	.agents/python/bin/python -m pip install --quiet --disable-pip-version-check $(PYTHON_CLIENTS)
	$(BIN)/python -m pytest -m agents tests/agents

# A file at a time on each of two processes, which take a core each; tests/conftest.py orders the files. Bytecode is written: tests
# start hundreds of processes, each of which would compile the package.
pytest: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m '$(MARKED)'

lint: style types site

style: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-test
	$(BIN)/pyright --pythonpath $(BIN)/python

# A link or an anchor that leads nowhere is an error. The variable silences an advertisement.
site: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every page that a script writes; a test fails while one of them is stale.
docs: $(VENV)/.installed-test
	@for script in write_cli_reference write_passes_page write_tool_formats results_table draw_architecture measure_walk write_peer_requirements; do $(BIN)/python scripts/docs/$$script.py; done

# A stamp is as old as the last install; a change of pyproject.toml installs anew.
$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)

# torch comes first, so that nothing else can pull in another build of it.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing torch and torchweave into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) '$(TORCH)'
	@$(PIP) --editable .
	@touch $@

# A build of torch for GPUs brings its Triton; beside the CPU build one is installed, to interpret the GPU kernels.
$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	@echo "installing the test tools"
	@extras=test; $(BIN)/python -c 'import triton' 2>/dev/null || extras+=,triton-on-cpu; $(PIP) --editable ".[$$extras]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache site
