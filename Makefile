# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` each do all the set-up they need, on a machine with nothing but make and a Python 3.

# Python versions that nnabla has wheels for, preferred one first.
PYTHON_VERSIONS ?= 3.10 3.9
OLDEST = 3.9
VENV ?= .venv
PYTHON = $(VENV)/bin/python
READY = $(VENV)/.ready
TEST_READY = $(VENV)/.ready_to_test
PYTEST_ARGS ?=
# Hypothesis' profile: that of CI draws the same examples for the same code each time.
EXAMPLES ?= ci
# nnabla's context for the nets of the tests: make test CONTEXT=cudnn:float (cudnn:half, cpu:half, ...)
CONTEXT ?=
PYTEST = $(PYTHON) -m pytest -n logical --dist worksteal --hypothesis-profile=$(EXAMPLES) $(if $(CONTEXT),--context=$(CONTEXT))

.DEFAULT_GOAL := help
.PHONY: help demo distributed test full lint types unit half oldest gpu docs package mutation format pictures architecture bench clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## what one loss scale can do, and what it cannot: a table and a picture in a minute
	$(PYTHON) samples/demo.py

test: lint types ## lint, types, and the tests that are quick or a gate: a few minutes
	$(PYTEST) -m "not slow or gate" $(PYTEST_ARGS)

full: $(TEST_READY) ## everything else: slow tests, half precision, the package, the oldest Python
	$(PYTEST) -m "slow and not gate" $(PYTEST_ARGS)
	$(MAKE) half package oldest

lint: $(TEST_READY) ## ruff: rules and format; import-linter: which folder may import which
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

format: $(TEST_READY) ## ruff: mend what can be mended, and lay out the code
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types: $(TEST_READY) ## mypy --strict
	$(PYTHON) -m mypy

distributed: $(READY) ## the digits on several processes: make distributed RANKS=4
	$(PYTHON) samples/distributed.py --ranks $(or $(RANKS),2)

unit: $(TEST_READY) ## all tests, or those that PYTEST_ARGS names; CONTEXT=cpu:half: nets in that context; EXAMPLES=default: new examples
	$(PYTEST) $(PYTEST_ARGS)

half: CONTEXT = cpu:half
half: $(TEST_READY) ## tests that hold in any context, in nnabla's own half precision on a CPU
	$(PYTEST) -m any_context tests

oldest: ## the quick tests on the oldest supported Python, where it can be had
	@if tools/make_venv.sh .venv$(OLDEST) $(OLDEST); then \
		$(MAKE) unit PYTHON_VERSIONS=$(OLDEST) VENV=.venv$(OLDEST) PYTEST_ARGS="-m 'not slow'"; \
	else echo "not tested on Python $(OLDEST)"; fi

gpu: $(READY) ## everything for a machine with an NVIDIA GPU: checks, timings, samples, tests; build/gpu/index.md
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[samples,mpi,test,cuda120]'
	$(PYTHON) benchmarks/gpu_all.py $(GPU_ARGS)

docs: $(TEST_READY) ## build the guide, warnings as errors, into build/guide/index.html: installs 1.1 GB, two minutes at first
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

package: $(READY) ## build sdist and wheel, and try both in an empty environment
	tools/try_package.sh $(PYTHON) build/package

mutation: $(TEST_READY) ## faults that no test notices: make mutation ROOM=core MUTATION_ARGS="--only '*.overflow.*'"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[samples,mpi,mutation]'
	$(PYTHON) -m tools.mutation $(or $(ROOM),core) $(MUTATION_ARGS)

pictures: $(TEST_READY) ## photograph the page of a recorded training for the documentation; needs a Chromium
	$(PYTHON) -m tools.report_pictures

architecture: $(TEST_READY) ## draw the folders of the package and their imports: docs/images/architecture.png
	$(PYTHON) -m tools.draw_architecture

bench: $(READY) ## CPU benchmarks
	for benchmark in benchmarks/cpu_kernels.py benchmarks/training_speed.py; do $(PYTHON) $$benchmark || exit 1; done

clean: ## remove the virtual environments and what tools left behind
	rm -rf .venv .venv$(OLDEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(KERNELS)/*.so

KERNELS = nnabla_adaloss/kernels/native
ENVIRONMENT = setup.py pyproject.toml tools/make_venv.sh $(wildcard building/*.py $(KERNELS)/*.[ch] $(KERNELS)/*/*.[ch])

# One pip command for everything: a second one that names less could bring in numpy 2, which nnabla cannot work with.
$(READY): EXTRAS = samples,mpi
$(READY): SIZE = 0.5 GB
$(TEST_READY): EXTRAS = samples,mpi,test
$(TEST_READY): SIZE = 1.1 GB

$(READY) $(TEST_READY): $(ENVIRONMENT)
	@tools/make_venv.sh $(VENV) $(PYTHON_VERSIONS)
	@echo "Installing into $(VENV): about $(SIZE), half a minute on a fast line, several minutes on a slow one."
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@$(PYTHON) -m pip check
	@touch $(READY) $@
