# The commands are the same on your machine and in CI. PYTHON: any CPython that pyproject.toml accepts.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LISTS := requirements/train.txt requirements/dev.txt
TOOLS := requirements/tools.txt requirements/build.txt
INSTALL := $(BIN)/python requirements/install.py
QUICK := tests/launcher $(addprefix tests/trainer/,checkpoint data metrics test_spec.py test_task.py)
PROSE := README.md CONTRIBUTING.md CODE_OF_CONDUCT.md SECURITY.md CHANGELOG.md docs examples k8s helm jaxlaunch

.PHONY: venv lock run test test-all quick check generated bench docs cluster-up cluster-down kind-smoke clean

venv: $(VENV)/.ready

# uv installs in a tenth of pip's time, but it has no wheel for some platforms: there, pip installs.
$(VENV)/.ready: pyproject.toml $(LISTS) $(TOOLS) requirements/uv.txt requirements/install.py
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: --requirement requirements/uv.txt
	$(INSTALL) --require-hashes $(TOOLS:%=--requirement %)
	$(INSTALL) --require-hashes --no-build-isolation $(LISTS:%=--requirement %)
	$(INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

lock:  ## write requirements/ anew, with the uv of PATH or of .venv; UPGRADE: --upgrade, or --upgrade-package NAME
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(PYTHON) requirements/lock.py $(UPGRADE)

run: venv  ## train examples/digits.yaml on this machine
	$(BIN)/launcher run examples/digits.yaml

test: venv  ## the tests that every change needs: those that wait beside those that compute
	$(BIN)/python -m tests.suite

test-all: venv  ## what `make test` leaves out: tests marked `extended` (pages, benchmarks, scale, other compilers, long kills)
	$(BIN)/python -m tests.suite --extended

quick: venv  ## unit tests that compile little and start no jobs or clusters; COVERAGE=--cov prints what they cover
	$(BIN)/python -m pytest -q -n auto -m "not slow and not extended" $(COVERAGE) $(QUICK)

check: venv  ## format, lint, types, spelling, prose, pages, releases, import errors of tests, import rules of packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell $(PROSE)
	$(BIN)/python -m tests.lint
	$(BIN)/python -m tests.prose
	$(BIN)/python -m tests.pages
	@out=$$($(BIN)/python -m pytest -qq --collect-only) || { echo "$$out"; exit 1; }
	$(BIN)/lint-imports --no-logo

generated: venv  ## write the pages, the chart's files and the golden manifests that are made from the code
	$(BIN)/python -m tests.generated

docs: venv  ## build the documentation's site into build/site; a dead link is an error
	$(BIN)/python -m tests.pages

bench: venv
	$(BIN)/python -m benchmarks

cluster-up: venv  ## a real Kubernetes on this machine, for tests and for you: eval "$$(make -s cluster-up)"
	@$(BIN)/python -m tests.cluster.harness up

cluster-down: venv
	@$(BIN)/python -m tests.cluster.harness down

kind-smoke: venv  ## build the image and run a job in a kind cluster; needs docker, kind and kubectl
	k8s/kind/up.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" NAMESPACE=team k8s/smoke.sh

clean:
	rm -rf $(VENV) build .cache runs
