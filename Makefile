# Every target makes what it needs: the first one called creates .venv and installs an extra of the project into it,
# later ones find it there. Whatever could hang has a time limit.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
TRAINER ?= native
# Processes that the tests are shared out to.
WORKERS ?= 2

BIN := $(VENV)/bin
comma := ,
# AccelerateTrainer is shown on two processes.
ON_TWO := $(if $(filter accelerate,$(TRAINER)),launch -n 2 -m omnitrain)
DEMO_EXTRAS := metrics$(comma)plot$(if $(filter hf,$(TRAINER)),$(comma)hf)
# $(call limit,seconds): `--foreground` lets Ctrl-C through; a system without `timeout` (macOS) runs without limits.
TIMEOUT := $(shell command -v timeout)
limit = $(if $(TIMEOUT),$(TIMEOUT) --foreground -k 30 $(1))

# Many processes start here; without bytecode each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv demo test test-fast test-sample test-all test-oldest check check-format check-lint check-types \
	check-architecture format signatures docs linkcheck examples notebooks notebooks-write bench bench-check gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("omnitrain needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] \
		+ ". Name another one: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The marker .has-<extra> says that the extra is installed as these two files want it, and so are those it includes.
# `--no-compile`: Python compiles what is imported, a small part of it, when it is imported; this halves the time.
INCLUDED_IN_test := metrics,plot metrics,plot,hf
INCLUDED_IN_dev := docs test $(INCLUDED_IN_test)
$(VENV)/.has-%: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(call limit,3600) $(BIN)/python -m pip --disable-pip-version-check install --no-compile -c $(CONSTRAINTS) -e ".[$*]"
	@touch $@ $(INCLUDED_IN_$*:%=$(VENV)/.has-%)

venv: $(VENV)/.has-dev ## .venv with all that a developer needs

demo: $(VENV)/.has-$(DEMO_EXTRAS) ## train on real data (TRAINER=native, accelerate or hf), results in runs/demo
	$(call limit,900) $(BIN)/omnitrain $(ON_TWO) demo --trainer $(TRAINER)

# The tests of a file stay together: what its fixtures make, such as launches of several processes, is made once then.
# without a GPU: many tests compare a trainer with a loop on the CPU; `make gpu` has the others
PYTEST := env CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# `make check` runs these two.
CHECKED := $(addprefix --ignore=tests/test_,typing.py architecture.py)
# Which tenth of the slow tests `make test-sample` runs; CI takes another one each day.
TENTH ?= $(shell date +%j | sed 's/^0*//')

test-fast: $(VENV)/.has-test ## tests without other processes, GPUs, examples and sleeping: in 90 seconds
	$(call limit,900) $(PYTEST) -m "not slow and not processes" $(CHECKED) \
		$(addprefix --ignore=tests/,distributed fuzz gpu test_examples.py)

test: $(VENV)/.has-test ## at least one quick test of every behaviour, on every trainer and backend: in 5 minutes
	$(call limit,1800) $(PYTEST) -m "not slow" $(CHECKED)

test-sample: $(VENV)/.has-test ## the same and a tenth of the slow tests, another one each day (TENTH=0 to 9)
	$(call limit,1800) $(PYTEST) --tenth $(TENTH) $(CHECKED)

test-all: $(VENV)/.has-test ## the whole test suite, what is exhaustive included: at night
	$(call limit,14400) $(PYTEST)

test-oldest: ## the same with the oldest dependencies that pyproject.toml allows, in .venv-oldest (several GB)
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

check: check-format check-lint check-types check-architecture ## what every commit must pass: format, lint, types, architecture

check-format: $(VENV)/.has-dev
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/signatures.py --check

check-lint: $(VENV)/.has-dev
	$(BIN)/ruff check .

check-types: $(VENV)/.has-dev
	$(call limit,900) $(BIN)/pyright --pythonpath $(BIN)/python
	PATH="$(abspath $(BIN)):$$PATH" VIRTUAL_ENV="$(abspath $(VENV))" \
		$(call limit,900) $(BIN)/pyright --verifytypes omnitrain --ignoreexternal
	$(call limit,900) $(BIN)/python -m pytest -q tests/test_typing.py

check-architecture: $(VENV)/.has-dev
	$(call limit,900) $(BIN)/python -m pytest -q tests/test_architecture.py

signatures: $(VENV)/.created ## copy the list of arguments to the constructors and settings that repeat it
	$(BIN)/python .ci/signatures.py

format: $(VENV)/.has-dev signatures ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.has-docs $(VENV)/.has-test ## build docs/_build/html, warnings are errors, and run the examples of all pages
	$(call limit,600) $(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	$(call limit,900) $(BIN)/python -m pytest -n $(WORKERS) -m slow tests/test_docs.py

linkcheck: $(VENV)/.has-docs ## follow every link of the documentation, those to other sites too
	$(call limit,600) $(BIN)/python -m sphinx -b linkcheck docs docs/_build/linkcheck

examples: $(VENV)/.has-test ## run every script in examples, as many at a time as there are WORKERS
	OMP_NUM_THREADS=1 $(call limit,1200) $(BIN)/python .ci/examples.py $(WORKERS)

notebooks: $(VENV)/.has-test ## execute every notebook, and compare what it shows with the outputs in it
	$(call limit,600) $(BIN)/python -m pytest -q tests/test_notebooks.py

notebooks-write: $(VENV)/.has-test ## execute every notebook, and write its outputs into it
	$(call limit,600) $(BIN)/python tests/test_notebooks.py

bench: $(VENV)/.has-test ## measure the trainers against hand-written loops
	$(call limit,1800) $(BIN)/python benchmarks/overhead.py

bench-check: $(VENV)/.has-test ## run every benchmark once, as small as it can be
	$(call limit,1800) $(BIN)/python -m pytest -n $(WORKERS) -m slow -k "not thirty_trials" \
		$(addprefix tests/test_,benchmarks.py thousand_ranks.py)

gpu: $(VENV)/.has-test ## all tests and measurements that want a GPU, in under 9 minutes; report in runs/gpu
	$(call limit,900) $(BIN)/python benchmarks/gpu.py

clean: ## remove what tools left behind; keeps .venv and runs
	rm -rf build dist *.egg-info docs/_build .pytest_cache .ruff_cache .hypothesis
	find omnitrain tests examples docs notebooks benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
