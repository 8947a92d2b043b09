# make setup: the environment in .venv; make demo: watch a model learn; make test: the whole suite.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# Where PyTorch publishes its CPU builds; used only when the configured package index has none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= 2

.PHONY: setup weights demo offline-demo dataset-demo lint juicer test test-all soak wheel clean

setup: $(VENV)/.ready

# A CPU build is asked for first, because the default Linux wheel of torch carries several GB of CUDA libraries.
# On a machine with an NVIDIA card: make setup TORCH_BUILD=default
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	if [ "$(TORCH_BUILD)" = default ]; then \
	  $(BIN)/python -m pip install --quiet -c constraints.txt torch; \
	else \
	  $(BIN)/python -m pip install --quiet "$(TORCH)+cpu" 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --extra-index-url $(TORCH_CPU_INDEX) "$(TORCH)+cpu" 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet "$(TORCH)"; \
	fi
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

weights: setup
	$(BIN)/python -m explorers.models.weights_cache

demo: weights
	$(BIN)/buffer-engine run pipelines/examples/demo.yaml

dataset-demo: weights
	$(BIN)/buffer-engine run pipelines/examples/champ_curation.yaml

offline-demo: weights
	$(BIN)/buffer-engine run pipelines/examples/offline_sft.yaml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# Data-Juicer in an environment of its own, because of its pins; the tests that run it are skipped without.
juicer: setup
	$(BIN)/python -m operators.bridge.juicer_env "$${BUFFER_ENGINE_CACHE:-$$HOME/.cache/buffer-engine}/juicer"

test: setup weights
	$(BIN)/python -m pytest

# Everything, with Data-Juicer, and the checks of the distribution; the extra over `make test` needs the package index.
test-all: lint juicer test wheel

# Fifteen processes on one store for as long as SOAK_SECONDS says, with every reader checking all it sees.
soak: setup
	SOAK_SECONDS=$${SOAK_SECONDS:-600} $(BIN)/python -m pytest -s tests/faults/test_store_soak.py

wheel: setup
	rm -rf dist
	$(BIN)/python -m build --quiet --wheel
	$(BIN)/check-wheel-contents dist

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache
