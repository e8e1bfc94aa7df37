# Everything runs from .venv/, which `make setup` builds from a lock file.

# `make test PYTHON=python3.12` takes that Python, in an environment of its own: .venv-3.12/.
PYTHON :=
VERSION := $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
VENV := .venv$(if $(PYTHON),-$(VERSION))
STAMP := $(VENV)/set-up
# Present once the core is compiled, or has been found not to compile here.
COMPILED := $(VENV)/compiled
CORE_TESTS := $(addprefix tests/,schedule properties project/test_compiled.py trace/test_perfetto.py \
    $(addprefix simulate/test_,engine.py jitter.py) $(addprefix planning/test_,admission.py balance.py))
CORE := $(shell find rrfp/schedule rrfp/simulate -name '*.py') rrfp/compiled.py setup.py
# Present while a set-up runs: one that was interrupted, or failed, is begun anew.
UNFINISHED := $(VENV)/unfinished
PIP := $(VENV)/bin/python -m pip -qq --disable-pip-version-check
LOCKS := requirements-3.11.lock requirements-3.12.lock
LOCK_VENV := build/lock-venv
# The environment of somebody else's job.
IMAGE := .venv-image

.DEFAULT_GOAL := help
.PHONY: help setup image train test test-core test-all test-gpu fuzz lint types format bench docs pictures screenshots lock clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

setup: $(COMPILED)  ## Build .venv/ with locked dependencies; does nothing when up to date

$(STAMP): $(LOCKS) pyproject.toml
	@python=$$(for candidate in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14); do \
	    $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	        && command -v $$candidate && break; \
	done); \
	if [ -z "$$python" ]; then \
	    echo "make setup: $(or $(PYTHON),the PATH) has no Python 3.11 or newer;" \
	        "install python3.11, or name one: make PYTHON=/usr/bin/python3.12" >&2; exit 1; \
	fi; \
	echo "Setting up $(VENV)/ with $$python; the first time takes a few minutes." >&2; \
	rm -f $@; \
	if [ -e $(UNFINISHED) ] || ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	    $$python -m venv --clear $(VENV) || { \
	        echo "make setup: $$python cannot make a virtual environment; install its venv" \
	            "package (Debian and Ubuntu: python3-venv)." >&2; exit 1; }; \
	fi; \
	touch $(UNFINISHED)
	@$(PIP) install -r $$($(VENV)/bin/python -c 'import sys; \
	    print("requirements-3.11.lock" if sys.version_info < (3, 12) else "requirements-3.12.lock")')
	@RRFP_COMPILED=0 $(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@ && rm $(UNFINISHED)

$(COMPILED): $(STAMP) $(CORE)
	@echo "Compiling the core; without a C compiler it runs interpreted." >&2
	@mkdir -p build
	@$(VENV)/bin/python setup.py -q build_ext --inplace >build/core.log 2>&1 \
	    || echo "make setup: the core does not compile and runs interpreted; see build/core.log" >&2
	@touch $@

image: $(IMAGE)/set-up  ## Build .venv-image/: Megatron-Core among packages that are a year old

$(IMAGE)/set-up: requirements-image.lock pyproject.toml
	@echo "Setting up $(IMAGE)/; the first time takes a few minutes." >&2
	@python3.11 -m venv --clear $(IMAGE)
	@$(IMAGE)/bin/python -m pip -qq --disable-pip-version-check install -r requirements-image.lock
	@RRFP_COMPILED=0 $(IMAGE)/bin/python -m pip -qq --disable-pip-version-check install \
	    --no-deps --no-build-isolation --editable .
	@touch $@

train: setup  ## Train a GPT readiness-first; more flags in ARGS="--steps 5"
	$(VENV)/bin/rrfp train --hint bf $(ARGS)

# Of pytest; the tests of a file stay together, because they share what they have trained.
WORKERS := 2

test: lint  ## Lint, types and the tests that are quick
	$(VENV)/bin/pytest -q -rs -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-core: setup  ## The core's quick tests on its sources, not compiled
	RRFP_COMPILED=0 $(VENV)/bin/pytest -q -rs -m "not slow" $(CORE_TESTS) $(ARGS)

test-all: lint  ## The same with every test, and more examples a property
	$(VENV)/bin/pytest -q -rs --hypothesis-profile thorough $(ARGS)

test-gpu: setup  ## What is to hold on a GPU; without one it says so
	$(VENV)/bin/pytest -q -rs tests/e2e/test_gpu.py $(ARGS)

FUZZ_INPUTS := 100000
# Of each reader, besides; atheris is slower and finds what chance does not.
GUIDED_INPUTS := 1000
ATHERIS := build/atheris

fuzz: setup $(ATHERIS)  ## Damaged inputs for every reader: FUZZ_INPUTS, and GUIDED_INPUTS each
	$(VENV)/bin/python -m tests.fuzz --inputs $(FUZZ_INPUTS) $(ARGS)
	PYTHONPATH=$(ATHERIS) $(VENV)/bin/python -m tests.fuzz.guided $(GUIDED_INPUTS)

$(ATHERIS): $(STAMP)
	@rm -rf $@
	@$(PIP) install --target $@ atheris==3.0.0

lint: setup  ## ruff and mypy
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/mypy --no-error-summary

types: setup  ## A second type checker, over the public API and the tests
	$(VENV)/bin/basedpyright --level error

format: setup  ## Format, and fix what ruff can fix
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format --quiet .

bench: setup  ## The benchmarks
	$(VENV)/bin/pytest -q --benchmark-only benchmarks $(ARGS)

# mkdocs-material's advertisement against mkdocs 2, which pyproject.toml rules out, is left out; every
# warning about these pages is shown, and is an error.
docs: setup  ## Build the documentation as a site, with an API reference, in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

pictures: setup  ## Draw the README's picture anew, from two paced runs
	$(VENV)/bin/python -m docs.pictures

screenshots: setup  ## Take the pictures in docs/images anew; needs chromium
	$(VENV)/bin/python -m docs.screenshots

lock:  ## Resolve PYTHON's lock file again from pyproject.toml
	$(or $(PYTHON),python3.11) -m venv --clear $(LOCK_VENV)
	$(LOCK_VENV)/bin/pip install -qq setuptools --upgrade ".[test,report,ui,docs]"
	lock=requirements-$(or $(VERSION),3.11).lock; \
	{ grep '^#' $$lock; $(LOCK_VENV)/bin/pip freeze --all \
	    | grep -vE '^(pip==|rrfp @|nvidia-|cuda-toolkit==|triton==)' | sed -E 's/^(torch==[^+]*)\+.*/\1/'; \
	} > requirements.new && mv requirements.new $$lock
	rm -rf $(LOCK_VENV)

clean:  ## Remove .venv/ and every cache; runs/ stays
	rm -rf .venv .venv-* build *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find rrfp tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	find rrfp -name '*.so' -delete
	rm -f rrfp/compiled.*.sha256
