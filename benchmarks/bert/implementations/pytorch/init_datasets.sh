#!/usr/bin/env bash
# Make the prepared sets from the official text: DATADIR/train and DATADIR/eval. Resumable: shards are kept.
#
#   TEXTDIR=DIR DATADIR=DIR ./init_datasets.sh
#
#   TEXTDIR  what download_dataset.sh fetched: part-*-of-*, eval.txt, vocab.txt
#   DATADIR  where the sets go
#   WORKERS  processes           [the cores of this machine]
#   ONLY     train or eval       [both]
#   PYTHON   interpreter that has the package [.venv/bin/python at the top, made at first use]
#
# Examples are those of the reference: 512 tokens, 76 predictions, dupe factor 10, seed 12345; for evaluation
# 10,000 evenly out of all. Other numbers may follow, as for `mlperf_bert prepare`: not the benchmark's sets.
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
[ -d "${TEXTDIR:-}" ] || fail "TEXTDIR: there is no directory '${TEXTDIR:-}'; fetch it with download_dataset.sh"
[ -n "${DATADIR:-}" ] || fail "DATADIR is not set; set it to the directory to make the sets in"
[[ ${ONLY:=both} =~ ^(both|train|eval)$ ]] || fail "ONLY is '$ONLY'; set it to train or eval, or leave it out"
shopt -s nullglob
parts=("$TEXTDIR"/part-?????-of-?????)
if [ "$ONLY" != eval ]; then
    [ ${#parts[@]} -gt 0 ] || fail "$TEXTDIR has no part-*-of-*; fetch them with download_dataset.sh"
    count=$((10#${parts[0]##*-of-}))
    [ ${#parts[@]} -eq "$count" ] ||
        fail "$TEXTDIR has ${#parts[@]} parts of $count; call download_dataset.sh again"
fi
needed=(vocab.txt)
[ "$ONLY" = train ] || needed+=(eval.txt)
for file in "${needed[@]}"; do
    [ -f "$TEXTDIR/$file" ] || fail "$TEXTDIR has no $file; call download_dataset.sh"
done
if [ -z "${PYTHON:-}" ]; then
    top=$(cd "$here/../../../.." && pwd)
    "$top/tools/venv.sh"
    PYTHON=$top/.venv/bin/python
fi

prepare() { # name of the set, options
    local name=$1
    shift
    echo "making $DATADIR/$name"
    "$PYTHON" -P -m mlperf_bert prepare --out "$DATADIR/$name" --vocab "$TEXTDIR/vocab.txt" --max-seq-length 512 \
        --max-predictions 76 --dupe-factor 10 --seed 12345 ${WORKERS:+--workers "$WORKERS"} "$@"
}

[ "$ONLY" = train ] || prepare eval --text "$TEXTDIR/eval.txt" --pick-eval 10000 "$@"
[ "$ONLY" = eval ] || prepare train --text "${parts[@]}" "$@"
if [ "$ONLY" != eval ] && [ $# -eq 0 ] && ! grep -q '"num_samples": 156726829,' "$DATADIR/train/index/dataset.json"; then
    echo "init_datasets.sh: warning: $DATADIR/train has NOT the published 156,726,829 examples; compare its text" >&2
fi
PYTHON=$PYTHON DATADIR=$DATADIR ONLY=$ONLY "$here/verify_dataset.sh"
