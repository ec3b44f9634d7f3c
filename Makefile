# The commands, the same here and in CI. PYTHON may be any CPython >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv run test check bench cluster-up cluster-down kind-smoke clean

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

run: venv  ## train examples/digits.yaml here
	$(BIN)/launcher run examples/digits.yaml

test: venv  ## side by side what is quiet, one after the other what starts gangs and clusters
	$(BIN)/python -m pytest -n auto tests/launcher tests/trainer
	$(BIN)/python -m pytest --ignore tests/launcher --ignore tests/trainer

check: venv  ## format, lint, types, that every test imports, floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@out=$$($(BIN)/python -m pytest -qq --collect-only) || { echo "$$out"; exit 1; }
	$(BIN)/python -m pytest -q tests/launcher/test_floors.py

bench: venv
	$(BIN)/python -m benchmarks

cluster-up: venv  ## a real Kubernetes on this machine, for tests and for you: eval "$$(make -s cluster-up)"
	@$(BIN)/python -m tests.cluster.harness up

cluster-down: venv
	@$(BIN)/python -m tests.cluster.harness down

kind-smoke: venv  ## the image and a job in a kind cluster; needs docker, kind and kubectl
	k8s/kind/up.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" NAMESPACE=team k8s/smoke.sh

clean:
	rm -rf $(VENV) runs
