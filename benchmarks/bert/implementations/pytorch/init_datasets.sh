#!/usr/bin/env bash
# Prepare DATADIR/train and DATADIR/eval from the official text. An interrupted call resumes with the next shard.
#
#   TEXTDIR=DIR DATADIR=DIR ./init_datasets.sh
#
#   TEXTDIR  the files from download_dataset.sh: part-*-of-*, eval.txt and vocab.txt
#   DATADIR  the directory for the prepared sets
#   WORKERS  number of processes [the cores of this machine]
#   ONLY     train or eval       [both]
#   PYTHON   an interpreter that has the package [.venv/bin/python of the repository, made at first use]
#
# The examples equal those of MLPerf's reference: 512 tokens, 76 predictions, dupe factor 10 and seed 12345. The
# evaluation set has 10,000 examples, picked evenly from all. You can append other options of `mlperf_bert prepare`,
# but then the sets are not the benchmark's.
set -euo pipefail

case ${1:-} in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac

fail() {
    echo "init_datasets.sh: error: $1" >&2
    exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ -d "${TEXTDIR:-}" ] || fail "TEXTDIR: no such directory '${TEXTDIR:-}'; download the text with download_dataset.sh"
[ -n "${DATADIR:-}" ] || fail "DATADIR: not set; set it to the directory for the prepared sets"
[[ ${ONLY:=both} =~ ^(both|train|eval)$ ]] || fail "ONLY: '$ONLY' is neither train nor eval; set it to train or eval, or unset it"
shopt -s nullglob
parts=("$TEXTDIR"/part-?????-of-?????)
if [ "$ONLY" != eval ]; then
    [ ${#parts[@]} -gt 0 ] || fail "$TEXTDIR: has no files part-*-of-*; download them with download_dataset.sh"
    count=$((10#${parts[0]##*-of-}))
    [ ${#parts[@]} -eq "$count" ] ||
        fail "$TEXTDIR: has ${#parts[@]} of $count parts; run download_dataset.sh again"
fi
needed=(vocab.txt)
[ "$ONLY" = train ] || needed+=(eval.txt)
for file in "${needed[@]}"; do
    [ -f "$TEXTDIR/$file" ] || fail "$TEXTDIR: has no $file; download it with download_dataset.sh"
done
if [ -z "${PYTHON:-}" ]; then
    top=$(cd "$here/../../../.." && pwd)
    "$top/tools/venv.sh"
    PYTHON=$top/.venv/bin/python
fi

prepare() { # name of the set, options
    local name=$1
    shift
    echo "preparing $DATADIR/$name"
    "$PYTHON" -P -m mlperf_bert prepare --out "$DATADIR/$name" --vocab "$TEXTDIR/vocab.txt" --max-seq-length 512 \
        --max-predictions 76 --dupe-factor 10 --seed 12345 ${WORKERS:+--workers "$WORKERS"} "$@"
}

[ "$ONLY" = train ] || prepare eval --text "$TEXTDIR/eval.txt" --pick-eval 10000 "$@"
[ "$ONLY" = eval ] || prepare train --text "${parts[@]}" "$@"
if [ "$ONLY" != eval ] && [ $# -eq 0 ] && ! grep -q '"num_samples": 156726829,' "$DATADIR/train/index/dataset.json"; then
    echo "init_datasets.sh: warning: $DATADIR/train does NOT have the published number of 156,726,829 examples;" \
        "compare its text with the official one" >&2
fi
PYTHON=$PYTHON DATADIR=$DATADIR ONLY=$ONLY "$here/verify_dataset.sh"
