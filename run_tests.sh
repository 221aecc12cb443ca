#!/usr/bin/env bash
# Every check and test that needs no GPU: style, types, shell, then pytest. Installs what it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ ! -w . ]; then
    echo "run_tests.sh: error: $PWD cannot be written to; make it writable, or test a copy of the tree" >&2
    exit 2
fi

stage() { printf '\n== %s, %d s after the start ==\n' "$1" "$SECONDS"; }

tools/venv.sh dev
export PATH=$PWD/.venv/bin:$PATH
stage "check"
ruff format --check .
ruff check --no-cache .
lint-imports --no-cache
git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck
hadolint Dockerfile
stage "tests"
mypy & # beside the first tests, as it takes one core; its verdict is asked for at the end
types=$!
status=0
# Where even --timeout of pyproject.toml cannot end a test, its process shows all stacks and ends.
OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 pytest -n auto --dist loadfile --max-worker-restart 0 --durations=25 \
    --junit-xml .cache/junit.xml -o faulthandler_timeout=960 -o faulthandler_exit_on_timeout=true "$@" || status=$?
stage "types"
wait "$types" || { echo "run_tests.sh: error: mypy found what stands above, before the tests' results" >&2; exit 1; }
exit "$status"
