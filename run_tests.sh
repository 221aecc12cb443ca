#!/usr/bin/env bash
# Run every check and test that needs no GPU: style, types and shell, then pytest. Installs what it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ ! -w . ]; then
    echo "run_tests.sh: error: $PWD: not writable; make it writable, or test a copy of the repository" >&2
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
mypy & # It takes one core and runs next to the first tests. Its result is checked at the end.
types=$!
status=0
# If --timeout of pyproject.toml cannot end a test, its process prints all stacks and exits.
OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 pytest -n auto --dist loadfile --max-worker-restart 0 --durations=25 \
    --junit-xml .cache/junit.xml -o faulthandler_timeout=960 -o faulthandler_exit_on_timeout=true "$@" || status=$?
stage "types"
wait "$types" || { echo "run_tests.sh: error: mypy found errors, which it printed above the tests' results; fix them" >&2; exit 1; }
exit "$status"
