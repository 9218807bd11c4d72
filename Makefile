# Every target first makes .venv from requirements.lock; once it is there a target starts at once.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-cluster test-faults test-gpu image lint lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# uv itself comes from the lock, with its hashes, and installs the rest in a fraction of pip's time.
# Bytecode is compiled at once: where Python may not write it, each process would take twice as long
# to import PyTorch or MLflow.
.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3,11) <= sys.version_info[:2] < (3,14) else f"Python 3.11 to 3.13 is needed, {sys.version.split()[0]} was found: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	@awk '/^uv==/ {on=1} on {print} on && !/\\$$/ {exit}' requirements.lock > .venv/uv.lock
	$(BIN)/pip install --quiet --require-hashes --only-binary :all: -r .venv/uv.lock
	VIRTUAL_ENV=.venv $(BIN)/uv pip sync --require-hashes --compile-bytecode requirements.lock
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --no-deps --no-build-isolation --editable .
	@touch $@

demo: .venv/installed  ## digits from nothing to a registered model, in a few minutes
	$(BIN)/ddpm run

PYTEST := $(BIN)/pytest --dist loadfile --no-loadscope-reorder
test: lint  ## lint, types, then the tests that take no longer than some seconds each
	$(PYTEST) -n 4 -m "not slow"

test-slow: .venv/installed  ## the other tests that need no cluster: pipelines, servers, killed runs
	$(PYTEST) -n 4 -m slow

test-cluster: .venv/installed  ## the tests on the Kubernetes that KUBECONFIG names
	$(PYTEST) -n 3 tests/cluster --timeout 900

IMAGE ?= ddpm:dev
LIGHT_IMAGE ?= ddpm-light:dev
BUILDER ?= docker
image:  ## build IMAGE and LIGHT_IMAGE with BUILDER: docker, podman or buildah
	$(BUILDER) build -t $(LIGHT_IMAGE) --target light --build-arg REVISION=$$(git rev-parse HEAD) .
	$(BUILDER) build -t $(IMAGE) --build-arg REVISION=$$(git rev-parse HEAD) .

COUNT ?= 120
SEED ?= 0
test-faults: .venv/installed  ## kill, stop, fill and damage real runs, in COUNT drawn ways from SEED on
	$(BIN)/python tests/faults --seed $(SEED) --count $(COUNT)

CIFAR10 ?= ../shared/data/cifar10-jpeg.zip
test-gpu: .venv/installed  ## all that needs a GPU, in 9 minutes: docs/results/gpu-CARD.json
	$(BIN)/python -m benchmarks.gpu --cifar10 $(CIFAR10)

lint: .venv/installed  ## ruff, formatting, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

lock: .venv/installed  ## resolve requirements.lock anew from pyproject.toml
	$(BIN)/uv pip compile --universal --generate-hashes --no-header --no-emit-find-links --no-emit-index-url \
	  --quiet --upgrade pyproject.toml --extra all --group dev --output-file requirements.lock

clean:  ## remove the demo's workspace and its MLflow store
	rm -rf workspace mlflow.db mlartifacts mlruns
