# PY=/path/to/python uses that interpreter as it is and installs nothing (machines without network).
VENV := .venv
ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-matrix test-gpu test-gpu4 bench bundle lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with vLLM, wrapt, CuPy and the test tools (9 GB, minutes)

$(VENV)/.ready: pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); print(*p["project"]["dependencies"], *p["dependency-groups"]["dev"], sep="\n")' > $(VENV)/requirements.txt
	@echo "installing vLLM and its CUDA libraries into $(VENV): 9 GB, several minutes"
	$(VENV)/bin/python -m pip install -qq --upgrade pip
	$(VENV)/bin/python -m pip install -qq -r $(VENV)/requirements.txt
	touch $@

demo: $(READY) ## serve a tiny model with the overlay in front (without a GPU: plan it, and compile the kernel)
	$(PY) -m overlay demo

test: $(READY) ## the CPU test suite against the installed vLLM
	$(PY) -m pytest -m "not gpu"

test-matrix: $(READY) ## what depends on vLLM, on every release (VERSIONS=0.27.1,0.30.0: on some); docs/versions.md
	$(PY) -m tests.matrix $(if $(VERSIONS),--versions $(VERSIONS)) $(if $(CACHE),--cache $(CACHE)) $(TESTS)

test-gpu: $(READY) ## kernel and engine tests, on a machine with a GPU
	$(PY) -m pytest -m gpu -rs

test-gpu4: $(READY) ## tensor parallel 4, decode context parallelism and load, on a machine with four GPUs
	$(PY) -m tests.gpu.ranks --gpus 4 --load

bench: $(READY) ## the kernel against this GPU's limits and its peers, kept in docs/measurements
	$(PY) -m overlay bench --check

bundle: $(READY) ## a folder for containers in OUT=build/bundle; for another image: PYTHON=3.12 PLATFORM=aarch64 CUDA=13
	$(PY) -m overlay bundle "$(or $(OUT),build/bundle)" $(if $(PYTHON),--python $(PYTHON)) $(if $(PLATFORM),--platform $(PLATFORM)) $(if $(CUDA),--cuda $(CUDA))

lint: $(READY) ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean: ## remove .venv and everything generated
	rm -rf $(VENV) build .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
