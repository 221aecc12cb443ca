#!/usr/bin/env bash
# Check that the prepared sets are complete and correct. This takes seconds. With --full it reads every byte.
#
#   DATADIR=DIR ./verify_dataset.sh [--full]
#
#   DATADIR  the output of init_datasets.sh, with train/ and eval/
#   ONLY     train or eval       [both]
#   PYTHON   an interpreter that has the package [.venv/bin/python of the repository, made at first use]
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
[ -d "${DATADIR:-}" ] || fail "DATADIR: no such directory '${DATADIR:-}'; create it with init_datasets.sh"
[ $# -eq 0 ] || [ "$*" = --full ] || fail "unknown argument '$*'; the only option is --full"
[[ ${ONLY:=both} =~ ^(both|train|eval)$ ]] || fail "ONLY: '$ONLY' is neither train nor eval; set it to train or eval, or unset it"
if [ -z "${PYTHON:-}" ]; then
    top=$(cd "$here/../../../.." && pwd)
    "$top/tools/venv.sh"
    PYTHON=$top/.venv/bin/python
fi
# Both sets are checked in one call, because only that finds held-out texts in the training set.
if [ "$ONLY" = both ]; then set -- "$DATADIR" "$@"; else set -- "$DATADIR/$ONLY" "$@"; fi
exec "$PYTHON" -P -m mlperf_bert verify "$@"
