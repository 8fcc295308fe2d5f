# make demo    environment, build, and the main job on the embedded demo model
# make test    everything that CI runs
# make help    the other targets
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH = $(shell grep '^torch==' constraints.txt)
TORCH_INDEX ?=
NATIVE_BUILD := build/native
SOURCES := pyproject.toml constraints.txt CMakeLists.txt \
           $(shell find src native -type f -name '*.py*' ! -name '*.pyc' -o -type f -name '*.[ch]pp')

.PHONY: help setup demo test lint pytest test-slow test-native sanitize format clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/installed ## Debian packages where missing, virtual environment, build

# A file of its own says that the environment is whole: an interrupted or failed venv leaves bin/python, without pip.
$(VENV)/created:
	PYTHON=$(PYTHON) scripts/system-packages.sh
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

# The ordinary package index has torch for CUDA only, which is gigabytes more. The CPU build is taken where pip finds it,
# be it through TORCH_INDEX=URL; only where there is none the ordinary build is.
$(VENV)/installed: $(SOURCES) $(VENV)/created
	@echo "installing PyTorch, Transformers and the tools, and compiling the native core: this takes minutes"
	$(BIN)/python -m pip install --quiet --no-deps $(TORCH_INDEX:%=--extra-index-url %) '$(TORCH)+cpu' 2>/dev/null || \
	  { echo "pip finds no CPU build of torch: taking the ordinary one, gigabytes with CUDA (see README)"; \
	    $(BIN)/python -m pip install --quiet -c constraints.txt torch; }
	$(BIN)/python -m pip install --quiet -c constraints.txt '.[dev]'
	@touch $@

demo: setup ## Pack the demo model, write a story under a budget below its size, prove that nothing changed
	$(BIN)/python demo/demo.py

test: setup lint pytest test-native ## Everything that CI runs

lint: setup ## ruff, mypy --strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find native -name '*.[ch]pp')

pytest: setup ## The Python tests
	$(BIN)/python -m pytest tests -q -m "not slow"

test-slow: setup ## The Python tests that take minutes
	$(BIN)/python -m pytest tests -q -m slow

test-native: ## Native tests under address and undefined-behaviour sanitizers, then under the thread sanitizer
	PYTHON=$(PYTHON) scripts/system-packages.sh
	$(MAKE) sanitize SANITIZER=address,undefined
	$(MAKE) sanitize SANITIZER=thread

sanitize:
	cmake -S . -B $(NATIVE_BUILD)-$(SANITIZER) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DZIPMOE_BUILD_PYTHON=OFF \
	  -DZIPMOE_BUILD_TESTS=ON -DZIPMOE_WARNINGS_AS_ERRORS=ON -DZIPMOE_SANITIZE=$(SANITIZER) -Wno-dev >/dev/null
	cmake --build $(NATIVE_BUILD)-$(SANITIZER)
	ctest --test-dir $(NATIVE_BUILD)-$(SANITIZER) --output-on-failure

format: setup ## Format everything
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format . ; $(BIN)/clang-format -i $$(find native -name '*.[ch]pp')

clean: ## Remove builds and the virtual environment
	rm -rf build $(VENV) demo/work
