# make tune   environment, install, and the main job for this machine
# make test   environment, lint, and the tests that this machine can run
# make smoke  on a GPU: the tests that take minutes there, over all operations
# make lint   ruff, mypy --strict, clang-format, file sizes, words
# make docs   the documentation site, strictly, in build/site
# make clean  forget the environment and build outputs

VENV ?= .venv
PYTHON ?= python3
# More for pip, e.g. PIP_ARGUMENTS="--extra-index-url URL" with an index of CPU-only torch wheels.
PIP_ARGUMENTS ?=
TUNE_ARGUMENTS ?=
TEST_ARGUMENTS ?=
# Processes that share the tests; one where a GPU is timed. In the order of their files, those that compile first, or
# the longest would begin when all else is done. Three, of which one waits for others' processes a tenth of the time.
TEST_PROCESSES ?= $(if $(wildcard /dev/nvidia0),0,3)

# Packages are installed without bytecode. Where none may be written either, every process that the tests start would
# compile torch once more.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode

bin := $(VENV)/bin
stamp := $(VENV)/.installed
cpp_sources = $(shell find templates/include templates/peaks benchmarks client examples tests/build tests/toy_family -name '*.h' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp')

.PHONY: tune test smoke lint docs venv clean

tune: venv
	$(bin)/attention-autotuner tune --all $(TUNE_ARGUMENTS)

test: lint
	$(if $(filter 0,$(TEST_PROCESSES)),,OMP_NUM_THREADS=1) $(bin)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(TEST_ARGUMENTS)

smoke: venv
	$(bin)/python -m pytest -q tests/gpu -m smoke $(TEST_ARGUMENTS)

lint: venv
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/python .ci/typecheck.py
	$(bin)/clang-format --dry-run -Werror $(cpp_sources)
	$(bin)/python .ci/sizes.py
	$(bin)/python .ci/words.py

docs: venv
	$(bin)/python -m sphinx -W --keep-going -b html -d build/site_doctrees docs build/site

venv: $(stamp)

$(stamp): pyproject.toml constraints.txt .ci/venv.sh
	.ci/venv.sh $(VENV) $(PYTHON) $(PIP_ARGUMENTS)
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
