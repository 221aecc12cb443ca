#!/usr/bin/env bash
# Every check and test that needs no GPU: style, types, shell, then pytest. Installs what it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# The stamp holds what was installed, so that a changed pyproject.toml installs again.
stamp=.venv/installed-dev
if ! cmp --silent pyproject.toml "$stamp"; then
    echo "installing the test environment into .venv"
    make setup
    cp pyproject.toml "$stamp"
fi
make check
make test
