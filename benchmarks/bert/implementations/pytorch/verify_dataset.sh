#!/usr/bin/env bash
# Whether the prepared sets are whole and right: in seconds; with --full every byte and all contents are read.
#
#   DATADIR=DIR ./verify_dataset.sh [--full]
#
#   DATADIR  what init_datasets.sh made: train/ and eval/
#   ONLY     train or eval       [both]
#   PYTHON   interpreter that has the package [.venv/bin/python at the top, made at first use]
set -euo pipefail

case ${1:-} in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac

fail() {
    echo "verify_dataset.sh: error: $1" >&2
    exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ -d "${DATADIR:-}" ] || fail "DATADIR: there is no directory '${DATADIR:-}'; make it with init_datasets.sh"
[ $# -eq 0 ] || [ "$*" = --full ] || fail "unknown argument '$*'; --full is the only one"
[[ ${ONLY:=both} =~ ^(both|train|eval)$ ]] || fail "ONLY is '$ONLY'; set it to train or eval, or leave it out"
if [ -z "${PYTHON:-}" ]; then
    top=$(cd "$here/../../../.." && pwd)
    "$top/tools/venv.sh"
    PYTHON=$top/.venv/bin/python
fi
# Together where both are asked for: held-out texts in train are only found so.
if [ "$ONLY" = both ]; then set -- "$DATADIR" "$@"; else set -- "$DATADIR/$ONLY" "$@"; fi
exec "$PYTHON" -P -m mlperf_bert verify "$@"
