# Commands for developers. All of them use .venv. `./run_tests.sh` runs both check and test.
BIN = .venv/bin

.PHONY: setup check format test test-real test-slow test-oldest test-gpu lock golden docs-tables bench package

setup:
	tools/venv.sh dev

# Count the lines of the files in git that match these patterns.
lines = $(shell git ls-files -z $(1) | xargs -0 cat | wc -l)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	git ls-files -z '*.sh' .ci/run | xargs -0 $(BIN)/shellcheck
	$(BIN)/hadolint Dockerfile
	@awk 'BEGIN { printf "tests: %.2f lines per line of program code (limit 0.85, goal 0.70)\n", \
		$(call lines,"tests/*.py") / $(call lines,"benchmarks/*.py" "tools/*.py") }'

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Run all tests, or those of one folder: make test FOLDER=data
TESTS = $(if $(FOLDER),$(or $(wildcard tests/unit/$(FOLDER) tests/tools/$(FOLDER)),$(error FOLDER: no tests for '$(FOLDER)'; use a folder in tests/unit or tests/tools)))
test: setup
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --durations=25 $(TESTS)

# Run the tests that need a real cluster of two nodes, two network namespaces and a browser. Installs SLURM and
# Chromium if they are missing.
test-real: setup
	tests/slurm/install.sh
	tests/browser/install.sh
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -m 'real and not longest' -o faulthandler_timeout=960 -o faulthandler_exit_on_timeout=true

# Run the tests that take too long to run every time.
test-slow: setup test-oldest
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/pytest -m longest
	$(BIN)/python tools/mutate.py --count 20

# Test model, optimizer, steps, graphs, bench and kernels with the oldest supported torch and its Triton. The first call
# downloads 6 GB.
OLDEST = tests/unit/model tests/unit/optim tests/unit/step tests/tools/bench \
	tests/unit/train/test_precision.py
test-oldest:
	tools/venv.sh dev oldest
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 .venv-oldest/bin/pytest -m 'not real' $(OLDEST)
	.venv-oldest/bin/pytest --collect-only -qq tests/gpu

# Update requirements/ from pyproject.toml. Versions stay if they can. OPTIONS=--upgrade uses the newest.
lock:
	trap 'rm -f requirements/all.txt' EXIT && \
		cat requirements/hashed.txt requirements/pinned.txt >requirements/all.txt && \
		PATH=$(BIN):$$PATH uv pip compile --quiet --universal --all-extras --no-header --generate-hashes \
			--python-version=3.11 --fork-strategy=fewest $(OPTIONS) --output-file=requirements/all.txt pyproject.toml && \
		$(BIN)/python tools/lock.py split requirements/all.txt

# Run the tests that need a GPU. tools/gpu_check.sh measures as well.
test-gpu: setup
	$(BIN)/pytest tests/gpu

# Record the golden traces again, and print their difference from the old ones.
golden: setup
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/golden/trace_cases.py

# Update the tables in the documents that a command prints (`<!-- made by: COMMAND -->`) from the logs' data.
docs-tables: setup
	$(BIN)/python tools/docs_tables.py $(OPTIONS)

# Repeat the measurements of docs/concepts/speed.md and docs/concepts/data.md.
bench: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/mlperf_bert bench transformers
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/mlperf_bert bench optimizer
	OMP_WAIT_POLICY=PASSIVE $(BIN)/mlperf_bert plan balance --config open_adamw_dgxa100_128x8x16x1

# Build a submission and check it with MLCommons' checkers and our own (docs/guides/submission.md).
package: setup
	$(BIN)/mlperf_bert package results --out runs/submission
